"""`MoELayer`: a mixture-of-experts layer for any PyTorch model, its experts spread over a group.

Legend: B sequences of S positions and T tokens of this rank, H hidden, E experts of all ranks.

| step | in | out | forward comm | backward comm |
|---|---|---|---|---|
| forward | x [..., H] | y [..., H] and :class:`Auxiliary` | by dispatcher | by dispatcher |

Each rank brings its own tokens, and an expert computes those of all n ranks of the group, so the
gradient of its weights is already the sum over these ranks. With ``gradients="mean"``, the
convention of DDP and FSDP (the objective is the mean of the ranks' losses), that sum is divided by
n.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, Literal, TypedDict, Unpack
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from moemesh.comm import launch
from moemesh.comm.collectives import all_reduce_, gather_json
from moemesh.comm.mesh import Axis, Mesh, device_of, local_part
from moemesh.config import experts as keys
from moemesh.config.dispatcher_table import dispatcher_row
from moemesh.config.errors import check_kind, known_keywords, whole
from moemesh.config.layout import Layout
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Combine, Payload, Plan
from moemesh.config.plan import Dispatcher as DispatcherName
from moemesh.config.suggest import choices_of, nearest_choice, nearest_divisors
from moemesh.config.toml import format_value
from moemesh.model.batch import token_context
from moemesh.model.dispatcher import Dispatcher
from moemesh.model.initialization import normal_slice
from moemesh.ops.permute import linear_map
from moemesh.parallel.expert.build import overlapped, tested_dispatcher
from moemesh.parallel.expert.layer_block import (
    Auxiliary,
    LayerBlock,
    TransformersBlock,
)
from moemesh.parallel.expert.misuse import (
    NO_GRAPH,
    refuse_form,
    refuse_misuse,
    refuse_reentrant,
)
from moemesh.parallel.expert.optimizers import watch_optimizers
from moemesh.parallel.expert.spread import (
    LayerError,
    SpreadExperts,
    copy_sharing,
    expert_parameters,
    full_state_dict,
)
from moemesh.parallel.expert.transformers_trainer import caller, follow
from moemesh.parallel.tensor import ShardedTokens
from moemesh.sharding.dispatchers import rows_at_once
from moemesh.sharding.load_run import load_run

# The group of ranks of a `MoELayer`: its axes, and the dispatchers that layers on it share.


def axes_of(group: ProcessGroup | DeviceMesh | None) -> tuple[Axis, Axis]:
    """The axis that shares the experts, and the axis of their replicas. Raises LayerError for a
    group that is not initialized, lacks this rank, or has replicas in another order."""
    alone = Mesh.single("cpu")["ep"]
    is_running = dist.is_available() and dist.is_initialized()
    if group is None and is_running:
        group = dist.group.WORLD
    if group is None:
        if (started := launch.num_joined()) > 1:
            raise LayerError(
                f"{started} ranks were started, without a process group: call "
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
            # Process groups number their ranks in ascending order, not in that of the mesh.
            if len(group.mesh.argsort(1).unique(dim=0)) > 1:
                raise LayerError(
                    f"ranks in one column of the DeviceMesh {group.mesh.tolist()} would hold other "
                    f"experts: DeviceMesh(..., {group.mesh.sort(1).values.tolist()})"
                )
            replicas, ranks = group.get_all_groups()
            return Axis.from_group(ranks, "ep"), Axis.from_group(replicas, "edp")
        return Axis.from_group(group, "ep"), alone
    except ValueError as error:
        raise LayerError(str(error)) from error


class Connection:
    """A mesh over the group, and its dispatchers: the layers of a model share them."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.dispatchers: dict[tuple[object, ...], Dispatcher] = {}

    @classmethod
    def over(cls, ranks: Axis, device: torch.device) -> Connection:
        """The connection of all layers on these ranks, built at the first call."""
        if ranks.group is None:
            return cls(Mesh.single(device))
        # The connection keeps the group alive, so no other object has its id.
        key = (id(ranks.group), device)
        connection = _CONNECTIONS.get(key)
        if connection is None:
            node = launch.ranks_of_a_node(ranks.ranks)
            layout = Layout(dp=ranks.size, ep=ranks.size, ranks_per_node=node)
            mesh = Mesh.from_group(ranks.group, layout, device)
            connection = _CONNECTIONS[key] = cls(mesh)
        return connection

    def agree(self, num_tokens: int, states: Mapping[str, str]) -> int:
        """The largest number of tokens of a rank, at least 1; all ranks call. `states`: sentence ->
        state of this rank. Raises LayerError with the sentence of the first state that differs."""
        of_ranks = gather_json([num_tokens, *states.values()], self.mesh.control)
        for place, sentence in enumerate(states, start=1):
            for rank, values in enumerate(of_ranks):
                if values[place] != of_ranks[0][place]:
                    raise LayerError(f"ranks 0 and {rank} of the group {sentence}")
        return max(1, *(values[0] for values in of_ranks))

    def dispatcher(
        self, config: ModelConfig, plan: Plan, dtype: torch.dtype, num_tokens: int
    ) -> Dispatcher:
        """The dispatcher of layers with these options."""
        key = (config, plan, dtype, num_tokens)
        if key not in self.dispatchers:
            self.dispatchers[key], _ = tested_dispatcher(
                config, plan, self.mesh, dtype=dtype, tokens_per_rank=num_tokens
            )
        return self.dispatchers[key]


#: Connections that a layer uses, by the id of their process group and by device.
_CONNECTIONS: WeakValueDictionary[tuple[int, torch.device], Connection] = WeakValueDictionary()


# Arguments of a `MoELayer`, checked: sizes, options of routing, names of choices.


class RoutingOptions(TypedDict, total=False):
    """Keys of :class:`~moemesh.config.model.ModelConfig` that a layer takes, with its defaults
    (but for ``num_shared_experts``, which is 0)."""

    num_shared_experts: int
    shared_intermediate_size: int
    shared_combine: keys.SharedCombine
    shared_gate: bool
    expert_bias: bool
    swiglu_limit: float
    swiglu_alpha: float
    swiglu_offset: float
    init_std: float
    router_score: keys.RouterScore
    router_when: keys.RouterWhen
    router_selection: keys.RouterSelection
    router_logit_bias: bool
    router_dtype: keys.RouterDtype
    router_jitter: float
    router_selection_bias: bool
    router_bias_rate: float
    router_groups: int
    router_groups_kept: int
    router_group_score: keys.GroupScore
    router_normalize: bool
    router_normalize_eps: float
    router_normalize_min: float
    router_scale: float
    router_scale_on: keys.RouterScaleOn
    capacity_factor: float
    capacity_policy: keys.CapacityPolicy
    capacity_renormalize: bool
    aux_loss_scope: keys.AuxLossScope
    aux_loss_coefficient: float
    z_loss_coefficient: float


def model_config(
    hidden_size: int, expert_size: int, num_experts: int, top_k: int, options: Mapping[str, Any]
) -> ModelConfig:
    """The options as a checked ModelConfig."""
    hidden_size = counted("hidden_size", hidden_size)
    expert_size = counted("expert_size", expert_size)
    num_experts = counted("num_experts", num_experts)
    top_k = counted("top_k", top_k)
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


def counted(name: str, number: object) -> int:
    """`number` as an int of at least 1. Raises LayerError for other values."""
    count = whole(number)
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise LayerError(f"{name} must be an integer of at least 1, not {number!r}")
    return count


def check_divides(num_experts: int, size: int) -> None:
    if num_experts % size:
        below, above = num_experts // size * size, -(-num_experts // size) * size
        raise LayerError(
            f"num_experts ({num_experts}) must be a multiple of the {size} ranks of the group: "
            f"num_experts = {f'{below} or ' if below else ''}{above}, or a group of "
            f"{nearest_divisors(num_experts, size)} ranks"
        )


def check_choice(name: str, choice: str, choices: tuple[str, ...]) -> None:
    if choice not in choices:
        raise LayerError(f"{name} cannot be {choice!r}: {nearest_choice(str(choice), choices)}")


#: Token ids of different ranks lie this far apart; they key the random numbers of jitter.
_IDS_PER_RANK = 1 << 40
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
#: (dtype of experts, shorter dtype of x) accepted without autocast: experts are cast to the second.
_SHORTER = {(torch.float32, torch.bfloat16), (torch.float32, torch.float16)}


def _save_as_block(layer: MoELayer, state: dict[str, Any], prefix: str, _: object) -> None:
    """A hook of the state dict: for `save_pretrained`, names and tensors become those of the block,
    which transformers reads. A state dict has no argument for its purpose, so the calling function
    decides."""
    if layer.origin and caller("save_pretrained", "transformers.modeling_utils"):
        if layer.ranks.size > 1:
            raise LayerError(
                "save_pretrained is called by one rank, which has the experts of one rank: put the "
                "blocks back before, on all ranks, block.load_state_dict(layer.to_transformers())"
            )
        layer.origin.store_into(state, prefix)


def _load_block(layer: MoELayer, state: dict[str, Any], prefix: str, *_: object) -> None:
    """A hook before loading: entries with names and tensors of the block become the layer's."""
    if layer.origin and {prefix + name for name in layer.origin.sources} <= state.keys():
        block = {name: state.pop(prefix + name) for name in layer.origin.sources}
        state.update({prefix + name: tensor for name, tensor in layer.origin.read(block).items()})


class MoELayer(nn.Module):
    """Route each token to `top_k` of `num_experts` SwiGLU experts of width `expert_size`.

    `group`: the ranks that share the experts, num_experts / size on each, in rank order; each rank
    calls the layer with tokens of its own, any number of them, at the same points of forward and
    backward. A ProcessGroup; a DeviceMesh of one dimension, or of two (replicas, group); None: all
    ranks of the default process group, or this process alone where there is none.

    `dispatcher`: how rows travel; "auto" measures links at the first forward. `payload` "fp8"
    quantizes them on the way to the experts. `combine` "exact" adds in a fixed order, so that
    results do not depend on the group. `dispatch_chunks` overlaps exchanges with computation.
    `max_tokens`: largest number of tokens of a rank, by which "auto" chooses and buffers are sized;
    None takes that of the first forward. More tokens than that are slower, never wrong.

    `gradients`: "mean" where the gradients of the other parameters are averaged over all ranks, as
    DDP and FSDP2 do; "sum" where they are added up (the loss is divided by global counts). The
    gradients of the experts are then right without a reduction over the group: keep them out of
    DDP with :func:`expert_parameters`; FSDP2 passes over them. Replicas (the first dimension of a
    DeviceMesh of two) still have to be reduced: :meth:`sync_expert_gradients` once a step, after
    its last backward.

    The scopes of the auxiliary losses: "sequence" (of x [..., S, H]; the loss is the mean over this
    rank's sequences), "microbatch" (all tokens of this call) and "global" (those of all ranks of
    the group). The loss of a scope is the mean of `loss` over the ranks for ``gradients="mean"``,
    and the sum over the ranks for "sum", where "sequence" gives the sum over all sequences.

    Raises LayerError (a ValueError) for wrong sizes, groups and inputs, ConfigError for options.
    """

    @known_keywords
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
        self.ranks, self.replicas = axes_of(group)
        self.config = model_config(hidden_size, expert_size, num_experts, top_k, options)
        check_choice("gradients", gradients, ("mean", "sum"))
        check_choice("dispatcher", dispatcher, choices_of(DispatcherName))
        check_choice("payload", payload, choices_of(Payload))
        check_choice("combine", combine, choices_of(Combine))
        if combine == "exact" and not dispatcher_row(dispatcher).sums_exactly:
            raise LayerError(
                f'dispatcher "{dispatcher}" adds results of a rank before they return, in no fixed '
                'order: combine = "fast", or another dispatcher'
            )
        if payload == "fp8" and not dispatcher_row(dispatcher).encodes:
            raise LayerError(
                f'dispatcher "{dispatcher}" sends rows in their own dtype: payload = "same", or '
                "another dispatcher"
            )
        size = self.ranks.size
        check_divides(num_experts, size)
        dispatch_chunks = counted("dispatch_chunks", dispatch_chunks)
        if max_tokens is not None:
            max_tokens = counted("max_tokens", max_tokens)
        if dtype is not None and dtype not in _DTYPES:
            raise LayerError(f"dtype must be one of {', '.join(map(str, _DTYPES))}, not {dtype!r}")
        self.gradients, self.max_tokens = gradients, max_tokens
        self.plan = Plan(
            dp=size,
            ep=size,
            dispatcher=dispatcher,
            payload=payload,
            combine=combine,
            dispatch_chunks=dispatch_chunks,
        )
        with nullcontext() if device is None else device_of(device):
            block = LayerBlock(self.config, gradients, size)
            if size > 1:
                block.experts = SpreadExperts(self.config, self.ranks)
                watch_optimizers()
        if size > 1 or dispatch_chunks > 1:
            block.exchange = overlapped(1 if combine == "exact" else dispatch_chunks)
        # The layer registers the block's children, and hides the block, which computes with them,
        # in a tuple: so names of parameters have no prefix.
        self.router, self.experts, self.shared = block.router, block.experts, block.shared
        self.shared_gate = block.shared_gate
        #: The block of transformers that the layer was made of.
        self.origin: TransformersBlock | None = None
        self._block = (block,)
        self._connection: Connection | None = None
        #: Tokens of a rank for which dispatcher and memory were planned at the first forward.
        self._num_tokens = 0
        #: Names that DDP leaves alone: it reads them from the module that it wraps.
        self._ddp_params_and_buffers_to_ignore = list(expert_parameters(self))
        if dtype is not None:
            self.to(dtype)
        self.reset_parameters()

    def extra_repr(self) -> str:
        c = self.config
        return (
            f"{c.hidden_size}, {c.expert_intermediate_size}, num_experts={c.num_experts}, "
            f"top_k={c.experts_per_token}, ranks={self.ranks.size}, {self.plan.dispatcher}"
        )

    @classmethod
    def from_transformers(
        cls,
        block: nn.Module,
        group: ProcessGroup | DeviceMesh | None = None,
        dispatcher: DispatcherName = "auto",
        **options: Any,
    ) -> MoELayer:
        """A layer in the place of a MoE block of transformers 5 (``Qwen3MoeSparseMoeBlock``, ...),
        with copies of its tensors: same dtypes, devices and ``requires_grad``.

        It returns what the block does: y [B, S, H] for x [B, S, H], for gpt-oss a pair that begins
        with y. With ``output_router_logits`` the model adds its balancing loss as before. The
        attribute ``counts`` has the counts of the last forward. `options` are those of the class
        that do not change what the block computes (``gradients``, ``payload``, ...), and
        ``router_bias_rate``. Every rank passes the whole block, and keeps its share of the experts.

        Raises LayerError for other modules and options, ConfigError for unknown families.
        """
        origin = TransformersBlock(block)
        config, keys = origin.config, RoutingOptions.__annotations__.keys()
        if fixed := sorted(options.keys() & {*keys, "device", "dtype"} - {"router_bias_rate"}):
            raise LayerError(f"{fixed[0]} follows from the block: leave it out")
        routing = {name: getattr(config, name) for name in keys}
        routing |= {"aux_loss_coefficient": 0.0, **options}
        layer = cls(
            config.hidden_size,
            config.expert_intermediate_size,
            config.num_experts,
            config.experts_per_token,
            group,
            dispatcher,
            device="meta",
            **{name: value for name, value in routing.items() if value is not None},
        )
        tensors = origin.read(block.state_dict(keep_vars=True))
        copies = {name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()}
        layer.load_state_dict(copies, assign=True)
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_(tensors[name].requires_grad)
        layer.origin = origin
        layer.recorder = layer._block[0].recorder = origin.recorder()
        layer.register_forward_hook(origin.finish)
        layer.register_state_dict_post_hook(_save_as_block)
        layer.register_load_state_dict_pre_hook(_load_block)
        # _apply: the copied selection bias becomes float32.
        return layer.train(block.training)._apply(lambda tensor: tensor)

    def to_transformers(self) -> dict[str, Tensor]:
        """The state dict of a transformers block with the weights of this layer; all ranks of the
        group call. Raises LayerError unless :meth:`from_transformers` made the layer."""
        if self.origin is None:
            raise LayerError("the layer was not made by MoELayer.from_transformers")
        return self.origin.stored(full_state_dict(self))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw initial weights: normal with ``init_std``, biases zero.

        Keyed by one number of torch's default generator and the global expert id: with equal seeds
        all ranks agree on the router, and a layer does not depend on the group.
        """
        seed = int(torch.randint(2**62, (), device="cpu"))
        spread = expert_parameters(self)
        for name, parameter in self.named_parameters():
            if parameter.device.type == "meta":
                continue
            local, offset = parameter, (0,) * parameter.ndim
            if isinstance(parameter, DTensor):  # sharded by FSDP2
                local, offset = local_part(parameter)
            shape = list(parameter.shape)
            parts = [range(at, at + size) for at, size in zip(offset, local.shape, strict=True)]
            if name in spread:
                shape[0], parts[0] = self.config.num_experts, self.experts.held
            if len(shape) == 1 or name.endswith("bias"):
                local.zero_()
            elif local.numel():
                local.copy_(normal_slice(seed, name, tuple(shape), parts))
                local *= self.config.init_std
        for buffer in self.buffers():
            buffer.zero_()

    def forward(self, x: Tensor, valid: Tensor | None = None) -> tuple[Tensor, Auxiliary]:
        """Returns y [..., H] for x [..., H]; `valid` bool [...] is False for padding, never routed.

        x has the dtype of the experts, or a shorter one (the experts are cast); under autocast x
        and weights are cast to its dtype. The router computes in fp32, or in fp64 with weights of
        fp64 (with ``router_dtype="model"`` its product has the dtype of the computation, as y).
        Raises LayerError for another width or dtype.
        """
        if torch.compiler.is_compiling():
            # Rows of an expert and messages are data: a graph cannot hold them.
            if torch.compiler.is_exporting():
                raise LayerError(NO_GRAPH)
            torch._dynamo.graph_break(msg=NO_GRAPH)
            return torch.compiler.disable(self._forward)(x, valid)
        return self._forward(x, valid)

    def _forward(self, x: Tensor, valid: Tensor | None) -> tuple[Tensor, Auxiliary]:
        dtype = self._checked_dtype(x, valid)
        if not torch.is_grad_enabled() and self.training:
            refuse_reentrant(self, self.config)
        if self._connection is None:
            self._connect(x, dtype)
        if torch.is_grad_enabled() and not x.requires_grad:
            # All ranks must take part in the exchanges of the backward. Whether the backward runs
            # must depend on the weights, which train on all ranks or on none, not on one rank's x.
            x = x.detach().requires_grad_(any(p.requires_grad for p in self.parameters()))
        num_tokens = max(self._num_tokens, math.prod(x.shape[:-1]))
        self._block[0].experts.max_rows = rows_at_once(
            num_tokens, self.config.experts_per_token, self.plan.etp
        )
        if isinstance(self.experts, SpreadExperts):
            self.experts.mark_gradients()
        with torch.autocast(x.device.type, enabled=False):
            x_TH = x.reshape(-1, x.shape[-1]).to(dtype)
            tensors: dict[str, Tensor] = dict(self.named_buffers())
            for name, parameter in self.named_parameters():
                compute_dtype, weight = dtype, parameter
                if name.startswith("experts.") and self.gradients == "mean" and self.ranks.size > 1:
                    weight = linear_map(
                        parameter, lambda x: x.view_as(x), lambda grad: grad * (1 / self.ranks.size)
                    )
                if name.startswith("router."):
                    compute_dtype = torch.promote_types(parameter.dtype, torch.float32)
                tensors[name] = weight.to(compute_dtype)
            has_jitter = self.config.router_jitter > 0 and self.training
            context = token_context(
                x,
                math.prod(x.shape[:-2]),  # sequences
                x.shape[-2] if x.ndim > 1 else 1,  # positions
                first_id=self.ranks.index * _IDS_PER_RANK,
                valid_T=None if valid is None else valid.reshape(-1),
                # One number of torch's generator, which a checkpointed forward repeats.
                step=int(torch.randint(2**31, (), device="cpu")) if has_jitter else 0,
                training=self.training,
            )
            y_TH, auxiliary = functional_call(self._block[0], tensors, (x_TH, context))
        # No view: `y += x` on a view would drop the hooks that FSDP2 adds to the results.
        return torch.ops.aten._unsafe_view(y_TH, x.shape), auxiliary

    @torch.no_grad()
    def update_selection_bias(self, counts: Tensor) -> None:
        """Balance without a loss: update the router's selection bias, once per optimizer step.
        `counts` [E], integers or finite floats: tokens of each expert in this rank's forwards of
        the step. They are summed over group and replicas; all of these ranks call."""
        bias_E = self.router.selection_bias
        if bias_E is None:
            raise LayerError("update_selection_bias needs router_selection_bias=True")
        needs = f"update_selection_bias needs a tensor of the tokens of {len(bias_E)} experts"
        if not isinstance(counts, Tensor):
            raise LayerError(f"{needs}, not the type {type(counts).__name__}")
        is_number = counts.dtype != torch.bool and not counts.is_complex()
        if not is_number or counts.shape != bias_E.shape:
            raise LayerError(f"{needs}, not {counts.dtype} of the shape {list(counts.shape)}")
        counts = counts.to(bias_E.device, torch.float64, copy=True)
        if not bool((counts.isfinite() & (counts >= 0)).all()):
            raise LayerError(f"{needs}, all finite and not negative: {counts.tolist()}")
        for axis in (self.ranks, self.replicas):
            all_reduce_(counts, axis, caller="moe.bias", phase="backward")
        self.router.update_selection_bias(counts)

    @torch.no_grad()
    def sync_expert_gradients(self) -> None:
        """Reduce the gradients of the experts over their replicas (mean or sum); all ranks call it,
        after the last backward of a step. Without replicas it does nothing."""
        if isinstance(self.experts, SpreadExperts):
            self.experts.sync_gradients(self.replicas, self.gradients == "mean")

    def _checked_dtype(self, x: Tensor, valid: Tensor | None) -> torch.dtype:
        """Dtype of the computation; raises LayerError for inputs that the layer cannot take."""
        hidden, weight = self.config.hidden_size, self.experts.gate_up
        check_kind("x", x, Tensor)
        if type(x) is not Tensor or x.is_nested or x.is_meta or x.layout is not torch.strided:
            refuse_form(x)
        if (  # inside torch.jit.trace, torch.func or forward_ad
            torch._C._is_tracing()
            or torch._C._functorch.peek_interpreter_stack() is not None
            or forward_ad._current_level >= 0
        ):
            raise LayerError(NO_GRAPH)
        if sharded := [name for name, p in self.named_parameters() if isinstance(p, DTensor)]:
            raise LayerError(
                f"{sharded[0]} is sharded in the forward of the layer: call fully_shard on the "
                "layer or on a module around it, not on a part of it"
            )
        if valid is not None:
            check_kind("valid", valid, Tensor)
        if x.ndim < 1 or x.shape[-1] != hidden:
            raise LayerError(
                f"x has the shape {list(x.shape)}, the layer needs [..., hidden_size = {hidden}]"
            )
        if valid is not None and (valid.shape != x.shape[:-1] or valid.dtype != torch.bool):
            raise LayerError(
                f"valid must be bool {list(x.shape[:-1])}, not {valid.dtype} {list(valid.shape)}"
            )
        if valid is not None and valid.device != x.device:
            raise LayerError(f"x is on {x.device}, valid on {valid.device}")
        if weight.device != x.device:
            raise LayerError(
                f"x is on {x.device}, the experts are on {weight.device}: "
                f"layer.to({str(x.device)!r})"
            )
        if torch.is_autocast_enabled(x.device.type) and x.is_floating_point():
            return torch.get_autocast_dtype(x.device.type)
        if x.dtype == weight.dtype or (weight.dtype, x.dtype) in _SHORTER:
            return x.dtype
        raise LayerError(
            f"x is {x.dtype}, the experts are {weight.dtype}: x.to({weight.dtype}), or "
            f"layer.to({x.dtype if x.is_floating_point() else torch.float32})"
        )

    def _connect(self, x: Tensor, dtype: torch.dtype) -> None:
        """At the first forward: check that the ranks agree, then choose and test a dispatcher."""
        refuse_misuse(self, self.ranks.size, self.replicas.size)
        connection = Connection.over(self.ranks, x.device)
        block = self._block[0]
        # A copy: FSDP2 resizes the memory of the weight, which numpy would forbid from now on.
        weight = self.router.weight.detach().cpu().clone().reshape(-1).view(torch.uint8)
        most_tokens = connection.agree(
            x.numel() // x.shape[-1],
            {
                "were built or called with different options or dtypes": (
                    f"{self.config} {self.plan} {self.gradients} {dtype} {self.max_tokens}"
                ),
                "have different router weights: build the layer with the same torch.manual_seed on "
                "all ranks, load a state dict, or wrap the model in DDP, which broadcasts": (
                    hashlib.blake2b(weight.numpy().tobytes()).hexdigest()
                ),
            },
        )
        tokens = self.max_tokens or most_tokens
        block.dispatcher = connection.dispatcher(self.config, self.plan, dtype, tokens)
        block.tokens = ShardedTokens(connection.mesh, "world")
        self._num_tokens = tokens
        self._connection = connection

    def _apply(self, fn: Any, recurse: bool = True) -> MoELayer:
        follow()  # a Trainer of transformers is found when it moves its model to a device
        super()._apply(fn, recurse)
        if (bias := self.router.selection_bias) is not None:
            # An update of 1e-3 would vanish in bfloat16.
            self.router.selection_bias = bias.float()
        if self._connection and self._connection.mesh.device != self.experts.gate_up.device:
            self._connection = None
        return self

    def __getstate__(self) -> dict[str, Any]:
        if self.ranks.size > 1:
            raise LayerError(
                f"a layer over {self.ranks.size} ranks cannot be pickled: it holds a process "
                "group. Save mm.full_state_dict(model), which all ranks call"
            )
        return self.__dict__.copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> MoELayer:
        """A copy with parameters of its own, over the same group."""
        block = self._block[0]
        shared = (self.ranks, self.replicas, self._connection, block.dispatcher, block.tokens)
        return copy_sharing(self, memo, *shared)
