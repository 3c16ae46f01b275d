"""Checks before a run: refusals, room on the disk and in memory, settings without effect."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import NamedTuple

from moemesh.checkpoint.files import file_limit, free_bytes
from moemesh.checkpoint.remote import Place
from moemesh.config.data import DataConfig
from moemesh.config.errors import Problem, UserError
from moemesh.config.load import Resolved
from moemesh.config.run import RunConfig
from moemesh.config.toml import format_value
from moemesh.config.trainable import refusals
from moemesh.data.input_files import HEAD, find, open_stream
from moemesh.data.sources import validation_source
from moemesh.data.tokenizer import DataError
from moemesh.parallel.expert import deepep_probe
from moemesh.schedule.action import Schedule
from moemesh.schedule.plan_schedule import build_step, step_problems
from moemesh.schedule.simulate import simulate
from moemesh.sharding.parameters import tuned_tensors
from moemesh.trace.memory_profile import MemoryProfile, format_bytes
from moemesh.train.records.sinks import missing_package
from moemesh.watch.devices import num_gpus

#: Ranks a core carries in a test of a layout; with more, starting alone takes minutes.
RANKS_PER_CORE = 4
#: Share of waiting in a step above which a pipeline gets a warning.
LARGE_BUBBLE = 0.5
#: Up to so many ranks may be meant for one machine, and have their memory predicted one by one.
MOST_RANKS = 8
#: So many times the usual rate are probably a mistake.
_HIGH = {"adamw": 10, "sgd": 1000}
#: Files of a source, and lines of a file, that are looked at.
_FEW = 20
#: Tokens of the shortest sequences that are proposed.
_SHORTEST = 64

# Refusals: legal settings that `moemesh train` cannot carry out.


def untrainable(resolved: Resolved, folder: Path | None = None) -> list[Problem]:
    """Legal settings that `moemesh train` would have to ignore, or from which nothing can come; it
    refuses them instead. `folder`: of the run, which may go on with what it has."""
    config, origins = resolved.config, resolved.origins
    plan, batch = config.plan, config.data.global_batch
    found = [*refusals(config), *step_problems(plan, config.model, config.data.seq_len)]
    if plan.dispatcher == "deepep":
        reasons = deepep_probe.refusals(
            etp=plan.etp,
            exact=plan.combine == "exact",
            coded=plan.payload != "same",
            dtype=config.train.dtype,
            hidden=config.model.hidden_size,
        )
        if plan.recompute == "full":
            reasons.append(
                "deepep does not dispatch twice in one order, as recompute = full would need"
            )
        if not (probe := deepep_probe.available()).usable:
            reasons.insert(0, str(probe))
        found += [
            Problem(
                code="not-available",
                key="plan.dispatcher",
                value="deepep",
                message=reason,
                fix="dispatcher = all_to_all, all_gather, hierarchical, low_latency or auto",
            )
            for reason in reasons
        ]
    for name in config.train.sinks:
        if (package := missing_package(name)) is not None:
            problem = Problem(
                code="not-available",
                key="train.sinks",
                value=list(config.train.sinks),
                message=f'the sink "{name}" needs the package {package}',
                fix=f"pip install {package}, or train.sinks without it",
            )
            found.append(problem)
    if plan.dp > batch:
        message = (
            f"dp ({plan.dp}) exceeds the {batch} sequences of a step (data.global_batch): "
            f"{plan.dp - batch} of the {plan.dp} replicas would have nothing to do"
        )
        fix = f"dp = {batch}, or data.global_batch = {plan.dp}"
        found.append(plan.problem("too-large", "dp", message, fix))
    is_new = not (folder and (folder / "plan.json").exists())
    if is_new and config.lora.rank and config.model_path is None and not config.train.train_only:
        message = (
            f"adapters of rank {config.lora.rank} would train beside random weights that stay as "
            "they are: no model.path says which weights they adapt"
        )
        fix = "model.path = FOLDER, or rank = 0 to train all weights"
        found.append(config.lora.problem("missing", "rank", message, fix))
    return [replace(problem, origin=origins.get(problem.key, "")) for problem in found]


# Room on the disk for the checkpoints of a run.


#: Bytes of a number of the masters, and of the model itself, by `train.dtype`.
_MASTER_BYTES = {"float32": 4, "bfloat16": 4, "float64": 8}
_WEIGHT_BYTES = {"float32": 4, "bfloat16": 2, "float64": 8}


class DiskError(UserError):
    """The disk has no room for a checkpoint; the message names the bytes needed and free."""


class DiskNeed(NamedTuple):
    """In bytes: one checkpoint; the most that a run has at a time, which is those that stay and the
    one that is being written; the checkpoints that are there already; what is free."""

    checkpoint: int
    most: int
    present: int
    free: int

    @property
    def is_short(self) -> bool:
        """Whether a later checkpoint will find no room."""
        return self.most > self.present + self.free


def checkpoint_bytes(config: RunConfig) -> int:
    """Size of a checkpoint in bytes: masters and moments of what trains, the weights of the rest.

    Headers, the manifest and the routers' biases, thousandths of it, are left out.
    """
    train = config.train
    moments = 2 if train.optimizer == "adamw" else int(bool(train.momentum))
    trained, frozen = _MASTER_BYTES[train.dtype] * (1 + moments), _WEIGHT_BYTES[train.dtype]
    return sum(
        prod(tensor.shape) * (trained if tensor.trains else tensor.weight_bytes(frozen))
        for tensor in tuned_tensors(config.model, config.plan, config.tuning)
    )


def disk_need(config: RunConfig, checkpoints: Place) -> DiskNeed:
    """Bytes that the run needs in the folder `checkpoints`, which need not exist yet."""
    size = checkpoint_bytes(config)
    present = 0  # of a store without bounds
    if isinstance(checkpoints, Path):
        files = (file for file in checkpoints.glob("step-*/*") if file.is_file())
        present = sum(file.stat().st_size for file in files)
    most = size * (config.train.checkpoints_kept + 1)
    return DiskNeed(size, most, present, free_bytes(checkpoints))


def refuse_full_disk(config: RunConfig, checkpoints: Place) -> DiskNeed:
    """Raise DiskError where not one more checkpoint fits, or may be written; returns what is
    needed."""
    need = disk_need(config, checkpoints)
    limit, part = file_limit(), need.checkpoint // config.plan.world_size
    if isinstance(checkpoints, Path) and limit is not None and part > limit:
        raise DiskError(
            f"{checkpoints}: a checkpoint has files of {format_bytes(part)} ({part:,} bytes) and "
            f"more, this process may write files of {limit:,} bytes: raise the limit (ulimit -f)"
        )
    if need.checkpoint > need.free:
        raise DiskError(
            f"{checkpoints}: a checkpoint takes {format_bytes(need.checkpoint)} "
            f"({need.checkpoint:,} bytes), {format_bytes(need.free)} ({need.free:,} bytes) are "
            "free: make room, choose a folder on another disk (--out), or train fewer weights "
            "(train.train_only, lora)"
        )
    return need


def disk_warning(config: RunConfig, checkpoints: Place) -> str | None:
    """A sentence where the first checkpoint fits, and a later one will not."""
    need = disk_need(config, checkpoints)
    if not need.is_short:
        return None
    kept = config.train.checkpoints_kept
    return (
        f"{kept} checkpoint(s) that stay and one that is written take {format_bytes(need.most)}; "
        f"{format_bytes(need.free + need.present)} are there for them: a later one will find the "
        "disk full; train.checkpoints_kept says how many stay"
    )


# Room in memory, and warnings: a large bubble, settings without effect.


class TooLargeError(UserError):
    """The model's weights, gradients and optimizer exceed the memory of the machine."""


def refuse_too_large(config: RunConfig, memory_bytes: int | None = None) -> None:
    """Raise TooLargeError where all ranks of a run on this machine's CPU together need more for
    weights, gradients and optimizer alone than it has; `memory_bytes` None asks the machine."""
    available = _memory_bytes() if memory_bytes is None else memory_bytes
    plan = config.plan
    needed = 0
    for rank in range(plan.world_size):
        profile = predicted_memory(config, rank)
        needed += profile.peak - profile.activations
        if needed > available:
            break
    else:
        return
    counted = f"{plan.world_size} rank(s)"
    if rank + 1 < plan.world_size:
        counted = f"the first {rank + 1} of {counted} alone"
    raise TooLargeError(
        f"{format_bytes(needed)} for weights, gradients and optimizer of {counted}, this machine "
        f"has {format_bytes(available)}: take a smaller model (model.preset, model.num_layers), or "
        "machines for it; `moemesh estimate` and `moemesh plan` say which"
    )


def predicted_memory(config: RunConfig, rank: int) -> MemoryProfile:
    """Memory that a rank of a run holds in a step, with uniform routing."""
    # Late: every rank reads this file, and none before its first step needs the planner.
    from moemesh.planner.traffic.own_memory import predict_memory

    return predict_memory(
        config.model,
        config.plan,
        seq_len=config.data.seq_len,
        global_batch=config.data.global_batch,
        dtype=config.train.dtype,
        optimizer=config.train.optimizer,
        momentum=config.train.momentum,
        rank=rank,
        tuning=config.tuning,
    )


def memory_warning(config: RunConfig, memory_bytes: int | None = None) -> str | None:
    """Where all ranks of a run on this machine's CPU together will probably need more memory than
    it has: both numbers, and the smallest change after which they fit. None where they fit, and
    for so many ranks that no machine is meant to have them."""
    if config.plan.world_size > MOST_RANKS:
        return None
    available = _memory_bytes() if memory_bytes is None else memory_bytes
    ranks, first = config.plan.world_size, predicted_memory(config, 0)
    # Where the states alone exceed the machine, no batch is small enough, and large models take
    # long to price.
    is_hopeless = ranks * (first.peak - first.activations) > available
    needed = ranks * first.peak if is_hopeless else _needed_here(config)
    if needed <= available:
        return None
    text = (
        f"{ranks} rank(s) need {format_bytes(needed)} by prediction, this machine has "
        f"{format_bytes(available)}"
    )
    for changed, name in () if is_hopeless else _smaller(config):
        if (smaller := _needed_here(changed)) <= available:
            return f"{text}: {name} needs {format_bytes(smaller)}"
    return f"{text}: take a smaller model, or plan it for other machines with `moemesh plan`"


def _needed_here(config: RunConfig) -> int:
    """Peaks of all ranks together."""
    return sum(predicted_memory(config, rank).peak for rank in range(config.plan.world_size))


def _smaller(config: RunConfig) -> Iterator[tuple[RunConfig, str]]:
    """Legal configurations that need less memory, each with its name: first those of the same
    losses, then those of another batch, then of shorter sequences."""
    plan, data = config.plan, config.data
    candidates: list[tuple[dict[str, object], dict[str, object]]] = []
    microbatches = [plan.microbatches]
    while data.global_batch // plan.dp >= 2 * microbatches[-1]:
        microbatches.append(2 * microbatches[-1])
        candidates.append(({"microbatches": microbatches[-1]}, {}))
    most = microbatches[-1]
    candidates.append(({"recompute": "full"}, {}))
    candidates.append(({"microbatches": most, "recompute": "full"}, {}))
    batch = data.global_batch // 2
    while batch >= plan.dp * plan.microbatches:
        candidates.append(({}, {"global_batch": batch}))
        batch //= 2
    least = plan.dp * plan.microbatches
    length = data.seq_len // 2
    while length >= _SHORTEST:
        candidates.append(({"recompute": "full"}, {"global_batch": least, "seq_len": length}))
        length //= 2
    for of_plan, of_data in candidates:
        changed = replace(
            config, plan=plan.model_copy(update=of_plan), data=data.model_copy(update=of_data)
        )
        if changed.check() or any(True for _ in refusals(changed)):
            continue
        changes = {"plan": of_plan, "data": of_data}
        yield (
            changed,
            ", ".join(
                f"{section}.{key} = {format_value(value)}"
                for section, keys in changes.items()
                for key, value in keys.items()
            ),
        )


def preflight_warnings(
    config: RunConfig, ranks_on_cpu: int = 0, schedule: Schedule | None = None
) -> Iterator[str]:
    """A sentence for each setting that is legal and probably a mistake. `ranks_on_cpu` share the
    cores of this machine; `schedule` None: that of the plan."""
    plan = config.plan
    defaults = type(plan)()
    if plan.pp == 1:
        for name in ("schedule", "stages_per_rank"):
            if (value := getattr(plan, name)) != getattr(defaults, name):
                yield f"plan.{name} = {value} does nothing: plan.pp = 1 is no pipeline"
    if plan.data != "parameter_server" and plan.servers != defaults.servers:
        yield f"plan.servers = {plan.servers} does nothing: plan.data is {plan.data}"
    if plan.recompute != "selective":
        for name in ("recompute_attention", "recompute_experts"):
            if (value := getattr(plan, name)) != getattr(defaults, name):
                yield (
                    f"plan.{name} = {str(value).lower()} does nothing: plan.recompute = "
                    f"{plan.recompute} is not selective"
                )
    if plan.ep == 1 and plan.spare_slots:
        yield f"plan.spare_slots = {plan.spare_slots} does nothing: plan.ep = 1 is even"
    if plan.ep * plan.etp == 1:
        for name in ("dispatcher", "payload"):
            if (value := getattr(plan, name)) != getattr(defaults, name):
                yield f"plan.{name} = {value} does nothing: plan.ep = 1 moves no token"
    train, data = config.train, config.data
    usual = config.usual_rate
    if train.lr >= _HIGH[train.optimizer] * usual:
        whose = "training from scratch" if config.model_path is None else "weights that are loaded"
        yield (
            f"train.lr = {train.lr:g} is {train.lr / usual:,.0f} times {usual:g}, the default for "
            f"{whose}: the loss will probably rise"
        )
    if (parts := plan.dp * plan.microbatches) > data.global_batch:
        yield (
            f"plan.dp = {plan.dp} and plan.microbatches = {plan.microbatches} cut a step of "
            f"data.global_batch = {data.global_batch} sequences into {parts} parts: "
            f"{parts - data.global_batch} are empty"
        )
    yield from _json_as_text(data)
    if train.epochs is None and train.warmup_steps >= train.steps:
        reached = train.lr * train.steps / train.warmup_steps
        yield (
            f"train.warmup_steps = {train.warmup_steps} is no less than train.steps = "
            f"{train.steps}: the learning rate ends at {reached:.1e}"
            f" and never falls; warm up for {max(train.steps // 10, 1)}, say"
        )
    if plan.pp > 1:
        schedule = schedule or build_step(plan, config.model, data.seq_len)
        if schedule.update is None:  # else it never drains
            simulation = simulate(schedule)
            rate = simulation.rank_idle / simulation.makespan
            if rate > LARGE_BUBBLE:
                yield (
                    f"plan.microbatches = {plan.microbatches} keeps {plan.pp} pipeline ranks "
                    f"waiting for {rate:.0%} of a step: more microbatches wait less"
                )
    cores = os.cpu_count() or 1
    if ranks_on_cpu > RANKS_PER_CORE * cores:
        yield f"{ranks_on_cpu} ranks share {cores} core(s): right results, no speed to measure"


def warnings_before_ranks(config: RunConfig) -> Iterator[str]:
    """Warnings for ranks that would be started on this machine, before there are any."""
    plan, device = config.plan, config.train.device
    ranks = plan.ranks_per_node or plan.world_size
    gpus = 0 if device == "cpu" else num_gpus()
    yield from preflight_warnings(config, 0 if gpus else ranks)
    if not gpus and (warning := memory_warning(config)):
        yield warning
    if gpus and ranks > gpus:
        yield f"{ranks} ranks share {gpus} GPU(s) of this machine: torchrun starts one on each"


def _json_as_text(data: DataConfig) -> Iterator[str]:
    """Files of JSON lines that are trained on as they stand, because their format was named."""
    named = [("data.format", source) for source in data.all_sources]
    if data.validation is not None:
        named.append(("data.validation_format", validation_source(data)))
    for key, source in named:
        if source.format not in ("text", "bytes"):
            continue
        with suppress(DataError, OSError):  # told where the data is looked at
            for file in find(source.path, source.format)[:_FEW]:
                with open_stream(file.path, file.compression) as stream:
                    lines = stream.read(HEAD).splitlines()[:_FEW]
                if num_objects := sum(line.startswith(b'{"') for line in lines):
                    yield (
                        f"{key} = {source.format} trains on {file.path} as it stands: {num_objects}"
                        f" of its first {len(lines)} lines are JSON, whose braces and keys are "
                        "learned like the rest; jsonl reads the records"
                    )
                    break


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
