"""The end of a run: measurements of all ranks with their predictions, and the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from moemesh.comm.collectives import gather_json
from moemesh.comm.mesh import Mesh
from moemesh.config.errors import UserError
from moemesh.config.run import RunConfig
from moemesh.planner.estimate import planned_step
from moemesh.planner.step_parts import predicted_seconds
from moemesh.planner.traffic.ledger import predict_ledger
from moemesh.planner.traffic.own_memory import predicted_memory
from moemesh.report import page
from moemesh.schedule.action import Schedule
from moemesh.schedule.simulate import simulate
from moemesh.schedule.stage_times import measured_costs
from moemesh.trace.ledger import Ledger
from moemesh.trace.memory_profile import MemoryProfile, MemoryProfiles
from moemesh.trace.run import Run, ledgers_to_json
from moemesh.trace.step_seconds import StepSeconds
from moemesh.trace.timeline import Timeline
from moemesh.train.records.run_folder import RunFolder


def write_end(
    config: RunConfig,
    folder: RunFolder,
    mesh: Mesh,
    *,
    timeline: Timeline,
    memory: MemoryProfile,
    seconds: tuple[int, Mapping[str, float]],
    rates: Mapping[str, float],
    num_steps: int,
    drawn: Schedule | None,
    summary: Mapping[str, Any],
) -> None:
    """Gather the ledgers, timelines and memory of all ranks, and write the files of the end into
    `folder`, and its page. All ranks call; rank 0 writes, and raises OSError on failure.

    `seconds`: number of measured steps and mean seconds of their parts; `rates`: measured rates of
    the machine, on which the predicted seconds are based; `num_steps`: steps of this start;
    `drawn`: the schedule that is simulated beside the measured timeline.
    """
    num_measured, parts = seconds
    predicted = _predicted_step(config, mesh, rates, drawn)
    local = (mesh.ledger.rows(), memory.to_json(), timeline.to_json(), dict(parts), predicted)
    ledgers, memories, timelines, parts_of_ranks, predictions = (
        gather_json(records, mesh.control) for records in local
    )
    if mesh.rank:
        return
    predictions = {rank: step for rank, step in enumerate(predictions) if step is not None}
    entries = {rank: Ledger.from_rows(ledger) for rank, ledger in enumerate(ledgers)}
    folder.write_json("ledger.json", ledgers_to_json(entries, steps=num_steps))
    if predictions:
        entries = {rank: Ledger.from_rows(step["ledger"]) for rank, step in predictions.items()}
        folder.write_json("ledger_predicted.json", ledgers_to_json(entries))
    profiles = MemoryProfiles(
        ranks=tuple(map(MemoryProfile.from_json, memories)),
        predicted=tuple(MemoryProfile.from_json(step["memory"]) for step in predictions.values()),
    )
    folder.write_json("memory.json", profiles.to_json())
    if num_measured:
        step_seconds = StepSeconds(
            steps=num_measured,
            ranks=dict(enumerate(parts_of_ranks)),
            predicted={rank: step["seconds"] for rank, step in predictions.items()},
            rates=dict(rates),
        )
        folder.write_json("seconds.json", step_seconds.to_json())
    merged = Timeline.merge([Timeline.from_json(records) for records in timelines])
    folder.write_json("timeline.json", merged.to_json())
    if drawn is not None:
        ideal = simulated(drawn, merged, mesh.layout.groups("pp")[0])
        folder.write_json("timeline_simulated.json", ideal.to_json())
    folder.write_json("summary.json", dict(summary))
    run, cluster = Run.load(folder.path), config.train.cluster
    if cluster is not None:
        with suppress(UserError):  # a report without the planned step is better than none
            run = replace(run, planned=planned_step(config, cluster))
    page.write(run)


def _predicted_step(
    config: RunConfig, mesh: Mesh, rates: Mapping[str, float], drawn: Schedule | None
) -> dict[str, Any] | None:
    """Memory, ledger and seconds of a step of this rank with uniform routing, as JSON; None if the
    planner cannot model the plan, such as a schedule of a file."""
    on_cpu = mesh.device.type == "cpu"
    with suppress(ValueError):
        memory = predicted_memory(config, mesh.rank, on_cpu=on_cpu)
        ledger = predict_ledger(
            config.model,
            config.plan.without_offload if on_cpu else config.plan,
            seq_len=config.data.seq_len,
            global_batch=config.data.global_batch,
            dtype=config.train.dtype,
            rank=mesh.rank,
            tuning=config.tuning,
            on_accelerator=not on_cpu,
            whole_matrices=config.train.updates_matrices,
        )
        bubble = 0.0 if drawn is None else simulate(drawn).bubble_rate
        seconds = predicted_seconds(config, rates, ledger, memory, bubble)
        return {"memory": memory.to_json(), "ledger": ledger.rows(), "seconds": seconds}
    return None


def simulated(schedule: Schedule, measured: Timeline, ranks: Sequence[int]) -> Timeline:
    """The simulated timeline of `schedule` on one pipeline of the run, whose ranks are `ranks`.

    Its operations take the times that were measured in the last step, or, for a stream, in all
    steps of the timeline.
    """
    timed = measured if schedule.update is not None else measured.last_step()
    passes = [record for record in timed.records if record.rank in ranks and record.kind in "FBIW"]
    costs = measured_costs([record for record in passes if record.kind])
    ideal = simulate(schedule, costs, unit="seconds").timeline
    records = tuple(replace(record, rank=ranks[record.rank]) for record in ideal.records)
    return replace(ideal, ranks=tuple(ranks), records=records)
