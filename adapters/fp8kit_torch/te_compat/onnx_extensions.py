"""Operations as ONNX: ``te_translation_table``, what ``torch.onnx.export(dynamo=True)`` makes of them.

A call in an exported program has its whole spec as a text. Its translation is written here in operators of
ONNX's own domain, in float32. Where a recipe quantises a product by one scale a tensor, its operands go
through QuantizeLinear and DequantizeLinear of FLOAT8E4M3FN, as other FP8 models have them; a runtime may fuse
these with the product. Needs ``onnxscript`` when it is used, and ``opset_version=20`` or later.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any

from fp8kit.errors import UnsupportedError
from fp8kit.execution.codec import decode
from fp8kit.formats import E4M3
from fp8kit.ops.activation import activation
from fp8kit.ops.attention import attention
from fp8kit.ops.attention_spec import LAYOUTS, AttentionSpec
from fp8kit.ops.dropout_add import add, dropout_add
from fp8kit.ops.embedding import embedding
from fp8kit.ops.linear import linear
from fp8kit.ops.norm import norm
from fp8kit.ops.norm_linear import norm_linear
from fp8kit.ops.product import ProductSpec
from fp8kit.ops.rope import rope
from fp8kit.ops.split_heads import split_heads
from fp8kit.spec import Operation
from fp8kit_torch.library import OPERATIONS, OPS

FLOAT, FLOAT8E4M3FN, INT64 = 1, 17, 7  # onnx.TensorProto
_OP = "onnx_export"
Values = Mapping[str, Any]


def _refuse(what: str, got: object, wanted: str) -> UnsupportedError:
    return UnsupportedError(_OP, what, got, wanted)


def check(spec: Any) -> None:
    """Refuses an operation's spec with a product that has no form here, when the model is traced."""
    if getattr(spec, "smoothing", None):
        raise _refuse("smooth_swiglu", repr(spec.smooth), "None")
    products = [spec] if isinstance(spec, ProductSpec) else []
    if is_dataclass(spec):
        products += [part for name in spec.__dataclass_fields__ for part in _products(getattr(spec, name))]
    for product in products:
        if product.weight_cached or product.input_cached:
            raise _refuse("is_first_microbatch", "FP8 weights or inputs kept from call to call", "None")
        how = None if product.fp8 is None else product.fp8.fprop
        for own in () if how is None or how.compute != "quantized" else (how.a, how.b):
            if own.format != E4M3 or own.granularity != "tensor" or own.levers or own.needs_state:
                raise _refuse("recipe", str(own), "operands in E4M3 with one scale a tensor")


def _products(value: Any) -> list[ProductSpec]:
    parts = value if isinstance(value, tuple) else (value,)
    return [part for part in parts if isinstance(part, ProductSpec)]


class Graph:
    """Operators of a translation: ``op`` is a set of ONNX's operators; ``inputs`` of the call by name."""

    def __init__(self, inputs: Values) -> None:
        from onnxscript import opset20

        self.op: Any = opset20
        self.inputs = inputs

    def input(self, name: str) -> Any:
        """An input in float32; None where it is not there."""
        value = self.inputs.get(name)
        return None if value is None else self.op.Cast(value, to=FLOAT)

    def like(self, value: Any, name: str = "x") -> Any:
        """A value in the dtype of an input."""
        return self.op.CastLike(value, self.inputs[name])

    def number(self, value: float) -> Any:
        """A float32 scalar."""
        return self.op.Constant(value_float=float(value))

    def ints(self, *values: int) -> Any:
        """An int64 vector."""
        return self.op.Constant(value_ints=list(values))

    def split(self, x: Any, sizes: Sequence[int], axis: int = -1) -> list[Any]:
        """Consecutive parts of these sizes."""
        at, ends = self.ints(axis), [sum(sizes[: i + 1]) for i in range(len(sizes))]
        return [
            self.op.Slice(x, self.ints(end - size), self.ints(end), at)
            for size, end in zip(sizes, ends, strict=True)
        ]

    def by_group(self, x: Any, groups: int, each: int) -> Any:
        """(b, heads, ...) as (b, groups, heads of a group, ...)."""
        op = self.op
        shape = op.Shape(x, start=0, end=1), self.ints(groups, each), op.Shape(x, start=2, end=4)
        return op.Reshape(x, op.Concat(*shape, axis=0))

    # --- products -------------------------------------------------------------------------------------------

    def rounded(self, x: Any, quantizer: Any) -> Any:
        """x, quantised to E4M3 and back."""
        op = self.op
        if quantizer.scale_source == "current":
            amax = op.Max(op.ReduceMax(op.Abs(x), keepdims=0), self.number(quantizer.epsilon))
            scale = op.Div(self.number(E4M3.max), amax)
            if quantizer.power_2:
                # the largest power of two that is not above it, as the exponent's bits say
                exponent = op.Floor(op.Div(op.Log(scale), self.number(math.log(2))))
                power = op.Pow(self.number(2), exponent)
                half = op.Mul(power, self.number(0.5))
                twice = op.Mul(power, self.number(2))
                power = op.Where(op.Greater(power, scale), half, power)
                scale = op.Where(op.GreaterOrEqual(scale, twice), twice, power)
            empty = op.Or(op.Equal(amax, self.number(0)), op.Or(op.IsNaN(amax), op.IsInf(amax)))
            inverse = op.Where(empty, self.number(1), op.Reciprocal(scale))
        else:
            inverse = self.number(1 / quantizer.static_scale)
        zero = op.Cast(self.number(0), to=FLOAT8E4M3FN)
        return op.DequantizeLinear(op.QuantizeLinear(x, inverse, zero), inverse, zero)

    def product(self, spec: ProductSpec, x: Any) -> Any:
        """x W^T, and the bias that the product adds, in float32."""
        op, prefix = self.op, spec.prefix
        weights = [self.input(f"{prefix}weight{i}") for i in range(len(spec.segments))]
        axis = 0 if spec.layout == "oi" else 1
        w = weights[0] if len(weights) == 1 else op.Concat(*weights, axis=axis)
        how = None if spec.fp8 is None else spec.fp8.fprop
        if how is not None and how.compute == "quantized":
            x = self.rounded(x, how.a)
            w = self.rounded(w, how.b)
        y = op.MatMul(x, op.Transpose(w, perm=[1, 0]) if spec.layout == "oi" else w)
        return op.Add(y, self.bias(spec)) if spec.bias == "add" else y

    def bias(self, spec: ProductSpec) -> Any:
        """The bias of all segments, in float32."""
        parts = [self.input(f"{spec.prefix}bias{i}") for i in range(len(spec.segments))]
        return parts[0] if len(parts) == 1 else self.op.Concat(*parts, axis=0)

    # --- elementwise ----------------------------------------------------------------------------------------

    def norm(self, spec: Any, x: Any) -> Any:
        """norm(x), in float32."""
        op = self.op
        if spec.identity:
            return x
        weight, bias = self.input("norm_weight"), self.input("norm_bias")
        if weight is not None and spec.zero_centered_gamma:
            weight = op.Add(weight, self.number(1))
        if spec.centered:
            return op.LayerNormalization(x, weight, bias, axis=-1, epsilon=spec.epsilon)[0]
        mean = op.ReduceSum if spec.normalization == "L2Normalization" else op.ReduceMean
        square = mean(op.Mul(x, x), self.ints(-1), keepdims=1)
        y = op.Div(x, op.Sqrt(op.Add(square, self.number(spec.epsilon))))
        return y if weight is None else op.Mul(y, weight)

    def activation(self, name: str, params: Sequence[float], x: Any, width: int) -> Any:
        """An activation of ``width`` columns (``backends.activation``), in float32."""
        op = self.op
        rules: dict[str, Callable[[Any], Any]] = {
            "gelu": lambda u: op.Gelu(u, approximate="tanh"),
            "qgelu": lambda u: op.Mul(u, op.Sigmoid(op.Mul(u, self.number(1.702)))),
            "silu": lambda u: op.Mul(u, op.Sigmoid(u)),
            "relu": op.Relu,
            "srelu": lambda u: op.Mul(op.Relu(u), op.Relu(u)),
        }
        gated = {"glu": op.Sigmoid, "swiglu": rules["silu"]}
        gated |= {f"{own[:-2]}glu": rules[own] for own in ("gelu", "qgelu", "relu", "srelu")}
        if name in rules:
            return rules[name](x)
        if name not in gated and name != "clamped_swiglu":
            raise _refuse("activation", repr(name), f"one of {', '.join([*rules, *gated, 'clamped_swiglu'])}")
        u, v = self.split(x, [width // 2] * 2)
        if name != "clamped_swiglu":
            return op.Mul(gated[name](u), v)
        limit, alpha, offset = map(self.number, params)
        u, v = op.Min(u, limit), op.Min(op.Max(v, op.Neg(limit)), limit)
        return op.Mul(op.Mul(u, op.Sigmoid(op.Mul(alpha, u))), op.Add(v, offset))


# --- operations ---------------------------------------------------------------------------------------------


def _linear(g: Graph, spec: Any) -> dict[str, Any]:
    y, residual = g.product(spec.product, g.input("x")), g.input("residual")
    return {"y": g.like(y if residual is None else g.op.Add(y, residual))}


def _norm(g: Graph, spec: Any) -> dict[str, Any]:
    return {"y": g.like(g.norm(spec, g.input("x")))}


def _norm_linear(g: Graph, spec: Any) -> dict[str, Any]:
    normed = g.norm(spec.norm, g.input("x"))
    y = g.like(g.product(spec.product, normed))
    return {"y": y, "normed": g.like(normed), "residual": g.inputs["x"]}


def _activation(g: Graph, spec: Any) -> dict[str, Any]:
    x, bias = g.input("x"), g.input("bias0")
    x = x if bias is None else g.op.Add(x, bias)
    return {"y": g.like(g.activation(spec.activation, spec.params, x, spec.features))}


def _dropout_add(g: Graph, spec: Any) -> dict[str, Any]:
    if spec.p:
        raise _refuse("hidden_dropout", spec.p, "0: a model in evaluation mode")
    y = g.input("x")
    for name in ("bias", "residual"):
        if g.inputs.get(name) is not None:
            y = g.op.Add(y, g.input(name))
    return {"y": g.like(y)}


def _add(g: Graph, spec: Any) -> dict[str, Any]:
    return {"y": g.op.Add(g.inputs["a"], g.inputs["b"])}


def _embedding(g: Graph, spec: Any) -> dict[str, Any]:
    return {"y": g.op.Gather(g.inputs["table"], g.inputs["ids"])}


def _split_heads(g: Graph, spec: Any) -> dict[str, Any]:
    op, rank = g.op, len(g.inputs["x"].shape) - 1
    heads = [own // spec.groups for _, own in spec.parts]
    lead = [0] * rank
    x = op.Reshape(g.inputs["x"], g.ints(*lead, spec.groups, sum(heads), spec.head_dim))
    parts = g.split(x, heads, rank + 1)
    return {
        name: op.Reshape(part, g.ints(*lead, own, spec.head_dim))
        for (name, own), part in zip(spec.parts, parts, strict=True)
    }


def _rope(g: Graph, spec: Any) -> dict[str, Any]:
    op, form = g.op, spec.qkv_format
    if form == "thd" or spec.alternating:
        raise _refuse(
            "rotary_pos_emb", f"{form}, interleaved projections", "'sbhd' or 'bshd', and plain ones"
        )
    x = g.input("x")
    apart, at = len(g.inputs["x"].shape) == 4, form.index("s")
    widths = [heads * dim for heads, dim, _ in spec.segments]
    pieces = [x] if apart or len(widths) == 1 else g.split(x, widths)
    length = op.Shape(x, start=at, end=at + 1)
    made = []
    for (heads, dim, name), piece in zip(spec.segments, pieces, strict=True):
        if not name:
            made.append(piece)
            continue
        size = g.inputs[name].shape[1]
        positions = op.Range(g.op.Constant(value_int=0), op.Squeeze(length), g.op.Constant(value_int=1))
        starts = g.inputs.get("start_positions")
        if starts is not None:
            whole = op.Cast(op.Unsqueeze(starts, g.ints(1)), to=INT64)
            positions = op.Add(whole, positions)  # (b, s)
        angles = op.Gather(g.input(name), positions)
        if starts is None:
            angles = op.Unsqueeze(angles, g.ints(1 - at))
        elif at == 0:
            angles = op.Transpose(angles, perm=[1, 0, 2])
        angles = op.Unsqueeze(angles, g.ints(2))  # (s, b, 1, r) or (b, s, 1, r)
        part = piece if apart else op.Reshape(piece, g.ints(0, 0, heads, dim))
        rotated = _rotated(g, part, angles, int(size), dim, spec.interleaved)
        made.append(rotated if apart else op.Reshape(rotated, g.ints(0, 0, heads * dim)))
    return {"y": g.like(made[0] if len(made) == 1 else op.Concat(*made, axis=-1))}


def _rotated(g: Graph, x: Any, angles: Any, size: int, dim: int, interleaved: bool) -> Any:
    """The first ``size`` of ``dim`` features rotated."""
    op = g.op
    rest = None
    if size < dim:
        x, rest = g.split(x, [size, dim - size])
    if interleaved:
        pairs = op.Reshape(x, g.ints(0, 0, 0, size // 2, 2))
        a, b = g.split(pairs, [1, 1])
        crossed = op.Reshape(op.Concat(op.Neg(b), a, axis=-1), g.ints(0, 0, 0, size))
    else:
        a, b = g.split(x, [size // 2] * 2)
        crossed = op.Concat(op.Neg(b), a, axis=-1)
    y = op.Add(op.Mul(x, op.Cos(angles)), op.Mul(crossed, op.Sin(angles)))
    return y if rest is None else op.Concat(y, rest, axis=-1)


def _attention(g: Graph, spec: AttentionSpec) -> dict[str, Any]:
    op = g.op
    if spec.packed or spec.quantized is not None or spec.bias == "alibi" or spec.dropout:
        got = f"{spec.qkv_format}, {spec.bias}, FP8 attention or dropout"
        raise _refuse("attention", got, "'sbhd' or 'bshd', no ALiBi, no FP8 attention, evaluation mode")
    q, k, v = _heads(g, spec)  # (b, heads, s, d)
    groups, each = spec.num_gqa_groups, spec.num_heads // spec.num_gqa_groups
    q = op.Reshape(q, g.ints(0, groups, each, -1, spec.head_dim))
    k, v = (op.Unsqueeze(part, g.ints(2)) for part in (k, v))
    scores = op.MatMul(q, op.Transpose(k, perm=[0, 1, 2, 4, 3]))
    bias = g.input("bias")
    if bias is not None:  # (1 | b, 1 | h, 1 | s, s)
        own = int(g.inputs["bias"].shape[1])
        bias = g.by_group(bias, groups, each) if own > 1 else op.Unsqueeze(bias, g.ints(1))
    scale = g.number(spec.softmax_scale)
    before = spec.bias == "pre_scale_bias"
    scores = op.Mul(op.Add(scores, bias) if before else scores, scale)
    if spec.softcap:
        scores = op.Mul(op.Tanh(op.Div(scores, g.number(spec.softcap))), g.number(spec.softcap))
    scores = scores if bias is None or before else op.Add(scores, bias)
    seen = _seen(g, spec, q, k, groups, each)
    low = g.number(-3e38)
    masked = scores if seen is None else op.Where(seen, scores, low)
    most = op.ReduceMax(masked, g.ints(-1), keepdims=1)
    offset: Any = None
    if spec.softmax_type == "learnable":
        offset = op.Reshape(g.input("softmax_offset"), g.ints(1, groups, each, 1, 1))
    elif spec.softmax_type == "off-by-one":
        offset = g.number(0)
    if offset is not None:
        most = op.Max(most, offset)
    weights = op.Exp(op.Sub(masked, most))
    weights = weights if seen is None else op.Where(seen, weights, g.number(0))
    total = op.ReduceSum(weights, g.ints(-1), keepdims=1)
    if offset is not None:
        total = op.Add(total, op.Exp(op.Sub(offset, most)))
    total = op.Where(op.Equal(total, g.number(0)), g.number(1), total)
    o = op.MatMul(op.Div(weights, total), v)
    o = op.Reshape(o, g.ints(0, spec.num_heads, -1, spec.head_dim_v))
    o = op.Transpose(o, perm=[2, 0, 1, 3] if spec.qkv_format == "sbhd" else [0, 2, 1, 3])
    first = next(iter(LAYOUTS[spec.layout]))
    return {"o": g.like(op.Reshape(o, g.ints(0, 0, spec.num_heads * spec.head_dim_v)), first)}


def _heads(g: Graph, spec: AttentionSpec) -> list[Any]:
    """q, k and v in float32, (b, heads, s, features)."""
    op, found = g.op, {}
    order = [1, 2, 0, 3] if spec.qkv_format == "sbhd" else [0, 2, 1, 3]
    for name in LAYOUTS[spec.layout]:
        parts, x = tuple(name), g.input(name)
        if len(parts) == 1:
            pieces = [x]
        elif spec.interleaved:
            x = op.Reshape(x, g.ints(0, 0, spec.num_heads, sum(map(spec.features, parts))))
            pieces = g.split(x, [*map(spec.features, parts)])
        else:
            pieces = g.split(x, [spec.width(part) for part in parts])
        for part, piece in zip(parts, pieces, strict=True):
            apart = spec.interleaved or (len(parts) == 1 and len(g.inputs[name].shape) == 4)
            if not apart:
                piece = op.Reshape(piece, g.ints(0, 0, spec.heads(part), spec.features(part)))
            found[part] = op.Transpose(piece, perm=order)
    return [found[part] for part in "qkv"]


def _seen(g: Graph, spec: AttentionSpec, q: Any, k: Any, groups: int, each: int) -> Any:
    """Which scores are attended to, of the shape of scores or one that spreads to it; None: all."""
    op = g.op
    zero, one = op.Constant(value_int=0), op.Constant(value_int=1)
    sizes = [op.Squeeze(op.Shape(x, start=3, end=4)) for x in (q, k)]
    rows = op.Unsqueeze(op.Range(zero, sizes[0], one), g.ints(1))
    columns = op.Range(zero, sizes[1], one)
    lengths: list[Any] = list(sizes)
    found: list[Any] = []
    if spec.padded:
        for i, name in enumerate(("cu_seqlens_q", "cu_seqlens_kv")):
            sums = op.Cast(g.inputs[name], to=INT64)
            end, start = (op.Slice(sums, *map(g.ints, at)) for at in ((1, 2**31), (0, -1)))
            lengths[i] = op.Reshape(op.Sub(end, start), g.ints(-1, 1, 1, 1, 1))
        found += [op.Less(rows, lengths[0]), op.Less(columns, lengths[1])]
    left, right = spec.window
    distance = op.Sub(columns, rows)
    if spec.bottom_right:
        distance = op.Sub(distance, op.Sub(lengths[1], lengths[0]))
    if right >= 0:
        found.append(op.LessOrEqual(distance, op.Constant(value_int=right)))
    if left >= 0:
        found.append(op.GreaterOrEqual(distance, op.Constant(value_int=-left)))
    if spec.masked:
        mask = op.Cast(g.inputs["mask"], to=9)  # bool
        own = int(g.inputs["mask"].shape[1])
        mask = g.by_group(mask, groups, each) if own > 1 else op.Unsqueeze(mask, g.ints(1))
        found.append(op.Not(mask))
    seen = None
    for each_ in found:
        seen = each_ if seen is None else op.And(seen, each_)
    return seen


_TRANSLATIONS: dict[Operation, Callable[[Graph, Any], dict[str, Any]]] = {
    linear: _linear,
    norm: _norm,
    norm_linear: _norm_linear,
    activation: _activation,
    dropout_add: _dropout_add,
    add: _add,
    embedding: _embedding,
    split_heads: _split_heads,
    rope: _rope,
    attention: _attention,
}


def _translated(operation: Operation, g: Graph, spec: Any) -> dict[str, Any]:
    """An operation's outputs: by its own translation, or by those of what it is made of."""
    if operation in _TRANSLATIONS:
        return _TRANSLATIONS[operation](g, spec)
    found = dict(g.inputs)
    for part in operation.decompose(spec):
        own = Graph({name: found[known] for name, known in part.inputs.items() if known in found})
        made = _translated(part.operation, own, part.spec)
        found |= {part.results.get(name, name): value for name, value in made.items()}
    return found


def _translation(operation: Operation) -> Callable[..., tuple[Any, ...]]:
    def translate(inputs: Any, state: Any, call: str) -> tuple[Any, ...]:
        _, spec, names, *_ = decode(call)
        made = _translated(operation, Graph(dict(zip(names, inputs, strict=True))), spec)
        return tuple([made[output] for output in operation.outputs(spec)])

    return translate


_TRANSLATED = {
    name: operation
    for name, operation in OPERATIONS.items()
    if operation in _TRANSLATIONS or type(operation).decompose is not Operation.decompose
}
TRANSLATED = frozenset(_TRANSLATED)  # names of operations

# operation of torch -> its translation
te_translation_table: dict[Any, Callable[..., tuple[Any, ...]]] = {
    OPS[name].call: _translation(operation) for name, operation in _TRANSLATED.items()
}
