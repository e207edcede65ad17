"""What functions and layers of experts refuse, in every frontend: values that can be looked at, by the names
of what was called."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import flax.nnx
import fp8kit_jax as fj
import fp8kit_torch as te
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from fp8kit_jax import flax as fj_flax
from fp8kit_jax import nnx as fj_nnx
from fp8kit_torch import router

import fp8kit as fk
from fp8kit.errors import ArgumentError, FormatError, Fp8kitError, ShapeError, UnsupportedError
from fp8kit.recipe import DelayedScaling
from tests.support.operands import normal

TOKENS, EXPERTS, FEATURES = 6, 3, 8
MASK = np.array([[1, 0, 1], [1, 1, 0], [0, 1, 1]] * 2, np.uint8)


def _native(array: Any) -> Any:
    return fk.tensor(np.asarray(array), device="cpu")


def _torch_topk(logits: Any, topk: int) -> Any:
    return router.fused_topk_with_score_function(logits, topk, False, None, None, None, "softmax", None)


def _torch_combine(rows: Any, row_map: Any, probs: Any = None, num_tokens: int | None = None) -> Any:
    shape = None if num_tokens is None else (num_tokens, rows.shape[1])
    return te.moe_unpermute(rows, row_map, probs, shape)


FRONTENDS = {
    "native": SimpleNamespace(
        array=_native,
        dispatch=fk.nn.moe.token_dispatch,
        combine=fk.nn.moe.token_combine,
        grouped=fk.nn.moe.grouped_dense,
        topk=fk.nn.moe.fused_topk_with_score_function,
        combines="token_combine",
    ),
    "torch": SimpleNamespace(
        array=torch.as_tensor,
        dispatch=te.token_dispatch,
        combine=_torch_combine,
        grouped=te.grouped_dense,
        topk=_torch_topk,
        combines="moe_unpermute",
    ),
    "jax": SimpleNamespace(
        array=jnp.asarray,
        dispatch=fj.token_dispatch,
        combine=fj.token_combine,
        grouped=fj.grouped_dense,
        topk=fj.fused_topk_with_score_function,
        combines="token_combine",
    ),
}


@pytest.fixture(params=FRONTENDS)
def frontend(request: pytest.FixtureRequest) -> SimpleNamespace:
    return FRONTENDS[request.param]


def _refused(kind: type[Fp8kitError], operation: str, argument: str, call: Callable[[], Any]) -> str:
    """The text of what a call refuses, which must be one argument of what was called."""
    with pytest.raises(kind) as caught:
        call()
    assert (caught.value.operation, caught.value.argument) == (operation, argument)
    return str(caught.value)


@pytest.mark.parametrize("slots", [0, 2])
def test_sizes_that_no_rows_fit(frontend: SimpleNamespace, slots: int) -> None:
    """On the CPU sizes are looked at: none is negative, and they claim no more rows than there are."""
    x, kernel = (frontend.array(normal(*shape)) for shape in ((TOKENS, FEATURES), (EXPERTS, FEATURES, 4)))
    for sizes in ([2, 2, 3], [2, -1, 2]):
        given = frontend.array(np.array(sizes, np.int32))
        _refused(
            ArgumentError,
            "grouped_dense",
            "group_sizes",
            lambda given=given: frontend.grouped(x, kernel, given, slots=slots),
        )
    frontend.grouped(x, kernel, frontend.array(np.array([2, 1, 2], np.int32)), slots=slots)


@pytest.mark.parametrize("dtype", [np.float32, np.bool_])
def test_sizes_are_integers(frontend: SimpleNamespace, dtype: Any) -> None:
    """Arrays of others are refused by one kind of error, and of integers another shape is by one other."""
    x, kernel = (frontend.array(normal(*shape)) for shape in ((TOKENS, FEATURES), (EXPERTS, FEATURES, 4)))

    def refused(kind: type[Fp8kitError], sizes: Any) -> str:
        given = frontend.array(sizes)
        return _refused(kind, "grouped_dense", "group_sizes", lambda: frontend.grouped(x, kernel, given))

    assert refused(FormatError, np.ones(EXPERTS, dtype)).endswith("shape (3,), expected integers")
    assert refused(ShapeError, np.ones(2, np.int32)).endswith("got shape (2,), expected (3,)")


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint8])
def test_sizes_of_any_integers(frontend: SimpleNamespace, dtype: Any) -> None:
    x, kernel = (frontend.array(normal(*shape)) for shape in ((TOKENS, FEATURES), (EXPERTS, FEATURES, 4)))
    y = frontend.grouped(x, kernel, frontend.array(np.array([3, 0, 3], dtype)))
    want = frontend.grouped(x, kernel, frontend.array(np.array([3, 0, 3], np.int32)))
    assert np.array_equal(np.asarray(y), np.asarray(want))
    if dtype is np.int64 and frontend is not FRONTENDS["jax"]:  # JAX has none
        for wide in (2**32, -7):  # 0, if 32 bits of it counted
            sizes = frontend.array(np.array([wide, 0, 3]))
            names = "grouped_dense", "group_sizes"
            text = _refused(ArgumentError, *names, lambda s=sizes: frontend.grouped(x, kernel, s))
            assert wide > 0 or "got [-7, 0, 3]" in text


@pytest.mark.parametrize("layer", [fk.nn.GroupedLinear, fk.nn.GroupedMLP, te.GroupedLinear, te.GroupedMLP])
@pytest.mark.parametrize("stays", [False, True])
def test_sizes_of_a_layer_are_integers(layer: Any, stays: bool) -> None:
    of_torch = layer.__module__.startswith("fp8kit_torch")
    array = torch.as_tensor if of_torch else _native
    experts, x = layer(2, 8, 4, device="cpu", use_grouped_tensor=stays), array(normal(6, 8))
    for sizes in (array(np.ones(2, np.float32)), np.ones(2, np.float32)):
        text = _refused(
            FormatError, "GroupedLinear", "m_splits", lambda given=sizes: experts(x, m_splits=given)
        )
        assert text.endswith("expected integers")


def test_a_layer_of_pytorch_names_itself() -> None:
    """Also where its product is another operation; of two parts the later one, before the first one runs."""
    experts = te.GroupedMLP(2, 8, 4, device="cpu", use_grouped_tensor=True)
    x, sizes, calls = torch.randn(6, 8), torch.tensor([3, 3]), []
    _refused(FormatError, "GroupedLinear", "inp", lambda: experts.fc1(x.half(), sizes))
    experts.fc1.register_forward_pre_hook(lambda *given: calls.append(1))
    for i in range(2):
        setattr(experts.fc2, f"weight{i}", torch.nn.Parameter(torch.ones(8, 6)))
    _refused(ShapeError, "GroupedLinear", "weight", lambda: experts(x, sizes))
    assert not calls


@pytest.mark.parametrize("layer", [te.GroupedLinear, te.GroupedMLP])
def test_sizes_of_a_layer(layer: Any) -> None:
    """Layers of PyTorch say ``m_splits``, and what it has to be."""
    experts = layer(4, 32, 64, device="cpu", use_grouped_tensor=True)
    x = torch.randn(16, 32)
    for sizes in ([[4, 4, 4, 4]], [8, 8]):
        text = _refused(
            ShapeError, "GroupedLinear", "m_splits", lambda given=sizes: experts(x, torch.tensor(given))
        )
        assert "expected (4,)" in text
    for sizes in ([4, 4, 4, 50], [20, -4, 0, 0]):
        _refused(
            ArgumentError, "GroupedLinear", "m_splits", lambda given=sizes: experts(x, torch.tensor(given))
        )


def test_a_dispatch_that_drops_rows_claims_no_more(frontend: SimpleNamespace) -> None:
    """Rows that do not fit are dropped, and the sizes are of those that are there: they are not refused."""
    x, kernel = (frontend.array(normal(*shape)) for shape in ((TOKENS, FEATURES), (EXPERTS, FEATURES, 4)))
    rows, _, row_map, _, sizes = frontend.dispatch(x, frontend.array(MASK), 7)
    assert np.asarray(sizes).tolist() == [4, 3, 0]
    y = frontend.grouped(rows, kernel, sizes)
    assert tuple(frontend.combine(y, row_map, num_tokens=TOKENS).shape) == (TOKENS, 4)


def test_names_of_what_was_called(frontend: SimpleNamespace) -> None:
    """Refusals name the function and its argument, not the operation that it is made of."""
    x, mask = frontend.array(normal(TOKENS, FEATURES)), frontend.array(MASK)
    short = frontend.array(np.ones((TOKENS - 1, EXPERTS), np.float32))
    _refused(ShapeError, "token_dispatch", "probs", lambda: frontend.dispatch(x, mask, 12, short))
    rows, _, row_map, _, _ = frontend.dispatch(x, mask, 12)
    names = frontend.combines, "row_id_map"
    _refused(ArgumentError, *names, lambda: frontend.combine(rows, row_map, num_tokens=3))
    narrow = frontend.array(np.ones((TOKENS, 2), np.float32))
    text = _refused(ArgumentError, *names, lambda: frontend.combine(rows, row_map, narrow))
    assert "columns of the probabilities" in text
    few = frontend.array(np.ones((3, FEATURES), np.float32))
    with pytest.raises(ShapeError, match=f"^{frontend.combines}: (inp|row_id_map): "):
        frontend.combine(few, row_map, num_tokens=TOKENS)
    _refused(ArgumentError, "fused_topk_with_score_function", "topk", lambda: frontend.topk(x, FEATURES + 1))


@pytest.mark.parametrize("dtype", [np.bool_, np.uint8, np.int8, np.int32, np.int64])
def test_dtypes_of_routing_maps(frontend: SimpleNamespace, dtype: Any) -> None:
    """A mask is of bools or of any integers, and indices are of any that are signed."""
    x = frontend.array(normal(TOKENS, FEATURES))
    *_, sizes = frontend.dispatch(x, frontend.array(MASK.astype(dtype)), 12)
    assert np.asarray(sizes).tolist() == [4, 4, 4]
    if np.issubdtype(dtype, np.signedinteger):
        chosen = frontend.array(np.argsort(1 - MASK, 1, kind="stable")[:, :2].astype(dtype))
        *_, sizes = frontend.dispatch(x, chosen, 12, num_experts=EXPERTS)
        assert np.asarray(sizes).tolist() == [4, 4, 4]


@pytest.mark.parametrize("dtype", [np.bool_, np.uint8])
def test_masks_stay_masks(frontend: SimpleNamespace, dtype: Any) -> None:
    """Also where the number of experts is said, which has to be theirs."""
    x, mask = frontend.array(normal(TOKENS, FEATURES)), frontend.array(MASK.astype(dtype))
    *_, sizes = frontend.dispatch(x, mask, 12, num_experts=EXPERTS)
    assert np.asarray(sizes).tolist() == [4, 4, 4]
    with pytest.raises(ArgumentError, match="num_experts"):
        frontend.dispatch(x, mask, 12, num_experts=EXPERTS + 1)


def test_indices_out_of_range_are_none() -> None:
    """Also where int32 cannot hold them."""
    for name in ("native", "torch"):
        frontend = FRONTENDS[name]
        x, chosen = frontend.array(normal(3, FEATURES)), np.array([[0], [2**32], [-1]])
        *_, sizes = frontend.dispatch(x, frontend.array(chosen), 3, num_experts=EXPERTS)
        assert np.asarray(sizes).tolist() == [1, 0, 0]


def test_floats_are_no_mask() -> None:
    for frontend in (FRONTENDS["native"], FRONTENDS["jax"]):
        x, mask = frontend.array(normal(TOKENS, FEATURES)), frontend.array(MASK.astype(np.float32))
        _refused(
            FormatError, "token_dispatch", "routing_map", lambda f=frontend, x=x, m=mask: f.dispatch(x, m, 12)
        )


@pytest.mark.parametrize("name", ["GroupedDense", "GroupedMLP"])
def test_delayed_scaling_is_refused_at_once(name: str) -> None:
    """Not with the advice to initialise within autocast, which would be refused then."""
    x, sizes, delayed = jnp.ones((8, 32)), jnp.array([4, 4]), DelayedScaling()
    of_flax = getattr(fj_flax, name)(2, 8)
    variables = of_flax.init(jax.random.key(0), x, sizes)
    of_nnx = getattr(fj_nnx, name)(2, 32, 8, rngs=flax.nnx.Rngs(0))
    for call in (
        lambda: of_flax.apply(variables, x, sizes),
        lambda: of_flax.init(jax.random.key(0), x, sizes),
        lambda: of_nnx(x, sizes),
    ):
        with fj.autocast(enabled=True, recipe=delayed):
            assert "Float8CurrentScaling" in _refused(UnsupportedError, "GroupedDense", "recipe", call)
