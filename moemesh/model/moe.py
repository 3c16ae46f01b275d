"""The mixture-of-experts layer: route, dispatch, compute, combine.

Legend: T tokens, E experts, L experts held here, H hidden, F expert width, B sequences.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from moemesh.config.layout import shard_sizes
from moemesh.config.model import ModelConfig
from moemesh.model.batch import Context
from moemesh.model.dispatcher import Dispatcher, LocalDispatcher, Rows
from moemesh.model.layers import MLP
from moemesh.model.router import Router, Routing
from moemesh.model.seams import LocalTokens, Tokens
from moemesh.ops.exact_experts import exact_experts
from moemesh.ops.expert_mlp import expert_mlp


class MoEOutput(NamedTuple):
    """``y_TH``; this rank's part of the auxiliary losses summed over sequences (a scalar); and the
    tokens that this rank's rows sent to each expert, int64 [E]."""

    y_TH: Tensor
    aux: Tensor
    counts_E: Tensor


class Experts(nn.Module):
    """Stacked SwiGLU experts: ``gate_up`` [L, 2, F, H] and ``down`` [L, H, F]."""

    def __init__(self, num_experts: int, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(num_experts, 2, width, hidden))
        self.down = nn.Parameter(torch.empty(num_experts, hidden, width))

    def forward(self, rows: Rows) -> Tensor:
        if rows.counts_LO is not None:
            return exact_experts(
                rows.source_NH, rows.weights_R, rows.counts_LO, self.gate_up, self.down
            )
        return expert_mlp(
            rows.source_NH, rows.map, rows.weights_R, rows.counts_L, self.gate_up, self.down
        )


class MoE(nn.Module):
    """Routed experts and, beside them, shared experts that every token visits."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.router = Router(config)
        self.experts = Experts(
            config.num_experts, config.hidden_size, config.expert_intermediate_size
        )
        self.shared = MLP(config.hidden_size, config.shared_width) if config.shared_width else None
        self.dispatcher: Dispatcher = LocalDispatcher(config.num_experts)
        self.num_chunks = 1
        self.tokens: Tokens = LocalTokens()

    def forward(self, x_TH: Tensor, context: Context) -> MoEOutput:
        routing = self.router(x_TH, context.valid_T)
        y_TH = self._experts_and_shared(x_TH, routing, context)
        counts_E = torch.bincount(
            routing.experts_TK.flatten() + 1, minlength=self.config.num_experts + 1
        )[1:]
        return MoEOutput(y_TH, self._auxiliary_loss(routing, context), counts_E)

    def _experts_and_shared(self, x_TH: Tensor, routing: Routing, context: Context) -> Tensor:
        """Dispatch, compute, combine, in `num_chunks` chunks of tokens.

        While the experts of one chunk compute, the rows of the next are under way, and the results
        of the one before; the shared experts run under the first dispatch. All plans come first,
        so that their small exchanges do not wait behind rows.
        """
        sizes = shard_sizes(len(x_TH), self.num_chunks)
        weights, xs = routing.weights_TK.split(sizes), x_TH.split(sizes)
        plans = [self.dispatcher.plan(experts_TK) for experts_TK in routing.experts_TK.split(sizes)]
        arriving = [self.dispatcher.dispatch(xs[0], weights[0], plans[0])]
        shared_TH = None if self.shared is None else self.shared(x_TH, context.num_tokens)
        leaving = []
        for chunk, plan in enumerate(plans):
            if (after := chunk + 1) < len(plans):
                arriving.append(self.dispatcher.dispatch(xs[after], weights[after], plans[after]))
            rows = arriving[chunk].wait()
            leaving.append(self.dispatcher.combine(self.experts(rows), plan))
        y_TH = torch.cat([pending.wait() for pending in leaving])
        return y_TH if shared_TH is None else y_TH + shared_TH

    def _auxiliary_loss(self, routing: Routing, context: Context) -> Tensor:
        """This rank's part of the balance loss and z-loss, each a sum over the sequences here.

        Per sequence with V valid tokens: ``alpha * E * sum_i f_i P_i`` with f_i = count_i / (K V),
        P_i = mean probability (Switch; Fedus et al., 2021), and ``beta * mean(logsumexp^2)``
        (ST-MoE; Zoph et al., 2022). Counts and V are summed over the ranks that share a sequence;
        then the parts add up to the loss of one device, and gradients need no correction.
        """
        config = self.config
        if not (config.aux_loss_coefficient or config.z_loss_coefficient):
            return routing.logits_TE.new_zeros(())
        num_sequences = context.num_sequences
        key_TK = context.sequence_T[:, None] * config.num_experts + routing.experts_TK
        counts_BE = torch.bincount(
            key_TK[routing.experts_TK >= 0], minlength=num_sequences * config.num_experts
        ).view(num_sequences, config.num_experts)
        counts_BE = self.tokens.sum_over_shards(counts_BE)
        valid_B = (counts_BE.sum(1) / config.experts_per_token).clamp(min=1).to(routing.logits_TE)
        frequency_BE = counts_BE / (config.experts_per_token * valid_B[:, None])
        mean_BE = torch.zeros_like(frequency_BE).index_add(
            0, context.sequence_T, routing.probabilities_TE / valid_B[context.sequence_T][:, None]
        )
        loss = config.aux_loss_coefficient * config.num_experts * (frequency_BE * mean_BE).sum()
        if config.z_loss_coefficient:
            square_T = routing.logits_TE.logsumexp(1).square() / valid_B[context.sequence_T]
            if context.valid_T is not None:
                square_T = square_T.masked_fill(~context.valid_T, 0.0)
            loss = loss + config.z_loss_coefficient * square_T.sum()
        return loss
