"""The predicted activations of a run of our own library on a CPU: what autograd keeps, by kind.

Each storage counts once. Per token of a microbatch with w bytes an element and W = max(w, 4),
N = tp, T tokens, T/N of them here:

| where | bytes | tokens |
|---|---|---|
| each norm | input, normalised copy: 2 W h; the inverse root W | T/N |
| attention | see `attention_activations` | |
| entry of an MLP | its input w h | T |
| MLP, shared experts | gate, up, silu(gate), product: 4 w f / N | T |
| router | its input W h where w < W; scores, choices and weights | T/N |
| experts | their rows w h a source row; gate and up 2 w f_e / x and a weight W a row | received |
| head | input w h, a target 8 and a log-sum-exp W | T |

On a CPU the norm is made of several operations, hence its copies; CUDA's fused norm keeps only its
input and the inverse root.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import ceil

from moemesh.config.dispatchers import EXACT_ROWS
from moemesh.config.layout import Layout, shard_sizes
from moemesh.planner.traffic.attention_activations import attention_kept
from moemesh.planner.traffic.dispatch_traffic import low_latency_slots
from moemesh.planner.traffic.ledger_lines import members
from moemesh.planner.traffic.routing import Routing, Sent, uniform_routing
from moemesh.planner.traffic.tensors import StagePlacement
from moemesh.schedule.action import Op

_INT64, _FLOAT64 = 8, 8


def predict_activations(
    placement: StagePlacement,
    layout: Layout,
    *,
    global_batch: int,
    element: int,
    rank: int = 0,
    routing: Routing | None = None,
) -> int:
    """Bytes that `rank` keeps for its backward at the fullest moment of a step, of a plan without
    recomputation, spare slots or weight versions: an upper bound of the first."""
    saved = _Saved(placement, layout, placement.seq_len, global_batch, element, rank, routing)
    return round(saved.peak())


class _Saved:
    """Bytes that autograd keeps on one rank."""

    def __init__(
        self,
        placement: StagePlacement,
        layout: Layout,
        seq_len: int,
        global_batch: int,
        element: int,
        rank: int,
        routing: Routing | None,
    ) -> None:
        self.placement, self.layout, self.rank = placement, layout, rank
        self.model, self.plan = placement.model, placement.plan
        self.batch = global_batch
        #: Of each slice of a sequence; its keys and values that later slices copy are left out.
        self.lengths = placement.lengths
        self.w, self.wide = element, max(element, 4)
        self.routing = routing or uniform_routing(self.model, layout)
        self.max_tokens = self.plan.tokens_per_rank(seq_len, global_batch)
        self.here = layout.coordinates(rank)

    def tokens(self, rank: int, number: int) -> tuple[int, int]:
        """(all tokens, rows of the stream) of forward `number` of the step (a microbatch, or a
        slice of one) on `rank`."""
        at = self.layout.coordinates(rank)
        microbatch, slice = divmod(number, len(self.lengths))
        sequences = self.placement.sequences(self.batch, at["dp"], microbatch)
        whole = sequences * self.placement.positions(at["cp"], slice)
        return whole, shard_sizes(whole, self.plan.tp)[at["tp"]]

    def peak(self) -> float:
        """The most that is kept at one time, walking this rank's operations in their order.

        In a block the forwards count before anything is given back. A split backward keeps
        everything until its weight half: an upper bound.
        """
        schedule, rank = self.placement.schedule, self.here["pp"]
        stage = cache(self.stage)

        def number(op: Op) -> int:
            return schedule.sample(op) * schedule.num_slices + op.slice

        kept = peak = 0.0
        for entry in schedule.orders[rank]:
            for op in entry:
                if op.kind == "F":
                    kept += stage(op.stage, number(op))
            peak = max(peak, kept)
            for op in entry:
                if op.kind in ("B", "W"):
                    kept -= stage(op.stage, number(op))
        return peak

    def stage(self, stage: int, number: int) -> float:
        """Of one forward on one stage."""
        whole, local = self.tokens(self.rank, number)
        length = self.placement.positions(self.here["cp"], number % len(self.lengths))
        found, layers = 0.0, self.placement.layers_of(stage)
        if stage == 0:
            found += _INT64 * whole + (whole if self.plan.tp > 1 else 0)
        if self.w == _FLOAT64:
            # The tables of rotary positions as they are made, for all layers.
            found += 2 * length * self.model.rotary_dim * self.w * (whole > 0)
        for layer in layers:
            found += 2 * self._norm(local)
            found += attention_kept(self.model, self.plan, (whole, local), length, self.w)
            if not self.model.is_moe_layer(layer):
                found += self._mlp(whole, self.model.intermediate_size, owns_input=True)
            else:
                found += self._moe(number, layer, whole, local)
        if stage == self.placement.schedule.num_stages - 1:
            hidden, ahead = self.model.hidden_size, self.model.num_mtp_layers
            head = self._norm(local) + whole * (self.w * hidden + _INT64 + self.wide)
            # In front of an extra prediction layer: token ids, two norms, both halves of the input.
            ids = _INT64 * whole + (whole if self.plan.tp > 1 else 0)
            entry = ids + 2 * self._norm(local) + 2 * local * self.w * hidden
            found += head + ahead * (head + entry)
        return found

    def _norm(self, rows: int) -> float:
        return rows * self.wide * (2 * self.model.hidden_size + 1)

    def _mlp(self, whole: int, width: int, *, owns_input: bool) -> float:
        hidden = self.model.hidden_size if owns_input else 0
        return whole * self.w * (hidden + 4 * width / self.plan.tp)

    def _moe(self, number: int, layer: int, whole: int, local: int) -> float:
        model, plan, w, wide = self.model, self.plan, self.w, self.wide
        k, experts = model.experts_per_token, model.num_experts
        alone = plan.ep * plan.etp == 1
        found = 0.0
        # The stream behind the norm: the router's input, in fp32 at least, and where they are the
        # same tensor that of the local experts and of the shared expert, too.
        found += local * wide * model.hidden_size
        if w < wide and (alone or (model.shared_width and plan.tp == 1)):
            found += local * w * model.hidden_size
        if model.shared_width:
            found += self._mlp(whole, model.shared_width, owns_input=plan.tp > 1)
        scores = wide * experts * (1 if model.router_score == "softmax" else 3)
        weights = k * (_INT64 + 1 + wide) + (1 + wide)
        found += local * (scores + weights)
        if model.aux_loss_coefficient or model.z_loss_coefficient:
            found += local * (2 * _INT64 + wide * experts)
        source, rows, laid_out = self._rows(number, layer)
        picked = (_INT64 + wide) * rows
        width = 2 * model.expert_intermediate_size / plan.etp
        expert = rows * wide + laid_out * w * width
        found += picked + expert
        if not alone:
            found += source * w * model.hidden_size + picked
        return found

    def _rows(self, number: int, layer: int) -> tuple[float, float, float]:
        """(rows of the experts' source, rows at the experts, the same as they are laid out for the
        products) of this rank, over all chunks."""
        plan = self.plan
        chunks = 1 if plan.combine == "exact" else plan.dispatch_chunks
        source = total = laid_out = 0.0
        for chunk in range(chunks):

            @cache
            def sent(rank: int, chunk: int = chunk) -> Sent:
                local = self.tokens(rank, number)[1]
                return self.routing(rank, number, layer, local, chunk, chunks)

            here, rows = self._received(sent)
            source, total = source + here, total + rows
            laid_out += rows if plan.combine == "fast" else self._padded(sent)
        return source, total, laid_out

    def _padded(self, sent: Callable[[int], Sent]) -> float:
        """Rows of the exact products: each expert's are padded, and all of them together."""
        per_rank = self.model.num_experts // self.plan.ep
        first = self.here["ep"] * per_rank
        group = members(self.layout, "ep_etp", self.rank)
        experts = range(first, first + per_rank)
        rows = (sum(sent(peer).by_expert[expert] for peer in group) for expert in experts)
        padded = sum(ceil(count / EXACT_ROWS) * EXACT_ROWS for count in rows)
        return ceil(padded / (4 * EXACT_ROWS)) * 4 * EXACT_ROWS

    def _received(self, sent: Callable[[int], Sent]) -> tuple[float, float]:
        plan, ep = self.plan, self.here["ep"]
        group = members(self.layout, "ep_etp", self.rank)
        rows = sum(sent(peer).rows[ep] for peer in group)
        if plan.combine == "exact":
            return rows, rows
        match plan.dispatcher:
            case "all_gather":
                return sum(sent(peer).tokens for peer in group), rows
            case "hierarchical":
                return sum(sent(peer).visits[ep] for peer in group), rows
            case "low_latency":
                slots = low_latency_slots(self.model, plan, self.max_tokens)
                if all(count <= slots for peer in group for count in sent(peer).rows):
                    return slots * len(group), rows
            case _:
                pass
        return rows, rows
