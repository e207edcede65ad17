"""Arrays at the frontend: whatever their memory, views, tensors and copies hold the values that NumPy
says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fp8kit as fk
from fp8kit import arrays, formats
from fp8kit.arrays import CPU
from fp8kit.errors import AutogradError, BackendError, Fp8kitError
from fp8kit.testing import assert_close, assert_same_bits
from tests.support.draws import (
    FLOATS,
    FOREIGN,
    HIGH,
    OTHERS,
    attempt,
    examples,
    host,
    shapes,
    thing,
    things,
    values,
)

ANY = [*FLOATS, *OTHERS]


@examples(250)
@given(things(ANY), st.data())
def test_a_view_has_the_values(x, data):
    view = attempt(lambda: arrays.as_view(x.thing), x)
    if x.refused:
        assert isinstance(view, Fp8kitError)
        return
    assert (view.shape, view.dtype.numpy, view.size, view.ndim) == (
        x.values.shape,
        x.values.dtype,
        x.values.size,
        x.values.ndim,
    )
    assert_same_bits("numpy", view.numpy(), x.values)
    flat = arrays.contiguous(view)
    assert flat.contiguous
    assert_same_bits("contiguous", flat.numpy(), x.values)
    assert_same_bits("to", arrays.to(view, CPU).numpy(), x.values)
    assert_same_bits("to_library", host(arrays.to_library(view, x.thing)), x.values)
    assert_same_bits(
        "strides", flat.with_strides(flat.shape, arrays.contiguous_strides(flat.shape)).numpy(), x.values
    )
    if x.values.dtype.name != "bool":
        assert_same_bits("dlpack", arrays.as_view(Dlpack(view)).numpy(), x.values)
    axes = data.draw(st.permutations(range(view.ndim)))
    assert_same_bits(
        "transpose", view.transpose(*axes).numpy(), np.array(x.values.transpose(axes), order="C")
    )
    shape = data.draw(shapes(0, 3) | st.just((-1,)) | st.just((x.values.size,)))
    reshaped = attempt(lambda: view.reshape(*shape), x)
    if isinstance(reshaped, Fp8kitError):
        assert not view.contiguous or np.prod(shape, dtype=int) not in (view.size, -1)
    else:
        assert_same_bits("reshape", reshaped.numpy(), x.values.reshape(shape))
    dim, start, length = (data.draw(st.integers(-2, 4)) for _ in range(3))
    part = attempt(lambda: view.slice(dim, start, length), x)
    inside = -view.ndim <= dim < view.ndim and start >= 0 <= length and start + length <= view.shape[dim]
    assert isinstance(part, Fp8kitError) != inside
    if inside:
        assert_same_bits("slice", part.numpy(), np.take(x.values, range(start, start + length), dim))
    again = attempt(lambda: view.repeated(start), x)
    assert isinstance(again, Fp8kitError) != (view.size == 1 and start >= 0)
    if not isinstance(again, Fp8kitError):
        assert_same_bits("repeated", again.numpy(), np.repeat(x.values.reshape(-1), start))


class Dlpack:
    def __init__(self, view):
        self.view = view

    def __dlpack__(self, **options):
        return self.view.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.view.__dlpack_device__()


@examples(100)
@given(st.sampled_from(FOREIGN), shapes(0, 3))
def test_element_types_that_there_are_none_of_are_refused(dtype, shape):
    x = np.zeros(shape, dtype)
    for call in (
        arrays.as_view,
        fk.tensor,
        fk.quantize,
        fk.nn.LayerNorm(4, device="cpu"),
        fk.nn.Embedding(3, 2, device="cpu"),
        lambda y: fk.Float8Tensor(y, np.ones(1, np.float32)),
        lambda y: fk.nn.cross_entropy(y, np.zeros(1, np.int32)),
        lambda y: fk.tensor(np.zeros(shape, np.float32)).copy_(y),
    ):
        with pytest.raises(Fp8kitError):
            call(x)


@examples(80)
@given(shapes(0, 3), st.sampled_from(ANY))
def test_fresh_arrays(shape, dtype):
    kind = formats.dtype(dtype)
    assert kind is formats.dtype(kind.name) is formats.dtype_from_dlpack(*kind.dlpack) is formats.dtype(kind)
    assert formats.dtype_of_format(kind.format) is kind if kind.format else kind.dlpack[0] != 10
    x = arrays.empty(shape, kind, CPU)
    assert (x.shape, x.dtype, x.contiguous, arrays.as_sizes(list(shape))) == (shape, kind, True, shape)
    arrays.zero_(x)
    assert_same_bits("zero_", x.numpy(), np.zeros(shape, dtype))
    y = thing(values(shape, dtype, 1), "plain")
    arrays.copy(x, arrays.as_view(y.thing))
    assert_same_bits("copy", x.numpy(), y.values)
    arrays.synchronize(CPU)
    assert arrays.current_stream(CPU) == 0
    assert arrays.available("cpu")
    assert arrays.provider(CPU).count() == 1


@examples(150)
@given(
    things([*FLOATS, np.dtype(np.int32)]),
    things([*FLOATS, np.dtype(np.int32)]),
    st.sampled_from(["copy_", "add_"]),
    st.booleans(),
)
def test_changes_in_place(x, y, name, same):
    if same:
        y = thing(values(x.values.shape, x.values.dtype, 5), "transposed")
    target = attempt(lambda: fk.tensor(x.thing), x)
    if isinstance(target, Fp8kitError):
        return
    if not isinstance(x.thing, fk.Tensor):
        before = target.view.writable
        held = target.numpy().copy()
        out = attempt(lambda: getattr(target, name)(y.thing), y)
        if isinstance(out, Fp8kitError):
            assert_same_bits("refused", target.numpy(), held)
            fits = (
                x.values.shape == y.values.shape
                and x.values.dtype == y.values.dtype
                and x.values.dtype in HIGH
            )
            assert not (fits and before and not y.refused)
            return
        assert before
        wide = [a.astype(np.float64) for a in (held, y.values)]
        assert_close(
            name,
            target.numpy(),
            wide[1] if name == "copy_" else wide[0] + wide[1],
            target.dtype if target.dtype.floating else "float64",
        )
        target.zero_()
        assert not target.numpy().any()


@examples(120)
@given(things(HIGH), things(HIGH), st.integers(0, 4))
def test_sums_and_their_gradients(x, y, cut):
    if cut:  # the end of x's shape: it repeats over the leading dimensions
        y = thing(values(x.values.shape[cut - 1 :], x.values.dtype, 3), "sliced")
    a, b = (attempt(lambda v=v: fk.tensor(v.thing, requires_grad=True), v) for v in (x, y))
    if x.refused or y.refused:
        return
    out = attempt(lambda: a + b, x, y)
    fits = (
        x.values.dtype == y.values.dtype
        and x.values.shape[max(x.values.ndim - y.values.ndim, 0) :] == y.values.shape
    )
    if not fits:
        assert isinstance(out, Fp8kitError)
        return
    assert_close("sum", out.numpy(), x.values.astype(float) + y.values.astype(float), out.dtype)
    g = values(out.shape, x.values.dtype, 9)
    out.backward(g, retain_graph=True)
    assert_same_bits("a", a.grad.numpy(), g)
    rows = g.astype(float).reshape(-1, y.values.size) if y.values.size else np.zeros((0, 0))
    terms = max(len(rows), 1)
    slack = (terms + 4) * 2.0**-24 * np.abs(rows).sum(0).reshape(y.values.shape) if y.values.size else 0
    assert_close("b", b.grad.numpy(), rows.sum(0).reshape(y.values.shape), out.dtype, slack)
    out.backward(g)
    with pytest.raises(AutogradError, match="already run"):
        out.backward(g)
    assert_close("a twice", a.grad.numpy(), 2 * g.astype(float), out.dtype)


@examples(80)
@given(
    things(FLOATS, layouts=("plain", "frozen", "torch", "view")),
    st.sampled_from([None, "float32", "bfloat16", "int32", "nonsense"]),
    st.sampled_from([None, "cpu", "cuda:99", "moon"]),
)
def test_tensors(x, dtype, device):
    made = attempt(lambda: fk.tensor(x.thing, dtype=dtype, device=device), x)
    if isinstance(made, Fp8kitError):
        wide = x.values.dtype == np.float64 and dtype not in (None, "nonsense")
        assert device in ("cuda:99", "moon") or dtype in ("nonsense", "int32") or wide
        assert not isinstance(made, BackendError) or device in ("cuda:99", "moon") or wide
        return
    want = x.values if dtype is None else x.values.astype(formats.dtype(dtype).numpy)
    assert_same_bits("tensor", made.numpy(), want)
    item = attempt(made.item, x)
    assert isinstance(item, Fp8kitError) if made.view.size != 1 else item == float(want.reshape(-1)[0])
    assert made.detach().version() is made.version() is fk.tensor(made).version()
    assert_same_bits("reshape", made.reshape(-1).numpy(), want.reshape(-1))


def test_read_only_memory_is_never_written():
    import torch

    frozen = np.arange(6, dtype=np.float32)
    frozen.flags.writeable = False
    for source in (frozen, Dlpack(arrays.as_view(frozen)), arrays.as_view(frozen).slice(0, 1, 4)):
        x = fk.tensor(source, requires_grad=True)
        assert not x.view.writable
        assert not x.numpy().flags.writeable
        x.grad = arrays.as_view(np.ones(x.shape, np.float32))
        with fk.no_grad():
            for write in (
                x.zero_,
                lambda x=x: x.copy_(np.zeros(x.shape, np.float32)),
                lambda x=x: x.add_(np.ones(x.shape, np.float32)),
                lambda x=x: arrays.zero_(x.view),
                lambda x=x: arrays.copy(x.view, x.view),
                lambda x=x: fk.optim.SGD([x], lr=1.0),
            ):
                with pytest.raises(Fp8kitError, match=r"read-only|may be written"):
                    write()
        own = fk.tensor(np.zeros(x.shape, np.float32), requires_grad=True)
        own.grad = x.view
        for write in (
            lambda own=own: fk.optim.clip_grad_norm_([own], 1.0),
            lambda own=own: fk.optim.GradScaler().unscale_(fk.optim.SGD([own])),
        ):
            with pytest.raises(Fp8kitError, match=r"read-only|may be written"):
                write()
        with pytest.raises(Fp8kitError, match="read-only"):
            fk.load(*_saved(x.numpy()), strict=True)
        assert not np.from_dlpack(x).flags.writeable
    np.testing.assert_array_equal(frozen, np.arange(6))
    assert fk.tensor(torch.zeros(3)).view.writable


def _saved(array):
    import tempfile
    from pathlib import Path

    path = Path(tempfile.mkdtemp()) / "x"
    fk.save(path, {"x": np.array(array)})
    return path, {"x": array}
