"""All checks of `moemesh train` that come before the import of torch and the start of ranks.

Settings, device, memory, data, tokenizer, weights, adapters, the run folder and its earlier run.
Nothing is written.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import date
from functools import cached_property, partial
from math import prod
from pathlib import Path
from pkgutil import resolve_name
from typing import NamedTuple

from moemesh.checkpoint.files import CheckpointError, file_limit, free_bytes
from moemesh.checkpoint.remote import Place
from moemesh.checkpoint.stored import candidates, open_stored, read_manifest
from moemesh.config.changes import Change
from moemesh.config.data import DataConfig
from moemesh.config.dispatcher_table import DISPATCHERS, dispatcher_row
from moemesh.config.errors import ConfigError, Problem, UserError, found_by, refuse_together
from moemesh.config.hub import short_name
from moemesh.config.load import Resolved, resolved_toml, with_recorded
from moemesh.config.names import Names
from moemesh.config.optimizer_table import OPTIMIZERS
from moemesh.config.run import RunConfig
from moemesh.config.toml import format_value
from moemesh.config.trainable import refusals
from moemesh.data import sources
from moemesh.data.input_files import HEAD, find, open_stream, pinned
from moemesh.data.samples import Samples
from moemesh.data.sources import validation_source
from moemesh.data.tokenizer import DataError, reads_clock
from moemesh.data.tokenizing import cache_beside
from moemesh.monitor import devices
from moemesh.monitor.devices import num_gpus
from moemesh.monitor.lease import Lease
from moemesh.schedule.action import Schedule
from moemesh.schedule.plan_schedule import build_step, step_problems
from moemesh.schedule.simulate import simulate
from moemesh.sharding.parameters import tuned_tensors
from moemesh.trace.machine import usable_cores
from moemesh.trace.memory_profile import MemoryProfile, format_bytes
from moemesh.train.records.kept_schedules import readable, refuse_unrecorded
from moemesh.train.records.rows import missing_package
from moemesh.train.records.run_folder import RunFolder, refuse_unknown_permissions
from moemesh.train.weights.weight_sources import (
    check_adapter_headers,
    check_adapters,
    check_folder,
    check_headers,
)

#: Largest number of ranks a core in a test of a layout; with more, starting alone takes minutes.
RANKS_PER_CORE = 4
#: Share of waiting in a step above which a pipeline gets a warning.
LARGE_BUBBLE = 0.5
#: Largest number of ranks that may be meant for one machine: memory is predicted for each.
MOST_RANKS = 8
#: Largest number of files of a source, and of lines of a file, that are checked.
_FEW = 20
#: Shortest proposed sequences in tokens.
_SHORTEST = 64

# Refusals: legal settings that `moemesh train` cannot carry out.


def untrainable(resolved: Resolved, folder: Path | None = None) -> list[Problem]:
    """Legal settings that `moemesh train` would have to ignore, or from which nothing can come; it
    refuses them. `folder`: run folder, whose saved files may replace missing inputs."""
    config, origins = resolved.config, resolved.origins
    plan, batch = config.plan, config.data.global_batch
    found = [*refusals(config), *step_problems(plan, config.model, config.data.seq_len)]
    if obstacles := dispatcher_row(plan.dispatcher).obstacles:
        others = Names(DISPATCHERS, where=lambda row: not row.obstacles)
        fix = f"dispatcher = {', '.join(others)} or auto"
        reasons = resolve_name(obstacles)(config)
        found += [plan.problem("not-available", "dispatcher", why, fix) for why in reasons]
    for name in config.train.sinks:
        if (package := missing_package(name)) is not None:
            message = f'the sink "{name}" needs the package {package}'
            fix = f"pip install {package}, or train.sinks without it"
            found.append(config.train.problem("not-available", "sinks", message, fix))
    if plan.dp > batch:
        message = (
            f"dp ({plan.dp}) exceeds the {batch} sequences of a step (data.global_batch): "
            f"{plan.dp - batch} of the {plan.dp} replicas would have nothing to do"
        )
        fix = f"dp = {batch}, or data.global_batch = {plan.dp}"
        found.append(plan.problem("too-large", "dp", message, fix))
    is_new = not (folder and (folder / "plan.json").exists())
    is_packed, is_base_random = config.lora.is_packed, config.model_path is None
    if is_packed and is_base_random:
        message = "base = nf4 reads the base at every start, and model.path names no folder"
        fix = 'model.path = FOLDER, or base = "same"'
        found.append(config.lora.problem("missing", "base", message, fix, "model.path"))
    elif is_new and config.lora.rank and is_base_random and not config.train.train_only:
        message = (
            f"adapters of rank {config.lora.rank} would train on random weights that do not train: "
            "model.path is missing, the folder of the weights that they adapt"
        )
        fix = "model.path = FOLDER, or rank = 0 to train all weights"
        found.append(config.lora.problem("missing", "rank", message, fix))
    return [replace(problem, origin=origins.get(problem.key, "")) for problem in found]


# Room on the disk for the checkpoints of a run.


#: Bytes of an element of the masters, and of the model itself, by `train.dtype`.
_MASTER_BYTES = {"float32": 4, "bfloat16": 4, "float64": 8}
_WEIGHT_BYTES = {"float32": 4, "bfloat16": 2, "float64": 8}


class DiskError(UserError):
    """The disk has no room for a checkpoint; the message names the bytes needed and free."""


class DiskNeed(NamedTuple):
    """Bytes of: one checkpoint; the largest total of a run (kept ones, the best one and one being
    written); the checkpoints present now; the free space."""

    checkpoint: int
    most: int
    present: int
    free: int


def checkpoint_bytes(config: RunConfig) -> int:
    """Size of a checkpoint in bytes: masters and moments of what trains, the weights of the rest
    unless the base is packed.

    Headers, the manifest and the routers' biases, thousandths of it, are left out.
    """
    train = config.train
    master, frozen = _MASTER_BYTES[train.dtype], _WEIGHT_BYTES[train.dtype]
    return sum(
        prod(tensor.shape)
        * (
            master * (1 + train.num_states(tensor.name))
            if tensor.trains
            else tensor.weight_bytes(frozen) * (not config.lora.is_packed)
        )
        for tensor in tuned_tensors(config.model, config.plan, config.tuning)
    )


def disk_need(config: RunConfig, checkpoints: Place) -> DiskNeed:
    """Space that the run needs in the folder `checkpoints`, which need not exist yet."""
    size = checkpoint_bytes(config)
    present = 0  # for a store without limits
    if isinstance(checkpoints, Path):
        files = (file for file in checkpoints.glob("step-*/*") if file.is_file())
        present = sum(file.stat().st_size for file in files)
    most = size * (config.train.checkpoints_kept + 2)  # the best one, and one being written
    return DiskNeed(size, most, present, free_bytes(checkpoints))


def refuse_full_disk(config: RunConfig, checkpoints: Place) -> DiskNeed:
    """Raise DiskError if no further checkpoint fits, or may be written; returns the need."""
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
    """A sentence if the first checkpoint fits and a later one will not."""
    need = disk_need(config, checkpoints)
    if need.most <= need.present + need.free:
        return None
    kept, available = config.train.checkpoints_kept, format_bytes(need.free + need.present)
    return (
        f"{kept} kept checkpoint(s), the best one and one being written take "
        f"{format_bytes(need.most)}, and {available} are available: a later one will find the disk "
        "full; train.checkpoints_kept is the number of kept ones"
    )


# Room in memory, and warnings: a large bubble, settings without effect.


class TooLargeError(UserError):
    """The model's weights, gradients and optimizer exceed the memory of the machine."""


def refuse_too_large(
    config: RunConfig, memory_bytes: int | None = None, *, on_cpu: bool = True
) -> None:
    """Raise TooLargeError if weights, gradients and optimizer of all ranks of a run on this
    machine's CPU exceed its memory, or not `on_cpu` what its ranks offload to the host;
    `memory_bytes` None: the memory of this machine."""
    available = _memory_bytes() if memory_bytes is None else memory_bytes
    plan = config.plan
    if not on_cpu and plan.offload == "none":
        return
    what = "weights, gradients and optimizer" if on_cpu else "gradients and optimizer on the host"
    needed = 0
    for rank in range(plan.world_size if on_cpu else plan.ranks_per_node or plan.world_size):
        profile = predicted_memory(config, rank, on_cpu=on_cpu)
        needed += profile.peak - profile.activations if on_cpu else profile.host
        if needed <= available:
            continue
        counted = f"{plan.world_size} rank(s)"
        if rank + 1 < plan.world_size:
            counted = f"the first {rank + 1} of {counted} alone"
        other = "" if on_cpu else "plan.offload = none, "
        raise TooLargeError(
            f"{format_bytes(needed)} for {what} of {counted}, this machine has "
            f"{format_bytes(available)}: take {other}a smaller model (model.preset, "
            "model.num_layers), or more machines; `moemesh estimate` and `moemesh plan` find them"
        )


def predicted_memory(config: RunConfig, rank: int, *, on_cpu: bool = True) -> MemoryProfile:
    """Memory of a rank of a run in a step, with uniform routing; on a CPU nothing is offloaded."""
    # Late: every rank reads this file, and none before its first step needs the planner.
    from moemesh.planner.traffic.own_memory import predict_memory

    return predict_memory(
        config.model,
        config.plan.without_offload if on_cpu else config.plan,
        seq_len=config.data.seq_len,
        global_batch=config.data.global_batch,
        dtype=config.train.dtype,
        num_states=config.train.num_states,
        rank=rank,
        tuning=config.tuning,
    )


def predicted_peaks(config: RunConfig) -> int:
    """Sum of the peaks of all ranks."""
    return sum(predicted_memory(config, rank).peak for rank in range(config.plan.world_size))


def memory_warning(config: RunConfig, memory_bytes: int | None = None) -> str | None:
    """A warning if all ranks of a run on this machine's CPU will probably need more memory than it
    has: both numbers, and the smallest change that fits. None if they fit, and for more than
    `MOST_RANKS` ranks, which are meant for other machines."""
    if config.plan.world_size > MOST_RANKS:
        return None
    available = _memory_bytes() if memory_bytes is None else memory_bytes
    ranks, first = config.plan.world_size, predicted_memory(config, 0)
    # If the states alone exceed the machine, no batch is small enough, and large models take long
    # to predict.
    is_hopeless = ranks * (first.peak - first.activations) > available
    needed = ranks * first.peak if is_hopeless else predicted_peaks(config)
    if needed <= available:
        return None
    text = (
        f"{ranks} rank(s) need {format_bytes(needed)} by prediction, this machine has "
        f"{format_bytes(available)}"
    )
    # Candidates that need less: first those with the same losses, then another batch, then shorter
    # sequences.
    plan, data = config.plan, config.data
    smaller: list[dict[str, dict[str, object]]] = []
    most, least = plan.microbatches, plan.dp * plan.microbatches
    while data.global_batch // plan.dp >= 2 * most:
        most *= 2
        smaller.append({"plan": {"microbatches": most}})
    smaller.append({"plan": {"recompute": "full"}})
    smaller.append({"plan": {"microbatches": most, "recompute": "full"}})
    batch = data.global_batch // 2
    while batch >= least:
        smaller.append({"data": {"global_batch": batch}})
        batch //= 2
    length = data.seq_len // 2
    while length >= _SHORTEST:
        shorter = {"global_batch": least, "seq_len": length}
        smaller.append({"plan": {"recompute": "full"}, "data": shorter})
        length //= 2
    for changes in [] if is_hopeless else smaller:
        sections = {
            name: getattr(config, name).model_copy(update=keys) for name, keys in changes.items()
        }
        changed = replace(config, **sections)
        is_legal = not (changed.check() or refusals(changed))
        if is_legal and (peaks := predicted_peaks(changed)) <= available:
            keys = (
                f"{section}.{key} = {format_value(value)}"
                for section in changes
                for key, value in changes[section].items()
            )
            return f"{text}: {', '.join(keys)} needs {format_bytes(peaks)}"
    return f"{text}: take a smaller model, or plan it for other machines with `moemesh plan`"


def preflight_warnings(
    config: RunConfig, ranks_on_cpu: int = 0, schedule: Schedule | None = None
) -> Iterator[str]:
    """A sentence for each setting that is legal and probably a mistake. `ranks_on_cpu`: ranks that
    share the cores of this machine; `schedule` None: that of the plan."""
    plan, train, data = config.plan, config.train, config.data
    optimizer = OPTIMIZERS[train.optimizer]
    idle = [  # condition, section, keys without effect, requirement of their effect
        (plan.pp == 1, plan, ("schedule", "stages_per_rank"), "plan.pp > 1"),
        (plan.data != "parameter_server", plan, ("servers",), "plan.data = parameter_server"),
        (
            plan.recompute != "selective",
            plan,
            ("recompute_attention", "recompute_experts"),
            "plan.recompute = selective",
        ),
        (plan.ep == 1, plan, ("spare_slots",), "plan.ep > 1"),
        (plan.ep * plan.etp == 1, plan, ("dispatcher", "payload"), "plan.ep > 1"),
        (plan.ep == 1, train, ("rebalance_every",), "plan.ep > 1"),
        (ranks_on_cpu > 0, plan, ("offload",), "a GPU, since a CPU has the states in its memory"),
    ]
    options = {key for row in OPTIMIZERS.values() for key in row.options}
    for key in sorted(options - {*optimizer.options}):
        names = [name for name, row in OPTIMIZERS.items() if key in row.options]
        idle.append((True, train, (key,), f"train.optimizer = {' or '.join(names)}"))
    for is_idle, section, names, needed in idle:
        for name in names if is_idle else ():
            if (value := getattr(section, name)) != type(section).model_fields[name].default:
                shown = value if isinstance(value, str) else format_value(value)
                yield f"{section.section}.{name} = {shown} has no effect: it needs {needed}"
    usual = config.usual_rate
    if train.lr >= optimizer.high_rate * usual:
        whose = "training from scratch" if config.model_path is None else "weights that are loaded"
        whose = "adapters" if config.lora.rank and config.model_path is not None else whose
        times = train.lr / usual
        shown = f"{times:,.0f}" if times < 1e6 else f"{times:.3g}"
        yield (
            f"train.lr = {train.lr:g} is {shown} times {usual:g}, the default for "
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
            f"train.warmup_steps = {train.warmup_steps} must be below train.steps = "
            f"{train.steps}: the learning rate ends at {reached:.1e}"
            f" and never falls; warm up for {max(train.steps // 10, 1)} steps, for example"
        )
    if plan.pp > 1:
        schedule = schedule or build_step(plan, config.model, data.seq_len)
        if schedule.update is None:  # asynchronous ones never drain
            simulation = simulate(schedule)
            rate = simulation.rank_idle / simulation.makespan
            if rate > LARGE_BUBBLE:
                yield (
                    f"plan.microbatches = {plan.microbatches} keeps {plan.pp} pipeline ranks "
                    f"waiting for {rate:.0%} of a step: more microbatches wait less"
                )
    cores = usable_cores()
    if ranks_on_cpu > RANKS_PER_CORE * cores:
        yield f"{ranks_on_cpu} ranks share {cores} core(s): right results, no speed to measure"


def warnings_before_ranks(config: RunConfig) -> Iterator[str]:
    """Warnings for ranks to be started on this machine, before their start."""
    plan, device = config.plan, config.train.device
    ranks = plan.ranks_per_node or plan.world_size
    gpus = 0 if device == "cpu" else num_gpus()
    yield from preflight_warnings(config, 0 if gpus else ranks)
    if not gpus and (warning := memory_warning(config)):
        yield warning
    if gpus and ranks > gpus:
        yield f"{ranks} ranks share {gpus} GPU(s) of this machine: torchrun starts one on each"


def _json_as_text(data: DataConfig) -> Iterator[str]:
    """Warnings about files of JSON lines that are trained on as text, because of their format."""
    named = [("data.format", source) for source in data.all_sources]
    if data.validation is not None:
        named.append(("data.validation_format", validation_source(data)))
    for key, source in named:
        if source.format not in ("text", "bytes"):
            continue
        with suppress(DataError, OSError):  # reported by the check of the data
            for file in find(source.path, source.format)[:_FEW]:
                with open_stream(file.path, file.compression) as stream:
                    lines = stream.read(HEAD).splitlines()[:_FEW]
                if num_objects := sum(line.startswith(b'{"') for line in lines):
                    yield (
                        f"{key} = {source.format} trains on {file.path} as text: {num_objects}"
                        f" of its first {len(lines)} lines are JSON, whose braces and keys are "
                        "learned like the rest; jsonl reads the records"
                    )
                    break


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


#: Final page of a run.
REPORT = "report.html"


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """A requested run, resolved once in each process: the configuration of `config_file` and
    `overrides`, the run folder `out` (None: see :attr:`path`), keys that may differ from those of
    the run in it, whether to take it over from an active run, a step after which the run is saved
    and ends, and the number of steps that are profiled on every rank before it ends."""

    resolved: Resolved
    config_file: Path | None = None
    overrides: Sequence[str] = ()
    out: Path | None = None
    allowed_changes: Sequence[str] = ()
    takeover: bool = False
    stop_after: int | None = None
    profile_steps: int | None = None

    @cached_property
    def path(self) -> Path:
        """`out`, or the folder of a run that is the configuration, or ``runs/NAME`` with the name
        of the file, of the model's folder, or of the preset: a repeated command finds its run."""
        file, out, config = self.config_file, self.out, self.resolved.config
        if file is not None and file.is_dir():
            out = out or file
        model = config.model_preset if config.model_path is None else short_name(config.model_path)
        return (out or Path("runs") / (file.stem if file else model)).expanduser()

    @cached_property
    def config(self) -> RunConfig:
        """The configuration, completed from that of an earlier run in the folder; in a first start,
        with the commits of datasets of the Hub, and the day if a chat template reads it."""
        config = with_recorded(self.resolved.config, self.path)
        data = config.data.with_paths(pinned)
        if data.date is None and reads_clock(data.tokenizer):
            data = data.model_copy(update={"date": str(date.today())})
        return replace(config, data=data)

    @cached_property
    def readable(self) -> Resolved:
        """The resolved configuration, with the run folder's copy of a lost schedule file."""
        plan = readable(self.config.plan, self.path)
        return replace(self.resolved, config=replace(self.config, plan=plan))

    def inspect(self) -> RunFolder:
        """The run folder in its present state, existing or not."""
        train = self.config.train
        return RunFolder.inspect(self.path, train.resume, train.checkpoint_folder)

    def arguments(self) -> list[str]:
        """The command line of a rank of this run."""
        words = ["train", *([str(self.config_file)] if self.config_file else [])]
        words += [word for override in self.overrides for word in ("--set", override)]
        words += ["--out", str(self.path)]
        words += [word for key in self.allowed_changes for word in ("--allow-change", key)]
        for option, value in (("--stop-after", self.stop_after), ("--profile", self.profile_steps)):
            words += [] if value is None else [option, str(value)]
        return words


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """The result of all checks of a run, and the state of its folder.

    `steps`: those of the checkpoints, newest first; `disk`: their need; `samples`: None unless the
    data is read in about a second; `notes` on the data.
    """

    request: RunRequest
    folder: RunFolder
    changes: tuple[Change, ...]
    steps: tuple[int, ...]
    disk: DiskNeed
    samples: Samples | None
    notes: Sequence[str]


def prepare(request: RunRequest, log: Callable[[str], None] = lambda text: None) -> Preparation:
    """Check everything: first the run folder, which an active run may hold (unless it is taken
    over), then the rest. Raises a UserError with all faults of settings, inputs and this machine.
    `log` gets the first line of a run, before data is read."""
    refuse_unknown_permissions(request.allowed_changes)
    config, path, folder = request.config, request.path, request.inspect()
    if not request.takeover:
        Lease.refuse_held(path)
    changes = tuple(folder.changes(resolved_toml(config), request.allowed_changes))
    steps = tuple(candidates(folder.checkpoints))
    is_done = config.train.epochs is None and bool(steps) and steps[0] >= config.train.steps
    look = disk_need if is_done else refuse_full_disk
    kept = request.readable
    read = [sources.name_of(source) for source in config.data.all_sources]
    read += [config.data.validation] if config.data.validation is not None else []
    read += [f"the weights in {config.model_path}"] if config.model_path is not None else []
    ranks = config.plan.world_size
    processes = "trains in this process" if ranks == 1 else f"starts {ranks} processes"
    samples, notes = check_inputs(
        kept,
        request.config_file,
        cache_beside(path),
        also=(
            lambda: None if untrainable(kept, path) else check_room(kept.config),
            partial(check_sources, config),
            partial(check_base, config, [folder.checkpoints / f"step-{n}" for n in steps[:1]]),
            # The newest checkpoint may be damaged: then the run resumes from an older one.
            partial(refuse_unrecorded, config, None if steps else 0),
            partial(look, config, folder.checkpoints),
        ),
        before_data=lambda: log(f"starting reads {', '.join(read)}; then {processes}"),
        folder=path,
    )
    return Preparation(
        request=request,
        folder=folder,
        changes=changes,
        steps=steps,
        disk=look(config, folder.checkpoints),
        samples=samples,
        notes=notes,
    )


def finished(request: RunRequest) -> str | None:
    """The message about a run that has taken its last step, if its folder and its newest checkpoint
    show that without its data; None if there is work left, or if that is unknown."""
    config, path = request.config, request.path
    if config.train.epochs is not None or not (path / REPORT).exists():
        return None
    folder = request.inspect()
    steps = candidates(folder.checkpoints)
    if not steps or steps[0] < config.train.steps or folder.changes(resolved_toml(config)):
        return None
    try:
        open_stored(folder.checkpoints, steps[0])
    except CheckpointError:
        return None
    return already_trained(path, steps[0], config.train.steps)


def already_trained(path: Path, done: int, last: int, early_stop: str | None = None) -> str:
    """The message about a run in `path` that has taken `done` steps of `last`, or ended earlier for
    the reason `early_stop`."""
    longer = f"train.steps={2 * last}" if done >= last else "train.patience=0"
    return (
        f"report   {path / REPORT}\n"
        f"To train longer: --set {longer}. To start a new run: --out NEW_DIR.\n"
        f"already trained to step {done} of {last}"
        + (f"; {early_stop}" if early_stop and done < last else "")
    )


def check_inputs(
    resolved: Resolved,
    config_file: Path | None = None,
    cache: Path | None = None,
    *,
    also: Sequence[Callable[[], object]] = (),
    before_data: Callable[[], None] = lambda: None,
    folder: Path | None = None,
) -> tuple[Samples | None, list[str]]:
    """Check that something trains, the device, tokenizer, data, local weights, and the checks of
    `also`. Raises a UserError with all faults.

    Data that is read in about a second is opened, which finds data that is too short; returns its
    samples and notes on it. `before_data` is called first, if everything else is valid.
    """
    config = resolved.config
    opened: list[Samples] = []
    notes: list[str] = []

    def open_small() -> None:
        if sources.is_small(config.data):
            seed, vocab_size = config.train.seed, config.model.vocab_size
            opened.append(
                sources.open_samples(
                    config.data, seed=seed, vocab_size=vocab_size, cache=cache, log=notes.append
                )
            )

    problems = untrainable(resolved, folder)
    errors: list[Exception] = [ConfigError(problems)] if problems else []
    device = partial(devices.refuse_missing, config.train.device, config.plan.world_size)
    weights = partial(check_headers, config), partial(check_adapter_headers, config)
    for check in (device, *weights, *also):
        errors += found_by(check)
    data = data_errors(config, config_file)
    if not errors and not data:
        before_data()
    refuse_together([*errors, *(data or found_by(open_small))])
    return next(iter(opened), None), notes


#: Keys of [data] without effect on its files.
_NOT_OF_FILES = {f"data.{key}" for key in ("seq_len", "global_batch", "held_out", "documents")}


def data_errors(
    config: RunConfig, config_file: Path | None, broken: Collection[str] = ()
) -> list[Exception]:
    """Faults of tokenizer and data files, from :func:`moemesh.data.sources.check`; none if one of
    the `broken` keys may set their path."""
    if any(key.startswith("data.") and key not in _NOT_OF_FILES for key in broken):
        return []
    is_known = "model.vocab_size" not in broken
    errors: list[Exception] = []
    home = Path() if config_file is None else config_file.parent
    named = [source.path for source in config.data.all_sources]
    named += [config.data.validation, config.data.tokenizer]
    for error in sources.check(config.data, config.model.vocab_size if is_known else 1 << 62):
        # The file exists in the folder of the configuration, but not at the path.
        for name in filter(None, named):
            is_beside = not Path(name).expanduser().exists() and (home / name).exists()
            if is_beside and re.search(rf"(?<![\w./-]){re.escape(name)}(?![\w/-])", str(error)):
                where = f"{home / name} exists, but paths do not start from the folder of"
                error = DataError(f"{error}; {where} {config_file}")
                break
        errors.append(error)
    return errors


def check_room(config: RunConfig) -> None:
    """Raises TooLargeError if the ranks of a run would exceed the memory of this machine."""
    if config.train.device == "cpu" or not devices.signs_of_gpus():
        refuse_too_large(config)


def check_base(config: RunConfig, checkpoints: Sequence[Place]) -> None:
    """Raises CheckpointError if the packed base of a run differs from that of its `checkpoints`."""
    if not config.lora.is_packed or found_by(partial(check_sources, config)):
        return
    for checkpoint in checkpoints:
        from moemesh.train.weights.conversion import open_base  # late: it imports torch

        state = None
        with suppress(CheckpointError):  # of a damaged one: the run resumes from another
            state = read_manifest(checkpoint).state
        open_base(config, state)


def check_sources(config: RunConfig) -> None:
    """Raises a UserError if the weights that a run starts from do not exist here."""
    if config.model_path is not None:
        check_folder(Path(config.model_path))
    if config.lora.path is not None:
        check_adapters(Path(config.lora.path))
