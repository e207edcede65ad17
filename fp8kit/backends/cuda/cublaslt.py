"""Matrix products by cuBLASLt: a problem as a value, a plan made once for it, and a run that only patches
pointers.

Everything is said row-major here; cuBLASLt is column-major and computes the transposed problem, out^T =
op(b)^T op(a)^T, in which a row-major matrix is the transposed column-major one of the same memory. So its A
is our b, and the two inputs' scales swap with them. Rules and types: NVIDIA's cuBLAS documentation,
cublasLtMatmul.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from fp8kit.backends.cuda import candidates, launch
from fp8kit.backends.cuda.steps import Step
from fp8kit.errors import BackendError, install
from fp8kit.formats import DType, float32
from fp8kit.lru import LRU, memoized

Scaling = Literal["tensor", "row", "block_1x128", "block_128x128", "mx", "nvfp4"]
WORKSPACE = 32 << 20  # bytes that a product may use for splitting its contraction; NVIDIA's advice for Hopper
_COMPUTE_32F = 68  # float32 throughout: no TF32
_FLOAT32 = float32.cuda

# cublasLtMatmulDescAttributes_t
_TRANSA, _TRANSB, _EPILOGUE, _BIAS_POINTER, _BIAS_TYPE, _FAST_ACCUMULATE = 3, 4, 7, 8, 26, 25
_A_SCALE, _B_SCALE, _A_SCALE_MODE, _B_SCALE_MODE = 17, 18, 31, 32
# cublasLtMatrixLayoutAttribute_t, cublasLtEpilogue_t, cublasLtMatmulMatrixScale_t
_BATCH_COUNT, _BATCH_STRIDE = 5, 6
_SOME_ADDRESS = 256  # stands for the scales while algorithms are looked for: only "tensor" is found without
_EPILOGUE_BIAS = 4
_SCALE_MODES: dict[Scaling, int] = {
    "tensor": 0,
    "nvfp4": 1,
    "mx": 2,
    "row": 3,
    "block_1x128": 4,
    "block_128x128": 5,
}


@dataclass(frozen=True)
class MatmulKey:
    """One matrix product, row-major: out (m, n) = alpha * op(a) op(b) [* scales] [+ bias] [+ addend].

    * ``layout``: "nt" a (m, k), b (n, k); "nn" a (m, k), b (k, n); "tn" a (k, m), b (k, n). FP8 takes "nt"
      only.
    * ``a``, ``b``, ``out``: element types; float8_e4m3fn, float8_e5m2 and float4_e2m1fn for codes.
      ``a_stride``, ``b_stride``, ``out_stride``: distance of rows, in elements.
    * ``batch``: number of products; ``a_step``, ``b_step``, ``out_step``: distance of neighbouring matrices,
      in elements (0: the same one).
    * ``bias``: n elements of out's type are added to every row. ``accumulate``: an array like out is added,
      or out itself.
    * ``scaling``: None, or how a and b are multiplied by their scale_inv: "tensor" (float32 [1]), "row"
      (float32 [m], [n]), "block_1x128" or "block_128x128" (see ``block_quantize``; one of the two at least is
      "block_1x128"), "mx" or "nvfp4" for both (see ``block_gemm``; of compute capability 10.0).
    * ``fast_accumulate``: FP8 sums may stay in the tensor cores' own width. ``workspace``: bytes that the
      product may use.
    * ``alignment``: what every pointer is a multiple of, in bytes. ``timed``: the fastest algorithm is looked
      for (``algorithms``).
    """

    m: int
    n: int
    k: int
    layout: Literal["nt", "nn", "tn"]
    a: DType
    b: DType
    out: DType
    a_stride: int
    b_stride: int
    out_stride: int
    bias: bool = False
    accumulate: bool = False
    scaling: tuple[Scaling, Scaling] | None = None
    fast_accumulate: bool = False
    workspace: int = WORKSPACE
    alignment: int = 16
    timed: bool = False
    batch: int = 1
    a_step: int = 0
    b_step: int = 0
    out_step: int = 0
    alpha: float = 1.0


@dataclass(frozen=True)
class Operand:
    """A column-major matrix: ``rows`` x ``columns``, ``ld`` between columns, transposed or not before the
    product."""

    rows: int
    columns: int
    ld: int
    step: int
    dtype: DType
    transposed: bool = False


def operands(key: MatmulKey) -> tuple[Operand, Operand, Operand]:
    """cuBLASLt's A, B and D for a problem: our b, our a and our out, each read column-major."""
    a_rows, a_columns = (key.k, key.m) if key.layout == "tn" else (key.m, key.k)
    b_rows, b_columns = (key.n, key.k) if key.layout == "nt" else (key.k, key.n)
    first = Operand(b_columns, b_rows, key.b_stride, key.b_step, key.b, key.layout == "nt")
    second = Operand(a_columns, a_rows, key.a_stride, key.a_step, key.a, key.layout == "tn")
    return first, second, Operand(key.n, key.m, key.out_stride, key.out_step, key.out)


@functools.cache
def bindings() -> Any:
    """``nvmath.bindings.cublasLt``; BackendError where nvmath is missing."""
    try:
        from nvmath.bindings import cublasLt as module
    except (ImportError, RuntimeError) as error:
        raise BackendError(f"cublaslt: nvmath cannot be imported ({error}); {install('cuda13')}") from error
    return module


def refusals() -> tuple[type[Exception], ...]:
    """Returns what ``bindings`` raise: a status that is not success, and what is missing."""
    return RuntimeError, bindings().cuBLASLtError


@functools.cache
def _handle(device_index: int) -> int:
    with launch.current_device(device_index):
        try:
            return int(bindings().create())
        except refusals() as error:
            raise BackendError(f"cublaslt: no handle on cuda:{device_index}: {error}") from error


# device and problem, about -> the algorithm of the last such problem
_NEAR: LRU[tuple[int, MatmulKey], bytes] = LRU(4096, name="cuBLASLt algorithms of sizes near by")


def _coarse(key: MatmulKey) -> MatmulKey:
    """Returns the problem with each size rounded up to a quarter of its power of two. Rows that lie badly,
    which not every algorithm takes, stay apart from others: ``alignment`` is theirs, too."""
    names = "m", "n", "k", "a_stride", "b_stride", "out_stride", "a_step", "b_step", "out_step"
    rounded = {}
    for name in names:
        size = getattr(key, name)
        unit = 1 << max(size.bit_length() - 3, 0)
        rounded[name] = -(-size // unit) * unit
    apart = [key.a.itemsize * one for one in (key.a_stride, key.a_step)]
    apart += [key.b.itemsize * one for one in (key.b_stride, key.b_step)]
    apart += [key.out.itemsize * one for one in (key.out_stride, key.out_step)]
    return replace(key, alignment=math.gcd(key.alignment, *apart), **rounded)


class MatmulPlan:
    """Descriptors and algorithms of one ``MatmulKey`` on one device. ``run`` may be called from several
    threads.

    ``algorithms`` counts the candidates, the best first as far as is known; ``choose(i)`` takes another.
    ``tuned``: that is for good; until then ``tune(plan, run, stream)`` is called before each ``run``, with a
    function that launches the product to another address, and may choose.

    A ``timed`` problem begins with the algorithm of one that is about as large, where there was one, in front
    of the heuristic's: to ask that takes 0.2 ms, and to load another algorithm's code 1 ms.
    """

    tune: Callable[[MatmulPlan, Callable[[int], None], int], None]

    def __init__(self, key: MatmulKey, device_index: int) -> None:
        self.key = key
        self.tuned = not key.timed
        self.calls = 0  # while it is not tuned
        self.device = device_index
        self._lt = bindings()
        self._handle = _handle(device_index)
        self._matmul = self._lt.matmul
        self._set = self._lt.matmul_desc_set_attribute
        self._refusals = refusals()
        self._get_device = launch.runtime().getDevice
        self._lock = threading.Lock()
        # host memory that cuBLASLt reads: scalars at each call, pointers when they are set
        self._scalars = (ctypes.c_float * 2)(key.alpha, 1.0 if key.accumulate else 0.0)
        self._alpha = ctypes.addressof(self._scalars)
        self._beta = self._alpha + 4
        self._pointer = ctypes.c_uint64(0)
        self._pointer_at = ctypes.addressof(self._pointer)
        self._held: list[Any] = []  # the candidates; none goes, since another thread may run it
        self._wide = False
        self._known: list[int] = []  # A's scale, B's scale, bias, as the descriptor has them
        try:
            with launch.current_device(device_index):
                self._describe()
                self._search = candidates.Search(
                    self._lt,
                    self._handle,
                    self._description,
                    self._layouts,
                    key.workspace,
                    key.alignment,
                    self._refusals,
                )
                self._near = (device_index, _coarse(key)) if key.timed else None
                near = None if self._near is None else _NEAR.get(self._near)
                self._asked = near is None or not self._search.accepts(near)  # the heuristic
                self._hold(self._search.proposed() if near is None or self._asked else [near])
        except self._refusals as error:
            raise self.error(error) from error
        if not self._held:
            raise self.error("no algorithm")
        self.choose(0)
        self.lend()

    def _describe(self) -> None:
        scale = 0 if self.key.scaling is None else _SOME_ADDRESS
        self._description, self._known = self.description(scale, scale, 0), [scale, scale, 0]
        self._layouts = tuple(self._layout(operand) for operand in operands(self.key))

    def description(self, a_scale: int, b_scale: int, bias: int) -> int:
        """Returns a new descriptor of the product with those addresses, to be destroyed by the caller."""
        key, (first, second, _) = self.key, operands(self.key)
        attributes: list[tuple[int, Any]] = [
            (_TRANSA, ctypes.c_int32(first.transposed)),
            (_TRANSB, ctypes.c_int32(second.transposed)),
        ]
        if key.bias:
            attributes += [
                (_EPILOGUE, ctypes.c_int32(_EPILOGUE_BIAS)),
                (_BIAS_TYPE, ctypes.c_int32(key.out.cuda)),
            ]
        if key.scaling is not None:
            attributes += [
                (_FAST_ACCUMULATE, ctypes.c_int8(key.fast_accumulate)),
                (_A_SCALE_MODE, ctypes.c_int32(_SCALE_MODES[key.scaling[1]])),
                (_B_SCALE_MODE, ctypes.c_int32(_SCALE_MODES[key.scaling[0]])),
                (_A_SCALE, ctypes.c_uint64(b_scale)),
                (_B_SCALE, ctypes.c_uint64(a_scale)),
            ]
        if bias:
            attributes.append((_BIAS_POINTER, ctypes.c_uint64(bias)))
        made = int(self._lt.matmul_desc_create(_COMPUTE_32F, _FLOAT32))
        for attribute, value in attributes:
            self._set(made, attribute, ctypes.addressof(value), ctypes.sizeof(value))
        return made

    def _layout(self, operand: Operand) -> int:
        layout = self._lt.matrix_layout_create(operand.dtype.cuda, operand.rows, operand.columns, operand.ld)
        if self.key.batch != 1:
            count, step = ctypes.c_int32(self.key.batch), ctypes.c_int64(operand.step)
            self._lt.matrix_layout_set_attribute(layout, _BATCH_COUNT, ctypes.addressof(count), 4)
            self._lt.matrix_layout_set_attribute(layout, _BATCH_STRIDE, ctypes.addressof(step), 8)
        return int(layout)

    def _hold(self, algorithms: list[bytes]) -> None:
        self._held += [ctypes.create_string_buffer(algorithm, candidates.SIZE) for algorithm in algorithms]

    @property
    def algorithms(self) -> int:
        """How many candidates there are."""
        self._ask()
        return len(self._held)

    def _ask(self) -> None:
        """Have the heuristic's candidates, too; none more where it has none."""
        with self._lock, launch.current_device(self.device):
            if not self._asked:
                known = [held.raw for held in self._held]
                with contextlib.suppress(*self._refusals):
                    self._hold([one for one in self._search.proposed() if one not in known])
            self._asked = True

    def lend(self) -> None:
        """Have further problems that are about as large begin with the chosen algorithm."""
        if self._near is not None:
            _NEAR.put(self._near, self.chosen)

    @property
    def chosen(self) -> bytes:
        """The algorithm that is taken. It holds for this cuBLASLt, here and elsewhere."""
        return ctypes.string_at(self.algorithm, candidates.SIZE)

    @property
    def splits(self) -> int:
        """Into how many parts, each summed by itself, it cuts the contraction."""
        return self._search.splits(self.chosen)

    def widen(self) -> None:
        """Let the relatives of the heuristic's candidates be candidates, too (``candidates``)."""
        self._ask()
        with self._lock, launch.current_device(self.device):
            if not self._wide:
                self._hold(self._search.relatives([held.raw for held in self._held]))
            self._wide = True

    def choose(self, index: int) -> None:
        """Take candidate number ``index`` from now on; relatives come last."""
        if not 0 <= index < len(self._held):
            raise BackendError(f"cublaslt: algorithm: got {index}, expected one of {len(self._held)}")
        self.algorithm = ctypes.addressof(self._held[index])

    def take(self, algorithm: bytes) -> bool:
        """Take what another plan had ``chosen`` for this product; whether cuBLASLt accepts it."""
        with self._lock, launch.current_device(self.device):
            accepted = len(algorithm) == candidates.SIZE and self._search.accepts(algorithm)
            if accepted:
                self._hold([algorithm])
                self.choose(len(self._held) - 1)
                self.lend()
        return accepted

    def run(self, addresses: tuple[int, ...], workspace_bytes: int, stream: int) -> None:
        """Launch the product. ``addresses``: of a, b, out, a_scale, b_scale, bias, the workspace, and of what
        is added, where the key says that something is; 0 for arrays that the key does not have, and there for
        out itself. ``stream`` is the raw handle.

        Raises BackendError when cuBLASLt refuses.
        """
        if self._get_device() != self.device:
            with launch.current_device(self.device):
                self.run(addresses, workspace_bytes, stream)
            return
        if not self.tuned:
            a, b, _, *rest = addresses
            self.tune(self, lambda to: self._launch((a, b, to, *rest), workspace_bytes, stream), stream)
        self._launch(addresses, workspace_bytes, stream)
        recording = launch.here.recording
        if recording is not None:
            recording.add(self.device, stream, self._step(addresses, workspace_bytes, stream))

    def _launch(self, addresses: tuple[int, ...], workspace_bytes: int, stream: int) -> None:
        """``run`` on the current device."""
        a, b, out, a_scale, b_scale, bias, workspace, addend = addresses
        first, second, result = self._layouts
        with self._lock:  # the descriptor holds this call's pointers
            known = self._known
            try:
                if known[0] != b_scale:
                    self._patch(0, _A_SCALE, b_scale)
                if known[1] != a_scale:
                    self._patch(1, _B_SCALE, a_scale)
                if known[2] != bias:
                    self._patch(2, _BIAS_POINTER, bias)
                self._matmul(
                    self._handle,
                    self._description,
                    self._alpha,
                    b,
                    first,
                    a,
                    second,
                    self._beta,
                    addend or out,
                    result,
                    out,
                    result,
                    self.algorithm,
                    workspace,
                    workspace_bytes,
                    stream,
                )
            except self._refusals as error:
                raise self.error(error) from error

    def _step(self, addresses: tuple[int, ...], workspace_bytes: int, stream: int) -> Step:
        """Returns the product as a step of a recording: ``Bound.run`` where it was, ``MatmulPlan.run``
        elsewhere."""
        run = Bound(self, addresses, workspace_bytes).run

        def work(*moved: int) -> None:
            *arrays, on = moved
            do = self._launch if self.tuned else self.run  # the device is current
            do(tuple(arrays), workspace_bytes, on)

        return Step("cublaslt", functools.partial(run, stream), run, work, addresses)

    def error(self, error: Exception | str) -> BackendError:
        """cuBLASLt's refusal of the product."""
        return BackendError(f"cublaslt: {self.key} on cuda:{self.device}: {error}")

    def _patch(self, slot: int, attribute: int, pointer: int) -> None:
        self._pointer.value = pointer
        self._set(self._description, attribute, self._pointer_at, 8)
        self._known[slot] = pointer


class Bound:
    """A plan's product with all its addresses (those of ``MatmulPlan.run``, the stream aside); its device is
    current when it runs.

    From its second run on it has a descriptor of its own, since the plan's has the addresses of the last
    call: most recorded products are done once, on other arrays, and need none.
    """

    __slots__ = ("__weakref__", "_addresses", "_before", "_nbytes", "_plan")

    def __init__(self, plan: MatmulPlan, addresses: tuple[int, ...], workspace_bytes: int) -> None:
        self._plan, self._addresses, self._nbytes = plan, addresses, workspace_bytes
        self._before: tuple[Any, ...] | None = None

    def _described(self) -> tuple[Any, ...]:
        """Returns the arguments of ``cublasLtMatmul`` before the algorithm."""
        plan = self._plan
        a, b, out, a_scale, b_scale, bias, _, addend = self._addresses
        first, second, result = plan._layouts
        try:
            description = plan.description(a_scale, b_scale, bias)
        except plan._refusals as error:
            raise plan.error(error) from error
        weakref.finalize(self, plan._lt.matmul_desc_destroy, description).atexit = False
        product = (plan._alpha, b, first, a, second, plan._beta)
        return plan._handle, description, *product, addend or out, result, out, result

    def run(self, stream: int) -> None:
        """Launch it on a stream."""
        plan = self._plan
        if not plan.tuned:  # another algorithm may be to come
            plan.run(self._addresses, self._nbytes, stream)
            return
        before = self._before
        if before is None:
            before = self._before = self._described()
        try:
            plan._matmul(*before, plan.algorithm, self._addresses[6], self._nbytes, stream)
        except plan._refusals as error:
            raise plan.error(error) from error


@memoized("cuBLASLt plans")
def plan(key: MatmulKey, device_index: int) -> MatmulPlan:
    """Returns the plan of a problem on a device, made at its first use and kept while it is among the most
    recently used. Its descriptors are destroyed with the last reference to it: cuBLASLt reads them during a
    call only. BackendError where cuBLASLt is missing or has no algorithm for it."""
    made = MatmulPlan(key, device_index)
    weakref.finalize(made, _destroy, made._lt, made._description, made._layouts).atexit = False
    return made


def _destroy(lt: Any, description: int, layouts: tuple[int, ...]) -> None:
    lt.matmul_desc_destroy(description)
    for layout in layouts:
        lt.matrix_layout_destroy(layout)
