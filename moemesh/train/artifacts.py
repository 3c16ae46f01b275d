"""The files of a run folder: written by rank 0 from what all ranks measured."""

from __future__ import annotations

import json
import math
import resource
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from moemesh.checkpoint.files import replace_by
from moemesh.config.cluster import load_cluster
from moemesh.config.load import resolved_toml
from moemesh.config.run import RunConfig
from moemesh.config.train import TrainConfig
from moemesh.config.tuning import num_trained
from moemesh.data.samples import Samples
from moemesh.model.attention import Attention, LatentAttention
from moemesh.model.experts import Experts
from moemesh.model.layers import MLP, RMSNorm
from moemesh.model.moe import MoE
from moemesh.model.router import Router
from moemesh.model.transformer import Transformer
from moemesh.ops.saved import SavedForBackward
from moemesh.parallel.expert.homes import rank_tokens
from moemesh.parallel.parallelize import RankModel
from moemesh.planner.flops import training_flops
from moemesh.planner.shapes.shape import from_model_config
from moemesh.planner.speed import device_peak_flops, mfu, peak_flops
from moemesh.schedule.action import Schedule
from moemesh.trace.loads import LayerLoads, neighbours
from moemesh.trace.memory_profile import MemoryProfile
from moemesh.trace.run import MetricsRow
from moemesh.trace.timeline import TimelineRecorder
from moemesh.train import data_record
from moemesh.train.failure import keep_failure
from moemesh.train.optimizer import Optimizer
from moemesh.train.row_log import Cut, RowLog
from moemesh.train.run_folder import CONFIG, DATA, ROWS, RunFolder
from moemesh.train.sinks import Sinks
from moemesh.train.step import FinishedStep, StepResult
from moemesh.watch import progress_words

# Model states of one rank, measured: bytes of weights, gradients and optimizer.


def state_bytes(parallel: RankModel, optimizer: Optimizer) -> dict[str, int]:
    """Bytes by the classes of :data:`moemesh.trace.memory_profile.PARTS`, between two steps; of
    gathered weights the most that a step has held."""
    reducer = parallel.reducer
    return {
        "dense_weights": reducer.weight_bytes(experts=False),
        "expert_weights": reducer.weight_bytes(experts=True),
        "gathered_weights": reducer.gathered_bytes,
        "gradients": reducer.gradient_bytes,
        "optimizer": optimizer.num_state_bytes(),
    }


# Alarms on expert loads: dead experts, collapse and drops, each shown once per layer.
#
# A run can lose its experts while its loss still falls.


@dataclass(frozen=True, kw_only=True)
class AlarmLimits:
    """An alarm rings when its condition has held for `num_steps` steps in a row.

    `entropy`: of a layer's loads (1 uniform, 0 one expert), collapse below it; `dropped`: share of
    choices for which an expert had no room, an alarm above it.
    """

    num_steps: int = 20
    entropy: float = 0.5
    dropped: float = 0.1


class LoadAlarms:
    """Looks at every layer of every step, in order; ``say(text, "alarm")`` prints one line."""

    def __init__(self, say: Callable[[str, str], None], limits: AlarmLimits | None = None) -> None:
        self._say, self._limits = say, limits or AlarmLimits()
        self._idle: dict[int, list[int]] = {}
        self._held: defaultdict[tuple[int, str], int] = defaultdict(int)
        self._rung: set[tuple[int, str]] = set()

    def look(self, loads: LayerLoads) -> None:
        """Check one layer of one step; a step that routed nothing changes nothing."""
        if not sum(loads.tokens_per_expert) + loads.dropped:
            return
        limits = self._limits
        dead = self._dead_experts(loads)
        self._ring(
            loads,
            "dead",
            bool(dead),
            f"{_experts(dead)} received no token for {limits.num_steps} steps",
        )
        share = max(loads.tokens_per_expert) / max(sum(loads.tokens_per_expert), 1)
        fullest = loads.tokens_per_expert.index(max(loads.tokens_per_expert))
        self._ring(
            loads,
            "collapse",
            self._holds(loads, "collapse", loads.entropy < limits.entropy),
            f"routing collapses: entropy of the loads {loads.entropy:.3f}, below "
            f"{limits.entropy:g} for {limits.num_steps} steps; expert {fullest} holds {share:.0%}",
        )
        self._ring(
            loads,
            "dropped",
            self._holds(loads, "dropped", loads.dropped_share > limits.dropped),
            f"{loads.dropped_share:.1%} of the choices found their expert full ({loads.dropped} in "
            f"this step), above {limits.dropped:.0%} for {limits.num_steps} steps",
        )

    def _dead_experts(self, loads: LayerLoads) -> list[int]:
        idle = self._idle.setdefault(loads.layer, [0] * len(loads.tokens_per_expert))
        for expert, tokens in enumerate(loads.tokens_per_expert):
            idle[expert] = 0 if tokens else idle[expert] + 1
        return [expert for expert, steps in enumerate(idle) if steps >= self._limits.num_steps]

    def _holds(self, loads: LayerLoads, kind: str, condition: bool) -> bool:
        key = loads.layer, kind
        self._held[key] = self._held[key] + 1 if condition else 0
        return self._held[key] >= self._limits.num_steps

    def _ring(self, loads: LayerLoads, kind: str, rings: bool, text: str) -> None:
        if rings and (loads.layer, kind) not in self._rung:
            self._rung.add((loads.layer, kind))
            self._say(f"alarm: step {loads.step}, layer {loads.layer}: {text}", "alarm")


def _experts(ids: list[int]) -> str:
    shown = ", ".join(map(str, ids[:8])) + (", ..." if len(ids) > 8 else "")
    return f"{len(ids)} expert{'s' if len(ids) > 1 else ''} ({shown})"


# Kinds of activations: which module's tensors count as what in memory.json.


#: The innermost module that runs decides.
_KINDS: dict[type[nn.Module], str] = {
    Transformer: "stream",
    RMSNorm: "norms",
    Attention: "attention",
    LatentAttention: "attention",
    MLP: "mlp",
    MoE: "dispatch",
    Router: "router",
    Experts: "experts",
}


def measure_saved(model: Transformer) -> SavedForBackward:
    """A measurement of what `model` keeps for its backward, by kind
    (:data:`moemesh.trace.memory_profile.ACTIVATION_KINDS`)."""
    kinds = {module: kind for module in model.modules() if (kind := _KINDS.get(type(module)))}
    # Norms of queries, keys and latents are parts of their attention.
    for block in [module for module, kind in kinds.items() if kind == "attention"]:
        for module in block.modules():
            kinds[module] = "attention"
    # Behind the last norm come head and loss.
    becomes = {} if model.norm is None else {model.norm: "head"}
    return SavedForBackward(model.parameters(), kinds, becomes)


# ``loads.jsonl``: expert loads of a run, in bins of steps, so that the file stays small.


class _Bin(NamedTuple):
    """The last step of a bin, and the number of its steps."""

    step: int
    steps: int


class LoadLog:
    """Writes the loads of every step, summed over neighbouring steps where there are many.

    The file holds at most twice `bins` bins (and one for each checkpoint), each a line a layer;
    when it is full, neighbours are summed and new bins are as wide as these. No token is lost.
    `bins` 0: a line for each step and layer, and no bound.
    """

    def __init__(self, log: RowLog, bins: int, checkpoints: Callable[[], set[int]] = set) -> None:
        """`checkpoints`: steps from which the run may go on; no bin is made across them."""
        self._log, self._most, self._checkpoints = log, bins, checkpoints
        self._bins: list[_Bin] = []
        self._width = 1
        self._open: list[LayerLoads] = []

    def resume(self) -> None:
        """Go on behind the bins that the file holds."""
        if not self._most:
            return
        self._bins = [_Bin(step, rows[0].steps) for step, rows in _bins_of(self._log.path)]
        self._width = max((one.steps for one in self._bins), default=1)

    def add(self, layers: Sequence[LayerLoads]) -> None:
        """The loads of all layers in the next step."""
        if self._open:
            layers = [one.plus(other) for one, other in zip(self._open, layers, strict=True)]
        self._open = list(layers)
        if self._open and (not self._most or self._open[0].steps >= self._width):
            self.flush()

    def flush(self) -> None:
        """Write the bin that is being filled: before a checkpoint, and at the end of the run.

        A bin that cannot be written stays open, so that later steps are added to it.
        """
        if not self._open:
            return
        if not self._log.append([loads.to_json() for loads in self._open], waits=False):
            return
        if self._most:
            self._bins.append(_Bin(self._open[0].step, self._open[0].steps))
        self._open = []
        if self._most and len(self._bins) >= 2 * self._most:
            self._thin()

    def _thin(self) -> None:
        """Sum neighbours in the file, unless so many checkpoints lie between them that it would
        not get shorter by much."""
        checkpoints = self._checkpoints()
        borders = {place for place, one in enumerate(self._bins) if one.step in checkpoints}
        borders = set(sorted(borders)[-self._most :])
        if len(self._bins) < 2 * self._most + len(borders):
            return
        parts = neighbours([one.steps for one in self._bins], self._most, borders)
        try:
            ends = [self._bins[part.stop - 1].step for part in parts]
            replace_by(self._log.path, _sums(self._log.path, ends))
        except OSError:
            return  # a full disk: the file stays as it is, and the next bin tries again
        self._bins = [
            _Bin(self._bins[part.stop - 1].step, sum(one.steps for one in self._bins[part]))
            for part in parts
        ]
        num_steps = sum(one.steps for one in self._bins)
        self._width = max(self._width, math.ceil(num_steps / self._most))


def _bins_of(path: Path) -> Iterator[tuple[int, list[LayerLoads]]]:
    """The bins of a file: the last step of each, and its loads of every layer."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for step, rows in groupby(_readable(file), key=lambda loads: loads.step):
            yield step, list(rows)


def _readable(lines: Iterator[str]) -> Iterator[LayerLoads]:
    for line in lines:
        try:
            yield LayerLoads.from_json(json.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError):
            continue  # a damaged line: nobody can read it


def _sums(path: Path, ends: Sequence[int]) -> Iterator[bytes]:
    """The rows of a file, summed to bins that end at the steps `ends`."""
    remaining = iter(ends)
    end = next(remaining)
    sums: dict[int, LayerLoads] = {}
    for step, rows in _bins_of(path):
        for loads in rows:
            before = sums.get(loads.layer)
            sums[loads.layer] = loads if before is None else before.plus(loads)
        if step == end:
            yield "".join(sums[layer].to_line() for layer in sorted(sums)).encode()
            sums, end = {}, next(remaining, -1)


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
        parallel: RankModel,
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
        # Late: no step needs the planner and the pages of the report, which are fifty files.
        from moemesh.train.ending import gather_end, write_end

        assert self._last is not None
        timeline = replace(self._last.timeline(), digest=self.parallel.pipeline.digest)
        end = gather_end(self.config, self.mesh, timeline, self._memory())
        if not self._writes:
            return
        summary = {
            "steps": self._row.step if self._row else 0,
            "validation_loss": self._validation,
            "unigram_loss": self._unigram,
            "parameters": sum(one.num_elements for one in self.parallel.placements.values()),
            "trained_parameters": num_trained(
                self.config.tuning, self.config.model, self.config.plan
            ),
        }
        pipeline = self.parallel.pipeline.schedule
        drawn = (self.drawn or pipeline) if pipeline.num_ranks > 1 else None
        try:
            write_end(self.config, self.folder, self.mesh, end, self._steps, drawn, summary)
        except OSError as error:
            file, reason = error.filename or self.folder.path, error.strerror or error
            text = f"{file} cannot be written ({reason}): the run is saved, its report is not whole"
            self._say(text, "disk")

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
