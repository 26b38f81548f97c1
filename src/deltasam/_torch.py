"""Every private name of torch that deltasam uses, and what happens when torch no longer has it.

No other module may use a private name of torch (``tests/project/test_torch_names.py``). An entry states why the name
is needed and since when torch has it ("2.6" is the oldest version that deltasam supports; all names were checked with
2.13). Where a name is missing, either a public name or a cautious answer takes its place, or the first use raises one
error with the version of torch and the remedy. ``import deltasam`` itself never fails because of a missing name.
"""

from __future__ import annotations

import inspect
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import compress
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_TESTED = "2.6 to 2.13"


def _missing(name: str, purpose: str, remedy: str = "") -> RuntimeError:
    return RuntimeError(
        f"torch {torch.__version__} has no {name}, which deltasam needs for {purpose}: "
        f"{f'{remedy}, or ' if remedy else ''}install a version of torch that deltasam is tested with ({_TESTED})"
    )


def _raises(error: RuntimeError) -> Callable[..., Any]:
    """A function that raises the error when it is called."""

    def fail(*_args: Any, **_options: Any) -> Any:
        raise error

    return fail


def _attribute(owner: object, name: str, purpose: str) -> Callable[[Any], Any]:
    """Reads a private attribute. Written in C, because hot loops call it."""
    return attrgetter(name) if hasattr(owner, name) else _raises(_missing(f"attribute {name!r}", purpose))


# -- kernels for many tensors at once (2.6) ---------------------------------------------------------------------------
# torch.optim is built on them; there are no public names. One call also means that an interruption (Ctrl-C) finds all
# tensors changed, or none. If they are gone, the first use raises.


def _kernel(name: str) -> Any:
    return getattr(torch, name, None) or _raises(_missing(f"torch.{name}", "moving the weights"))


#: ``foreach_add(values, others, alpha=1)``
foreach_add: Any = _kernel("_foreach_add")
#: ``foreach_copy_(values, sources, non_blocking=False)``
foreach_copy_: Any = _kernel("_foreach_copy_")
_foreach_clone: Any = getattr(torch, "_foreach_clone", None)  # not in 2.6; without it a tensor at a time is allocated


def foreach_clone(values: list[Tensor]) -> list[Tensor]:
    """A copy of each tensor, which has no graph."""
    with torch.no_grad():
        if _foreach_clone is not None:
            return list(_foreach_clone(values))
        made = list(map(torch.empty_like, values))
        foreach_copy_(made, values)
    return made


#: ``foreach_lerp(values, ends, weight)``: weight 0 is ``values``, 1 is ``ends``, 2 the other side of ``ends``.
foreach_lerp: Any = _kernel("_foreach_lerp")
#: The same, in place.
foreach_lerp_: Any = _kernel("_foreach_lerp_")
#: ``foreach_mul_(values, factor)``, the factor a tensor with one element.
foreach_mul_: Any = _kernel("_foreach_mul_")
#: ``foreach_norm(values, order, dtype=None)``
foreach_norm: Any = _kernel("_foreach_norm")
_fused_sgd_: Any = _kernel("_fused_sgd_")


def fused_ascent_(weights: list[Tensor], direction: list[Tensor], step: Tensor) -> None:
    """``weights += step * direction`` in one kernel; a step of zero changes nothing, whatever the direction holds.

    The kernel is that of ``torch.optim.SGD(fused=True)``; its ``found_inf`` is the guard. It ignores strides, so each
    direction must have those of its weight.
    """
    _fused_sgd_(
        weights, direction, [], weight_decay=0.0, momentum=0.0, lr=step.float(), dampening=0.0, nesterov=False,
        maximize=True, is_first_step=False, grad_scale=None, found_inf=(step == 0).float(),
    )  # fmt: skip


# -- tensors and graphs -----------------------------------------------------------------------------------------------

#: Changes with every write in place, except writes through ``.data`` (2.6; documented, though private).
version_of: Callable[[Tensor], int] = _attribute(Tensor, "_version", "finding tensors that a pass has changed")


def base_of(tensor: Tensor) -> Tensor | None:
    """The tensor of which this one is a view (2.6); None if it is not a view, or if torch no longer tells."""
    base: Tensor | None = getattr(tensor, "_base", None)
    return base


def is_view(tensor: Tensor) -> bool:
    """Whether a tensor is a view of another one (2.6). If torch no longer tells, assume so: callers make a copy."""
    ask: Any = getattr(tensor, "_is_view", None)
    return True if ask is None else bool(ask())


_gradient_hooks = attrgetter("_post_accumulate_grad_hooks")


def with_gradient_hooks(parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Those for which ``register_post_accumulate_grad_hook`` was called (2.6). If torch no longer tells, all."""
    try:
        return dict(compress(parameters.items(), map(_gradient_hooks, parameters.values())))
    except AttributeError:
        return dict(parameters)


_tensor_hooks = attrgetter("_backward_hooks")


def tensor_hooks_of(parameters: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Those for which ``register_hook`` was called (2.6), with the numbers of their hooks, each given only once.

    If torch no longer tells, none.
    """
    try:
        hooked = compress(parameters.items(), map(_tensor_hooks, parameters.values()))
        return {name: tuple(_tensor_hooks(p)) for name, p in hooked}
    except AttributeError:
        return {}


def output_dtype(node: Any) -> torch.dtype | None:
    """The dtype of the tensor that a node of an autograd graph has computed (2.6); None if torch no longer tells."""
    metadata = getattr(node, "_input_metadata", None)
    dtype: torch.dtype | None = metadata[0].dtype if metadata else None
    return dtype


def indices_of(node: Any) -> tuple[Tensor | None, ...] | None:
    """The indices with which ``x[...]`` was read or assigned (2.6), by dimension; None if torch no longer tells."""
    found = getattr(node, "_saved_indices", None)
    return tuple(found) if found else None


def shape_before(node: Any) -> tuple[int, ...]:
    """The shape of what an operation was called with (2.6); empty if it is not kept."""
    return tuple(getattr(node, "_saved_self_sym_sizes", ()))


def dimension_of(node: Any) -> int:
    """The dimension of ``gather``, ``index_select``, ... (2.6); 0 if there is none, or if torch no longer tells."""
    dimension = int(getattr(node, "_saved_dim", 0))
    if dimension < 1 << 63:
        return dimension
    index = getattr(node, "_saved_index", None)  # counted from the end, and stored without a sign
    ndim = len(shape_before(node)) or getattr(node, "_saved_source_dim", 0 if index is None else index.ndim)
    return dimension - (1 << 64) + int(ndim)


# -- modules (2.6) ----------------------------------------------------------------------------------------------------
# The dictionaries themselves, because tensors are exchanged in them: setattr() refuses a tensor that is not a
# Parameter. And because named_parameters() and modules() compose names, which takes too long in every step.

_WHY_SLOTS = "exchanging the tensors of a module during a pass"
parameters_of: Callable[[nn.Module], dict[str, Any]] = _attribute(nn.Module(), "_parameters", _WHY_SLOTS)
children_of: Callable[[nn.Module], dict[str, Any]] = _attribute(nn.Module(), "_modules", _WHY_SLOTS)
buffers_of: Callable[[nn.Module], dict[str, Any]] = _attribute(nn.Module(), "_buffers", _WHY_SLOTS)
#: The same for ``vars(module)``, several times as fast: a module has a ``__getattr__`` of its own.
parameters_in, children_in, buffers_in = map(itemgetter, ("_parameters", "_modules", "_buffers"))
forward_pre_hooks_of: Callable[[nn.Module], dict[int, Any]] = _attribute(nn.Module(), "_forward_pre_hooks", _WHY_SLOTS)

#: For isinstance(): the base of all batch norms, and that of all convolutions; if gone, their public subclasses.
BATCH_NORM: Any = getattr(
    nn.modules.batchnorm, "_BatchNorm", (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
)
CONVOLUTION: Any = getattr(
    nn.modules.conv,
    "_ConvNd",
    (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)


# -- __torch_function__ and __torch_dispatch__ (2.6) ------------------------------------------------------------------

_WHY_PROXIES = "the low-rank engine of per-instance perturbations"
_THE_LOOP = "pass engine='loop'"

#: A context in which ``__torch_function__`` of tensor subclasses is not called.
no_torch_function: Any = getattr(torch._C, "DisableTorchFunctionSubclass", None) or _raises(
    _missing("torch._C.DisableTorchFunctionSubclass", _WHY_PROXIES, _THE_LOOP)
)

try:  # documented by torch in notes and tutorials under these private modules only
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
except ImportError:

    class TorchDispatchMode:  # type: ignore[no-redef]
        """Replaces torch's class; making one raises."""

        __init__ = _raises(_missing("torch.utils._python_dispatch.TorchDispatchMode", _WHY_PROXIES, _THE_LOOP))


try:
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_wrapper_subclass
except ImportError:

    def is_wrapper_subclass(t: object) -> bool:  # type: ignore[misc]
        """Whether a tensor is quantised, sharded or the like."""
        return type(t) not in (Tensor, nn.Parameter)


try:
    from torch.utils._pytree import tree_flatten as tree_flatten
    from torch.utils._pytree import tree_leaves as tree_leaves
    from torch.utils._pytree import tree_map_only as tree_map_only
    from torch.utils._pytree import tree_unflatten as tree_unflatten
except ImportError:
    tree_flatten = tree_leaves = tree_map_only = tree_unflatten = _raises(
        _missing("torch.utils._pytree", _WHY_PROXIES, _THE_LOOP)
    )


def argument_names(operation: Any) -> list[str]:
    """The names of the arguments of an operation in a dispatch mode (2.6); empty if torch no longer tells."""
    return [argument.name for argument in getattr(getattr(operation, "_schema", None), "arguments", ())]


def in_function_transform() -> bool:
    """Whether a transform of ``torch.func`` is running, where values cannot be read (2.6).

    If torch no longer tells, assume so: checks that read values are left out.
    """
    level: Any = getattr(getattr(torch._C, "_functorch", None), "maybe_current_level", None)
    return True if level is None else level() is not None


# -- precision --------------------------------------------------------------------------------------------------------

#: Whether torch has its newer way to set TF32 (2.9), by backend and kind of operation. It is not used by its public
#: names, because ``torch.backends.mkldnn.fp32_precision`` sets all backends. Without it only the older way is used.
HAS_FP32_PRECISION = hasattr(torch._C, "_get_fp32_precision_getter") and hasattr(
    torch._C, "_set_fp32_precision_setter"
)


def fp32_precision(backend: str, kind: str) -> str:
    """The setting for a backend ("generic", "cuda", "mkldnn") and a kind ("all", "matmul", "conv", "rnn")."""
    return torch._C._get_fp32_precision_getter(backend, kind)


def set_fp32_precision(backend: str, kind: str, value: str) -> None:
    """Sets it to "none", "ieee", "tf32" or "bf16"."""
    torch._C._set_fp32_precision_setter(backend, kind, value)


def cpu_has_bfloat16() -> bool:
    """Whether the CPU multiplies bfloat16 matrices in hardware (2.6). If torch no longer tells, assume not."""
    ask = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return ask is not None and bool(ask())


#: The fused attention of CPUs, as a dispatch mode sees it (2.6). Without it attention consists of other products.
CPU_ATTENTION = tuple(
    getattr(torch.ops.aten, name)
    for name in (
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention_for_cpu_backward",
    )
    if hasattr(torch.ops.aten, name)
)


# -- torch.compile ----------------------------------------------------------------------------------------------------

#: The child of a compiled module that holds the module itself (2.6). Public code of other libraries relies on it.
COMPILED_CHILD = "_orig_mod"


def uncompiled(model: nn.Module) -> Any:
    """What ``torch.compile`` was given and calls, or the model itself if it is not compiled (2.6).

    Accelerate's ``unwrap_model`` replaces ``_orig_mod`` by the module inside DDP; the bound method that is called
    (``_torchdynamo_orig_callable``) still knows the wrapper.
    """
    given = getattr(vars(model).get("_torchdynamo_orig_callable"), "__self__", None)
    return given if isinstance(given, nn.Module) else getattr(model, COMPILED_CHILD, model)


def any_compiled(modules: Iterable[nn.Module]) -> bool:
    """Whether one of the modules was compiled, by ``torch.compile(module)`` or by ``module.compile()`` (2.6)."""
    return any(
        COMPILED_CHILD in children_of(m) or getattr(m, "_compiled_call_impl", None) is not None for m in modules
    )


class CompiledCall(NamedTuple):
    """Where a compiled model keeps the function that its calls go to, what that calls, and the compiler."""

    attributes: dict[str, Any]
    name: str
    inner: nn.Module
    backend: Callable[..., Any]


_BACKENDS = ("_torchdynamo_orig_backend", "_torchdynamo_orig_callable")  # what wraps a backend; the second name in 2.6


def compiled_call(model: nn.Module) -> CompiledCall | None:
    """How a model is called that was compiled as a whole (2.6); None if it was not, or if torch no longer tells."""
    attributes = vars(model)
    if COMPILED_CHILD in children_of(model):
        name, context = "forward", attributes.get("dynamo_ctx")
    elif attributes.get("_compiled_call_impl") is not None:
        name = "_compiled_call_impl"
        cells = getattr(attributes[name], "__closure__", None) or ()
        context = next((cell.cell_contents for cell in cells if hasattr(cell.cell_contents, "callback")), None)
    else:
        return None
    backend: Any = getattr(context, "callback", None)
    while (inner := next((getattr(backend, own) for own in _BACKENDS if hasattr(backend, own)), None)) is not None:
        backend = inner
    if name not in attributes or not callable(backend):
        return None
    return CompiledCall(attributes, name, uncompiled(model), backend)


def replays_graphs(backend: Any) -> bool:
    """Whether a compiler records CUDA graphs of its own (2.6), as in ``mode="reduce-overhead"``."""
    return bool(getattr(backend, "config", {}).get("triton.cudagraphs", False))


def call_uncompiled(module: Any, args: Any, kwargs: Any) -> Any:
    """Calls a module, with its hooks, but not what ``module.compile()`` has compiled (2.6)."""
    return module._call_impl(*args, **kwargs)


def is_compiler_loaded() -> bool:
    """Whether something in this process may have been compiled; asking does not load the compiler (2.6)."""
    return "torch._dynamo" in sys.modules


_WHY_COMPILED = "deltasam.speed.compiling.compiled()"
_PLAIN_COMPILE = "call torch.compile(model) instead"


def inductor_settings() -> list[str]:
    """The names of all settings of Inductor (2.6). Takes seconds at first: it imports the compiler.

    Raises:
        RuntimeError: torch no longer lists them.
    """
    try:
        from torch._inductor import list_options
    except ImportError as error:
        raise _missing("torch._inductor.list_options", _WHY_COMPILED, _PLAIN_COMPILE) from error
    return list_options()


def inductor_pass() -> tuple[Any, Callable[[tuple[str, ...]], Any]]:
    """The base class of changes to Inductor's graphs, and the hash that its cache knows them by (2.6).

    Raises:
        RuntimeError: torch no longer has them.
    """
    try:
        from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
    except ImportError as error:
        raise _missing("torch._inductor.custom_graph_pass", _WHY_COMPILED, _PLAIN_COMPILE) from error
    return CustomGraphPass, get_hash_for_files


def inductor_multiplies_to_float32() -> bool:
    """Whether Inductor compiles a half-precision product with a float32 result (2.9).

    Call it while Inductor compiles: the module cannot be imported first. If it is gone, the answer is no.
    """
    try:
        from torch._inductor.kernel.mm import tuned_mm
    except ImportError:
        return False
    return "out_dtype" in inspect.signature(tuned_mm).parameters


# -- activation checkpointing -----------------------------------------------------------------------------------------


class _Recomputing(threading.local):
    """How each thread wants its checkpointed functions to be recomputed, the outermost way first."""

    def __init__(self) -> None:
        self.ways: list[Callable[[Callable[[], Any]], Any]] = []


_RECOMPUTING = _Recomputing()
_REPLACED: dict[object, Any] = {}  # torch's own function, once for every context of any thread that is open
_REPLACING = threading.Lock()


@contextmanager
def recomputed_by(run: Callable[[Callable[[], Any]], Any]) -> Iterator[None]:
    """Functions that this thread checkpoints inside are recomputed in backward as ``run(compute)``.

    By then the context of the forward has been left; ``run`` can enter it again. A function of torch is replaced
    (2.6, renamed in 2.14), because the calls that a model makes cannot be seen from outside. If it is gone, this only
    warns.
    """
    from torch.utils import checkpoint  # late: with torch 2.6 this takes half a second

    module: Any = checkpoint
    former = "_checkpoint_without_reentrant_generator"  # in 2.14 it is there, and nothing calls it
    name = f"{former}_impl" if hasattr(module, f"{former}_impl") else former
    if not hasattr(module, name):
        warnings.warn(
            f"torch {torch.__version__} implements activation checkpointing in an unknown way: do not combine it with "
            f"Contrastive or with noise on embeddings, or install torch {_TESTED}, which deltasam is tested with",
            stacklevel=3,
        )
        yield
        return

    key, ways = object(), _RECOMPUTING.ways
    depth = len(ways)
    try:  # from here on: an interruption (Ctrl-C) must not leave the way of this context to later ones
        with _REPLACING:
            own = _REPLACED[key] = next(iter(_REPLACED.values()), getattr(module, name))
            setattr(module, name, partial(_checkpointed, own))
        ways.append(run)
        yield
    finally:
        del ways[depth:]
        with _REPLACING:
            if key in _REPLACED:
                own = _REPLACED[key]
                del _REPLACED[key]  # a call, as of pop, could be interrupted
                if not _REPLACED:
                    setattr(module, name, own)


def _checkpointed(own: Callable[..., Any], function: Callable[..., Any], *rest: Any, **options: Any) -> Any:
    """Torch's function ``own`` with the ways of this thread to recompute."""

    def recomputed(way: Callable[..., Any], inner: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **named: way(lambda: inner(*args, **named))

    for way in reversed(_RECOMPUTING.ways):
        function = recomputed(way, function)
    return own(function, *rest, **options)


# -- several processes ------------------------------------------------------------------------------------------------


def active_ddp() -> Any:
    """The ``DistributedDataParallel`` whose forward is running (2.6), or None; also if torch no longer tells."""
    return getattr(nn.parallel.DistributedDataParallel, "_active_ddp_module", None)


def joins_uneven_inputs(ddp: Any) -> bool:
    """Whether ``DistributedDataParallel.join()`` is open (2.6). If torch no longer tells, assume not: torch hangs."""
    return bool(getattr(getattr(ddp, "_join_config", None), "enable", False))


def fsdp_parameter_groups(module: Any) -> list[Any]:
    """What ``fully_shard`` keeps about a module's parameters (2.6; several groups since 2.12).

    There is no public way to keep parameters gathered during both forward and backward.

    Raises:
        RuntimeError: This version of torch has other names for it.
    """
    try:
        state = module._get_fsdp_state()
        found = getattr(state, "_fsdp_param_groups", None)
        groups = [group for group in ([state._fsdp_param_group] if found is None else found) if group is not None]
        for group in groups:
            _ = group.post_forward_mesh_info, group.reshard_after_backward
    except AttributeError as error:
        raise _missing(
            f"FSDP state where deltasam looks for it ({error})",
            "gathering sharded parameters during a step",
            "pass scope='global' if the method takes it, use DistributedDataParallel",
        ) from error
    return groups


def drop_unsharded_gradients(group: Any) -> None:
    """Drops the gradients that a parameter group of ``fully_shard`` holds back (2.6); ``zero_grad`` does not."""
    for p in getattr(group, "fsdp_params", ()):
        if "unsharded_accumulated_grad" in vars(p):  # in 2.15 a property that reads the next one
            p.unsharded_accumulated_grad = None
        unsharded = getattr(p, "_unsharded_param", None)
        if unsharded is not None:
            unsharded.grad = None


def fsdp_gathers_as(module: Any) -> torch.dtype | None:
    """The dtype of ``MixedPrecisionPolicy(param_dtype=...)`` of a sharded module (2.6), None if there is none."""
    state: Any = getattr(module, "_get_fsdp_state", lambda: None)()
    dtype: torch.dtype | None = getattr(getattr(state, "_mp_policy", None), "param_dtype", None)
    return dtype


#: Module and name of the function in which a ``DataLoader`` receives from its workers, as a traceback shows it (2.6).
#: If it is renamed, an error of a dying worker is passed on without an explanation.
RECEIVES_FROM_WORKER = ("torch.utils.data.dataloader", "_try_get_data")
