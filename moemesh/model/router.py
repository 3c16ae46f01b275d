"""The router: scores, choice and weights, in fp32 (fp64 in a float64 model).

    logits -> scores -> choice -> weights -> capacity

Legend: T tokens of this rank, E experts, K slots per token, H hidden, B sequences, S positions, G
groups of experts; N tokens of the microbatch on all ranks that share its sequences (in
:func:`within_capacity` all choices of these tokens).
"""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moemesh.config.model import ModelConfig
from moemesh.model.batch import Context
from moemesh.model.faults import first_fault
from moemesh.model.seams import NO_SLICES, PLAIN_FLOW, Flow, Tokens
from moemesh.ops.linear import linear
from moemesh.ops.permute import count_ids
from moemesh.ops.uniform import uniform


class WholeSequences:
    """The microbatch as [B, S, ...], gathered from the ranks that share its sequences, for choices
    that compare the tokens of a sequence; without gradient. ``valid_BS`` is False for padding."""

    def __init__(self, context: Context, tokens: Tokens) -> None:
        self._tokens, self._shape = tokens, (context.num_sequences, context.length)
        ids_T = context.token_ids_T
        # Ids and padding in one exchange: the id of padding is complemented, hence negative.
        key_T = ids_T if context.valid_T is None else torch.where(context.valid_T, ids_T, ~ids_T)
        key_N = tokens.gather(key_T, *self._shape)
        self._order_N = torch.argsort(torch.where(key_N < 0, ~key_N, key_N))
        self.valid_BS = key_N[self._order_N].view(self._shape) >= 0
        self._own_T = context.sequence_T * context.length + context.position_T

    def gather(self, x_T: Tensor) -> Tensor:
        """This rank's rows [T, ...] -> all rows [B, S, ...]."""
        x_N = self._tokens.gather(x_T.detach(), *self._shape)
        return x_N[self._order_N].view(*self._shape, *x_N.shape[1:])

    def own(self, x_BS: Tensor) -> Tensor:
        """All rows [B, S, ...] -> this rank's rows [T, ...]."""
        return x_BS.flatten(0, 1)[self._own_T]


# The choice of experts: stable top-k, groups, expert choice, Sinkhorn. None of these functions has
# a gradient; the weights of the chosen experts have one.

#: Rounds of Sinkhorn's algorithm; always all of them, so that no rank stops before another.
SINKHORN_ROUNDS = 8

#: Number of scores up to which :func:`stable_top_k` sorts the scores. For more of them it takes
#: the top-k of integer keys. The sort takes 8 us for 128 scores and 40 us for 2,048; the keys take
#: 35 and 39 us.
FEW_SCORES = 1024


def stable_top_k(scores_TE: Tensor, num_chosen: int) -> Tensor:
    """Ids of the best scores, best first; equal scores by ascending id."""
    is_fp32_on_cpu = scores_TE.dtype == torch.float32 and scores_TE.device.type == "cpu"
    if not is_fp32_on_cpu or scores_TE.numel() <= FEW_SCORES:
        # One kernel instead of the eight of the keys below. contiguous() frees the other ids.
        order_TE = torch.sort(scores_TE, dim=1, descending=True, stable=True).indices
        return order_TE[:, :num_chosen].contiguous()
    # One int64 key per score, without ties: any top-k of the keys is stable, and takes a third of
    # the time of the sort. Upper half: the bits of the score, changed so that as integers they
    # ascend with its value; lower half: the id, descending.
    bits_TE = (scores_TE + 0.0).view(torch.int32)  # + 0.0: -0.0 and 0.0 are equal scores
    ascending_TE = bits_TE ^ ((bits_TE >> 31) & 0x7FFFFFFF)
    num_experts = scores_TE.shape[1]
    rank_E = torch.arange(num_experts - 1, -1, -1, device=scores_TE.device)
    key_TE = (ascending_TE.to(torch.int64) << 32) + rank_E
    return key_TE.topk(num_chosen, dim=1).indices


def stable_top_k_sort(scores_TE: Tensor, num_chosen: int) -> Tensor:
    """Reference for :func:`stable_top_k`. Any dtype."""
    return torch.sort(scores_TE, dim=1, descending=True, stable=True).indices[:, :num_chosen]


def keep_best_groups(scores_TE: Tensor, config: ModelConfig) -> Tensor:
    """Group-limited routing (DeepSeek-V3): scores of all but the best groups of experts become
    -inf, not 0: scores plus a bias may be negative."""
    num_tokens, num_experts = scores_TE.shape
    grouped = scores_TE.view(num_tokens, config.router_groups, num_experts // config.router_groups)
    if config.router_group_score == "max":
        group_scores_TG = grouped.amax(2)
    else:
        group_scores_TG = grouped.topk(min(2, grouped.shape[2]), dim=2).values.sum(2)
    kept_TG = torch.zeros_like(group_scores_TG, dtype=torch.bool)
    kept_TG.scatter_(1, stable_top_k(group_scores_TG, config.router_groups_kept), True)
    return grouped.masked_fill(~kept_TG[:, :, None], -torch.inf).view(num_tokens, num_experts)


def capacity_per_sequence(valid_BS: Tensor, config: ModelConfig, factor: float) -> Tensor:
    """ceil(V * K * factor / E), at most V, for V valid tokens in a sequence: int64 [B]. In
    integers: as floats, 10 * 1.1 is above 11, and its ceiling is 12."""
    num_B = valid_BS.sum(1)
    exact = Fraction(factor).limit_denominator(10_000)
    numerator = num_B * (config.experts_per_token * exact.numerator)
    denominator = config.num_experts * exact.denominator
    return torch.minimum((numerator + denominator - 1) // denominator, num_B)


def comparable(scores: Tensor) -> Tensor:
    """Scores for comparisons between tokens, rounded: fp32 to bf16 and fp64 to fp32. The last bits
    of equal tokens' scores depend on the layout. Rounded, such scores nearly always tie, and of
    tied tokens the earlier one wins in every layout."""
    if scores.dtype == torch.float64:
        return scores.to(torch.float32).to(scores.dtype)
    return scores.to(torch.bfloat16).to(scores.dtype)


def expert_choice(scores_BSE: Tensor, valid_BS: Tensor, capacity_B: Tensor) -> Tensor:
    """Each expert takes the `capacity_B` tokens of a sequence that score best: bool [B, S, E]. Zhou
    et al., "Mixture-of-Experts with Expert Choice Routing", 2022 (arXiv:2202.09368). Of equal
    scores the earlier position wins. Any number of experts may take a token, or none."""
    scores_BSE = scores_BSE.masked_fill(~valid_BS[:, :, None], -torch.inf)
    order = torch.sort(scores_BSE, dim=1, descending=True, stable=True).indices
    rank_BSE = torch.argsort(order, dim=1)
    return (rank_BSE < capacity_B[:, None, None]) & valid_BS[:, :, None]


def slots(chosen_TE: Tensor, num_slots: int) -> Tensor:
    """bool [T, E] -> ids of the chosen experts, ascending, then -1: int64 [T, num_slots]. A token
    has at most `num_slots` experts."""
    num_experts = chosen_TE.shape[1]
    ids_E = torch.arange(num_experts, device=chosen_TE.device)
    ids_TE = torch.where(chosen_TE, ids_E, num_experts).sort(dim=1).values[:, :num_slots]
    return ids_TE.masked_fill(ids_TE == num_experts, -1)


def sinkhorn(logits_BSE: Tensor, valid_BS: Tensor) -> Tensor:
    """Logits [B, S, E] balanced so that all experts of a sequence have equal sums of weights.

    exp(logits) with rows and columns scaled in turn to equal sums (Sinkhorn & Knopp, 1967; Clark et
    al., "Unified Scaling Laws for Routed Language Models", 2022, arXiv:2202.01169), in logarithms.
    Only the order within a row has a meaning. Rows of padding take no part.
    """
    log_BSE = logits_BSE
    is_padding = ~valid_BS[:, :, None]
    for _ in range(SINKHORN_ROUNDS):
        log_BSE = log_BSE - log_BSE.logsumexp(2, keepdim=True)
        columns = log_BSE.masked_fill(is_padding, -torch.inf).logsumexp(1, keepdim=True)
        # The sum over a sequence of padding alone is -inf: nothing is subtracted.
        log_BSE = log_BSE - columns.masked_fill(columns == -torch.inf, 0.0)
    return log_BSE


def within_capacity(
    experts_BSK: Tensor, priority_BSK: Tensor | None, capacity_B: Tensor, num_experts: int
) -> Tensor:
    """Mask of the choices that are within the capacity of their expert: bool [B, S, K], False for
    no choice (-1).

    Each expert keeps at most `capacity_B` tokens of a sequence: those of highest priority, then of
    earliest position. Whole sequences are counted, so that the mask does not depend on the layout.
    """
    num_sequences = len(experts_BSK)
    sequence_B11 = torch.arange(num_sequences, device=experts_BSK.device)[:, None, None]
    queue_N = (sequence_B11 * num_experts + experts_BSK).flatten()
    none_N = (experts_BSK < 0).flatten()
    num_queues = num_sequences * num_experts
    queue_N = queue_N.masked_fill(none_N, num_queues)
    # A queue has the choices of one expert in one sequence. Two stable sorts order them: into
    # queues, and inside a queue by priority, then by position. A place is the index in a queue.
    order_N = torch.arange(queue_N.numel(), device=queue_N.device)
    if priority_BSK is not None:
        order_N = torch.sort(priority_BSK.flatten(), descending=True, stable=True).indices
    order_N = order_N[torch.sort(queue_N[order_N], stable=True).indices]
    counts = count_ids(queue_N, num_queues + 1)
    starts = counts.cumsum(0) - counts
    place_N = torch.empty_like(queue_N)
    place_N[order_N] = torch.arange(queue_N.numel(), device=queue_N.device)
    place_N -= starts[queue_N]
    limit_N = capacity_B[:, None, None].expand_as(experts_BSK).flatten()
    return ((place_N < limit_N) & ~none_N).view_as(experts_BSK)


#: Key of the jitter's random numbers; changing it changes every run with jitter.
JITTER_STREAM = 3


class Routing(NamedTuple):
    """The experts of each token in one layer and microbatch.

    Floating numbers are fp32, or fp64 in a float64 model.

    - ``weights_TK``: with gradient; 0 without an expert.
    - ``experts_TK``: int64 logical ids; -1 = none.
    - ``probabilities_TE``: for balance losses; rows sum to 1 (0 for padding).
    - ``logits_TE``: what the scores were computed from.
    - ``preferred_TK``: the plain top-k of the scores, without bias, groups, balancing or capacity,
      which the balance loss counts (DeepSeek-V3, arXiv:2412.19437, eq. 18). If the model has
      neither that loss nor a z-loss, the chosen experts.
    - ``num_dropped``: number of this rank's choices whose expert was full, an int64 scalar. None:
      no capacity was applied.
    - ``fault``: code of the first of this rank's logits that is not finite
      (:mod:`moemesh.model.faults`), an int64 scalar.
    - ``is_complete``: the host knows, without a wait for the device, that ``experts_TK`` has no -1.
    """

    weights_TK: Tensor
    experts_TK: Tensor
    probabilities_TE: Tensor
    logits_TE: Tensor
    preferred_TK: Tensor
    num_dropped: Tensor | None
    fault: Tensor
    is_complete: bool = False


class Router(nn.Module):
    """One linear layer and a choice; ``selection_bias`` changes the choice, not the weights.

    `layer` is the global index of the layer, the same in every layout.
    """

    selection_bias: Tensor | None

    def __init__(self, config: ModelConfig, layer: int = 0) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.bias = (
            nn.Parameter(torch.empty(config.num_experts)) if config.router_logit_bias else None
        )
        # fp32 in every run: in bfloat16 an update of 1e-3 would vanish near 1 (spacing 2^-8).
        if config.router_selection_bias:
            self.register_buffer("selection_bias", torch.zeros(config.num_experts))
        else:
            self.selection_bias = None

    def forward(
        self, x_TH: Tensor, context: Context | None = None, tokens: Tokens | None = None
    ) -> Routing:
        """Route rows of the residual stream. Without a context they are valid tokens of an
        evaluation, and each chooses its experts independently."""
        config = self.config
        logits_TE = self.logits(x_TH)
        if context is None:
            return route(logits_TE, config, self.selection_bias, None)
        if config.router_jitter and context.training:
            # Factors within 1 +- jitter (Fedus et al., "Switch Transformers", 2021, which applies
            # them to the router's input), keyed by logical coordinates: equal in all layouts and in
            # a recomputation.
            experts_E = torch.arange(logits_TE.shape[1], device=logits_TE.device)
            keys = context.seed, JITTER_STREAM, context.step, self.layer
            noise_TE = uniform(*keys, context.token_ids_T[:, None], experts_E)
            factor_TE = 1 + config.router_jitter * (2 * noise_TE - 1)
            logits_TE = logits_TE * factor_TE.to(logits_TE.dtype)
        replayed_TK = None if context.experts is None else context.experts.get(self.layer)
        chosen_TK = replayed_TK
        is_joint = config.router_selection != "token_choice"
        if is_joint and replayed_TK is None and context.training:
            chosen_TK = context.flow.once(
                self._choose_together, logits_TE, context, tokens or Tokens()
            )
        bias_E, flow = self.selection_bias, context.flow
        routing = route(logits_TE, config, bias_E, context.valid_T, chosen_TK, flow)
        by_tokens = config.router_selection != "expert_choice" or not context.training
        # A generated token must not compete with later tokens, which do not exist yet.
        is_whole = context.training or context.slices is NO_SLICES
        if config.capacity_factor and by_tokens and is_whole and replayed_TK is None:
            routing = limit_to_capacity(routing, config, context, tokens or Tokens())
        return routing

    def logits(self, x_TH: Tensor) -> Tensor:
        """[T, E], fp32 (fp64 in a float64 model); with ``router_dtype = "model"`` rounded to the
        model's dtype first."""
        weight_EH = self.weight
        if self.config.router_dtype == "model":
            logits_TE = F.linear(x_TH, weight_EH.to(x_TH.dtype)).to(weight_EH.dtype)
        else:
            # The product in fp32: a bf16 router changes the experts of 0.5 to 2 % of tokens. On a
            # GPU F.linear avoids the cost of an autograd Function (the router's small weight
            # gradient is then not deferred); on a CPU it would change the bits of old runs.
            product = linear if x_TH.device.type == "cpu" else F.linear
            logits_TE = product(x_TH.to(weight_EH.dtype), weight_EH)
        return logits_TE if self.bias is None else logits_TE + self.bias

    @torch.no_grad()
    def _choose_together(self, logits_TE: Tensor, context: Context, tokens: Tokens) -> Tensor:
        """Choices [T, K] that compare the tokens of a sequence: expert choice, or Sinkhorn."""
        config, whole = self.config, WholeSequences(context, tokens)
        if config.router_selection == "sinkhorn":
            balanced_BSE = sinkhorn(whole.gather(logits_TE), whole.valid_BS)
            return stable_top_k(whole.own(balanced_BSE), config.experts_per_token)
        capacity_B = capacity_per_sequence(whole.valid_BS, config, config.capacity_factor or 1.0)
        scores_BSE = comparable(whole.gather(score(logits_TE, config)))
        chosen_TE = whole.own(expert_choice(scores_BSE, whole.valid_BS, capacity_B))
        # Number of slots: the most experts of a token on any rank (at least 1).
        most = torch.cat([chosen_TE.sum(1), chosen_TE.new_ones(1, dtype=torch.int64)]).max()
        return slots(chosen_TE, int(tokens.max_over_ranks(most)))

    @torch.no_grad()
    def update_selection_bias(self, counts_E: Tensor) -> None:
        """Aux-loss-free balancing (Wang et al., 2024), once per optimizer step.

        `counts_E` (int64): tokens per expert of the whole step, all ranks and microbatches.
        """
        move_bias_(self.selection_bias, counts_E, self.config.router_bias_rate)


@torch.no_grad()
def move_bias_(bias_E: Tensor, counts_E: Tensor, rate: float) -> None:
    """Raise the bias of experts with fewer tokens than the mean by `rate`, lower that of experts
    with more; then subtract the mean of the biases."""
    if not rate:
        return
    counts = counts_E.double()
    bias_E += rate * torch.sign(counts.mean() - counts).to(bias_E)
    bias_E -= bias_E.mean()  # else all biases may drift together


def score(logits: Tensor, config: ModelConfig) -> Tensor:
    """Scores of logits [T, any]: a softmax over dim 1, or an elementwise function."""
    match config.router_score:
        case "softmax":
            return logits.softmax(1)
        case "sigmoid":
            return logits.sigmoid()
        case "sqrtsoftplus":
            # Below about -100 softplus is 0 in fp32, where the root's slope is infinite.
            return F.softplus(logits).clamp(min=torch.finfo(logits.dtype).tiny).sqrt()


def route(
    logits_TE: Tensor,
    config: ModelConfig,
    selection_bias: Tensor | None,
    valid_T: Tensor | None,
    chosen_TK: Tensor | None = None,
    flow: Flow = PLAIN_FLOW,
) -> Routing:
    """Choose K experts per token and weigh them; or weigh those of `chosen_TK` (-1 = none).

    Of equal scores the lowest id is chosen, on every backend: `torch.topk` promises no order of
    ties. Ids define the routing: an expert whose weight underflows to 0 stays chosen, also in a
    recomputed forward.
    """
    gates_TE = score(logits_TE, config)
    scores_TE = gates_TE if config.router_when == "before" else logits_TE
    experts_TK, preferred_TK = flow.once(
        choose, scores_TE.detach(), config, selection_bias, valid_T, chosen_TK
    )
    probabilities_TE = gates_TE
    if config.router_score != "softmax":
        if config.aux_loss_probabilities == "softmax":
            probabilities_TE = logits_TE.softmax(1)
        else:
            probabilities_TE = gates_TE / gates_TE.sum(1, keepdim=True)
    if valid_T is not None:
        probabilities_TE = probabilities_TE.masked_fill(~valid_T[:, None], 0.0)
    is_complete = valid_T is None and chosen_TK is None
    # Softmax over all experts, normalized over the chosen ones, equals a softmax of their logits.
    is_softmax_of_chosen = (
        config.router_score == "softmax"
        and config.router_when == "before"
        and config.router_normalize
        and not config.router_normalize_eps
        and not config.router_normalize_min
    )
    if is_complete and is_softmax_of_chosen and logits_TE.device.type != "cpu":
        # The same function in two operations; on a CPU it would change the bits of old runs.
        weights_TK = logits_TE.gather(1, experts_TK).softmax(1)
        if config.router_scale_on == "weights" and config.router_scale != 1.0:
            weights_TK = weights_TK * config.router_scale
    else:
        weights_TK = weigh(scores_TE, experts_TK, config, is_complete=is_complete)
    return Routing(
        weights_TK=weights_TK,
        experts_TK=experts_TK,
        probabilities_TE=probabilities_TE,
        logits_TE=logits_TE,
        preferred_TK=preferred_TK,
        num_dropped=None,
        fault=first_fault(logits_TE, valid_T),
        is_complete=is_complete,
    )


def choose(
    scores_TE: Tensor,
    config: ModelConfig,
    selection_bias: Tensor | None,
    valid_T: Tensor | None,
    chosen_TK: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """``experts_TK`` and ``preferred_TK`` of :class:`Routing`; -1 for padding."""
    experts_TK = chosen_TK
    if experts_TK is None:
        choice_TE = scores_TE
        if selection_bias is not None:
            choice_TE = choice_TE + selection_bias
        if config.router_groups > 1:
            choice_TE = keep_best_groups(choice_TE, config)
        experts_TK = stable_top_k(choice_TE, config.experts_per_token)
    preferred_TK = experts_TK
    is_plain = chosen_TK is None and selection_bias is None and config.router_groups == 1
    if not is_plain and (config.aux_loss_coefficient or config.z_loss_coefficient):
        preferred_TK = stable_top_k(scores_TE, config.experts_per_token)
    if valid_T is None:
        return experts_TK, preferred_TK
    none_T1 = ~valid_T[:, None]
    return experts_TK.masked_fill(none_T1, -1), preferred_TK.masked_fill(none_T1, -1)


def weigh(
    scores_TE: Tensor, experts_TK: Tensor, config: ModelConfig, *, is_complete: bool = False
) -> Tensor:
    """Weights [T, K] of chosen experts, 0 for -1, with gradient; `is_complete`: all are chosen."""
    none_TK = None if is_complete else experts_TK < 0
    weights_TK = scores_TE.gather(1, experts_TK if is_complete else experts_TK.clamp(min=0))
    if config.router_when == "after":
        weights_TK = score(weights_TK, config)
    if none_TK is not None:
        weights_TK = weights_TK.masked_fill(none_TK, 0.0)
    if config.router_normalize:
        total_T1 = weights_TK.sum(1, keepdim=True)
        if config.router_normalize_min:
            total_T1 = total_T1.clamp(min=config.router_normalize_min)
        elif config.router_normalize_eps:
            total_T1 = total_T1 + config.router_normalize_eps
        if none_TK is not None:
            # A token without any expert has no weights to divide; 0 / 0 would poison the gradient.
            total_T1 = total_T1.masked_fill(none_TK.all(1, keepdim=True), 1.0)
        weights_TK = weights_TK / total_T1
    if config.router_scale_on == "weights" and config.router_scale != 1.0:
        weights_TK = weights_TK * config.router_scale
    return weights_TK


def limit_to_capacity(
    routing: Routing, config: ModelConfig, context: Context, tokens: Tokens
) -> Routing:
    """Drop choices beyond the capacity of their expert (Lepikhin et al., "GShard", 2020). Capacity
    is per sequence, over all ranks that hold its tokens."""
    keep_TK = context.flow.once(_keep, routing, config, context, tokens)
    dropped_TK = ~keep_TK & (routing.experts_TK >= 0)
    weights_TK = routing.weights_TK.masked_fill(dropped_TK, 0.0)
    if config.capacity_renormalize:
        before_T1 = routing.weights_TK.sum(1, keepdim=True)
        after_T1 = weights_TK.sum(1, keepdim=True)
        nothing_T1 = (after_T1 == 0).detach()
        weights_TK = weights_TK * (before_T1 / after_T1.masked_fill(nothing_T1, 1.0))
    return routing._replace(
        weights_TK=weights_TK,
        experts_TK=routing.experts_TK.masked_fill(dropped_TK, -1),
        num_dropped=dropped_TK.sum(),
        is_complete=False,
    )


@torch.no_grad()
def _keep(routing: Routing, config: ModelConfig, context: Context, tokens: Tokens) -> Tensor:
    """Mask [T, K] of the choices within capacity."""
    whole = WholeSequences(context, tokens)
    priority_BSK = None
    if config.capacity_policy == "probability":
        priority_BSK = comparable(whole.gather(routing.weights_TK))
    capacity_B = capacity_per_sequence(whole.valid_BS, config, config.capacity_factor)
    experts_BSK = whole.gather(routing.experts_TK)
    keep_BSK = within_capacity(experts_BSK, priority_BSK, capacity_B, config.num_experts)
    return whole.own(keep_BSK)
