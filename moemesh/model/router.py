"""The router: scores, choice and weights, in fp32 whatever the model's dtype.

Legend: T tokens, E experts, K slots per token, H hidden, B sequences, S positions.

    logits -> scores -> choice (selection.py) -> weights -> capacity (capacity.py)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moemesh.config.model import ModelConfig
from moemesh.model.batch import Context
from moemesh.model.capacity import within_capacity
from moemesh.model.faults import first_fault
from moemesh.model.seams import NO_SLICES, PLAIN_FLOW, Flow, LocalTokens, Tokens
from moemesh.model.selection import (
    capacity_per_sequence,
    comparable,
    expert_choice,
    keep_best_groups,
    sinkhorn,
    slots,
    stable_top_k,
    stable_top_k_sort,
)
from moemesh.model.sequences import WholeSequences
from moemesh.ops.linear import linear
from moemesh.ops.uniform import uniform

__all__ = ["Router", "Routing", "route", "stable_top_k", "stable_top_k_sort"]

#: Keys the random numbers of this purpose; changing it changes every run with jitter.
JITTER_STREAM = 3


class Routing(NamedTuple):
    """Where each token goes: made once per layer and microbatch, then only read.

    ``weights_TK`` fp32 with gradient, 0 where there is no expert; ``experts_TK`` int64 logical ids,
    -1 = none; ``probabilities_TE`` fp32, rows summing to 1 (0 for padding), for balance losses;
    ``logits_TE`` fp32; ``preferred_TK`` the plain top-k of the scores, without bias, groups,
    balancing or capacity: what the balance loss counts (DeepSeek-V3, arXiv:2412.19437, eq. 18);
    ``num_dropped`` choices that found their expert full (None where none can be), and ``fault`` the
    first logit that is not finite (:mod:`moemesh.model.faults`), both int64 scalars of this rank's
    tokens. ``is_complete``: no -1 in ``experts_TK``, as the host knows without looking.
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
    """One linear layer and a choice; ``selection_bias`` steers the choice, not the weight.

    `layer` is the global index of the layer, the same in every layout.
    """

    def __init__(self, config: ModelConfig, layer: int = 0) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.bias = (
            nn.Parameter(torch.empty(config.num_experts)) if config.router_logit_bias else None
        )
        # fp32 in every run: in bfloat16 an update of 1e-3 would vanish near 1 (spacing 2^-8).
        bias_E = torch.zeros(config.num_experts) if config.router_selection_bias else None
        self.register_buffer("selection_bias", bias_E)

    def forward(
        self, x_TH: Tensor, context: Context | None = None, tokens: Tokens | None = None
    ) -> Routing:
        """Route rows of the residual stream. Without a context they are valid tokens of an
        evaluation, and every one chooses for itself."""
        config = self.config
        logits_TE = self.logits(x_TH)
        if context is None:
            return route(logits_TE, config, self.selection_bias, None)
        if config.router_jitter and context.training:
            logits_TE = logits_TE * self._jitter(logits_TE, context)
        given_TK = None if context.experts is None else context.experts.get(self.layer)
        chosen_TK = given_TK
        if given_TK is None and context.training:
            chosen_TK = context.flow.once(
                self._choose_together, logits_TE, context, tokens or LocalTokens()
            )
        bias_E, flow = self.selection_bias, context.flow
        routing = route(logits_TE, config, bias_E, context.valid_T, chosen_TK, flow)
        by_tokens = config.router_selection != "expert_choice" or not context.training
        # In generated text a token does not wait for those behind it, with which it would compete.
        is_whole = context.training or context.slices is NO_SLICES
        if config.capacity_factor and by_tokens and is_whole and given_TK is None:
            routing = limit_to_capacity(routing, config, context, tokens or LocalTokens())
        return routing

    def logits(self, x_TH: Tensor) -> Tensor:
        """[T, E], fp32 (fp64 in a float64 model)."""
        if self.config.router_dtype == "model":
            logits_TE = F.linear(x_TH, self.weight.to(x_TH.dtype)).to(self.weight.dtype)
        else:
            # The product itself in fp32: a bf16 router changes the experts of 0.5 to 2 % of tokens.
            logits_TE = linear(x_TH.to(self.weight.dtype), self.weight)
        return logits_TE if self.bias is None else logits_TE + self.bias

    def _jitter(self, logits_TE: Tensor, context: Context) -> Tensor:
        """Factors within 1 +- jitter (Switch; Fedus et al., 2021, there on the router's input).

        A function of logical coordinates, so lanes and recomputations agree on every choice.
        """
        experts_E = torch.arange(logits_TE.shape[1], device=logits_TE.device)
        keys = context.seed, JITTER_STREAM, context.step, self.layer
        noise_TE = uniform(*keys, context.token_ids_T[:, None], experts_E)
        return (1 + self.config.router_jitter * (2 * noise_TE - 1)).to(logits_TE.dtype)

    @torch.no_grad()
    def _choose_together(
        self, logits_TE: Tensor, context: Context, tokens: Tokens
    ) -> Tensor | None:
        """Choices that compare the tokens of a sequence [T, K]; None when tokens choose alone."""
        config = self.config
        match config.router_selection:
            case "expert_choice":
                whole = WholeSequences(context, tokens)
                capacity_B = capacity_per_sequence(
                    whole.valid_BS, config, config.capacity_factor or 1.0
                )
                scores_BSE = comparable(whole.gather(score(logits_TE, config)))
                chosen_TE = whole.own(expert_choice(scores_BSE, whole.valid_BS, capacity_B))
                # As many slots on every rank as the most wanted token anywhere needs.
                most = torch.cat([chosen_TE.sum(1), chosen_TE.new_ones(1, dtype=torch.int64)]).max()
                return slots(chosen_TE, int(tokens.max_over_ranks(most)))
            case "sinkhorn":
                whole = WholeSequences(context, tokens)
                balanced_BSE = sinkhorn(whole.gather(logits_TE), whole.valid_BS)
                return stable_top_k(whole.own(balanced_BSE), config.experts_per_token)
            case _:
                return None

    @torch.no_grad()
    def update_selection_bias(self, counts_E: Tensor) -> None:
        """Aux-loss-free balancing (Wang et al., 2024), once per optimizer step.

        `counts_E` (int64): tokens per expert of the whole step, all ranks and microbatches.
        """
        if not self.config.router_bias_rate:
            return
        counts = counts_E.double()
        self.selection_bias += self.config.router_bias_rate * torch.sign(counts.mean() - counts).to(
            self.selection_bias
        )
        self.selection_bias -= self.selection_bias.mean()  # or it drifts as a whole


def score(logits: Tensor, config: ModelConfig) -> Tensor:
    """Logits [T, any] as scores; softmax over dim 1, the others elementwise."""
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

    Equal scores go to the lowest id, on every backend: `torch.topk` promises no order of ties. The
    indices are the truth: a chosen expert stays chosen when its weight underflows to 0, and when
    the forward is computed again.
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
    if is_complete and _is_softmax_of_chosen(config) and logits_TE.device.type != "cpu":
        # The same function in two operations; on a CPU it would change the bits of old runs.
        weights_TK = logits_TE.gather(1, experts_TK).softmax(1)
        if config.router_scale_on == "weights" and config.router_scale != 1.0:
            weights_TK = weights_TK * config.router_scale
    else:
        weights_TK = weigh(scores_TE, experts_TK, config)
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
    """The experts of each token, and those that its scores alone prefer; -1 for padding."""
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


def weigh(scores_TE: Tensor, experts_TK: Tensor, config: ModelConfig) -> Tensor:
    """Weights [T, K] of the chosen experts, 0 for none; with gradient."""
    none_TK = experts_TK < 0
    weights_TK = scores_TE.gather(1, experts_TK.clamp(min=0))
    if config.router_when == "after":
        weights_TK = score(weights_TK, config)
    weights_TK = weights_TK.masked_fill(none_TK, 0.0)
    if config.router_normalize:
        total_T1 = weights_TK.sum(1, keepdim=True)
        if config.router_normalize_min:
            total_T1 = total_T1.clamp(min=config.router_normalize_min)
        else:
            total_T1 = _plus(total_T1, config.router_normalize_eps)
        # A token without any expert has no weights to divide; 0 / 0 would poison the gradient.
        weights_TK = weights_TK / total_T1.masked_fill(none_TK.all(1, keepdim=True), 1.0)
    if config.router_scale_on == "weights" and config.router_scale != 1.0:
        weights_TK = weights_TK * config.router_scale
    return weights_TK


def _plus(x: Tensor, number: float) -> Tensor:
    return x + number if number else x


def _is_softmax_of_chosen(config: ModelConfig) -> bool:
    """Whether a token's weights are the softmax of the logits of its experts alone: divided by
    their sum, the scores of a softmax over all experts are just that."""
    return (
        config.router_score == "softmax"
        and config.router_when == "before"
        and config.router_normalize
        and not config.router_normalize_eps
        and not config.router_normalize_min
    )


def limit_to_capacity(
    routing: Routing, config: ModelConfig, context: Context, tokens: Tokens
) -> Routing:
    """Drop the choices for which their expert has no room (Lepikhin et al., "GShard", 2020).

    The room is counted per sequence, over all ranks that hold its tokens.
    """
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
    """Which of the choices [T, K] find room."""
    whole = WholeSequences(context, tokens)
    priority_BSK = None
    if config.capacity_policy == "probability":
        priority_BSK = comparable(whole.gather(routing.weights_TK))
    capacity_B = capacity_per_sequence(whole.valid_BS, config, config.capacity_factor)
    experts_BSK = whole.gather(routing.experts_TK)
    keep_BSK = within_capacity(experts_BSK, priority_BSK, capacity_B, config.num_experts)
    return whole.own(keep_BSK)
