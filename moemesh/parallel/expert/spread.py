"""Experts spread over the ranks of a group: a rank holds L of the E experts.

| step | in | out | forward comm | backward comm |
|---|---|---|---|---|
| state_dict | L experts of the rank | DTensors of E experts, by global id | none | none |
| full_state_dict | the same | tensors of E experts | all_gather | none |
| load_state_dict | E experts, by global id | L experts of the rank | see below | none |
| sync_gradients | partial over replicas | the whole | none | all_reduce over replicas |
| norm of a gradient | norm of L experts | norm of E experts | none | all_gather |

Loading gathers DTensors that are sharded in another way, and else communicates nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed._composable.contract import REGISTRY_KEY
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from moemesh.comm import transfers
from moemesh.comm.collectives import all_reduce_
from moemesh.comm.mesh import Axis, local_part
from moemesh.config.errors import UserError, check_kind, check_limit, public
from moemesh.config.layout import shard_range
from moemesh.config.model import ModelConfig
from moemesh.model.experts import Experts
from moemesh.model.moe import swiglu_form


class LayerError(UserError):
    """A layer cannot be built or called like this; names the numbers and the nearest choice."""


#: Refusal of modules that compute the experts' weights from further parameters, of which each rank
#: would have its own.
PARAMETRIZED = (
    "parametrizations and adapters of PEFT change experts that are spread over ranks: leave its "
    "target_parameters out, or train adapters by [lora] of `moemesh train`"
)


class Spread(nn.Module):
    """``num_experts / ranks.size`` consecutive experts of a layer, in rank order: the first dim of
    every parameter.

    FSDP passes over them; DDP, which broadcasts the parameters of rank 0, has to be given their
    names: :func:`expert_parameters`.
    """

    ranks: Axis
    num_experts: int

    def share_state(self) -> None:
        """Add hooks that make state dicts hold DTensors of the experts of all ranks."""
        self.register_state_dict_post_hook(_share)
        self.register_load_state_dict_pre_hook(_take_own)
        # FSDP passes over modules that torch's composable `replicate` manages.
        setattr(self, REGISTRY_KEY, {"replicate": None})

    @property
    def held(self) -> range:
        """Global ids of this rank's experts."""
        return shard_range(self.num_experts, self.ranks.size, self.ranks.index)

    def mark_gradients(self) -> None:
        """Add hooks that make every accumulated gradient a :class:`SpreadGradient`. Raises
        LayerError for parametrized experts, and inside DDP's ``join()``."""
        ddp = DistributedDataParallel._active_ddp_module
        if ddp is not None and ddp._join_config.enable:
            raise LayerError(
                "join() lets a rank without inputs call DDP's reductions, but not the exchanges of "
                "experts: without join(), such a rank calls the model with 0 sequences"
            )
        if "parametrizations" in self._modules:
            raise LayerError(PARAMETRIZED)
        for parameter in self.parameters():
            hooks = parameter._post_accumulate_grad_hooks or {}
            is_marked = any(isinstance(hook, _Mark) for hook in hooks.values())
            if parameter.requires_grad and parameter.is_leaf and not is_marked:
                # Our hook runs before those of the program, which may reduce the gradient.
                others = dict(hooks)
                hooks.clear()
                parameter.register_post_accumulate_grad_hook(_Mark(self.ranks))
                hooks.update(others)

    @torch.no_grad()
    def sync_gradients(self, replicas: Axis, mean: bool) -> None:
        """Sum the gradients over `replicas`, the holders of the same experts, or take the mean."""
        for parameter in self.parameters():
            if parameter.requires_grad and replicas.size > 1:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                    _Mark(self.ranks)(parameter)
                gradient = parameter.grad
                # Layers with the same experts call once each: a sum must not be summed twice.
                if getattr(gradient, "version_of_sum", None) == gradient._version:
                    continue
                all_reduce_(gradient, replicas, caller="moe.sync", phase="backward")
                gradient /= replicas.size if mean else 1
                gradient.version_of_sum = gradient._version

    def __deepcopy__(self, memo: dict[int, Any]) -> Spread:
        return copy_sharing(self, memo, self.ranks)


class SpreadExperts(Spread, Experts):
    """Our own :class:`Experts`, of which each rank holds an equal share."""

    def __init__(self, config: ModelConfig, ranks: Axis) -> None:
        Experts.__init__(
            self,
            config.num_experts // ranks.size,
            config.hidden_size,
            config.expert_intermediate_size,
            bias=config.expert_bias,
            form=swiglu_form(config),
        )
        self.ranks, self.num_experts = ranks, config.num_experts
        self.share_state()


def copy_sharing(module: Any, memo: dict[int, Any], *shared: object) -> Any:
    """A deep copy of `module` in which `shared` stay the same objects."""
    memo |= {id(value): value for value in shared}
    clone = module.__class__.__new__(module.__class__)
    memo[id(module)] = clone
    clone.__dict__.update(copy.deepcopy(module.__dict__, memo))
    return clone


def expert_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Name -> parameter of the experts of `model` that are spread over ranks. DDP must leave them
    alone::

        model._ddp_params_and_buffers_to_ignore = list(expert_parameters(model))
    """
    check_kind("model", model, nn.Module)
    return {
        f"{prefix}.{name}" if prefix else name: parameter
        for prefix, experts in model.named_modules()
        if isinstance(experts, Spread)
        for name, parameter in experts.named_parameters()
    }


#: Products of two tensors; a result without dimensions is a sum over all elements.
_PRODUCTS = (
    *("dot", "vdot", "inner", "linalg_vecdot", "tensordot", "einsum"),
    *("matmul", "__matmul__", "__rmatmul__", "mv"),
)
#: Name of a function of torch that reduces a gradient -> reduction that combines the results of
#: the ranks. Other reductions raise.
_OVER_RANKS: dict[str, Callable[[Tensor], Tensor]] = {
    **dict.fromkeys(("sum", "nansum", "count_nonzero", *_PRODUCTS), torch.sum),
    **dict.fromkeys(("max", "amax"), torch.max),
    **dict.fromkeys(("min", "amin"), torch.min),
    "mean": torch.mean,
    "all": torch.all,
    "any": torch.any,
}
_NORMS = ("norm", "linalg_norm", "linalg_vector_norm", "linalg_matrix_norm")
#: Functions that may return one element without a reduction.
_SELECTIONS = (
    *("__getitem__", "select", "narrow", "index_select", "take", "gather", "masked_select"),
    *("nonzero", "argwhere", "unique", "_unique2", "bincount", "diagonal", "as_strided"),
    *("new_tensor", "new_empty", "new_zeros", "new_ones", "new_full"),
    *("unbind", "split", "split_with_sizes", "chunk", "tensor_split", "__get__"),
)
#: Functions that reduce along a dimension which they keep.
_ALONG = ("normalize", "softmax", "log_softmax", "cumsum")
#: Functions to which programs pass `numel` as a size.
_SIZED = ("view", "view_as", "reshape", "reshape_as", "copy_", "narrow", "__setitem__")
_OWN_SIZE = (
    "numel() of a gradient of experts is that of all ranks: for views and buffers "
    "math.prod(grad.shape), or grad.as_subclass(torch.Tensor)"
)
#: Names of the first parameter of torch's functions.
_FIRST = ("input", "tensors", "self")
_JOINED = ("cat", "concat", "concatenate", "stack", "hstack", "vstack", "column_stack")


class SpreadGradient(Tensor):
    """A gradient of the experts of this rank, whose reductions are those over the experts of all
    ranks: norm, sum, mean, largest and smallest element, dot product, all and any; also `numel`.

    A reduction over all elements is a collective: every rank of the group takes it at the same
    point, as with `torch.nn.utils.clip_grad_norm_`. `GradScaler` skips a step on all ranks when one
    has a gradient that is not finite. Results of the same size (``clone``, ``weight * grad``,
    ``flatten``, ``isnan``) are of this class as well, and so are reductions that keep the first
    dimension (the norm of each expert). So are norms, with `ranks` None: `torch.stack` accepts
    them beside DTensors.

    Raises LayerError for reductions that are not combined over ranks (``std``, ...), and for those
    of a tensor that joins gradients of experts with gradients that all ranks share (``torch.cat``).
    """

    ranks: Axis | None
    #: Whether the tensor also has gradients of other parameters than experts over `ranks`.
    is_mixed: bool = False

    @classmethod
    def of(cls, tensor: Tensor, ranks: Axis | None, is_mixed: bool = False) -> SpreadGradient:
        gradient = tensor.as_subclass(cls)
        gradient.ranks, gradient.is_mixed = ranks, is_mixed
        return gradient

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        # A call with keywords alone gets its first argument by position, like other calls.
        if not args and (named := [key for key in _FIRST if key in kwargs]):
            args = (kwargs.pop(named[0]),)
        name = getattr(func, "__name__", "")
        with torch._C.DisableTorchFunctionSubclass():
            if name in _JOINED:
                tensors = args[0]
                full = [x.full_tensor() if isinstance(x, DTensor) else x for x in tensors]
                result, gradient = func(full, *args[1:], **kwargs), _spread(tensors)
                if gradient is None:
                    return result
                axis = gradient.ranks
                is_mixed = any(getattr(x, "ranks", None) is not axis or x.is_mixed for x in tensors)
                return cls.of(result, axis, is_mixed)
            if name.startswith("_foreach_"):
                if func is torch._foreach_norm:  # DTensors may be among them
                    norm = torch.linalg.vector_norm
                    results = [norm(tensor, *args[1:], **kwargs) for tensor in args[0]]
                else:
                    results = func(*args, **kwargs)
                if not isinstance(results, list | tuple):
                    return results
                lists = [x for x in args if isinstance(x, list | tuple) and len(x) == len(results)]
                operands = zip(*lists, strict=True)
                name = name.removeprefix("_foreach_")
                return [
                    _result(name, result, own, args, kwargs)
                    for result, own in zip(results, operands, strict=True)
                ]
            try:
                result = func(*args, **kwargs)
            except RuntimeError as error:
                if name in _SIZED:
                    raise LayerError(f"{name}: {error}. {_OWN_SIZE}") from error
                raise
            first = args[0] if args and isinstance(args[0], list | tuple) else ()
            operands = [*first, *args, *kwargs.values()]
            gradient = _spread(operands)
            if gradient is None:
                return result
            assert gradient.ranks is not None
            if name in ("numel", "nelement") and not gradient.is_mixed:
                return result * gradient.ranks.size
            if func is torch._amp_foreach_non_finite_check_and_unscale_:
                found_inf = args[1]
                all_reduce_(found_inf, gradient.ranks, caller="moe.scaler", phase="backward")
                found_inf.clamp_(max=1)
            # `of` returns a view: a base in this class would have a base itself, and so on without
            # end (torch.compile follows bases).
            if func == Tensor._base.__get__:
                return result
            return _result(name, result, operands, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.clone()

    def __format__(self, spec: str) -> str:
        return format(self.as_subclass(Tensor), spec)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)


def _spread(operands: Iterable[object]) -> SpreadGradient | None:
    """The first gradient of experts among `operands`."""
    spread = (x for x in operands if isinstance(x, SpreadGradient))
    return next((x for x in spread if getattr(x, "ranks", None) is not None), None)


def _result(
    name: str,
    result: Any,
    operands: Sequence[object],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """The value that a program gets for the `result` of this rank: over all ranks if it is a
    reduction."""
    gradient = _spread(operands)
    if gradient is None or any(result is operand for operand in operands):
        return result
    parts = [x for x in (result if isinstance(result, tuple) else [result]) if type(x) is Tensor]
    dims = _dims_kept(name, gradient, args, kwargs)
    is_pair = len(parts) > 1 and name not in _SELECTIONS and gradient.numel() > 1
    if (name in _ALONG and gradient.ndim == 1) or (
        is_pair and all(x.numel() == 1 and (x.ndim == 0 or not dims) for x in parts)
    ):
        raise LayerError(_not_combined(name, gradient))
    if type(result) is not Tensor:
        return result
    is_known = name in _OVER_RANKS or name in _NORMS
    may_reduce = result.numel() == 1 and name not in _SELECTIONS
    is_whole = result.ndim == 0 if dims is None or name in _PRODUCTS else not dims
    if may_reduce and is_whole and (is_known or gradient.numel() > 1):
        return _over_ranks(name, result, gradient, args, kwargs)
    has_all = result.numel() == gradient.numel()
    keeps_experts = is_known and dims is not None and 0 in dims and result.ndim > 0
    if has_all or keeps_experts:
        is_mixed = any(getattr(operand, "is_mixed", False) for operand in operands)
        return SpreadGradient.of(result, gradient.ranks, is_mixed)
    return result


def _dims_kept(
    name: str, gradient: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> set[int] | None:
    """The dimensions of `gradient` that a call of `name` does not reduce; None if the call does
    not name dimensions. A flat gradient has only one, which every reduction takes."""
    if gradient.ndim == 1:
        return set()
    position = 2 if name in _NORMS else 1
    default = (-2, -1) if name == "linalg_matrix_norm" else None
    dims = kwargs.get("dim", args[position] if len(args) > position else default)
    if dims is None or dims == () or dims == [] or isinstance(dims, bool):
        return None
    dims = [dims] if isinstance(dims, int) else dims
    if not isinstance(dims, list | tuple) or not all(isinstance(dim, int) for dim in dims):
        return None
    return set(range(gradient.ndim)) - {dim % gradient.ndim for dim in dims}


def _not_combined(name: str, gradient: SpreadGradient) -> str:
    what = "and of others" if gradient.is_mixed else "that are spread over ranks"
    return (
        f"{name} over gradients of experts {what} would be that of this rank: take the norm, "
        "sum, mean, max or min of each gradient, or grad.as_subclass(torch.Tensor)"
    )


def _over_ranks(
    name: str, result: Tensor, gradient: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Tensor:
    """The reduction over all ranks, with equal bits on each, from the `result` of this rank."""
    if torch.compiler.is_compiling():
        # A graph would reduce twice. After the exception torch runs the caller uncompiled.
        raise LayerError("reductions of gradients of experts over ranks are not compiled")
    order, is_norm = 2, name in _NORMS
    if is_norm:
        given = args[1] if len(args) > 1 else kwargs.get("ord", kwargs.get("p"))
        order = 2 if given in (None, "fro") else given
        # Of a matrix, all other orders of these two are norms of it as an operator.
        is_matrix = name == "linalg_matrix_norm" or (name == "linalg_norm" and gradient.ndim == 2)
        is_norm = given in (None, "fro") or not (isinstance(given, str) or is_matrix)
    if gradient.is_mixed or not (name in _OVER_RANKS or is_norm):
        raise LayerError(_not_combined(name, gradient))
    flat = result.view(1)
    flat = flat.view(torch.uint8) if flat.dtype == torch.bool else flat
    parts = transfers.all_gather(flat, gradient.ranks, phase="backward", caller="moe.norm")
    if name in _OVER_RANKS:
        total = _OVER_RANKS[name](parts.view(result.dtype))
        return total.to(result.dtype).view(result.shape)
    # The norm of order 0 counts elements.
    norm = parts.sum() if order == 0 else torch.linalg.vector_norm(parts, order)
    return SpreadGradient.of(norm.view(result.shape), None)


class _Mark(NamedTuple):
    """A post-accumulate hook of a parameter: its gradient becomes a :class:`SpreadGradient`."""

    ranks: Axis

    def __call__(self, parameter: Tensor) -> None:
        if type(parameter.grad) is Tensor:
            parameter.grad = SpreadGradient.of(parameter.grad, self.ranks)


@public
def clip_grad_norm_(model: nn.Module, max_norm: float) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_` of all parameters, on all ranks; returns the norm."""
    check_kind("model", model, nn.Module, "torch.nn.utils.clip_grad_norm_ takes parameters")
    check_limit("max_norm", max_norm)
    return nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """The state dict of `model` on one process: with the experts of all ranks, and tensors in place
    of DTensors. All ranks call it; then one of them may save."""
    check_kind("model", model, nn.Module)
    state = model.state_dict()
    return {key: x.full_tensor() if isinstance(x, DTensor) else x for key, x in state.items()}


class ExpertShare(DTensor):
    """An entry of a state dict: a DTensor of the experts of all ranks, sharded by rank.
    `torch.distributed.checkpoint` and :func:`moemesh.save_checkpoint` write all shards. Other
    serialization, which would write the shard of one rank, raises LayerError."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if type(result) is DTensor and result.placements == (Shard(0),):
            result.__class__ = cls
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.clone()

    def refuse(self, *args: Any) -> Any:
        local, offset = local_part(self)
        raise LayerError(
            f"this state dict holds experts {offset[0]} to {offset[0] + len(local) - 1} of "
            f"{len(self)}: save mm.full_state_dict(model), which all ranks call, or use "
            "torch.distributed.checkpoint or mm.save_checkpoint"
        )

    __reduce_ex__ = storage = untyped_storage = data_ptr = numpy = refuse


def _share(experts: nn.Module, state: dict[str, Any], prefix: str, metadata: object) -> None:
    """Hook of state dicts: entries get the global shape; their local part is the parameter."""
    assert isinstance(experts, Spread)
    for name, parameter in experts.named_parameters():
        state[prefix + name] = share_of(experts, parameter.detach())


def share_of(experts: Spread, tensor: Tensor) -> Tensor:
    """`tensor` [L, ...] of this rank's experts as the local part of a DTensor [E, ...]."""
    assert experts.ranks.group is not None
    mesh = DeviceMesh.from_group(experts.ranks.group, experts.ranks.device.type)
    share = DTensor.from_local(tensor, mesh, [Shard(0)], run_check=False)
    share.__class__ = ExpertShare
    return share


def own_part(experts: Spread, given: Tensor) -> Tensor:
    """This rank's L experts of `given` [E, ...], or `given` if it has another length."""
    if isinstance(given, DTensor):
        local, (first, *_) = local_part(given)
        if first == experts.held.start and len(local) == len(experts.held):
            return local
        given = given.full_tensor()
    if len(given) != experts.num_experts:
        return given
    return given.narrow(0, experts.held.start, len(experts.held))


def _take_own(
    experts: nn.Module,
    state: dict[str, Any],
    prefix: str,
    metadata: Mapping[str, Any],
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    """Hook before loading: replace the experts of all ranks in `state` by those of this rank."""
    assert isinstance(experts, Spread)
    for name, parameter in experts.named_parameters():
        given = state.get(prefix + name)
        if not isinstance(given, Tensor):  # torch refuses it
            continue
        expected = [experts.num_experts, *parameter.shape[1:]]
        if list(given.shape) != expected:
            errors.append(
                f"{prefix}{name}: the state has {list(given.shape)}, the layer needs {expected}: "
                "the experts of all ranks, by global id"
            )
            state[prefix + name] = parameter.detach()  # else torch reports the shape as well
            continue
        part = own_part(experts, given)
        # An assigned view would keep the experts of all ranks in memory.
        is_view = metadata.get("assign_to_params_buffers") and not isinstance(given, DTensor)
        state[prefix + name] = part.clone() if is_view else part
