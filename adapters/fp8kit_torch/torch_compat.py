"""Every private name of torch that fp8kit_torch uses: what each is for, and what stands in for it where a
torch has it no more.

The names are those of torch 2.11 to 2.15. Where nothing public says the same, a torch without the name is
refused at import, as a BackendError: its numbers would be wrong.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _pytree, checkpoint
from torch.utils._device import DeviceContext

from fp8kit.errors import BackendError

KNOWN = "torch 2.11 to 2.15"


def _required(owner: Any, name: str) -> Any:
    """What torch has by that name. BackendError for a torch that has it not."""
    if not hasattr(owner, name):
        got = f"{torch.__version__}, which has no {getattr(owner, '__name__', owner)}.{name}"
        raise BackendError("fp8kit_torch", "torch", got, f"{KNOWN}, whose names fp8kit knows")
    return getattr(owner, name)


# --- memory and streams -------------------------------------------------------------------------------------

Empty = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]


def empty_strided(kind: str) -> Empty:
    """(shape, strides, dtype) -> a tensor on the current device of that kind. What Inductor's code calls: it
    goes past the dispatcher, which takes longer than the allocator. Else ``torch.empty_strided``."""
    quick: Empty | None = getattr(getattr(torch._C._dynamo, "guards", None), f"_empty_strided_{kind}", None)
    return quick or (
        lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=kind)
    )


def _public_stream(index: int) -> int:
    return int(torch.cuda.current_stream(index).cuda_stream)


# Handle of the current stream of a CUDA device, without an object round it.
current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _public_stream)
# Index of the current CUDA device; the public function also starts CUDA.
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
# Whether the current CUDA stream is captured; the public function also asks whether CUDA is there.
is_capturing: Callable[[], bool] = getattr(
    torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing
)

# --- autograd -----------------------------------------------------------------------------------------------

# Number of the backward pass that runs on this thread, -1 outside of any.
current_backward: Callable[[], int] = _required(torch._C, "_current_graph_task_id")
# Calls a function when the backward pass that runs has ended.
at_backwards_end: Callable[[Callable[[], object]], None] = _required(
    torch.autograd.Variable, "_execution_engine"
).queue_callback
# Tells autograd that tensors were written to, those of inference mode aside.
increment_version: Callable[[list[torch.Tensor]], None] = getattr(
    torch._C, "_increment_version", torch.autograd.graph.increment_version
)
# (message, count) -> a function whose results, so many, raise when they are differentiated.
DelayedError: Callable[..., Any] = _required(torch._C._functions, "DelayedError")
# Whether torch.func transforms run on this thread.
transforming: Callable[[], bool] = getattr(torch._C, "_are_functorch_transforms_active", lambda: True)
# How many modes of torch's see each call below autograd: those of make_fx, of FakeTensors, of counters.
dispatch_modes: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)
# A tensor that such a transform left behind: what it wraps.
unwrap: Callable[[torch.Tensor], torch.Tensor] = getattr(
    getattr(torch._C, "_functorch", None), "unwrap_if_dead", lambda tensor: tensor
)
# The functions that say of a tensor which transform wraps it, and which one runs on this thread.
_functorch: Any = getattr(torch._C, "_functorch", None)
_REVERSE = "torch.func.grad, vjp or jacrev"
_FORWARD = "torch.func.jvp or jacfwd"
_TRANSFORMS = {
    "Vmap": "torch.vmap",
    "Functionalize": "torch.func.functionalize",
    "Grad": _REVERSE,
    "Jvp": _FORWARD,
}


def running_transform() -> str:
    """What the innermost transform of torch.func is called that runs on this thread; "" where none does."""
    top = getattr(_functorch, "peek_interpreter_stack", lambda: None)() if transforming() else None
    return "" if top is None else _TRANSFORMS.get(top.key().name, "torch.func")


def traced_by_make_fx() -> bool:
    """Whether ``make_fx`` traces what runs on this thread, by torch's operations alone."""
    from torch.fx.experimental import proxy_tensor

    return proxy_tensor.get_proxy_mode() is not None


def transform_of(tensor: torch.Tensor) -> str:
    """What the transform is called, of torch.func or of forward-mode autograd, whose wrapper or dual tensor
    this is; "" for a plain tensor, and where torch has not the names that say so."""

    def is_a(*names: str) -> bool:
        return any(getattr(_functorch, f"is_{name}", lambda t: False)(tensor) for name in names)

    if is_a("batchedtensor", "legacy_batchedtensor"):
        return "torch.vmap"
    if is_a("functionaltensor"):
        return "torch.func.functionalize"
    if is_a("gradtrackingtensor"):
        return running_transform() or _REVERSE
    return "torch.autograd.forward_ad" if forward_ad.unpack_dual(tensor).tangent is not None else ""


# DUALS[LEVEL] is the level of forward mode, -1 outside of it: a look-up, since every call asks.
DUALS, LEVEL = vars(forward_ad), "_current_level"
_required(forward_ad, LEVEL)


def calls_backward(function: type[torch.autograd.Function]) -> None:
    """Let nodes of ``function``, which has a ``backward`` and no ``vjp``, call it themselves: torch looks in
    two calls of Python at each, which of the two there is."""
    node: Any = getattr(function, "_backward_cls", None)
    if node is not None:
        node.apply = function.backward


def applier(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``function.apply``, for a function without ``setup_context`` and for tensors that no transform wraps:
    the call of the base class in C++ that ``apply`` ends in, without the Python before it."""
    quick = super(torch.autograd.Function, function).apply

    def apply(*args: Any) -> Any:
        return function.apply(*args) if transforming() else quick(*args)

    return apply


# --- modes --------------------------------------------------------------------------------------------------


def _any_autocast() -> bool:
    return any(map(torch.is_autocast_enabled, ("cpu", "cuda")))


# Whether ``torch.autocast`` is on for any kind of device: quicker than to ask what kind a tensor's is.
any_autocast: Callable[[], bool] = getattr(torch._C, "_is_any_autocast_enabled", _any_autocast)


# Whether somebody has registered a hook on the calls of all modules.
any_global_hook: Callable[[], bool] = getattr(torch.nn.modules.module, "_has_any_global_hook", lambda: True)


def default_device_is_set() -> bool:
    """Whether somebody has said where torch makes tensors (``with torch.device``, ``set_default_device``):
    ``torch.get_default_device`` says "cpu" either way."""
    if any(isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack()):
        return True
    return getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None) is not None


def function_modes() -> bool:
    """Whether a ``TorchFunctionMode`` sees calls of torch's functions, other than the one of
    ``torch.device``, which looks at those that make tensors."""
    return any(not isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack())


def global_forward_hooks() -> bool:
    """Whether there are forward hooks on every module (``register_module_forward_hook``)."""
    return bool(torch.nn.modules.module._global_forward_hooks)


def global_hooks() -> bool:
    """Whether there are hooks of any kind on every module."""
    hooks = torch.nn.modules.module
    return bool(
        hooks._global_forward_hooks
        or hooks._global_forward_pre_hooks
        or hooks._global_backward_hooks
        or hooks._global_backward_pre_hooks
    )


# --- modules ------------------------------------------------------------------------------------------------

# Attributes of a module: what ``own_parameters`` and ``own_modules`` return, and its hooks after and before
# forward. In the path of every call ``module.__dict__[PARAMETERS]`` saves the call of a function.
PARAMETERS, MODULES = "_parameters", "_modules"
FORWARD_HOOKS, FORWARD_PRE_HOOKS = "_forward_hooks", "_forward_pre_hooks"
HOOKS = (FORWARD_HOOKS, FORWARD_PRE_HOOKS, "_backward_hooks", "_backward_pre_hooks")
_OF_HOOKS = (  # what there is beside them: how hooks are called
    *("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs"),
    "_is_full_backward_hook",
)
_COMPILED = "_compiled_call_impl"
for _name in (PARAMETERS, MODULES, *HOOKS, *_OF_HOOKS, _COMPILED):
    _required(nn.Module(), _name)
_hooks: Callable[[nn.Module], tuple[Any, ...]] = attrgetter(*HOOKS)
# What comes into a module's own call: hooks, and what ``compile()`` made of it.
call_changes: Callable[[nn.Module], tuple[Any, ...]] = attrgetter(_COMPILED, *HOOKS)


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks of its own, on forward or backward."""
    return any(_hooks(module))


def take_hooks(module: nn.Module, source: nn.Module) -> None:
    """Let a module have another one's hooks, those that come later among them."""
    for name in (*HOOKS, *_OF_HOOKS):
        vars(module)[name] = vars(source)[name]


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The mapping in which a module keeps its own parameters: to look one up, which is slow as an attribute,
    and to put what torch would not take as one."""
    return module._parameters


def set_own_parameters(module: nn.Module, parameters: Mapping[str, Tensor | None]) -> None:
    """Let a module keep its own parameters in another mapping from now on."""
    module._parameters = parameters  # type: ignore[assignment]


def own_modules(module: nn.Module) -> dict[str, nn.Module | None]:
    """The mapping in which a module keeps the modules within it: with each of a module's names, which
    ``named_children`` gives once."""
    return module._modules


def twin_of(
    module: nn.Module,
    parameters: Mapping[str, Tensor | None] | None = None,
    modules: Mapping[str, nn.Module | None] | None = None,
) -> nn.Module:
    """A shallow copy of a module that has these parameters, or these modules, in the place of its own."""
    twin = copy.copy(module)
    of = {PARAMETERS: parameters, MODULES: modules}
    vars(twin).update((name, own) for name, own in of.items() if own is not None)
    return twin


# A library for the definition of one op, in the place of the one that defined it when this package was
# imported before.
library_of_op: Callable[..., Any] = _required(torch._library.custom_ops, "get_library_allowing_overwrite")


_BelowAutograd: Any = _required(torch._C, "_AutoDispatchBelowAutograd")
_after_autograd: Any = _required(torch._C, "_after_autograd_keyset")


def below_autograd(op: Any, keyset: Any, *args: Any) -> Any:
    """What an op's function for autograd leaves to what comes after it. ``keyset``: as that one was called
    with."""
    with _BelowAutograd():
        return op.redispatch(keyset & _after_autograd, *args)


# --- tensors ------------------------------------------------------------------------------------------------

# How often a tensor's memory was written to, as autograd counts. RuntimeError for one of inference mode.
version: Callable[[Tensor], int] = attrgetter("_version")
# The tensor that this one is a view of; None for one that is no view.
base: Callable[[Tensor], Tensor | None] = attrgetter("_base")


def has_gradient_hooks(tensor: Tensor) -> bool:
    """Whether somebody has registered a hook on the tensor's gradient."""
    return bool(tensor._backward_hooks)


def local_part(tensor: Any) -> Any:
    """This process's part of a DTensor, without the autograd of ``to_local``; anything else as it is."""
    return getattr(tensor, "_local_tensor", tensor)


# Operations of ATen behind ``to``, ``pin_memory`` and ``view``.
TO_COPY, PIN_MEMORY, UNSAFE_VIEW = (
    _required(torch.ops.aten, name).default for name in ("_to_copy", "_pin_memory", "_unsafe_view")
)
# What the pickles of ``torch.save`` and of tensors name as a function: module and name. Of a tensor of a
# storage; of the storage's bytes.
REBUILT_TENSOR, LOADED_STORAGE = ("torch._utils", "_rebuild_tensor_v2"), ("torch.storage", "_load_from_bytes")


# For a subclass that decides by ``__torch_dispatch__`` alone.
no_torch_function: Any = _required(torch._C, "_disabled_torch_function_impl")
# A tensor of a subclass that has a shape and no memory of its own.
wrapper_subclass: Callable[..., Any] = _required(torch.Tensor, "_make_wrapper_subclass")
# The same memory as a tensor of a subclass.
make_subclass: Callable[..., Any] = _required(torch.Tensor, "_make_subclass")
# Within, writes to tensors do not count as changes of what autograd keeps.
unseen_writes: Callable[..., Any] = _required(torch.autograd, "_unsafe_preserve_version_counter")
tree_map: Callable[..., Any] = _pytree.tree_map
tree_leaves: Callable[..., list[Any]] = _pytree.tree_leaves
tree_flatten: Callable[..., tuple[list[Any], Any]] = _pytree.tree_flatten
tree_unflatten: Callable[..., Any] = _pytree.tree_unflatten


def schema_arguments(operation: Any) -> Any:
    """The arguments of an ATen operation as its schema has them."""
    return operation._schema.arguments


def untyped_storage(storage: Any) -> Any:
    """The bytes of a storage, typed or not; the public method of the former warns that it is deprecated."""
    return storage if isinstance(storage, torch.UntypedStorage) else storage._untyped_storage


_of_weak: Callable[[int], torch.UntypedStorage | None] = _required(torch.UntypedStorage, "_new_with_weak_ptr")


def storage_of(weak: StorageWeakRef) -> torch.UntypedStorage | None:
    """The storage that is referred to; None once it is gone."""
    return _of_weak(weak.cdata)


_storage_owners: Callable[[int], int] = _required(torch._C, "_storage_Use_Count")


def owners(tensor: torch.Tensor) -> int:
    """How many tensors have this one's memory."""
    storage = tensor.untyped_storage()
    return _storage_owners(storage._cdata) - 1


_use_count: Callable[[torch.Tensor], int] = _required(torch.Tensor, "_use_count")


def _holders(tensor: torch.Tensor) -> tuple[int, int, int]:
    """How many hold the tensor in Python and in C++, and how many tensors have its memory."""
    return sys.getrefcount(tensor), _use_count(tensor), owners(tensor)


def held_alone(tensors: list[torch.Tensor]) -> bool:
    """Whether nobody but the list, which nobody iterates over, holds its tensors or their memory."""
    return all(found == _ALONE for found in map(_holders, tensors))


(_ALONE,) = map(_holders, [torch.empty(1)])


_TensorGuards: Any = getattr(getattr(torch._C._dynamo, "guards", None), "TensorGuards", None)


def alike(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """A function that says in one call whether as many tensors have the class, dtype, device, shape, strides
    and ``requires_grad`` that these have now, each those of its place, outside of modes in which torch is not
    now; one that says no where torch has not the class. The stride of a dimension of one element, which
    nobody looks at, is any."""
    if _TensorGuards is None:
        return lambda *others: False
    sizes = [[*t.shape] for t in tensors]
    strides = [
        [None if size == 1 else stride for size, stride in zip(t.shape, t.stride(), strict=True)]
        for t in tensors
    ]
    made = _TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    return made.check  # type: ignore[no-any-return]


# Lists of tensors in few kernels.
foreach_add_: Callable[..., Any] = _required(torch, "_foreach_add_")
foreach_copy_: Callable[..., Any] = _required(torch, "_foreach_copy_")
foreach_mul: Callable[..., Any] = _required(torch, "_foreach_mul")
foreach_norm: Callable[..., Any] = _required(torch, "_foreach_norm")

# --- torch.utils.checkpoint (``torch_checkpoint``) ----------------------------------------------------------

# The pair of hooks on saved tensors that was put up last; puts one up, takes it down.
top_hooks: Callable[[bool], Any] = _required(torch._C._autograd, "_top_saved_tensors_default_hooks")
pop_hooks: Callable[[], Any] = _required(torch._C._autograd, "_pop_saved_tensors_default_hooks")
push_hooks: Callable[..., Any] = _required(torch._C._autograd, "_push_saved_tensors_default_hooks")
# False within the forward of an autograd.Function, and in inference mode.
forward_grad_enabled: Callable[[], bool] = _required(torch._C, "_is_fwd_grad_enabled")
# A context in which a selective checkpoint's mode does not count calls.
unseen: Any = _required(torch._C, "_DisableTorchDispatch")
# The classes in which its hooks are made, for a first and for a recompute pass.
FIRST_PASS, LATER_PASS = (
    _required(checkpoint, name).__name__ + "." for name in ("_checkpoint_hook", "_recomputation_hook")
)
# How Dynamo calls a checkpointed function that it traces.
TRACED_CHECKPOINT = "CheckpointHigherOrderVariable"

# --- ONNX ---------------------------------------------------------------------------------------------------

_NO_TRANSLATION = re.compile(r"No ONNX function found for .*fp8kit[.:]+(\w+)")


def untranslated(error: BaseException) -> str | None:
    """The operation of fp8kit's for which ``torch.onnx`` has no translation, where that is its error: its
    text alone names the operation."""
    found = _NO_TRANSLATION.search(str(error))
    return found and found[1]


# --- processes ----------------------------------------------------------------------------------------------


def _communication(name: str, former: str) -> Any:
    """A function of torch.distributed by its name, else by its former one."""
    known = torch.distributed
    return getattr(known, name, None) or getattr(known, former, None)  # None where torch has no processes


# (target, source, group=...): the processes' sources one after the other; this process's part of their sum
all_gather_single: Any = _communication("all_gather_single", "all_gather_into_tensor")
reduce_scatter_single: Any = _communication("reduce_scatter_single", "reduce_scatter_tensor")


# The process groups of this process, empty without any: the public question takes two calls of Python.
GROUPS: Any = {}
if torch.distributed.is_available():
    GROUPS = _required(torch.distributed.distributed_c10d, "_pg_map")


def store_of(group: Any) -> Any:
    """The key-value store that a group's processes met by."""
    known = torch.distributed.distributed_c10d
    return known._world.pg_map[group][1]


def wait_for(result: Any) -> None:
    """Wait for the collective whose operation gave this: its work, or a tuple that ends with it. On a GPU the
    stream does."""
    work = result[-1] if isinstance(result, tuple) else result
    torch._C._distributed_c10d.Work.unbox(work).wait()


def is_of_processes(error: RuntimeError) -> bool:
    """Whether a collective of torch's raised an error. Those of gloo are plain RuntimeErrors, raised in C++
    from within backward passes, too: nothing but their text names it."""
    return isinstance(error, torch.distributed.DistError) or "gloo" in str(error)


def timeout_of(group: Any, device: torch.device) -> timedelta:
    """How long a group's ranks wait for each other on that kind of device; ten minutes, as NCCL's groups by
    default, where torch has not the names that say so."""
    options = getattr(group._get_backend(device), "options", None)
    return getattr(options, "_timeout", timedelta(minutes=10))  # type: ignore[no-any-return]


def path_of_shards(owner: Any) -> str | None:
    """The path of the module whose parameters a group of ``fully_shard`` holds; None for anything else."""
    path = getattr(owner, "_module_fqn", None)
    return path if isinstance(path, str) else None


def has_symmetric_memory(name: str) -> bool:
    """Whether somebody has called ``enable_symm_mem_for_group`` for the group of that name."""
    memory = sys.modules.get("torch.distributed._symmetric_memory")
    return memory is not None and bool(memory.is_symm_mem_enabled_for_group(name))


def symmetric_memory(size: int, device: torch.device, name: str) -> tuple[torch.Tensor, Any]:
    """So many bytes that every rank of the group of that name can reach, and torch's handle of all ranks'.
    The ranks meet here."""
    kind = torch._C._distributed_c10d._SymmetricMemory
    memory = kind.empty_strided_p2p((size,), (1,), torch.uint8, device, name)
    torch.cuda.synchronize(device)  # its signals are zero before another rank sets one
    return memory, kind.rendezvous(memory)
