"""Attention in FP8 by cuDNN, on Hopper (``cudnn_fp8``).

cuDNN wants every result's scale beforehand, and gives its amax afterwards. So its graph runs twice in
forward: for the amax of o, then with o's scale; and three times in backward: for the amax of dS; for those of
dq, dk and dv, of the rounded dS; and with all scales. That is current scaling, and needs no state. Nothing
waits for the host.

Padding holds 0; cuDNN gets the batches' true lengths, and what it leaves in padding is replaced, as in
``cudnn_sdpa``.
"""

from __future__ import annotations

from fp8kit import slowness
from fp8kit.arrays import ArrayView, Shape
from fp8kit.backends.cuda import cudnn_fp8, cudnn_plans, cudnn_sdpa, launch, quantize, recorded, scales
from fp8kit.backends.cuda.attention_padding import Padding
from fp8kit.backends.cuda.attention_problem import Problem, arranged, problem
from fp8kit.backends.cuda.device import provider
from fp8kit.backends.protocol import AttentionExtras, AttentionSpec
from fp8kit.errors import BackendError
from fp8kit.formats import E4M3, E5M2, Format, float32, uint8
from fp8kit.quantization import Quantizer

NAME = "cuDNN in FP8"
EMULATED = "emulation in float32"
DIRECTIONS = ("forward", "backward", "deterministic backward")
_MODES = ((False, True), (True, False), (True, True))  # (backward, deterministic), of each
_NEVER = 1e30  # a log-sum-exp that makes exp(score - lse) 0
_SLOW = "it is emulated in float32, many times slower than cuDNN's FP8 kernels"

# float32 numbers of a call, by name; amaxes first, which are zeroed
_FORWARD = ("nothing", "amax_o", "scale_s", "descale_s", "scale_o", "descale_o")
_GRADIENTS = ("dq", "dk", "dv")
_BACKWARD = (
    *("nothing", "amax_o", "amax_dq", "amax_dk", "amax_dv", "amax_ds"),
    *("group_0", "group_1", "group_2"),
    *("scale_s", "descale_s", "scale_o", "descale_o"),
    *("scale_0", "scale_1", "scale_2", "scale_ds"),
    *("descale_0", "descale_1", "descale_2", "descale_ds"),
)
_ZEROED = {False: 2, True: 9}


def _problem(q: Shape, k: Shape, v: Shape, spec: AttentionSpec) -> Problem:
    """Returns the problem of q, k and v of shapes (b, h, s, d)."""

    def transposed(x: Shape) -> Shape:
        b, heads, length, dim = x
        return (length, b, heads, dim) if spec.qkv_format == "sbhd" else (b, length, heads, dim)

    found = problem(transposed(q), transposed(k), transposed(v), float32, spec)
    return found._replace(qkv_format="bshd", zero_padded=True)


def _formats(p: Format, gradients: Format) -> tuple[str, str]:
    """Returns the names by which ``cudnn_fp8`` knows them."""
    known = {E4M3: "E4M3", E5M2: "E5M2"}
    return known.get(p, f"{p.name}, of its own"), known.get(gradients, f"{gradients.name}, of its own")


def _layout(about: Problem, backward: bool) -> dict[str, int]:
    """Returns where parts of the workspace lie; cuDNN's own starts at "end"."""

    def codes(name: str) -> int:
        b, h, s, d = cudnn_sdpa.size(about, name)
        return b * h * s * d

    found = {name: codes(name) for name in (("o", *_GRADIENTS) if backward else ("o",))}
    found["numbers"] = 4 * len(_BACKWARD if backward else _FORWARD)
    if about.padded:
        found["lengths"] = 8 * about.batch
        if backward:
            found["stats"] = 4 * about.batch * about.heads * about.rows
    return arranged(found)


class _FP8Call:
    """A call: its workspace's parts, its numbers, what it launches."""

    def __init__(
        self,
        about: Problem,
        formats: tuple[str, str],
        backward: bool,
        deterministic: bool,
        like: ArrayView,
        extras: AttentionExtras,
        workspace: ArrayView | None,
        stream: int,
    ) -> None:
        self.about, self.device, self.stream, self.backward = about, like.device, stream, backward
        self.key = cudnn_fp8.key_of(about, formats, backward, deterministic, like.device.index)
        self.layout, self.names = _layout(about, backward), _BACKWARD if backward else _FORWARD
        self.start, given = (0, 0) if workspace is None else (workspace.ptr, workspace.nbytes)
        self.left = given - self.layout["end"]
        reason = cudnn_fp8.why_not(about, formats, backward, self.key.deterministic, like.device.index)
        if reason is not None:
            raise BackendError(f"fp8_attention: {reason}")
        self.padding = Padding(about, like.device.index, extras, stream) if about.padded else None
        self.pointers = {name: self.number(name).ptr for name in self.names if name != "nothing"}
        # cuDNN starts from what an amax holds, or writes over it: 0 is right for both
        self.clear(0, _ZEROED[backward])

    def at(self, name: str) -> int:
        """Address of a part."""
        return self.start + self.layout[name]

    def number(self, name: str) -> ArrayView:
        """One of the numbers."""
        return ArrayView(self.at("numbers") + 4 * self.names.index(name), (1,), float32, self.device)

    def codes(self, name: str) -> ArrayView:
        """Codes in the workspace, as a matrix."""
        b, h, s, d = cudnn_sdpa.size(self.about, name)
        return ArrayView(self.at(name), (b * h * s, d), uint8, self.device)

    def clear(self, first: int, count: int) -> None:
        """Zeros in some numbers."""
        with launch.current_device(self.device.index):
            recorded.clear(self.device.index, self.stream, self.at("numbers") + 4 * first, 4 * count)

    def fixed_scale(self, p: Quantizer) -> None:
        """P's scale: so many, divided by an amax of at least 1, of nothing."""
        pair = self.number("scale_s"), self.number("descale_s")
        scales.scale_from_amax(
            self.number("nothing"), *pair, p.static_scale, False, 1.0, float32.max, self.stream
        )

    def scale(self, amax: str, name: str, how: Quantizer) -> None:
        """A scale and its inverse, of an amax; 1 of an amax of 0."""
        pair = self.number(f"scale_{name}"), self.number(f"descale_{name}")
        fmt = how.format
        scales.scale_from_amax(
            self.number(amax), *pair, fmt.max, how.power_2, how.epsilon, float32.max, self.stream
        )

    def run(self) -> None:
        """Launch the graph with the addresses as they are."""
        lengths = ("lengths_q", "lengths_kv") if self.padding is not None else ()
        wanted = *cudnn_fp8.names(self.backward), *lengths
        uids = {cudnn_fp8.UIDS[name]: self.pointers[name] for name in wanted}
        cudnn_plans.put(self.key, uids, self.start + self.layout["end"], self.left, self.stream)

    def lengths(self) -> None:
        """The batches' true lengths for cuDNN."""
        if self.padding is not None:
            self.padding.lengths(self.at("lengths"))
            self.pointers["lengths_q"] = self.at("lengths")
            self.pointers["lengths_kv"] = self.at("lengths") + 4 * self.about.batch

    def decode(self, name: str, descale: str, into: ArrayView, fmt: Format) -> None:
        """Codes of the workspace as values, padding 0. ``into``: (b, h, s, d)."""
        codes = self.codes(name)
        rows, columns = codes.shape
        values = into.reshape(rows, columns)
        quantize.dequantize(codes, values, self.number(descale), fmt, (rows, columns), self.stream)
        if self.padding is not None:
            b, h, s, d = into.shape
            transposed = into.with_strides((b, s, h, d), (h * s * d, d, s * d, 1))
            self.padding.zero(transposed, name in ("o", "dq"))


def fp8_attention_fwd(
    q: ArrayView,
    k: ArrayView,
    v: ArrayView,
    scale_invs: ArrayView,
    o: ArrayView,
    lse: ArrayView,
    extras: AttentionExtras,
    spec: AttentionSpec,
    p: Quantizer,
    out: Quantizer,
    workspace: ArrayView | None,
    stream: int,
) -> None:
    """See ``backends.protocol``. BackendError for what cuDNN does not take."""
    about, formats = _problem(q.shape, k.shape, v.shape, spec), _formats(p.format, p.format)
    call = _FP8Call(about, formats, False, True, q, extras, workspace, stream)
    call.lengths()
    call.pointers |= {"q": q.ptr, "k": k.ptr, "v": v.ptr, "o": call.at("o"), "stats": lse.ptr}
    for i, name in enumerate("qkv"):
        call.pointers[f"descale_{name}"] = scale_invs.slice(0, i, 1).ptr
    call.fixed_scale(p)
    call.scale("nothing", "o", out)
    call.run()
    call.scale("amax_o", "o", out)
    call.run()
    call.decode("o", "descale_o", o, out.format)
    if call.padding is not None:
        call.padding.statistics(lse.ptr, lse.ptr, float("-inf"))


def fp8_attention_bwd(
    do: ArrayView,
    q: ArrayView,
    k: ArrayView,
    v: ArrayView,
    scale_invs: ArrayView,
    o: ArrayView,
    lse: ArrayView,
    dq: ArrayView,
    dk: ArrayView,
    dv: ArrayView,
    extras: AttentionExtras,
    spec: AttentionSpec,
    p: Quantizer,
    out: Quantizer,
    ds: Quantizer,
    dqkv: Quantizer,
    groups: tuple[int, int, int],
    deterministic: bool,
    workspace: ArrayView | None,
    stream: int,
) -> None:
    """See ``backends.protocol``. BackendError for what cuDNN does not take."""
    about, formats = _problem(q.shape, k.shape, v.shape, spec), _formats(p.format, ds.format)
    call = _FP8Call(about, formats, True, deterministic, q, extras, workspace, stream)
    call.lengths()
    call.pointers |= {"q": q.ptr, "k": k.ptr, "v": v.ptr, "d_o": do.ptr, "stats": lse.ptr}
    call.pointers |= {name: call.at(name) for name in ("o", *_GRADIENTS)}
    for i, name in enumerate(("d_o", "q", "k", "v")):
        call.pointers[f"descale_{name}"] = scale_invs.slice(0, i, 1).ptr
    for name, group in zip(_GRADIENTS, groups, strict=True):
        call.pointers[f"scale_{name}"] = call.number(f"scale_{group}").ptr
    if call.padding is not None:
        call.pointers["stats"] = call.at("stats")
        call.padding.statistics(lse.ptr, call.at("stats"), _NEVER)

    call.fixed_scale(p)
    codes = call.codes("o")
    rows, columns = codes.shape
    given, whole = o.reshape(rows, columns), (rows, columns)
    scales.amax(given, call.number("amax_o"), whole, stream)
    call.scale("amax_o", "o", out)
    pair = call.number("scale_o"), call.number("descale_o")
    quantize.quantize(given, codes, *pair, None, out.format, whole, True, 0, 0, None, stream)

    used = sorted(set(groups))
    for number in used:
        call.scale("nothing", str(number), dqkv)
    call.scale("nothing", "ds", ds)
    call.run()
    call.scale("amax_ds", "ds", ds)
    first = _BACKWARD.index("amax_dq")
    call.clear(first, len(_GRADIENTS))  # what the gradients were before dS had its scale
    call.run()
    for number in used:
        for i, name in enumerate(_GRADIENTS):
            if groups[i] == number:
                amax = ArrayView(call.number(f"amax_{name}").ptr, (1, 1), float32, q.device)
                scales.amax(amax, call.number(f"group_{number}"), (1, 1), stream)
        call.scale(f"group_{number}", str(number), dqkv)
    call.run()
    for i, (name, into) in enumerate(zip(_GRADIENTS, (dq, dk, dv), strict=True)):
        call.decode(name, f"descale_{groups[i]}", into, dqkv.format)


def fp8_attention_workspace(
    q: Shape,
    k: Shape,
    v: Shape,
    spec: AttentionSpec,
    forward_format: Format,
    backward_format: Format,
    backward: bool,
    deterministic: bool,
) -> int:
    """See ``backends.protocol``. For the current device; where its kernels could be used, the first call of a
    kind that they do not take is said to be slow."""
    about, device = _problem(q, k, v, spec), launch.runtime().getDevice()
    formats, mode = _formats(forward_format, backward_format), (backward, deterministic or not backward)
    reason = cudnn_fp8.why_not(about, formats, *mode, device)
    if reason is not None:
        if 10 * launch.capability(device)[0] >= cudnn_fp8.HOPPER:
            slowness.say(f"FP8 attention with {reason}", _SLOW, "`fp8kit info --attention` explains")
        return 0
    plan = cudnn_plans.plan_of(cudnn_fp8.key_of(about, formats, *mode, device))
    return _layout(about, backward)["end"] + max(plan.workspace, 1)


def explain(
    q: Shape, k: Shape, v: Shape, spec: AttentionSpec, formats: tuple[Format, Format]
) -> list[tuple[str, str]]:
    """cuDNN's answer for each direction, "runs" or the reason why it does not, for the current device; where
    there is none, the reasons that are known without one. Shapes (b, h, s, d)."""
    device = launch.runtime().getDevice() if provider.count() else None
    about, names = _problem(q, k, v, spec), _formats(*formats)
    runs = "runs" if device is not None else "no usable CUDA device"
    return [
        (name, cudnn_fp8.why_not(about, names, *mode, device) or runs)
        for name, mode in zip(DIRECTIONS, _MODES, strict=True)
    ]
