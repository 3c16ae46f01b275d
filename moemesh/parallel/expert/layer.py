"""`MoELayer`: a mixture-of-experts layer for any PyTorch model, its experts spread over a group.

Legend: T tokens of this rank, H hidden, E experts of all ranks, L = E / n of one of n ranks.

| step | in | out | forward comm | backward comm |
|---|---|---|---|---|
| forward | x [..., H] | y [..., H] and :class:`Auxiliary` | by dispatcher | by dispatcher |
| state_dict | L own experts | E experts, by global id | all_gather | none |
| load_state_dict | E experts, by global id | L own experts | none | none |
| sync_expert_gradients | partial over replicas | the whole | none | all_reduce over replicas |

Each rank brings its own tokens, so the backward of a dispatch delivers, to each expert, the sum of
the gradients of all ranks of the group. With ``gradients="mean"``, the convention of DDP and FSDP
(the objective is the mean of the ranks' losses), that sum is divided by n on its way to the weight.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, cast, get_args
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel

from moemesh.comm import launch, transfers
from moemesh.comm.collectives import all_reduce_, gather_json
from moemesh.comm.mesh import Axis, Mesh
from moemesh.config import model as sizes
from moemesh.config.errors import UserError
from moemesh.config.layout import Layout
from moemesh.config.load import load_run
from moemesh.config.plan import Combine, Payload, Plan
from moemesh.config.plan import Dispatcher as DispatcherName
from moemesh.config.section import nearest_divisors
from moemesh.config.suggest import nearest_choice
from moemesh.config.toml import format_value
from moemesh.model.balance_loss import auxiliary_loss
from moemesh.model.batch import Context
from moemesh.model.dispatcher import Dispatcher
from moemesh.model.experts import Experts
from moemesh.model.faults import NO_FAULT
from moemesh.model.initialization import normal_slice
from moemesh.model.moe import MoE
from moemesh.parallel.expert.build import most_rows, tested_dispatcher
from moemesh.parallel.expert.overlapped import overlapped
from moemesh.parallel.tensor.tokens import ShardedTokens

EXPERTS = ("experts.gate_up", "experts.down")
#: Token ids of different ranks lie this far apart; they key the random numbers of jitter.
_IDS_PER_RANK = 1 << 40


class RoutingOptions(TypedDict, total=False):
    """Keys of :class:`~moemesh.config.model.ModelConfig` that a layer takes, with its defaults
    (but for ``num_shared_experts``, which is 0)."""

    num_shared_experts: int
    shared_intermediate_size: int
    shared_combine: sizes.SharedCombine
    init_std: float
    router_score: sizes.RouterScore
    router_when: sizes.RouterWhen
    router_selection: sizes.RouterSelection
    router_logit_bias: bool
    router_dtype: sizes.RouterDtype
    router_jitter: float
    router_selection_bias: bool
    router_bias_rate: float
    router_groups: int
    router_groups_kept: int
    router_group_score: sizes.GroupScore
    router_normalize: bool
    router_normalize_eps: float
    router_normalize_min: float
    router_scale: float
    router_scale_on: sizes.RouterScaleOn
    capacity_factor: float
    capacity_policy: sizes.CapacityPolicy
    capacity_renormalize: bool
    aux_loss_scope: sizes.AuxLossScope
    aux_loss_coefficient: float
    z_loss_coefficient: float


class Auxiliary(NamedTuple):
    """What a forward says beside its output.

    ``loss``: the sum of the next two, to be added to this rank's loss; both carry their
    coefficients and gradients. ``counts`` int64 [E]: choices of this rank's tokens by global expert
    id, after capacity; ``num_dropped`` int64: choices for which an expert had no room; ``finite``
    bool: whether all logits of the router were. No value waits for the device.
    """

    loss: Tensor
    balance_loss: Tensor
    z_loss: Tensor
    counts: Tensor
    num_dropped: Tensor
    finite: Tensor


class LayerError(UserError):
    """A layer cannot be built or called like this; names the numbers and the nearest choice."""


class MoELayer(nn.Module):
    """Route each token to `top_k` of `num_experts` SwiGLU experts of width `expert_size`.

    `group`: the ranks that share the experts, num_experts / size on each, in rank order; each rank
    calls the layer with tokens of its own, any number of them, at the same points of forward and
    backward. A ProcessGroup; a DeviceMesh of one dimension, or of two (replicas, group); None: all
    ranks of the default process group, or this process alone where there is none.

    `dispatcher`: how rows travel; "auto" measures links at the first forward. `payload` "fp8"
    quantizes them on the way to the experts. `combine` "exact" adds in a fixed order, so that
    results do not depend on the group. `dispatch_chunks` overlaps exchanges with computation.
    `max_tokens`: most tokens of a rank; None takes those of the first forward (they choose
    a dispatcher and size the buffers of "low_latency"; more is slower, never wrong).

    `gradients`: "mean" where the gradients of the other parameters are averaged over all ranks, as
    DDP and FSDP2 do; "sum" where they are added up (the loss is divided by global counts). The
    gradients of the experts are then right without a reduction over the group: keep them out of
    DDP and FSDP2 with :func:`expert_parameters`. Replicas (the first dimension of a DeviceMesh of
    two) still have to be reduced: :meth:`sync_expert_gradients` after each backward.

    The scopes of the auxiliary losses: "sequence" (the last dim but one of x; the mean over this
    rank's sequences), "microbatch" (all tokens of this call) and "global" (those of all ranks of
    the group). With "mean" the mean over the ranks of `loss` is the loss of the scopes; with "sum"
    their sum is, and "sequence" gives the sum over sequences.

    Raises LayerError (a ValueError) for sizes, groups and inputs that cannot be, ConfigError for
    options.
    """

    def __init__(
        self,
        hidden_size: int,
        expert_size: int,
        num_experts: int,
        top_k: int,
        group: ProcessGroup | DeviceMesh | None = None,
        dispatcher: DispatcherName = "auto",
        *,
        payload: Payload = "same",
        combine: Combine = "fast",
        dispatch_chunks: int = 1,
        max_tokens: int | None = None,
        gradients: Literal["mean", "sum"] = "mean",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[RoutingOptions],
    ) -> None:
        super().__init__()
        self.ranks, self.replicas = _axes(group)
        self.config = _config(hidden_size, expert_size, num_experts, top_k, options)
        _check_choice("gradients", gradients, ("mean", "sum"))
        for name, choice, kind in (
            ("dispatcher", dispatcher, DispatcherName),
            ("payload", payload, Payload),
            ("combine", combine, Combine),
        ):
            _check_choice(name, choice, get_args(kind))
        size = self.ranks.size
        if num_experts % size:
            below, above = num_experts // size * size, -(-num_experts // size) * size
            raise LayerError(
                f"num_experts ({num_experts}) must be a multiple of the {size} ranks of the group: "
                f"num_experts = {f'{below} or ' if below else ''}{above}, or a group of "
                f"{nearest_divisors(num_experts, size)} ranks"
            )
        if dispatch_chunks < 1 or (max_tokens is not None and max_tokens < 1):
            raise LayerError(
                f"dispatch_chunks ({dispatch_chunks}) and max_tokens ({max_tokens}) must be at "
                "least 1"
            )
        self.gradients, self.max_tokens = gradients, max_tokens
        self.plan = Plan(dp=size, ep=size, dispatcher=dispatcher, payload=payload, combine=combine)
        with torch.device("cpu" if device is None else device):
            block = _Block(self.config, gradients, size)
            if size > 1:
                block.experts = _SpreadExperts(num_experts // size, hidden_size, expert_size)
                block.experts.ranks = self.ranks
        if size > 1 or dispatch_chunks > 1:
            block.runner = overlapped(1 if combine == "exact" else dispatch_chunks)
        # The children are the layer's own, so that names of parameters have no prefix; the block
        # that computes with them is not.
        self.router, self.experts, self.shared = block.router, block.experts, block.shared
        self._block = (block,)
        self._connection: _Connection | None = None
        #: Tokens of a rank that dispatcher and memory were planned for, at the first forward.
        self._num_tokens = 0
        #: DDP reads this where the layer is the whole model.
        self._ddp_params_and_buffers_to_ignore = list(EXPERTS) if size > 1 else []
        self.register_state_dict_post_hook(_gather_experts)
        self.register_load_state_dict_pre_hook(_take_own_experts)
        if dtype is not None:
            self.to(dtype)
        self.reset_parameters()

    def extra_repr(self) -> str:
        c = self.config
        return (
            f"{c.hidden_size}, {c.expert_intermediate_size}, num_experts={c.num_experts}, "
            f"top_k={c.experts_per_token}, ranks={self.ranks.size}, {self.plan.dispatcher}"
        )

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw initial weights: normal with ``init_std``, biases zero.

        Keyed by one number of torch's default generator and the global expert id: with equal seeds
        all ranks agree on the router, and a layer does not depend on the group.
        """
        seed = int(torch.randint(2**62, (), device="cpu"))
        for name, parameter in self.named_parameters():
            if parameter.device.type == "meta":
                continue
            shape, parts = list(parameter.shape), [range(size) for size in parameter.shape]
            if name in EXPERTS:
                shape[0], first = self.config.num_experts, self.ranks.index * len(parts[0])
                parts[0] = range(first, first + len(parts[0]))
            if len(shape) == 1:
                parameter.zero_()
            else:
                parameter.copy_(normal_slice(seed, name, tuple(shape), parts))
                parameter *= self.config.init_std
        for buffer in self.buffers():
            buffer.zero_()

    def expert_parameters(self) -> dict[str, nn.Parameter]:
        """Name -> parameter of this rank's experts: those that no other rank of the group holds."""
        return {name: cast("nn.Parameter", self.get_parameter(name)) for name in EXPERTS}

    def forward(self, x: Tensor, valid: Tensor | None = None) -> tuple[Tensor, Auxiliary]:
        """y [..., H] of x [..., H]; `valid` bool [...]: False for padding, which is not routed.

        x has the dtype of the experts, or a shorter one (they are cast); under autocast x and
        weights are cast to its dtype. The router computes in fp32 (fp64). y has the dtype of the
        computation. Raises LayerError for another width or dtype.
        """
        dtype = self._checked_dtype(x, valid)
        if self._connection is None:
            self._connect(x, dtype)
        if torch.is_grad_enabled() and not x.requires_grad:
            # A backward runs on all ranks or on none, whatever the inputs of this one.
            x = x.detach().requires_grad_(any(p.requires_grad for p in self.parameters()))
        num_tokens = max(self._num_tokens, math.prod(x.shape[:-1]))
        self.experts.max_rows = most_rows(self.config, self.plan, num_tokens)
        with torch.autocast(x.device.type, enabled=False):
            x_TH = x.reshape(-1, x.shape[-1]).to(dtype)
            parameters = {
                name: self._prepared(name, parameter, dtype)
                for name, parameter in self.named_parameters()
            }
            y_TH, auxiliary = functional_call(
                self._block[0], parameters, (x_TH, self._context(x, valid))
            )
        return y_TH.view(x.shape), auxiliary

    @torch.no_grad()
    def update_selection_bias(self, counts: Tensor) -> None:
        """Aux-loss-free balancing, once per optimizer step: `counts` int64 [E] are those of this
        rank's forwards of the step; they are summed over group and replicas, which all call."""
        if self.router.selection_bias is None:
            raise LayerError("update_selection_bias needs router_selection_bias=True")
        counts = counts.clone()
        for axis in (self.ranks, self.replicas):
            all_reduce_(counts, axis, caller="moe.bias", phase="backward")
        self.router.update_selection_bias(counts)

    @torch.no_grad()
    def sync_expert_gradients(self) -> None:
        """Reduce the gradients of the experts over their replicas (mean or sum); all ranks call it,
        after the last backward of a step. Without replicas it does nothing."""
        for parameter in self.expert_parameters().values():
            if parameter.requires_grad and self.replicas.size > 1:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                all_reduce_(parameter.grad, self.replicas, caller="moe.sync", phase="backward")
                if self.gradients == "mean":
                    parameter.grad /= self.replicas.size

    def _prepared(self, name: str, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        """The parameter as the computation takes it; its gradient finds the way back."""
        if name in EXPERTS and self.gradients == "mean" and self.ranks.size > 1:
            parameter = _ScaleGradient.apply(parameter, 1 / self.ranks.size)
        if name.startswith("router."):
            dtype = torch.promote_types(parameter.dtype, torch.float32)
        return parameter.to(dtype)

    def _checked_dtype(self, x: Tensor, valid: Tensor | None) -> torch.dtype:
        """The dtype of the computation."""
        hidden, own = self.config.hidden_size, self.experts.gate_up
        if x.ndim < 1 or x.shape[-1] != hidden:
            raise LayerError(
                f"x has the shape {list(x.shape)}, the layer needs [..., hidden_size = {hidden}]"
            )
        if valid is not None and (valid.shape != x.shape[:-1] or valid.dtype != torch.bool):
            raise LayerError(
                f"valid must be bool {list(x.shape[:-1])}, not {valid.dtype} {list(valid.shape)}"
            )
        if own.device != x.device:
            raise LayerError(
                f"x is on {x.device}, the experts are on {own.device}: layer.to({str(x.device)!r})"
            )
        if torch.is_autocast_enabled(x.device.type) and x.is_floating_point():
            return torch.get_autocast_dtype(x.device.type)
        if x.dtype == own.dtype or (own.dtype, x.dtype) in _SHORTER:
            return x.dtype
        raise LayerError(
            f"x is {x.dtype}, the experts are {own.dtype}: x.to({own.dtype}), or "
            f"layer.to({x.dtype if x.is_floating_point() else torch.float32})"
        )

    def _context(self, x: Tensor, valid: Tensor | None) -> Context:
        """The tokens of x as sequences: the last dim but one are positions, those before it count
        sequences."""
        length = x.shape[-2] if x.ndim > 1 else 1
        num_sequences = math.prod(x.shape[:-2])
        rows_T = torch.arange(num_sequences * length, device=x.device)
        has_jitter = self.config.router_jitter > 0 and self.training
        nothing = x.new_zeros(0)
        return Context(
            num_sequences=num_sequences,
            seq_len=length,
            num_tokens=len(rows_T),
            cosine_SD=nothing,
            sine_SD=nothing,
            sequence_T=rows_T // max(length, 1),
            valid_T=None if valid is None else valid.reshape(-1),
            token_ids_T=rows_T + self.ranks.index * _IDS_PER_RANK,
            # One number of torch's generator, so that a checkpointed forward finds it again.
            step=int(torch.randint(2**31, (), device="cpu")) if has_jitter else 0,
            training=self.training,
        )

    def _connect(self, x: Tensor, dtype: torch.dtype) -> None:
        """At the first forward: check that the ranks agree, then choose and test a dispatcher."""
        ddp = DistributedDataParallel._get_active_ddp_module()
        if ddp is not None and self.ranks.size > 1:
            reduced = {id(parameter) for parameter in ddp._module_parameters}
            if any(id(parameter) in reduced for parameter in self.expert_parameters().values()):
                raise LayerError(
                    "DDP has overwritten the experts of this rank with those of rank 0. Before "
                    "wrapping the model: model._ddp_params_and_buffers_to_ignore = "
                    "list(moemesh.expert_parameters(model))"
                )
        connection = _Connection.over(self.ranks, x.device)
        mesh, block = connection.mesh, self._block[0]
        tokens = self._agree(mesh, x.numel() // x.shape[-1], dtype)
        block.dispatcher = connection.dispatcher(self.config, self.plan, dtype, tokens)
        block.tokens = ShardedTokens(mesh["tp"], mesh["world"])
        self._num_tokens = tokens
        self._connection = connection

    def _agree(self, mesh: Mesh, num_tokens: int, dtype: torch.dtype) -> int:
        """The tokens to plan for; LayerError on all ranks where their layers are not one."""
        # A copy: FSDP2 resizes the memory of the weight, and numpy forbids that for good.
        weight = self.router.weight.detach().cpu().clone().reshape(-1).view(torch.uint8)
        mine = {
            "options": f"{self.config} {self.plan} {self.gradients} {dtype} {self.max_tokens}",
            "router": hashlib.blake2b(weight.numpy().tobytes()).hexdigest(),
            "tokens": num_tokens,
        }
        everyone = gather_json(mine, mesh.control)
        for key, words in (
            ("options", "were built or called with different options or dtypes"),
            (
                "router",
                "have different router weights: build the layer with the same torch.manual_seed on "
                "all ranks, load a state dict, or wrap the model in DDP, which broadcasts",
            ),
        ):
            other = [rank for rank, one in enumerate(everyone) if one[key] != everyone[0][key]]
            if other:
                raise LayerError(f"ranks 0 and {other[0]} of the group {words}")
        return self.max_tokens or max(1, *(one["tokens"] for one in everyone))

    def _apply(self, fn: Any, recurse: bool = True) -> MoELayer:
        super()._apply(fn, recurse)
        if (bias := self.router.selection_bias) is not None:
            # An update of 1e-3 would vanish in bfloat16.
            self.router.selection_bias = bias.float()
        if self._connection and self._connection.mesh.device != self.experts.gate_up.device:
            self._connection = None
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> MoELayer:
        """A copy with parameters of its own, over the same group."""
        block = self._block[0]
        for shared in (self.ranks, self.replicas, block.dispatcher, block.tokens):
            memo[id(shared)] = shared
        clone = self.__class__.__new__(self.__class__)
        memo[id(self)] = clone
        clone.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return clone


def expert_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Name -> parameter of the experts of every :class:`MoELayer` in `model` that are spread over
    ranks: those that DDP and FSDP2 must leave alone::

        model._ddp_params_and_buffers_to_ignore = list(expert_parameters(model))
        fully_shard(model, ignored_params=set(expert_parameters(model).values()))
    """
    return {
        f"{prefix}.{name}" if prefix else name: parameter
        for prefix, layer in model.named_modules()
        if isinstance(layer, MoELayer) and layer.ranks.size > 1
        for name, parameter in layer.expert_parameters().items()
    }


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float) -> Tensor:
    """Clip the gradients of `model` to one norm of all its parameters on all ranks; returns it.

    For models with :class:`MoELayer` in place of torch's function, by which each rank would see its
    own experts alone, and clip parameters that all share by a factor of its own. All ranks call.
    """
    spread = {id(p.grad) for p in expert_parameters(model).values() if p.grad is not None}
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    total = torch.zeros((), dtype=torch.float64, device=gradients[0].device if gradients else None)
    for is_sharded in (False, True):  # by FSDP2, as DTensors
        shared = [
            gradient
            for gradient in gradients
            if id(gradient) not in spread and hasattr(gradient, "full_tensor") == is_sharded
        ]
        norm = torch.nn.utils.get_total_norm(shared)
        total += (norm.full_tensor() if hasattr(norm, "full_tensor") else norm).double().square()
    own: dict[ProcessGroup, Tensor] = {}
    for layer in model.modules():
        if isinstance(layer, MoELayer) and layer.ranks.group is not None:
            square = own.setdefault(layer.ranks.group, torch.zeros_like(total))
            for parameter in layer.expert_parameters().values():
                if parameter.grad is not None:
                    square += parameter.grad.double().square().sum()
    for group, square in own.items():
        dist.all_reduce(square, group=group)
        total += square
    norm = total.sqrt()
    factor = min(1.0, max_norm / (norm.item() + 1e-6))
    for gradient in gradients:
        gradient *= factor
    return norm


class _Block(MoE):
    """The computation, on parameters that are prepared for it."""

    def __init__(self, config: sizes.ModelConfig, gradients: str, num_ranks: int) -> None:
        super().__init__(config)
        self.gradients, self.num_ranks = gradients, num_ranks

    def forward(  # type: ignore[override]
        self, x_TH: Tensor, context: Context
    ) -> tuple[Tensor, Auxiliary]:
        routing = self.router(x_TH, context, self.tokens)
        scale = self._loss_scale(context)
        balance_loss, z_loss = (
            auxiliary_loss(
                routing, self.config.model_copy(update={other: 0.0}), context, self.tokens
            )
            * scale
            for other in ("z_loss_coefficient", "aux_loss_coefficient")
        )
        counts_E = torch.bincount(
            routing.experts_TK.flatten() + 1, minlength=self.config.num_experts + 1
        )[1:]
        y_TH = self.apply_experts(x_TH, routing, context)
        return y_TH, Auxiliary(
            loss=balance_loss + z_loss,
            balance_loss=balance_loss,
            z_loss=z_loss,
            counts=counts_E,
            num_dropped=routing.num_dropped,
            finite=routing.fault == NO_FAULT,
        )

    def _loss_scale(self, context: Context) -> float | Tensor:
        """From this rank's part of the losses, a sum over its scopes, to its loss."""
        if self.gradients == "sum" or self.config.aux_loss_scope == "microbatch":
            return 1.0
        if self.config.aux_loss_scope == "global":
            return float(self.num_ranks)
        if context.valid_T is None:
            return 1 / max(context.num_sequences, 1)
        routed_B = context.valid_T.view(context.num_sequences, -1).any(1)
        return 1 / routed_B.sum().clamp(min=1)


class _SpreadExperts(Experts):
    """Experts of which each rank holds others: who shards them as if all held the same is wrong."""

    ranks: Axis

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(value, "device_mesh"):  # a DTensor: FSDP2 shards the parameter
            others = set(value.device_mesh.mesh.flatten().tolist()) & set(self.ranks.ranks)
            if len(others) > 1:
                raise LayerError(
                    f"fully_shard would mix the experts of ranks {sorted(others)}: each holds its "
                    "own. Give it ignored_params=set(moemesh.expert_parameters(model).values())"
                )
        super().__setattr__(name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> _SpreadExperts:
        memo[id(self.ranks)] = self.ranks
        clone = self.__class__.__new__(self.__class__)
        memo[id(self)] = clone
        clone.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return clone


class _ScaleGradient(torch.autograd.Function):
    """The same tensor; its gradient is multiplied by `factor`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


#: (dtype of the experts, dtype of x) that go together without autocast.
_SHORTER = {(torch.float32, torch.bfloat16), (torch.float32, torch.float16)}


#: Whether state dicts hold this rank's experts as DTensors; see :func:`sharded_state_dicts`.
_SHARDED = ContextVar("_SHARDED", default=False)


@contextmanager
def sharded_state_dicts() -> Iterator[None]:
    """Inside, a `state_dict` sends nothing: experts are DTensors of global shape, each rank's part
    its own memory, as sharded checkpoints want them."""
    token = _SHARDED.set(True)
    try:
        yield
    finally:
        _SHARDED.reset(token)


@torch.no_grad()
def _gather_experts(
    layer: nn.Module, state: dict[str, Tensor], prefix: str, metadata: object
) -> None:
    """Experts of all ranks, by global id, in place of this rank's."""
    assert isinstance(layer, MoELayer)
    for name in EXPERTS:
        own = state[prefix + name].detach()
        if layer.ranks.group is None:
            continue
        if _SHARDED.get():
            mesh = DeviceMesh.from_group(layer.ranks.group, own.device.type)
            state[prefix + name] = DTensor.from_local(own, mesh, [Shard(0)], run_check=False)
            continue
        gathered = transfers.all_gather(own, layer.ranks, phase="control", caller="moe.state_dict")
        state[prefix + name] = gathered


def _take_own_experts(
    layer: nn.Module,
    state: dict[str, Tensor],
    prefix: str,
    metadata: Mapping[str, Any],
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    """This rank's experts out of those of all ranks."""
    assert isinstance(layer, MoELayer)
    for name, own in layer.expert_parameters().items():
        given = state.get(prefix + name)
        if given is None or layer.ranks.size == 1:
            continue
        expected = [layer.config.num_experts, *own.shape[1:]]
        if list(given.shape) != expected:
            errors.append(
                f"{prefix}{name}: the state has {list(given.shape)}, the layer needs {expected}: "
                "the experts of all ranks, by global id"
            )
            state[prefix + name] = own.detach()
            continue
        part = given.narrow(0, layer.ranks.index * len(own), len(own))
        state[prefix + name] = part.clone() if metadata.get("assign_to_params_buffers") else part


def _axes(group: ProcessGroup | DeviceMesh | None) -> tuple[Axis, Axis]:
    """The axis that shares the experts, and the axis of their replicas."""
    alone = Mesh.single("cpu")["ep"]
    is_running = dist.is_available() and dist.is_initialized()
    if group is None and is_running:
        group = dist.group.WORLD
    if group is None:
        if (started := launch.num_joined()) > 1:
            raise LayerError(
                f"{started} ranks were started, but there is no process group: call "
                "torch.distributed.init_process_group() before the layer is built"
            )
        return alone, alone
    if not is_running:
        raise LayerError(
            "the process group of the layer is not initialized: call "
            "torch.distributed.init_process_group() first, or leave group out"
        )
    try:
        if isinstance(group, DeviceMesh) and group.ndim == 2:
            replicas, ranks = group.get_all_groups()
            return Axis.from_group(ranks, "ep"), Axis.from_group(replicas, "edp")
        return Axis.from_group(group, "ep"), alone
    except ValueError as error:
        raise LayerError(str(error)) from error


def _config(
    hidden_size: int, expert_size: int, num_experts: int, top_k: int, options: Mapping[str, Any]
) -> sizes.ModelConfig:
    """The options as a checked ModelConfig."""
    known = RoutingOptions.__annotations__
    for name in options.keys() - known.keys():
        raise TypeError(f"MoELayer has no option {name!r}: {nearest_choice(name, sorted(known))}")
    numbers = {
        "hidden_size": hidden_size,
        "expert_size": expert_size,
        "num_experts": num_experts,
        "top_k": top_k,
    }
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise LayerError(f"{name} must be an integer of at least 1, not {number!r}")
    if top_k > num_experts:
        raise LayerError(
            f"top_k ({top_k}) exceeds num_experts ({num_experts}): top_k = 1 to {num_experts}"
        )
    values = {
        "hidden_size": hidden_size,
        "expert_intermediate_size": expert_size,
        "num_experts": num_experts,
        "experts_per_token": top_k,
        "num_shared_experts": 0,
        **options,
    }
    overrides = [f"model.{name}={format_value(value)}" for name, value in values.items()]
    return load_run([], overrides, environ={}).config.model


def _check_choice(name: str, choice: str, choices: tuple[str, ...]) -> None:
    if choice not in choices:
        raise LayerError(f"{name} cannot be {choice!r}: {nearest_choice(str(choice), choices)}")


class _Connection:
    """A mesh over the group, and its dispatchers: the layers of a model share them."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.dispatchers: dict[tuple[object, ...], Dispatcher] = {}

    @classmethod
    def over(cls, ranks: Axis, device: torch.device) -> _Connection:
        """That of another layer of the group, or a new one."""
        if ranks.group is None:
            return cls(Mesh.single(device))
        # The connection keeps the group alive, so no other object has its id.
        key = (id(ranks.group), device)
        found = _CONNECTIONS.get(key)
        if found is None:
            node = launch.ranks_of_a_node(ranks.ranks)
            layout = Layout(dp=ranks.size, ep=ranks.size, ranks_per_node=node)
            found = _CONNECTIONS[key] = cls(Mesh.from_group(ranks.group, layout, device))
        return found

    def dispatcher(
        self, config: sizes.ModelConfig, plan: Plan, dtype: torch.dtype, num_tokens: int
    ) -> Dispatcher:
        """The dispatcher of layers with these options."""
        key = (config, plan, dtype, num_tokens)
        if key not in self.dispatchers:
            self.dispatchers[key], _ = tested_dispatcher(
                config, plan, self.mesh, dtype=dtype, tokens_per_rank=num_tokens
            )
        return self.dispatchers[key]

    def __deepcopy__(self, memo: dict[int, Any]) -> _Connection:
        return self


_CONNECTIONS: WeakValueDictionary[tuple[int, torch.device], _Connection] = WeakValueDictionary()
