"""The files of a run folder: written by rank 0 from what all ranks measured."""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from moemesh.comm.collectives import gather_json
from moemesh.config.cluster import load_cluster
from moemesh.config.errors import UserError
from moemesh.config.load import resolved_toml
from moemesh.config.run import RunConfig
from moemesh.config.train import TrainConfig
from moemesh.config.tuning import num_trained
from moemesh.data.samples import Samples
from moemesh.parallel.expert.homes import rank_tokens
from moemesh.parallel.parallelize import ParallelModel
from moemesh.planner.flops import training_flops
from moemesh.planner.shapes.shape import from_model_config
from moemesh.planner.speed import device_peak_flops, mfu, peak_flops
from moemesh.report import page
from moemesh.schedule.action import Schedule
from moemesh.trace import progress_words
from moemesh.trace.ledger import Ledger
from moemesh.trace.loads import LayerLoads
from moemesh.trace.memory import MemoryProfile, MemoryProfiles
from moemesh.trace.run import MetricsRow, Run, ledgers_to_json
from moemesh.trace.timeline import Timeline, TimelineRecorder
from moemesh.train import data_record
from moemesh.train.alarms import LoadAlarms
from moemesh.train.failure import keep_failure
from moemesh.train.folder import CONFIG, DATA, ROWS, RunFolder
from moemesh.train.load_log import LoadLog
from moemesh.train.memory_kinds import measure_saved
from moemesh.train.optimizer import Optimizer
from moemesh.train.prediction import planned_step, predicted_for
from moemesh.train.row_log import Cut
from moemesh.train.simulated_timeline import simulated
from moemesh.train.sinks import Sinks
from moemesh.train.states import state_bytes
from moemesh.train.step import FinishedStep, StepResult

#: Files of the end of a start that hold under its plan alone.
_OF_A_PLAN = ("ledger", "ledger_predicted", "timeline", "timeline_simulated", "memory")
_NOT_LEARNED = (
    "note: the run ends above the unigram model, which knows only how often each token occurs: it "
    "has not learned its text so far; `moemesh explain` on its folder says what to change"
)


class Artifacts:
    """Collects on every rank, writes on rank 0."""

    def __init__(
        self,
        folder: RunFolder,
        config: RunConfig,
        parallel: ParallelModel,
        optimizer: Optimizer,
        say: Callable[[str, str], None],
    ) -> None:
        self.folder, self.config = folder, config
        self.parallel, self.optimizer, self.mesh = parallel, optimizer, parallel.mesh
        self._writes = self.mesh.rank == 0
        self._say = say
        self._alarms = LoadAlarms(say)
        self._metrics = folder.row_log("metrics.jsonl", say)
        log = folder.row_log("loads.jsonl", say)
        self._loads = LoadLog(log, config.train.load_bins, folder.saved_steps)
        self._sinks: Sinks | None = None
        shape = from_model_config(config.model)
        self._flops_per_token = training_flops(shape, config.data.seq_len)
        self._peak_flops = _peak_flops(config.train, self.mesh.device)
        self._last: TimelineRecorder | None = None
        #: What the measured timeline is set beside, where it is not the schedule of one step.
        self.drawn: Schedule | None = None
        self._measured = False
        self._waited = 0.0
        self._steps = 0
        self._row: MetricsRow | None = None
        self._validation: float | None = None
        self._unigram = 0.0
        self._activations: dict[str, int] = {}
        #: Most bytes of older weight versions, and of copies from which a step can be undone.
        self.weight_versions = self.snapshots = 0
        #: What tells the run from others, for its checkpoints; empty on ranks that do not write.
        self.identity: dict[str, object] = {}

    def begin(self, done: int, samples: Samples) -> None:
        """Write what is known before the first step, cut the logs back to step `done`."""
        if not self._writes:
            return
        self._unigram = samples.unigram_loss()
        config, data = resolved_toml(self.config), data_record.record(samples)
        self.identity = {"config": config, "data": data}
        self.folder.write_json(DATA, data)
        plan = self.config.plan
        self.folder.write_text(CONFIG, config)
        # Borders of nodes are those of the launcher where the plan does not say.
        borders = self.mesh.layout.ranks_per_node
        derived = {"world_size": plan.world_size, "edp": plan.edp, "ranks_per_node": borders}
        record = json.dumps({**plan.model_dump(mode="json"), **derived}, indent=1) + "\n"
        earlier = self.folder.path / "plan.json"
        if earlier.is_file() and earlier.read_text(encoding="utf-8", errors="replace") != record:
            for name in _OF_A_PLAN:
                (self.folder.path / f"{name}.json").unlink(missing_ok=True)
        self.folder.write_text("plan.json", record)
        if not done and (kept := self.folder.set_rows_aside()):
            text = f"an earlier start saved nothing; its rows are kept in {' and '.join(kept)}"
            self._say(f"{text}, and the run begins again at step 1", "note")
        self.go_back(done)
        keep_failure(self.folder.path)

    def go_back(self, done: int) -> None:
        """Cut the rows of steps back to step `done`."""
        if not self._writes:
            return
        self.flush()
        for name in ROWS:
            self._tell(name, self.folder.cut_after(name, done))
        self._loads.resume()
        if self._sinks is not None:
            self._sinks.close()
        self._sinks = Sinks(self.config.train.sinks, self.folder.path, done + 1, self._say)

    def close(self) -> None:
        """Write what waits, and let go of the sinks, whatever has happened."""
        self.flush()
        if self._sinks is not None:
            self._sinks.close()

    def _tell(self, name: str, cut: Cut) -> None:
        """Say what a cut could not keep."""
        if cut.damaged:
            where = f"line {cut.first_damaged}" + (", ..." if cut.damaged > 1 else "")
            text = f"{name}: {cut.damaged} damaged rows ({where}) are left out"
            self._say(text, "damaged")
        if cut.lost:
            text = f"{name}: steps {cut.lost[0]} to {cut.lost[-1]} are no longer in its sums"
            self._say(text, "damaged")

    def flush(self) -> None:
        """Write the rows that wait: before a checkpoint, from which a run may go on, and at the
        end."""
        if self._writes:
            self._metrics.flush()
            self._loads.flush()

    def measured(self, step: FinishedStep) -> dict[str, float]:
        """Of a finished step on this rank: fields of its row that no loss follows from."""
        data, plan = self.config.data, self.config.plan
        flops = self._flops_per_token * data.global_batch * data.seq_len
        tflops = flops / plan.world_size / step.seconds / 1e12
        found = {
            "data_seconds": step.recorder.seconds("data", step.number),
            "memory_bytes": _peak_bytes(self.mesh.device),
            "tflops_per_rank": tflops,
        }
        waited = progress_words.waited_in_steps()
        # NCCL lets the host go on at once, and its device waits.
        if waited is not None and plan.world_size > 1 and self.mesh.device.type == "cpu":
            found["communication_seconds"] = waited - self._waited
            self._waited = waited
        if self._peak_flops is not None:
            found["mfu"] = mfu(tflops, self._peak_flops)
        counts_LE, dropped_L = step.result.counts_LE, step.result.dropped_L
        if num_wanted := int(counts_LE.sum() + dropped_L.sum()):
            mean_L = counts_LE.double().mean(dim=1).clamp(min=1e-9)
            found["load_max_over_mean"] = float((counts_LE.amax(dim=1) / mean_L).max())
            found["dropped_share"] = int(dropped_L.sum()) / num_wanted
        return found

    def record(self, row: MetricsRow, result: StepResult, recorder: TimelineRecorder) -> None:
        """One finished step."""
        self._last, self._row = recorder, row
        self._steps += 1
        if row.validation_loss is not None:
            self._validation = row.validation_loss
        if not self._writes:
            return
        self.folder.check_lease()
        self._metrics.append([row.to_json()])
        if self._sinks is not None:
            self._sinks.put(row)
        loads = self._layer_loads(row.step, result)
        self._loads.add(loads)
        for layer in loads:
            self._alarms.look(layer)

    def _layer_loads(self, step: int, result: StepResult) -> list[LayerLoads]:
        """What every layer routed in a step."""
        layers = self.config.model.routed_layers
        rank_LP = result.rank_LP
        if rank_LP is None:
            ep = self.config.plan.ep
            rank_LP = rank_tokens(result.counts_LE, layers, self.parallel.homes, ep)
        found = zip(
            layers, result.counts_LE, rank_LP.tolist(), result.dropped_L.tolist(), strict=True
        )
        return [
            LayerLoads(
                step=step,
                layer=layer,
                tokens_per_expert=tuple(counts_E.tolist()),
                tokens_per_rank=tuple(tokens_P),
                dropped=dropped,
            )
            for layer, counts_E, tokens_P, dropped in found
        ]

    @contextmanager
    def first_step_memory(self) -> Iterator[None]:
        """Measure what the first step of this process saves for its backward; later calls do
        nothing."""
        if self._measured:
            yield
            return
        self._measured = True
        with measure_saved(self.parallel.model) as saved:
            yield
        self._activations = {kind: size for kind, size in saved.peak_by_kind.items() if size}

    def finish(self) -> None:
        """Gather the ranks' ledgers, timelines and memory, and write the report. All ranks call.

        What cannot be written is told: the run has ended well, and is saved.
        """
        control = self.mesh.control
        ledgers = gather_json(self.mesh.ledger.rows(), control)
        memories = gather_json(self._memory().to_json(), control)
        assert self._last is not None
        own = replace(self._last.timeline(), digest=self.parallel.pipeline.digest)
        timelines = gather_json(own.to_json(), control)
        foretold = predicted_for(
            self.config, self.mesh.rank, on_accelerator=self.mesh.device.type != "cpu"
        )
        predictions = gather_json(foretold, control)
        if not self._writes:
            return
        try:
            self._write_report(ledgers, memories, timelines, predictions)
        except OSError as error:
            file, reason = error.filename or self.folder.path, error.strerror or error
            text = f"{file} cannot be written ({reason}): the run is saved, its report is not whole"
            self._say(text, "disk")

    def _write_report(
        self,
        ledgers: Sequence[Any],
        memories: Sequence[Any],
        timelines: Sequence[Any],
        predictions: Sequence[Any],
    ) -> None:
        """The files of the end, from what every rank gave."""
        entries = {rank: Ledger.from_rows(ledger) for rank, ledger in enumerate(ledgers)}
        self.folder.write_json("ledger.json", ledgers_to_json(entries, steps=self._steps))
        known = {rank: found for rank, found in enumerate(predictions) if found is not None}
        profiles = MemoryProfiles(
            ranks=tuple(map(MemoryProfile.from_json, memories)),
            predicted=tuple(MemoryProfile.from_json(one["memory"]) for one in known.values()),
        )
        self.folder.write_json("memory.json", profiles.to_json())
        if known:
            expected = {rank: Ledger.from_rows(one["ledger"]) for rank, one in known.items()}
            self.folder.write_json("ledger_predicted.json", ledgers_to_json(expected))
        timeline = Timeline.merge([Timeline.from_json(t) for t in timelines])
        self.folder.write_json("timeline.json", timeline.to_json())
        pipeline = self.parallel.pipeline
        if pipeline.schedule.num_ranks > 1:
            ranks = self.mesh.layout.groups("pp")[0]
            ideal = simulated(self.drawn or pipeline.schedule, timeline, ranks)
            self.folder.write_json("timeline_simulated.json", ideal.to_json())
        self.folder.write_json(
            "summary.json",
            {
                "steps": self._row.step if self._row else 0,
                "validation_loss": self._validation,
                "unigram_loss": self._unigram,
                "parameters": self._num_parameters(),
                "trained_parameters": self._num_trained(),
            },
        )
        run, cluster = Run.load(self.folder.path), self.config.train.cluster
        if cluster is not None:
            with suppress(UserError):  # a report without a price is better than none
                run = replace(run, planned=planned_step(self.config, cluster))
        page.write(run)

    def _memory(self) -> MemoryProfile:
        return MemoryProfile(
            rank=self.mesh.rank,
            **state_bytes(self.parallel, self.optimizer),
            weight_versions=self.weight_versions,
            snapshots=self.snapshots,
            activations=sum(self._activations.values()),
            activation_kinds=self._activations,
            peak=_peak_bytes(self.mesh.device),
            peak_of="allocator" if self.mesh.device.type == "cuda" else "process",
        )

    def _num_parameters(self) -> int:
        return sum(where.num_elements for where in self.parallel.placements.values())

    def _num_trained(self) -> int:
        return num_trained(self.config.tuning, self.config.model, self.config.plan)

    def summary(self) -> str:
        """The losses that say whether it worked."""
        unit = self.config.data.loss_unit
        return "\n".join(
            [
                f"validation loss     {self._validation:.4f} {unit}",
                f"unigram model       {self._unigram:.4f} {unit}",
                f"report              {Path(self.folder.path) / 'report.html'}",
                *([] if self._validation < self._unigram else [_NOT_LEARNED]),
            ]
        )


def _peak_flops(train: TrainConfig, device: torch.device) -> float | None:
    """Operations a second of one device, by the cluster that the user names or by the data sheet of
    the GPU; None where nobody says."""
    if train.cluster is not None:
        return peak_flops(load_cluster(train.cluster), train.dtype)
    if device.type != "cuda":
        return None
    return device_peak_flops(torch.cuda.get_device_name(device), train.dtype)


def _peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
