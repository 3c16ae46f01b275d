"""Experts, routers and MLPs of a model: their sizes, which layers have them, how tokens choose."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from moemesh.config.errors import Problem
from moemesh.config.section import Count, NotNegative, Positive, Range, Section, Share, Size
from moemesh.config.suggest import nearest_divisors
from moemesh.config.toml import format_value

RouterScore = Literal["softmax", "sigmoid", "sqrtsoftplus"]
RouterWhen = Literal["before", "after"]
GroupScore = Literal["top2", "max"]
RouterSelection = Literal["token_choice", "expert_choice", "sinkhorn"]
RouterDtype = Literal["float32", "model"]
RouterScaleOn = Literal["weights", "output"]
SharedCombine = Literal["sum", "average"]
CapacityPolicy = Literal["probability", "position"]
AuxLossScope = Literal["sequence", "microbatch", "global"]

#: Upper bound on num_layers, of a config.json, too: outputs list every layer, and a typing error
#: must not fill the memory.
MOST_LAYERS = 1 << 16


class ExpertConfig(Section):
    """The part of :class:`moemesh.config.model.ModelConfig` that describes its layers' MLPs.

    Layers are numbered from 0; the extra prediction layers come after the last.
    """

    section: ClassVar[str] = "model"

    num_layers: Annotated[int, Range(1, MOST_LAYERS)] = 8
    #: Width of a dense MLP.
    intermediate_size: Size = 384
    #: The first layers, which have a dense MLP in place of experts.
    first_dense_layers: Count = 1
    #: The layers with experts, ascending; None: all but the first `first_dense_layers`.
    moe_layers: tuple[Count, ...] | None = None
    #: 0 makes the model dense.
    num_experts: Count = 8
    experts_per_token: Size = 2
    #: Width of one expert.
    expert_intermediate_size: Size = 128
    num_shared_experts: Count = 1
    #: Width of all shared experts together; None is num_shared_experts * expert_intermediate_size.
    shared_intermediate_size: Size | None = None
    #: Multiply the shared experts' output by the sigmoid of a learned projection to one number.
    shared_gate: bool = False
    #: Biases on both projections of the routed experts.
    expert_bias: bool = False
    #: Every SwiGLU is ``gate * sigmoid(alpha * gate) * (up + offset)``. With a limit above 0 the
    #: gate is at most the limit, and up within +- the limit (gpt-oss: 7, 1.702, 1).
    swiglu_limit: NotNegative = 0.0
    swiglu_alpha: Positive = 1.0
    swiglu_offset: NotNegative = 0.0
    #: Logits become gates by softmax, sigmoid or sqrt(softplus), before or after the choice.
    router_score: RouterScore = "softmax"
    router_when: RouterWhen = "before"
    #: Tokens choose experts, experts choose tokens (arXiv:2202.09368), or tokens choose after a
    #: Sinkhorn balancing (arXiv:2202.01169). The last two read whole sequences, later tokens
    #: included: only training uses them, else tokens choose.
    router_selection: RouterSelection = "token_choice"
    #: A learned bias on the logits.
    router_logit_bias: bool = False
    #: Dtype of the product that makes the logits; later steps are fp32 (or fp64) in every run.
    router_dtype: RouterDtype = "float32"
    #: Training only: each logit is multiplied by a random number within 1 +- jitter.
    router_jitter: Share = 0.0
    #: A bias on the scores that choose, not on the gates (arXiv:2408.15664); its change per step.
    router_selection_bias: bool = False
    router_bias_rate: NotNegative = 1e-3
    #: Experts are chosen from the best `router_groups_kept` of `router_groups` groups only.
    router_groups: Size = 1
    router_groups_kept: Size = 1
    #: Score of a group: the sum of its two best scores, or its best.
    router_group_score: GroupScore = "top2"
    #: Divide the gates of a token by (their sum + eps), or by max(their sum, `min`). The scale then
    #: multiplies the gates, or the summed output of the routed experts.
    router_normalize: bool = True
    router_normalize_eps: NotNegative = 0.0
    router_normalize_min: NotNegative = 0.0
    router_scale: Positive = 1.0
    router_scale_on: RouterScaleOn = "weights"
    #: Shared and routed experts are added, or averaged.
    shared_combine: SharedCombine = "sum"
    #: Most tokens of a sequence that an expert takes, in fair shares; 0: no limit (dropless). With
    #: expert_choice, tokens that each expert chooses, in fair shares; 0: one fair share.
    capacity_factor: Annotated[float, Range(0.0, 1e6)] = 0.0
    #: Choices that a full expert keeps: the largest weights, or the earliest tokens.
    capacity_policy: CapacityPolicy = "probability"
    #: A token that lost an expert keeps its total weight.
    capacity_renormalize: bool = False
    #: Tokens that an auxiliary loss is computed over. "microbatch" depends on the layout.
    aux_loss_scope: AuxLossScope = "sequence"
    #: "each": losses of every layer, added up. "together": one loss over the choices of all layers,
    #: as in transformers.
    aux_loss_layers: Literal["each", "together"] = "each"
    #: Probabilities of the load-balance loss: the router's scores, divided by their sum, or a
    #: softmax of its logits (MiniMax-M2, whose scores are sigmoids).
    aux_loss_probabilities: Literal["router", "softmax"] = "router"
    aux_loss_coefficient: NotNegative = 0.01
    z_loss_coefficient: NotNegative = 0.0

    #: Extra layers that predict further tokens (arXiv:2412.19437, section 2.2).
    num_mtp_layers: Annotated[int, Range(0, MOST_LAYERS)] = 0
    #: Weight of the mean of their losses, which is added to the main loss.
    mtp_loss_weight: NotNegative = 0.3

    @property
    def shared_width(self) -> int:
        """Width of all shared experts of a layer together; 0 when there are none."""
        if self.num_shared_experts == 0:
            return 0
        if self.shared_intermediate_size is not None:
            return self.shared_intermediate_size
        return self.num_shared_experts * self.expert_intermediate_size

    @property
    def routed_layers(self) -> tuple[int, ...]:
        """All layers that route their tokens to experts, ascending, including extra prediction
        layers, which are like the last layer."""
        if self.num_experts == 0:
            return ()
        layers = self.moe_layers
        if layers is None:
            layers = tuple(range(min(self.first_dense_layers, self.num_layers), self.num_layers))
        extra = self.mtp_layers if layers[-1:] == (self.num_layers - 1,) else range(0)
        return (*layers, *extra)

    @property
    def mtp_layers(self) -> range:
        """The numbers of the extra prediction layers."""
        return range(self.num_layers, self.num_layers + self.num_mtp_layers)

    def is_moe_layer(self, index: int) -> bool:
        """Whether layer `index` routes its tokens to experts."""
        return index in self.routed_layers

    @property
    def num_moe_layers(self) -> int:
        """Layers with experts, without extra prediction layers."""
        return sum(index < self.num_layers for index in self.routed_layers)

    @property
    def num_dense_layers(self) -> int:
        """Layers with a dense MLP, without extra prediction layers."""
        return self.num_layers - self.num_moe_layers

    @property
    def has_aux_loss(self) -> bool:
        """Whether the routers have a loss of their own."""
        return bool(self.num_experts and (self.aux_loss_coefficient or self.z_loss_coefficient))

    @property
    def has_joint_aux_loss(self) -> bool:
        """Whether one auxiliary loss covers all layers."""
        return self.has_aux_loss and self.aux_loss_layers == "together"

    @property
    def layout_warning(self) -> str:
        """A sentence if a part of the objective changes with the layout, else ""."""
        changes = {
            "microbatch": "plan.dp, plan.microbatches and data.global_batch",
            "global": "plan.microbatches",
        }.get(self.aux_loss_scope)
        if not self.has_aux_loss or changes is None:
            return ""
        return (
            f'with aux_loss_scope = "{self.aux_loss_scope}" the auxiliary loss changes with '
            f'{changes}; "sequence" is the same in every layout'
        )

    def expert_rules(self) -> Iterator[Problem]:
        """Problems of the rules between the keys of this class."""
        if not self.num_experts:
            return
        yield from self._layer_rules()
        chosen, experts = self.experts_per_token, self.num_experts
        if chosen > experts:
            message = f"experts_per_token ({chosen}) exceeds num_experts ({experts})"
            fix = f"experts_per_token = {experts}"
            yield self.problem("too-large", "experts_per_token", message, fix, "num_experts")
        if self.num_shared_experts == 0 and self.shared_intermediate_size is not None:
            name = "shared_intermediate_size"
            message = (
                f"{name} ({self.shared_intermediate_size}) has no use: num_shared_experts is 0"
            )
            fix = f"num_shared_experts = 1, or leave {name} out"
            yield self.problem("conflict", name, message, fix, "num_shared_experts")
        if self.shared_gate and not self.shared_width:
            message = "shared_gate has nothing to multiply: num_shared_experts is 0"
            fix = "shared_gate = false, or num_shared_experts = 1"
            yield self.problem("conflict", "shared_gate", message, fix, "num_shared_experts")
        yield from self._group_rules()
        has_minimum, name = self.router_normalize_min > 0, "router_normalize_min"
        if has_minimum and not self.router_normalize:
            message = f"{name} has no use: router_normalize is false"
            fix = f"router_normalize = true, or {name} = 0.0"
            yield self.problem("conflict", name, message, fix, "router_normalize")
        if has_minimum and self.router_normalize_eps > 0:
            message = f"{name} and router_normalize_eps are two ways to one end"
            fix = f"router_normalize_eps = 0.0, or {name} = 0.0"
            yield self.problem("conflict", name, message, fix, "router_normalize_eps")
        selection = self.router_selection
        is_expert_choice = selection == "expert_choice"
        # Balanced choices exclude other ways of balancing. With expert_choice a token has any
        # number of experts, not K of them for a softmax.
        for name, wrong, legal in (
            ("router_selection_bias", self.router_selection_bias, "false"),
            ("router_groups", self.router_groups > 1, "1"),
            ("router_when", is_expert_choice and self.router_when == "after", '"before"'),
        ):
            if wrong and selection != "token_choice":
                value = format_value(getattr(self, name))
                message = f'router_selection = "{selection}" does not go with {name} = {value}'
                fix = f'{name} = {legal}, or router_selection = "token_choice"'
                yield self.problem("conflict", name, message, fix, "router_selection")

    def _layer_rules(self) -> Iterator[Problem]:
        """Rules of the keys that choose the layers with experts."""
        layers, dense, count = self.moe_layers, self.first_dense_layers, self.num_layers
        if layers is None:
            if dense > count:
                message = f"first_dense_layers ({dense}) exceeds num_layers ({count})"
                fix = f"first_dense_layers = {count}"
                yield self.problem("too-large", "first_dense_layers", message, fix, "num_layers")
            return
        if not layers or list(layers) != sorted(set(layers)) or layers[-1] >= count:
            legal = sorted({index for index in layers if 0 <= index < count})
            message = (
                f"moe_layers {list(layers)} must be different layers, ascending, from 0 to "
                f"num_layers - 1 ({count - 1})"
            )
            fix = f"moe_layers = {legal or list(range(min(count, 3)))}"
            yield self.problem("out-of-range", "moe_layers", message, fix, "num_layers")
        default = type(self).model_fields["first_dense_layers"].default
        if dense != default:
            message = (
                f"first_dense_layers ({dense}) and moe_layers both choose the layers with experts"
            )
            fix = f"first_dense_layers = {default}, or leave moe_layers out"
            yield self.problem("conflict", "first_dense_layers", message, fix, "moe_layers")

    def _group_rules(self) -> Iterator[Problem]:
        groups, kept, experts = self.router_groups, self.router_groups_kept, self.num_experts
        if groups <= 0:
            return
        if experts % groups:
            message = f"router_groups ({groups}) must divide num_experts ({experts})"
            fix = f"router_groups = {nearest_divisors(experts, groups)}"
            yield self.problem("not-divisible", "router_groups", message, fix, "num_experts")
            return
        size, chosen = experts // groups, self.experts_per_token
        keys = ("router_groups", "num_experts")
        if kept > groups:
            message = f"router_groups_kept ({kept}) exceeds router_groups ({groups})"
            fix = f"router_groups_kept = {groups}"
            yield self.problem("too-large", "router_groups_kept", message, fix, "router_groups")
        elif kept * size < chosen <= experts:
            message = (
                f"experts_per_token ({chosen}) exceeds the {kept * size} experts "
                f"of the kept groups ({kept} of {groups} groups of {size})"
            )
            fix = f"router_groups_kept = {-(-chosen // size)}, or experts_per_token = {kept * size}"
            related = ("router_groups_kept", *keys)
            yield self.problem("too-large", "experts_per_token", message, fix, *related)
        if groups > 1 and self.router_group_score == "top2" and size < 2:
            message = (
                f'router_group_score = "top2" needs groups of at least 2 experts; '
                f"num_experts ({experts}) / router_groups ({groups}) is {size}"
            )
            fix = 'router_group_score = "max"'
            yield self.problem("conflict", "router_group_score", message, fix, *keys)
