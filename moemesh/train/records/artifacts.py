"""The files of a run folder: written by rank 0 from measurements of all ranks.

Legend: L MoE layers of the model, E experts, P ranks of ep.
"""

from __future__ import annotations

import json
import resource
import shlex
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from moemesh.config.cluster import load_cluster
from moemesh.config.load import resolved_toml
from moemesh.config.run import RunConfig
from moemesh.config.sources import RUN_CONFIG, RUN_PLAN
from moemesh.config.train import TrainConfig
from moemesh.data.samples import Samples
from moemesh.model.attention import Attention, LatentAttention
from moemesh.model.experts import Experts
from moemesh.model.layers import MLP, RMSNorm
from moemesh.model.moe import MoE
from moemesh.model.router import Router
from moemesh.model.transformer import Transformer
from moemesh.monitor import progress
from moemesh.ops.saved import SavedForBackward
from moemesh.parallel.expert.homes import rank_tokens
from moemesh.parallel.parallelize import RankModel
from moemesh.planner.parameters import training_flops
from moemesh.planner.shapes.counted import shape_of
from moemesh.planner.speed import device_peak_flops, mfu, peak_flops
from moemesh.schedule.action import Schedule
from moemesh.sharding.parameters import num_trained
from moemesh.trace.loads import COLLAPSE_STEPS, LayerLoads, collapse_text
from moemesh.trace.memory_profile import MemoryProfile
from moemesh.trace.run import LEAST_STEPS, LOADS, METRICS, REPORT, MetricsRow
from moemesh.trace.timeline import TimelineRecorder
from moemesh.train.early_stop import EarlyStop
from moemesh.train.optimizer import Optimizer
from moemesh.train.records.expert_loads import LoadAlarms, LoadLog
from moemesh.train.records.failure import keep_failure
from moemesh.train.records.machine_rates import measure_rates
from moemesh.train.records.rows import Sinks, cut_after
from moemesh.train.records.run_folder import (
    DATA,
    ROWS,
    RunFolder,
    answers_chats,
    record_of_data,
)
from moemesh.train.records.step_clock import StepClock
from moemesh.train.step import FinishedStep


def state_bytes(parallel: RankModel, optimizer: Optimizer) -> dict[str, int]:
    """Bytes by the classes of :data:`moemesh.trace.memory_profile.PARTS`, between two steps; the
    peak of a step for gathered weights and reduction buffers."""
    reducer = parallel.reducer
    return {
        "dense_weights": reducer.weight_bytes(experts=False),
        "expert_weights": reducer.weight_bytes(experts=True),
        "gathered_weights": reducer.gathered_bytes,
        "gradients": reducer.gradient_bytes,
        "optimizer": optimizer.num_state_bytes(),
        "buffers": reducer.most_buffer_bytes,
    }


#: Kinds of activations in memory.json by module; the innermost module decides.
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
    """A measurement of the tensors that `model` saves for its backward, by kind
    (:data:`moemesh.trace.memory_profile.ACTIVATION_KINDS`)."""
    kinds = {module: kind for module in model.modules() if (kind := _KINDS.get(type(module)))}
    # Norms of queries, keys and latents are parts of their attention.
    for block in [module for module, kind in kinds.items() if kind == "attention"]:
        kinds |= dict.fromkeys(block.modules(), "attention")
    # After the last norm, head and loss save their tensors.
    becomes = {} if model.norm is None else {model.norm: "head"}
    return SavedForBackward(model.parameters(), kinds, becomes)


#: Files from the end of a start that describe its plan: a start with another plan deletes them.
_OF_A_PLAN = ("ledger", "ledger_predicted", "timeline", "timeline_simulated", "memory", "seconds")
#: Notes of the summary on a run that ends above the unigram model: a short run, and a longer one.
_SHORT = (
    "note: {steps} a start: with more of them (train.steps) the loss falls below that of "
    "the unigram model, which has only the frequency of each token"
)
_NOT_LEARNED = (
    "note: the run ends above the unigram model, which has only the frequency of each token: it "
    "has not learned its text so far; `moemesh explain` on its folder has advice"
)


class Artifacts:
    """Collects measurements on every rank, writes on rank 0."""

    def __init__(
        self,
        folder: RunFolder,
        config: RunConfig,
        parallel: RankModel,
        optimizer: Optimizer,
        log: Callable[[str, str], None],
    ) -> None:
        self.folder, self.config, self.mesh = folder, config, parallel.mesh
        self.parallel, self.optimizer, self._log = parallel, optimizer, log
        self._writes = self.mesh.rank == 0
        self._alarms = LoadAlarms(log)
        self._metrics = folder.row_log(METRICS, log)
        load_rows = folder.row_log(LOADS, log)
        #: Loads of the last steps, in which the summary looks for a collapse.
        self._recent = deque[LayerLoads](maxlen=COLLAPSE_STEPS * len(config.model.routed_layers))
        self._loads = LoadLog(load_rows, config.train.load_bins, folder.saved_steps)
        self._sinks: Sinks | None = None
        shape = shape_of(config.model)
        self._flops_per_token = training_flops(
            shape, config.data.seq_len, adapters=config.trains_adapters
        )
        self._peak_flops = _peak_flops(config.train, self.mesh.device)
        #: Recorder, row of metrics and validation loss of the last steps that have them.
        self._last: TimelineRecorder | None = None
        self._row: MetricsRow | None = None
        self._validation: float | None = None
        #: Schedule drawn beside the measured timeline; None: that of one step.
        self.drawn: Schedule | None = None
        self._has_measured_memory = False
        self._waited = 0.0  # seconds of waits for other ranks, up to the last step
        self._unigram = 0.0  # loss of the unigram model
        self._steps = 0  # number of steps in this process
        self._activations: dict[str, int] = {}  # bytes by kind
        #: Peak bytes of older weight versions, and of copies for undoing a step.
        self.weight_versions = self.snapshots = 0
        is_clocked = self.mesh.device.type == "cpu" and config.plan.optimizer_validation != "after"
        # The rates come first: their clock is another one, and only the newest clock gets waits.
        self._rates = measure_rates(config, self.mesh) if is_clocked else {}
        #: Measures the parts of steps; None where steps are post-validated, or their device runs
        #: later.
        self._clock = StepClock(parallel.model) if is_clocked else None
        #: Identity of the run, for its checkpoints; empty on ranks that do not write.
        self.identity: dict[str, object] = {}

    def begin(self, done: int, samples: Samples) -> None:
        """Write the files of the start, and cut the logs back to step `done`."""
        if not self._writes:
            return
        self._unigram = samples.unigram_loss()
        config, data = resolved_toml(self.config), record_of_data(samples)
        self.identity = {"config": config, "data": data}
        self.folder.write_json(DATA, data)
        self.folder.write_text(RUN_CONFIG, config)
        plan, path = self.config.plan, self.folder.path
        # The launcher decides the borders of nodes, unless the plan has them.
        borders = self.mesh.layout.ranks_per_node
        derived = {"world_size": plan.world_size, "edp": plan.edp, "ranks_per_node": borders}
        record = json.dumps({**plan.model_dump(mode="json"), **derived}, indent=1) + "\n"
        earlier = path / RUN_PLAN
        if earlier.is_file() and earlier.read_text(encoding="utf-8", errors="replace") != record:
            for name in _OF_A_PLAN:
                (path / f"{name}.json").unlink(missing_ok=True)
        self.folder.write_text(RUN_PLAN, record)
        if not done and (names := self.folder.set_rows_aside()):
            text = f"an earlier start saved nothing; its rows are kept in {' and '.join(names)}"
            self._log(f"{text}, and the run restarts at step 1", "note")
        self.go_back(done)
        keep_failure(path)

    def go_back(self, done: int) -> None:
        """Cut the rows of steps back to step `done`."""
        if not self._writes:
            return
        self.flush()
        for name in ROWS:
            cut = cut_after(self.folder.path / name, done)
            if cut.damaged:
                where = f"line {cut.first_damaged}" + (", ..." if cut.damaged > 1 else "")
                text = f"{name}: {cut.damaged} damaged rows ({where}) are left out"
                self._log(text, "damaged")
            # A dense model has no rows of loads.
            if cut.missing and (name == METRICS or self.config.model.routed_layers):
                self._log(f"{cut.missing}: their rows were lost, the weights are whole", "damaged")
            elif cut.lost:
                text = f"{name}: steps {cut.lost[0]} to {cut.lost[-1]} have left its sums"
                self._log(text, "damaged")
        self._loads.resume()
        if self._sinks is not None:
            self._sinks.close()
        self._sinks = Sinks(self.config.train.sinks, self.folder.path, done + 1, self._log)

    def close(self) -> None:
        """Write pending rows and close the sinks, in any state."""
        self.flush()
        if self._sinks is not None:
            self._sinks.close()

    def flush(self) -> None:
        """Write pending rows: before a checkpoint, from which a run may resume, and at the end."""
        if self._writes:
            self._metrics.flush()
            self._loads.flush()

    def record(
        self, step: FinishedStep, *, epoch: float, validation_loss: float | None = None
    ) -> MetricsRow:
        """Record a finished step, and write it; returns its row of metrics. `epoch`: number of
        passes through the training samples so far."""
        result = step.result
        row = MetricsRow(
            step=step.number,
            loss=result.loss,
            grad_norm=result.grad_norm,
            aux_loss=result.aux_loss,
            tokens=result.num_tokens,
            tokens_per_second=result.num_tokens / step.seconds,
            lr=self.config.train.learning_rate(step.number),
            seconds=step.seconds,
            validation_loss=validation_loss,
            mtp_loss=result.mtp_loss,
            epoch=epoch,
            **self._measured(step),
        )
        if self._clock is not None:
            self._clock.finish_step(step.recorder, step.number, step.seconds)
        self._last, self._row = step.recorder, row
        self._steps += 1
        if validation_loss is not None:
            self._validation = validation_loss
        if not self._writes:
            return row
        self.folder.check_lease()
        self._metrics.append([row.to_json()])
        if self._sinks is not None:
            self._sinks.put(row)
        layers, rank_LP = self.config.model.routed_layers, result.rank_LP
        if rank_LP is None:
            ep = self.config.plan.ep
            rank_LP = rank_tokens(result.counts_LE, layers, self.parallel.homes, ep)
        numbers = (tensor.tolist() for tensor in (result.counts_LE, rank_LP, result.dropped_L))
        loads = [
            LayerLoads(
                step=row.step,
                layer=layer,
                tokens_per_expert=tuple(counts_E),
                tokens_per_rank=tuple(tokens_P),
                dropped=dropped,
            )
            for layer, counts_E, tokens_P, dropped in zip(layers, *numbers, strict=True)
        ]
        self._loads.add(loads)
        self._recent += loads
        for loads_of_layer in loads:
            self._alarms.check(loads_of_layer)
        return row

    def _measured(self, step: FinishedStep) -> dict[str, Any]:
        """Fields of :class:`MetricsRow` that are measured: time, memory and speed of this rank, and
        the balance of the experts."""
        data, plan, device = self.config.data, self.config.plan, self.mesh.device
        flops = self._flops_per_token * data.global_batch * data.seq_len
        tflops = flops / plan.world_size / step.seconds / 1e12
        measured = {
            "data_seconds": step.recorder.seconds("data", step.number),
            "memory_bytes": _peak_bytes(device),
            "tflops_per_rank": tflops,
        }
        waited = progress.waited_in_steps()
        # With NCCL the device waits, not the host, where waits are measured.
        if waited is not None and plan.world_size > 1 and device.type == "cpu":
            measured["communication_seconds"] = waited - self._waited
            self._waited = waited
        if self._peak_flops is not None:
            measured["mfu"] = mfu(tflops, self._peak_flops)
        counts_LE, dropped_L = step.result.counts_LE, step.result.dropped_L
        if num_wanted := int(counts_LE.sum() + dropped_L.sum()):
            mean_L = counts_LE.double().mean(dim=1).clamp(min=1e-9)
            measured["load_max_over_mean"] = float((counts_LE.amax(dim=1) / mean_L).max())
            measured["dropped_share"] = int(dropped_L.sum()) / num_wanted
        return measured

    @contextmanager
    def first_step_memory(self) -> Iterator[None]:
        """Measure the tensors that the first step of this process saves for its backward; no-op
        afterwards."""
        if self._has_measured_memory:
            yield
            return
        self._has_measured_memory = True
        with measure_saved(self.parallel.model) as saved:
            yield
        self._activations = {kind: size for kind, size in saved.peak_by_kind.items() if size}

    def finish(self, early_stop: EarlyStop) -> None:
        """Gather the ranks' ledgers, timelines and memory, and write the report. All ranks call.

        Write errors are logged only: the run has finished, and is saved.
        """
        # Late: no step needs these parts of the planner, and the pages of the report.
        from moemesh.train.records.ending import write_end

        assert self._last is not None
        config, pipeline = self.config, self.parallel.pipeline
        has_pipeline = pipeline.schedule.num_ranks > 1
        memory = MemoryProfile(
            rank=self.mesh.rank,
            **state_bytes(self.parallel, self.optimizer),
            weight_versions=self.weight_versions,
            snapshots=self.snapshots,
            host=self.optimizer.num_state_bytes(on_host=True),
            activations=sum(self._activations.values()),
            activation_kinds=self._activations,
            peak=_peak_bytes(self.mesh.device),
            peak_of="allocator" if self.mesh.device.type == "cuda" else "process",
        )
        summary = {
            "steps": self._row.step if self._row else 0,
            "validation_loss": self._validation,
            "early_stop": early_stop.reason,
            "unigram_loss": self._unigram,
            "parameters": sum(x.num_elements for x in self.parallel.placements.values()),
            "trained_parameters": num_trained(config.tuning, config.model, config.plan),
        }
        try:
            write_end(
                config,
                self.folder,
                self.mesh,
                timeline=replace(self._last.timeline(), digest=pipeline.digest),
                memory=memory,
                seconds=(0, {}) if self._clock is None else self._clock.result(),
                rates=self._rates,
                num_steps=self._steps,
                drawn=(self.drawn or pipeline.schedule) if has_pipeline else None,
                summary=summary,
            )
        except OSError as error:
            file, reason = error.filename or self.folder.path, error.strerror or error
            incomplete = "the run is saved, its report is incomplete"
            self._log(f"{file} cannot be written ({reason}): {incomplete}", "disk")

    def summary(self, early_stop: EarlyStop) -> str:
        """The final losses, the path of the report, and notes."""
        data, steps, path = self.config.data, self.config.train.steps, self.folder.path
        unit, run = data.loss_unit, shlex.quote(str(path))
        reason, (step, loss) = early_stop.reason, early_stop.best
        notes: list[str] = []
        if not self._validation < self._unigram:  # a loss of NaN included
            subject = "1 step is" if steps == 1 else f"{steps} steps are"
            is_short = steps < LEAST_STEPS and not reason
            notes.append(_SHORT.format(steps=subject) if is_short else _NOT_LEARNED)
        if collapse := collapse_text(self._recent):
            notes.append(f"note: {collapse}")
        lowest = [f"lowest validation   {loss:.4f} {unit}, step {step}"] if early_stop.since else []
        explain = f"moemesh explain {run}"
        prompt = '"def "' if data.path is None and not data.sources else "TEXT"
        if answers_chats(path, data.tokenizer):
            prompt = "TEXT --chat"
        # A small model repeats itself if it always takes the likeliest token.
        generate = f"moemesh generate {run} --prompt {prompt} --temperature 0.8"
        width = max(len(explain), len(generate)) + 2
        return "\n".join(
            [
                *([f"early stop          {reason}"] if reason else []),
                *lowest,
                f"validation loss     {self._validation:.4f} {unit}",
                f"unigram model       {self._unigram:.4f} {unit}",
                f"report              {path / REPORT}",
                f"{'next':<20}{explain:<{width}}what bounds its speed, and what would change it",
                f"{'':<20}{generate:<{width}}text from the trained model",
                *notes,
            ]
        )


def _peak_flops(train: TrainConfig, device: torch.device) -> float | None:
    """FLOP/s of one device, from the user's cluster file or the data sheet of the GPU; None if
    unknown."""
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
