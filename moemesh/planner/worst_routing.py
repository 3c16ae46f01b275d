"""Memory under the worst routing: the router sends to one rank as many rows as it can.

Rows that a rank is sent are kept for the backward, whatever their number; its experts compute at
most `rows_at_once` of them together, and keep gate and up only of so many. The most is therefore
held either under all rows that can come, or under just as many as are computed at once.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import ceil
from typing import Any

from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.planner.layout_sources import exact_plan
from moemesh.planner.memory import estimate_memory
from moemesh.planner.planned_layout import PlannedLayout
from moemesh.planner.shapes.load_shape import Model
from moemesh.planner.traffic.dispatch_traffic import capacity_of, crowded_routing
from moemesh.planner.traffic.own_memory import predict_activations
from moemesh.planner.traffic.tensors import ELEMENT_BYTES, StagePlacement
from moemesh.sharding.dispatchers import rows_at_once

#: More microbatches for each pipeline rank hold no more at the fullest moment.
_ENOUGH = 4
#: Copies of a rank's rows that exist while its experts run backward, beside those that are kept:
#: the gradients that came, those of the experts' inputs, and the same in the order of the way back.
#: Where rows come in two hops, each has its own.
_ROW_COPIES = 3
#: Numbers of a row, in widths of an expert, while it is computed: gate and up, their gradients,
#: the product and its gradient.
_ROW_WIDTHS = 6


@dataclass(frozen=True, kw_only=True)
class WorstRouting:
    """The fullest rank of the pipeline rank with the most memory.

    `rows` of one layer and microbatch can come to it, `balanced_rows` come under uniform routing.
    It computes at most `rows_at_once` of them together (None: all), so in `blocks`; beyond the
    capacity `dropped_choices` of the tokens of its group are dropped. `activation_bytes` are held
    at the most, buffers of the exchange and of the experts included; `more_bytes` of them beyond
    uniform routing.
    """

    rows: int
    balanced_rows: int
    rows_at_once: int | None
    blocks: int
    dropped_choices: int
    activation_bytes: float
    more_bytes: float

    @property
    def times_mean(self) -> float:
        return self.rows / self.balanced_rows if self.balanced_rows else 1.0

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "times_mean": self.times_mean}


def worst_routing(
    model: Model, layout: PlannedLayout, plan: Plan | None, rank: int
) -> WorstRouting | None:
    """The worst routing of `rank` in what `moemesh train` runs under `plan`;
    where it does not run this, of any trainer. None for a model without routed experts."""
    if not model.shape.is_moe:
        return None
    config = model.config
    if config is not None and plan is not None and layout.dtype in ELEMENT_BYTES:
        known = exact_plan(config, plan)
        if isinstance(known, Plan):
            return of_own_run(
                config,
                known,
                seq_len=layout.seq_len,
                global_batch=layout.global_batch,
                dtype=layout.dtype,
                rank=rank,
            )
    # Other trainers keep gate and up of all rows: closed forms.
    k, per_rank = model.shape.experts_per_token, model.shape.num_experts // layout.ep
    times = layout.ep * min(k, per_rank) / k
    uncapped = times
    if layout.capacity_factor:
        times = min(times, max(layout.capacity_factor, 1.0))
    times = max(times, layout.imbalance)
    balanced = round(layout.token_shard * k * layout.etp)
    uniform = estimate_memory(model.shape, layout).worst.activations
    crowded = estimate_memory(model.shape, layout.changed(imbalance=times)).worst.activations
    return WorstRouting(
        rows=round(balanced * times),
        balanced_rows=balanced,
        rows_at_once=None,
        blocks=1,
        dropped_choices=round(balanced * max(uncapped - times, 0.0)),
        activation_bytes=crowded,
        more_bytes=crowded - uniform,
    )


def of_own_run(
    model: ModelConfig, plan: Plan, *, seq_len: int, global_batch: int, dtype: str, rank: int
) -> WorstRouting:
    """The activations of `moemesh train` on `rank`, counted as by :func:`predict_activations`.

    Raises ValueError when the plan's schedule cannot be made.
    """
    share = ceil(ceil(global_batch / plan.dp) / plan.microbatches)
    if plan.microbatches > _ENOUGH * plan.pp and plan.update_window is None:
        plan = plan.model_copy(update={"microbatches": _ENOUGH * plan.pp})
        global_batch = share * plan.dp * plan.microbatches
    placement, layout = StagePlacement(model, plan, seq_len), plan.layout
    element = ELEMENT_BYTES[dtype]
    tokens = plan.tokens_per_rank(seq_len, global_batch)
    # Of one layer: rows at the fullest rank, under uniform routing, and choices that are dropped.
    peers = plan.ep * plan.etp
    # Experts that one token can choose on a single rank.
    of_a_token = min(model.experts_per_token, model.num_experts // layout.ep)
    balanced = tokens * model.experts_per_token * plan.etp
    kept = capacity_of(model, layout, tokens, seq_len) * of_a_token
    most_rows, dropped = kept * peers, (tokens * of_a_token - kept) * peers
    if model.router_selection == "expert_choice":
        most_rows, dropped = balanced, 0
    at_once, chunks = rows_at_once(tokens, model.experts_per_token, plan.etp), plan.dispatch_chunks
    if plan.combine == "exact":
        at_once, chunks = max(most_rows, balanced), 1

    hops = 1 + (plan.dispatcher == "hierarchical" and layout.ep_rail > 1)

    def held(crowd: float | None) -> float:
        """Bytes under uniform routing (None), or with a share of all tokens in the crowd."""
        routing, rows, here = None, float(balanced), layout.coordinates(rank)["ep"]
        if crowd is not None:
            routing = crowded_routing(model, layout, here, seq_len, crowd)
            rows = crowd * most_rows
        settings = {"global_batch": global_batch, "element": element, "rank": rank}
        kinds = predict_activations(placement, **settings, routing=routing)
        width = model.expert_intermediate_size / plan.etp
        copies = _ROW_COPIES * hops * rows * model.hidden_size
        working = copies + _ROW_WIDTHS * min(rows, at_once) * width
        return sum(kinds.values()) + element * working

    crowds = [1.0]
    if most_rows > at_once * chunks:
        crowds.append(at_once * chunks / most_rows)
    uniform = most = held(None)
    if most_rows > balanced:
        most = max(uniform, *map(held, crowds))
    return WorstRouting(
        rows=most_rows,
        balanced_rows=balanced,
        rows_at_once=None if plan.combine == "exact" else at_once,
        blocks=chunks * max(ceil(most_rows / chunks / at_once), 1),
        dropped_choices=dropped,
        activation_bytes=most,
        more_bytes=most - uniform,
    )
