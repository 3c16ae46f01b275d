"""Times of pipeline operations for the automatic scheduler: estimated from a model, or measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from moemesh.config.errors import UserError
from moemesh.config.limits import parse_json
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.schedule.action import Entry, Kind, Op
from moemesh.schedule.costs import Costs
from moemesh.schedule.terapipe import stage_costs
from moemesh.sharding.stages import cut_layers, last_stage_cost, layer_costs
from moemesh.trace.timeline import Timeline, WorkRecord

#: File of a run with its measured operations.
TIMELINE = "timeline.json"
KINDS: tuple[Kind, ...] = ("F", "B", "I", "W")


def estimated_costs(plan: Plan, model: ModelConfig, seq_len: int) -> Costs:
    """Multiply-adds per token of each stage of the plan; messages take no time.

    With W multiply-adds with weights (the head with the last stage) and A of attention scores, a
    forward takes W + A, its input gradient W + 2 A and the recomputation of `plan.recompute`, its
    weight gradient W. Raises ValueError when the model cannot be cut into the plan's stages.
    """
    layers = cut_layers(model, plan.num_stages, plan.layers_per_stage)
    # Multiply-adds of gate and up in the experts that a token visits.
    routed = 2 * model.experts_per_token * model.hidden_size * model.expert_intermediate_size
    forward: list[float] = []
    inputs: list[float] = []
    weights: list[float] = []
    for stage, (weight, per_token) in enumerate(stage_costs(model, layers)):
        scores = per_token * (seq_len + 1) / 2
        inner = weight
        moe_layers = sum(model.is_moe_layer(index) for index in layers[stage])
        if stage == len(layers) - 1:
            # Layers are recomputed, extra ones included, but neither heads nor projections.
            inner -= last_stage_cost(model) - model.num_mtp_layers * layer_costs(model)[-1]
            moe_layers += sum(model.is_moe_layer(index) for index in model.mtp_layers)
        parts = plan.recomputed_parts
        recomputed = (inner + scores) * ("full" in parts) + scores * ("attention" in parts)
        recomputed += moe_layers * routed * ("experts" in parts)
        forward.append(weight + scores)
        inputs.append(weight + 2 * scores + recomputed)
        weights.append(weight)
    return Costs(forward=forward, input_gradient=inputs, weight_gradient=weights)


def measured_costs(records: Sequence[WorkRecord]) -> Costs:
    """Median seconds of operations by kind and stage, and of overlapped blocks by their two stages.

    A kind that a stage ran only in blocks takes half the median of all blocks. If only backwards or
    only their halves were measured, the others follow: half of the whole, or the sum. Stages that
    are not in `records` take 0.
    """
    # Operations of a block have one start and one end.
    moments: dict[tuple[int, float, float], list[WorkRecord]] = {}
    for record in records:
        moments.setdefault((record.rank, record.start, record.end), []).append(record)
    alone: dict[tuple[str, int], list[float]] = {}
    blocks: dict[tuple[int, ...], list[float]] = {}
    for (_, start, end), block in moments.items():
        stages = [(record.kind, record.stage or 0) for record in block]
        if len(block) == 1:
            alone.setdefault(stages[0], []).append(end - start)
            continue
        blocks.setdefault(tuple(stage for _, stage in sorted(stages)), []).append(end - start)
        for key in stages:  # no times if it never ran alone
            alone.setdefault(key, [])
    halves = [time / 2 for times in blocks.values() for time in times]
    table = {key: median(times or halves) for key, times in alone.items()}

    def measured(op: Op) -> float:
        if (seconds := table.get((op.kind, op.stage))) is not None:
            return seconds
        if op.kind == "B":
            return sum(table.get((half, op.stage), 0.0) for half in "IW")
        return table.get(("B", op.stage), 0.0) / 2 if op.kind in "IW" else 0.0

    def measured_block(entry: Entry) -> float:
        stages = tuple(op.stage for op in sorted(entry))
        return median(blocks[stages]) if stages in blocks else sum(map(measured, entry))

    return Costs(
        forward=measured,
        input_gradient=measured,
        weight_gradient=measured,
        backward=measured,
        overlapped=measured_block,
    )


def costs_of_run(folder: Path) -> tuple[Costs, int]:
    """Seconds of each stage, measured in the last step of the run in `folder`, and the number of
    stages. Raises UserError for a folder without a timeline, or one without pipeline operations."""
    path = folder / TIMELINE
    try:
        timeline = Timeline.from_json(parse_json(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror}): measured costs need the folder of a run "
            "that has ended"
        ) from error
    except (ValueError, KeyError, TypeError, OverflowError, AttributeError) as error:
        raise UserError(f"{path} does not hold the timeline of a run: {error}") from error
    records = [record for record in timeline.last_step().records if record.kind in KINDS]
    if not records:
        raise UserError(f"{path} has no operation of a pipeline stage")
    num_stages = 1 + max(record.stage or 0 for record in records)
    measured = measured_costs(records).forward  # one function for all kinds of operations
    assert callable(measured)
    forward, backward, inputs, weights = (
        [measured(Op(kind, stage, 0)) for stage in range(num_stages)] for kind in KINDS
    )
    costs = Costs(
        forward=forward, input_gradient=inputs, weight_gradient=weights, backward=backward
    )
    return costs, num_stages
