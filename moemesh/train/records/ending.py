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
    model, plan, data, train = config.model, config.plan, config.data, config.train
    plan = plan.without_offload if mesh.device.type == "cpu" else plan
    common: dict[str, Any] = {
        "seq_len": data.seq_len,
        "global_batch": data.global_batch,
        "dtype": train.dtype,
        "rank": mesh.rank,
        "tuning": config.tuning,
    }
    # The prediction of a step of this rank, for uniform routing; None if a schedule comes from a
    # file that the planner cannot model.
    predicted: dict[str, Any] | None = None
    with suppress(ValueError):
        on_accelerator = mesh.device.type != "cpu"
        of_memory = predicted_memory(config, mesh.rank, on_cpu=not on_accelerator)
        of_ledger = predict_ledger(
            model,
            plan,
            **common,
            on_accelerator=on_accelerator,
            whole_matrices=train.updates_matrices,
        )
        bubble = 0.0 if drawn is None else simulate(drawn).bubble_rate
        of_seconds = predicted_seconds(config, rates, of_ledger, of_memory, bubble)
        predicted = {
            "memory": of_memory.to_json(),
            "ledger": of_ledger.rows(),
            "seconds": of_seconds,
        }
    steps, parts = seconds
    local = (mesh.ledger.rows(), memory.to_json(), timeline.to_json(), dict(parts), predicted)
    ledgers, memories, timelines, measured_parts, predictions = (
        gather_json(records, mesh.control) for records in local
    )
    if mesh.rank:
        return
    entries = {rank: Ledger.from_rows(ledger) for rank, ledger in enumerate(ledgers)}
    folder.write_json("ledger.json", ledgers_to_json(entries, steps=num_steps))
    predicted_of = {
        rank: prediction for rank, prediction in enumerate(predictions) if prediction is not None
    }
    profiles = MemoryProfiles(
        ranks=tuple(map(MemoryProfile.from_json, memories)),
        predicted=tuple(
            MemoryProfile.from_json(records["memory"]) for records in predicted_of.values()
        ),
    )
    folder.write_json("memory.json", profiles.to_json())
    if predicted_of:
        expected = {
            rank: Ledger.from_rows(records["ledger"]) for rank, records in predicted_of.items()
        }
        folder.write_json("ledger_predicted.json", ledgers_to_json(expected))
    if steps:
        of_steps = StepSeconds(
            steps=steps,
            ranks=dict(enumerate(measured_parts)),
            predicted={rank: prediction["seconds"] for rank, prediction in predicted_of.items()},
            rates=dict(rates),
        )
        folder.write_json("seconds.json", of_steps.to_json())
    whole = Timeline.merge([Timeline.from_json(records) for records in timelines])
    folder.write_json("timeline.json", whole.to_json())
    if drawn is not None:
        ideal = simulated(drawn, whole, mesh.layout.groups("pp")[0])
        folder.write_json("timeline_simulated.json", ideal.to_json())
    folder.write_json("summary.json", dict(summary))
    run, cluster = Run.load(folder.path), config.train.cluster
    if cluster is not None:
        with suppress(UserError):  # a report without a price is better than none
            run = replace(run, planned=planned_step(config, cluster))
    page.write(run)


def simulated(schedule: Schedule, measured: Timeline, ranks: Sequence[int]) -> Timeline:
    """The simulated timeline of `schedule` on one pipeline of the run, whose ranks are `ranks`.

    The times are those of the last step, or, for a stream, of all steps in the timeline.
    """
    timed = measured if schedule.update is not None else measured.last_step()
    passes = [record for record in timed.records if record.rank in ranks and record.kind in "FBIW"]
    costs = measured_costs([record for record in passes if record.kind])
    ideal = simulate(schedule, costs, unit="seconds").timeline
    records = tuple(replace(record, rank=ranks[record.rank]) for record in ideal.records)
    return replace(ideal, ranks=tuple(ranks), records=records)
