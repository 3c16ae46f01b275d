"""All checks of `moemesh train` that come before the start of ranks.

Settings, device, memory, data, tokenizer, weights, adapters, the run folder and its earlier run.
Nothing is written. Torch is imported for a packed base only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import date
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple

from moemesh.checkpoint.files import CheckpointError
from moemesh.checkpoint.remote import Place
from moemesh.checkpoint.retention import DiskNeed, disk_need, refuse_full_disk
from moemesh.checkpoint.stored import candidates, open_stored, read_manifest
from moemesh.config.changes import Change
from moemesh.config.dispatcher_table import DISPATCHERS, dispatcher_row
from moemesh.config.errors import ConfigError, Problem, found_by, refuse_together
from moemesh.config.hub import short_name
from moemesh.config.huggingface.folder import read_config
from moemesh.config.huggingface.keys import off_note
from moemesh.config.huggingface.model import trained_families
from moemesh.config.load import Resolved, resolved_toml, with_recorded
from moemesh.config.lora import ADAPTER_CONFIG
from moemesh.config.names import Names
from moemesh.config.optimizer_table import OPTIMIZERS
from moemesh.config.run import RunConfig
from moemesh.config.sources import RUN_PLAN
from moemesh.config.toml import format_value
from moemesh.config.trainable import refusals
from moemesh.data import sources
from moemesh.data.input_files import HEAD, find, open_stream, pinned
from moemesh.data.samples import Samples
from moemesh.data.sources import validation_source
from moemesh.data.tokenizer import DataError, reads_clock
from moemesh.data.tokenizing import cache_beside
from moemesh.monitor import devices
from moemesh.monitor.lease import Lease
from moemesh.schedule.action import Schedule
from moemesh.schedule.plan_schedule import build_step, step_problems
from moemesh.schedule.simulate import simulate
from moemesh.trace.machine import usable_cores
from moemesh.trace.run import REPORT
from moemesh.train.records.kept_schedules import readable, refuse_unrecorded
from moemesh.train.records.run_folder import RunFolder, refuse_unknown_permissions
from moemesh.train.weights.weight_sources import (
    check_adapter_headers,
    check_adapters,
    check_folder,
    check_headers,
)

#: Ranks per core above which a run on CPUs gets a warning: their start alone takes minutes.
RANKS_PER_CORE = 4
#: Share of waiting in a step above which a pipeline gets a warning.
LARGE_BUBBLE = 0.5
#: Largest number of files of a source, and of lines of a file, that are checked.
_FEW = 20

# Refusals: legal settings that `moemesh train` cannot carry out here. Each takes a configuration
# and the run folder (None if unknown; a run that resumes in it may lack inputs of its start), and
# yields problems.


def _dispatcher(config: RunConfig, _: Path | None) -> Iterator[Problem]:
    if obstacles := dispatcher_row(config.plan.dispatcher).obstacles:
        others = Names(DISPATCHERS, where=lambda row: not row.obstacles)
        fix = f"dispatcher = {', '.join(others)} or auto"
        for why in resolve_name(obstacles)(config):
            yield config.plan.problem("not-available", "dispatcher", why, fix)


def _sinks(config: RunConfig, _: Path | None) -> Iterator[Problem]:
    for name in config.train.sinks:
        if name in ("tensorboard", "wandb") and find_spec(name) is None:
            message = f'the sink "{name}" needs the package {name}'
            fix = f"pip install {name}, or train.sinks without it"
            yield config.train.problem("not-available", "sinks", message, fix)


def _idle_replicas(config: RunConfig, _: Path | None) -> Iterator[Problem]:
    dp, batch = config.plan.dp, config.data.global_batch
    if dp > batch:
        message = (
            f"dp ({dp}) exceeds the {batch} sequences of a step (data.global_batch): "
            f"{dp - batch} of the {dp} replicas would have nothing to do"
        )
        fix = f"dp = {batch}, or data.global_batch = {dp}"
        yield config.plan.problem("too-large", "dp", message, fix)


def _random_base(config: RunConfig, folder: Path | None) -> Iterator[Problem]:
    lora, is_new = config.lora, not (folder and (folder / RUN_PLAN).exists())
    if config.model_path is not None:
        return
    if lora.is_packed:
        message = "base = nf4 reads the base at every start, and model.path names no folder"
        fix = 'model.path = FOLDER, or base = "same"'
        yield lora.problem("missing", "base", message, fix, "model.path")
    elif is_new and lora.rank and not config.train.train_only:
        message = (
            f"adapters of rank {lora.rank} would train on random weights that do not train: "
            "model.path is missing, the folder of the weights that they adapt"
        )
        fix = "model.path = FOLDER, or rank = 0 to train all weights"
        yield lora.problem("missing", "rank", message, fix)


#: Refusals in the order of their messages.
REFUSALS: tuple[Callable[[RunConfig, Path | None], Iterable[Problem]], ...] = (
    lambda config, _: refusals(config),
    lambda config, _: step_problems(config.plan, config.model, config.data.seq_len),
    _dispatcher,
    _sinks,
    _idle_replicas,
    _random_base,
)


def untrainable(resolved: Resolved, folder: Path | None = None) -> list[Problem]:
    """The problems of all :data:`REFUSALS`, with the origins of their keys."""
    return [
        replace(problem, origin=resolved.origins.get(problem.key, ""))
        for refusal in REFUSALS
        for problem in refusal(resolved.config, folder)
    ]


# Warnings: settings that are legal and probably a mistake. Each yields sentences.


class Start(NamedTuple):
    """A run that is about to start. `ranks_on_cpu`: number of ranks that share the cores of this
    machine, 0 with GPUs; `schedule`: that of a step (None: the plan's)."""

    config: RunConfig
    ranks_on_cpu: int = 0
    schedule: Schedule | None = None


def _without_effect(start: Start) -> Iterator[str]:
    plan, train = start.config.plan, start.config.train
    recomputed = ("recompute_attention", "recompute_experts")
    a_gpu = "a GPU, since a CPU has the states in its memory"
    idle = [  # condition, section, keys without effect, requirement of their effect
        (plan.pp == 1, plan, ("schedule", "stages_per_rank"), "plan.pp > 1"),
        (plan.data != "parameter_server", plan, ("servers",), "plan.data = parameter_server"),
        (plan.recompute != "selective", plan, recomputed, "plan.recompute = selective"),
        (plan.ep == 1, plan, ("spare_slots",), "plan.ep > 1"),
        (plan.ep * plan.etp == 1, plan, ("dispatcher", "payload"), "plan.ep > 1"),
        (plan.ep == 1, train, ("rebalance_every",), "plan.ep > 1"),
        (start.ranks_on_cpu > 0, plan, ("offload",), a_gpu),
    ]
    options = {key for row in OPTIMIZERS.values() for key in row.options}
    for key in sorted(options - {*OPTIMIZERS[train.optimizer].options}):
        names = [name for name, row in OPTIMIZERS.items() if key in row.options]
        idle.append((True, train, (key,), f"train.optimizer = {' or '.join(names)}"))
    for is_idle, section, names, needed in idle:
        for name in names if is_idle else ():
            if (value := getattr(section, name)) != type(section).model_fields[name].default:
                shown = value if isinstance(value, str) else format_value(value)
                yield f"{section.section}.{name} = {shown} has no effect: it needs {needed}"


def _high_rate(start: Start) -> Iterator[str]:
    config, train, usual = start.config, start.config.train, start.config.usual_rate
    if train.lr >= OPTIMIZERS[train.optimizer].high_rate * usual:
        whose = "training from scratch" if config.model_path is None else "weights that are loaded"
        whose = "adapters" if config.lora.rank and config.model_path is not None else whose
        times = train.lr / usual
        shown = f"{times:,.0f}" if times < 1e6 else f"{times:.3g}"
        yield (
            f"train.lr = {train.lr:g} is {shown} times {usual:g}, the default for "
            f"{whose}: the loss will probably rise"
        )


def _empty_parts(start: Start) -> Iterator[str]:
    plan, batch = start.config.plan, start.config.data.global_batch
    if (parts := plan.dp * plan.microbatches) > batch:
        yield (
            f"plan.dp = {plan.dp} and plan.microbatches = {plan.microbatches} cut a step of "
            f"data.global_batch = {batch} sequences into {parts} parts: {parts - batch} are empty"
        )


def _json_as_text(start: Start) -> Iterator[str]:
    data = start.config.data
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


def _long_warmup(start: Start) -> Iterator[str]:
    train = start.config.train
    if train.epochs is None and train.warmup_steps >= train.steps:
        yield (
            f"train.warmup_steps = {train.warmup_steps} must be below train.steps = "
            f"{train.steps}: the learning rate ends at "
            f"{train.lr * train.steps / train.warmup_steps:.1e} and never falls; --set "
            f"train.warmup_steps={train.steps // 10}, for example"
        )


def _large_bubble(start: Start) -> Iterator[str]:
    plan, config = start.config.plan, start.config
    if plan.pp == 1:
        return
    schedule = start.schedule or build_step(plan, config.model, config.data.seq_len)
    if schedule.update is None:  # asynchronous ones never drain
        simulation = simulate(schedule)
        rate = simulation.rank_idle / simulation.makespan
        if rate > LARGE_BUBBLE:
            yield (
                f"plan.microbatches = {plan.microbatches} keeps {plan.pp} pipeline ranks "
                f"waiting for {rate:.0%} of a step: more microbatches wait less"
            )


def _crowded_cores(start: Start) -> Iterator[str]:
    ranks, cores = start.ranks_on_cpu, usable_cores()
    if ranks > RANKS_PER_CORE * cores:
        yield f"{ranks} ranks share {cores} core(s): right results, no speed to measure"


def _without_noise(start: Start) -> Iterator[str]:
    """A note for each kind of noise in the training of transformers or PEFT that is off here."""
    config = start.config
    given: dict[str, object] = {}
    if config.model_path is not None and config.model.implementation == "moemesh":
        with suppress(ConfigError):  # reported by the check of the folder
            given |= read_config(Path(config.model_path))
        family = trained_families()["family"].get(str(given.get("model_type")), {})
        if not family.get("jitters"):
            given.pop("router_jitter_noise", None)
    given |= {"lora_dropout": _adapter_config(config).get("lora_dropout")}
    for key in ("attention_dropout", "router_jitter_noise", "lora_dropout"):
        size = given.get(key)
        if isinstance(size, int | float) and size > 0:
            yield off_note(key, size)


def _adapter_config(config: RunConfig) -> dict[str, Any]:
    """The ``adapter_config.json`` of lora.path; empty without one that can be read."""
    if config.lora.path is not None:
        with suppress(ConfigError):  # reported by the check of the folder
            return read_config(Path(config.lora.path) / ADAPTER_CONFIG, "lora.path")
    return {}


def _gate_and_up_apart(start: Start) -> Iterator[str]:
    """PEFT holds gate and up of all experts in one parameter: the two share one A for each
    expert."""
    names = _adapter_config(start.config).get("target_parameters")
    if isinstance(names, list) and any(str(name).endswith("gate_up_proj") for name in names):
        yield "gate and up of an expert train an A each: in PEFT they share one"


#: Warnings in the order of their lines.
WARNINGS: tuple[Callable[[Start], Iterator[str]], ...] = (
    _without_effect,
    _high_rate,
    _empty_parts,
    _json_as_text,
    _long_warmup,
    _large_bubble,
    _crowded_cores,
    _without_noise,
    _gate_and_up_apart,
)


def preflight_warnings(
    config: RunConfig, ranks_on_cpu: int = 0, schedule: Schedule | None = None
) -> list[str]:
    """The sentences of all :data:`WARNINGS`."""
    start = Start(config, ranks_on_cpu, schedule)
    return [text for warning in WARNINGS for text in warning(start)]


def warnings_before_ranks(config: RunConfig) -> Iterator[str]:
    """Warnings for ranks to be started on this machine, before their start."""
    from moemesh.planner.machine_memory import memory_warning  # late, as in `prepare`

    plan, device = config.plan, config.train.device
    ranks = plan.ranks_per_node or plan.world_size
    gpus = 0 if device == "cpu" else devices.num_gpus()
    yield from preflight_warnings(config, 0 if gpus else ranks)
    if not gpus and (warning := memory_warning(config)):
        yield warning
    if gpus and ranks > gpus:
        yield f"{ranks} ranks share {gpus} GPU(s) of this machine: torchrun starts one on each"


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """A requested run, resolved once in each process.

    `resolved`: the configuration of `config_file` and `overrides`; `out`: the run folder (None: see
    :attr:`path`); `allowed_changes`: keys that may differ from those of the run in it; `takeover`:
    take the folder over from an active run; `stop_after`: step after which the run is saved and
    ends; `profile_steps`: number of steps to profile on every rank before the run ends."""

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
        """`out`, or `config_file` if it is a run folder, or ``runs/NAME``, named after the file,
        the folder of the model or the preset: a repeated command resumes its run."""
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


class Preparation(NamedTuple):
    """The result of all checks of a run, and the state of its folder.

    `changes`: differences from the configuration of the run in the folder; `steps`: steps of its
    checkpoints, newest first; `disk`: bytes for checkpoints; `samples`: None if reading the data
    takes more than about a second; `notes`: lines about the data.
    """

    request: RunRequest
    folder: RunFolder
    changes: tuple[Change, ...]
    steps: tuple[int, ...]
    disk: DiskNeed
    samples: Samples | None
    notes: Sequence[str]


def prepare(request: RunRequest, log: Callable[[str], None] = lambda text: None) -> Preparation:
    """Check everything: first the names of --allow-change, and that the run folder can be used and
    no active run holds it (unless it is taken over), then the rest. Raises a UserError with all
    faults of settings, inputs and this machine. `log` gets the first line of a run, before data is
    read."""
    # Late: ranks import this module, too, and need no prices of layouts.
    from moemesh.planner.machine_memory import check_room

    refuse_unknown_permissions(request.allowed_changes)
    resolved = request.readable
    config, path, folder = request.config, request.path, request.inspect()
    if not request.takeover:
        Lease.refuse_held(path)
    changes = tuple(folder.changes(resolved_toml(config), request.allowed_changes))
    steps = tuple(candidates(folder.checkpoints))
    is_done = config.train.epochs is None and bool(steps) and steps[0] >= config.train.steps
    # A run that is done writes no checkpoint, so a full disk does not matter.
    measure_disk = partial(disk_need if is_done else refuse_full_disk, config, folder.checkpoints)
    inputs = [sources.name_of(source) for source in config.data.all_sources]
    inputs += [config.data.validation] if config.data.validation is not None else []
    inputs += [f"the weights in {config.model_path}"] if config.model_path is not None else []
    ranks = config.plan.world_size
    processes = "trains in this process" if ranks == 1 else f"starts {ranks} processes"
    samples, notes = check_inputs(
        resolved,
        request.config_file,
        cache_beside(path),
        also=(
            lambda: None if untrainable(resolved, path) else check_room(resolved.config),
            # Checkpoints hold all weights but a packed base.
            lambda: None if steps and not config.lora.is_packed else check_sources(config),
            partial(check_base, config, [folder.checkpoints / f"step-{n}" for n in steps[:1]]),
            # The newest checkpoint may be damaged: then the run resumes from an older one.
            partial(refuse_unrecorded, config, None if steps else 0),
            measure_disk,
        ),
        before_data=lambda: log(f"starting reads {', '.join(inputs)}; then {processes}"),
        folder=path,
    )
    return Preparation(request, folder, changes, steps, measure_disk(), samples, notes)


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
    """Check settings, device and local weights, call the checks of `also`, then check tokenizer and
    data. Raises a UserError with all faults.

    If everything is valid, `before_data` is called. Valid data that is read in about a second is
    opened, which finds data that is too short. Returns its samples (None: not opened) and notes.
    """
    config = resolved.config
    opened: list[Samples] = []
    notes: list[str] = []

    def open_small() -> None:
        if sources.is_small(config.data):
            seed, vocab_size = config.train.seed, config.model.vocab_size
            samples = sources.open_samples(
                config.data, seed=seed, vocab_size=vocab_size, cache=cache, log=notes.append
            )
            opened.append(samples)

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
    # Without a valid vocab_size any token is accepted.
    vocab_size = 1 << 62 if "model.vocab_size" in broken else config.model.vocab_size
    errors: list[Exception] = []
    home = Path() if config_file is None else config_file.parent
    named = [source.path for source in config.data.all_sources]
    named += [config.data.validation, config.data.tokenizer]
    for error in sources.check(config.data, vocab_size):
        # The path of the error may exist in the folder of the configuration instead.
        for name in filter(None, named):
            is_beside = not Path(name).expanduser().exists() and (home / name).exists()
            if is_beside and re.search(rf"(?<![\w./-]){re.escape(name)}(?![\w/-])", str(error)):
                where = f"{home / name} exists, but paths do not start from the folder of"
                error = DataError(f"{error}; {where} {config_file}")
                break
        errors.append(error)
    return errors


def check_base(config: RunConfig, checkpoints: Sequence[Place]) -> None:
    """Raises CheckpointError if the packed base of a run differs from that of its `checkpoints`."""
    if not config.lora.is_packed or found_by(partial(check_sources, config)):
        return
    for checkpoint in checkpoints:
        from moemesh.train.weights.conversion import open_base  # late: it imports torch

        state = None
        with suppress(CheckpointError):  # a damaged checkpoint: the run resumes from another
            state = read_manifest(checkpoint).state
        open_base(config, state)


def check_sources(config: RunConfig) -> None:
    """Raises a UserError if the weights that a run starts from do not exist here."""
    if config.model_path is not None:
        check_folder(Path(config.model_path))
    if config.lora.path is not None:
        check_adapters(Path(config.lora.path))
