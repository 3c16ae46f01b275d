"""All that `moemesh train` can check and tell before torch is imported and a rank is started.

Settings, device, memory, data, tokenizer, weights, adapters, the run folder and its earlier run.
Nothing is written.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

from moemesh.checkpoint.files import CheckpointError
from moemesh.checkpoint.stored import candidates, open_stored
from moemesh.config.changes import Change
from moemesh.config.errors import ConfigError, found_by, refuse_together
from moemesh.config.load import Resolved, resolved_toml, with_recorded
from moemesh.config.run import RunConfig
from moemesh.data import sources
from moemesh.data.samples import Samples
from moemesh.data.token_cache import cache_beside
from moemesh.data.tokenizer import DataError
from moemesh.train.preflight import (
    DiskNeed,
    disk_need,
    refuse_full_disk,
    refuse_too_large,
    untrainable,
)
from moemesh.train.records.kept_schedules import readable, refuse_unrecorded
from moemesh.train.records.run_folder import RunFolder, refuse_unknown_permissions
from moemesh.train.weights.weight_sources import (
    check_adapters,
    check_folder,
    check_headers,
)
from moemesh.watch import devices
from moemesh.watch.lease import Lease

#: The page that a run ends with.
REPORT = "report.html"


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """A run as it was asked for, resolved once in each process: the configuration of `config_file`
    and `overrides`, the run folder `out` (None: see :attr:`path`), keys that may differ from those
    of the run in it, whether to take it from a run at work there, a step behind which the run is
    saved and ends, and the number of steps that are profiled on every rank before it ends."""

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
        """`out`, or the folder of a run that is the configuration, or ``runs/<name of the file, of
        the model's folder, or of the preset>``: the same command finds the same run again."""
        file, out, config = self.config_file, self.out, self.resolved.config
        if file is not None and file.is_dir():
            out = out or file
        model = config.model_preset if config.model_path is None else Path(config.model_path).name
        return (out or Path("runs") / (file.stem if file else model)).expanduser()

    @cached_property
    def config(self) -> RunConfig:
        """The configuration, with what follows from that of an earlier run in the folder."""
        return with_recorded(self.resolved.config, self.path)

    @cached_property
    def readable(self) -> Resolved:
        """The same with the run folder's copy in place of a schedule file that is gone."""
        plan = readable(self.config.plan, self.path)
        return replace(self.resolved, config=replace(self.config, plan=plan))

    def inspect(self) -> RunFolder:
        """The run folder as it is, or is not yet."""
        train = self.config.train
        return RunFolder.inspect(self.path, train.resume, train.checkpoint_folder)

    def arguments(self) -> list[str]:
        """The command line of a rank that carries it out."""
        words = ["train", *([str(self.config_file)] if self.config_file else [])]
        words += [word for override in self.overrides for word in ("--set", override)]
        words += ["--out", str(self.path)]
        words += [word for key in self.allowed_changes for word in ("--allow-change", key)]
        for option, value in (("--stop-after", self.stop_after), ("--profile", self.profile_steps)):
            words += [] if value is None else [option, str(value)]
        return words


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """A run that nothing speaks against, and what is found in its folder.

    `steps`: of the checkpoints, newest first; `disk`: what they need; `samples`: where the data is
    read in about a second, else None; `notes` on the data.
    """

    request: RunRequest
    folder: RunFolder
    changes: tuple[Change, ...]
    steps: tuple[int, ...]
    disk: DiskNeed
    samples: Samples | None
    notes: Sequence[str]


def prepare(request: RunRequest, say: Callable[[str], None] = lambda text: None) -> Preparation:
    """Look at everything: first at the folder of the run, which a run may hold (unless it is to be
    taken over), then at the rest. Raises a UserError with all that is wrong with settings, inputs
    and this machine together. `say` gets the first line of a run, before data is read."""
    refuse_unknown_permissions(request.allowed_changes)
    config, path, folder = request.config, request.path, request.inspect()
    if not request.takeover:
        Lease.refuse_held(path)
    changes = tuple(folder.changes(resolved_toml(config), request.allowed_changes))
    steps = tuple(candidates(folder.checkpoints))
    is_done = config.train.epochs is None and bool(steps) and steps[0] >= config.train.steps
    look = disk_need if is_done else refuse_full_disk
    kept = request.readable
    samples, notes = check_inputs(
        kept,
        request.config_file,
        cache_beside(path),
        also=(
            lambda: None if untrainable(kept, path) else check_room(kept.config),
            partial(check_sources, config),
            # The newest checkpoint may turn out damaged: then the run goes on from an older one.
            partial(refuse_unrecorded, config, None if steps else 0),
            partial(look, config, folder.checkpoints),
        ),
        before_data=lambda: say(starting(config)),
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
    """What is said of a run that is at its last step already, where its folder and its newest
    checkpoint say so without its data; None where there is something to do, or to find out."""
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


def starting(config: RunConfig) -> str:
    """The first line of a run, long before its header: what it reads and which processes start."""
    read = [sources.name_of(source) for source in config.data.all_sources]
    if config.data.validation is not None:
        read.append(config.data.validation)
    if config.model_path is not None:
        read.append(f"the weights in {config.model_path}")
    ranks = config.plan.world_size
    processes = "trains in this process" if ranks == 1 else f"starts {ranks} processes"
    return f"starting reads {', '.join(read)}; then {processes}"


def already_trained(path: Path, done: int, last: int) -> str:
    """The message about a run in `path` that has `done` steps of `last` behind it."""
    return (
        f"report   {path / REPORT}\n"
        f"To train longer: --set train.steps={2 * last}. To start a new run: --out NEW_DIR.\n"
        f"already trained to step {done} of {last}"
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
    """What is trained at all, a device that was named, tokenizer, data, weights that are here, and
    what the checks of `also` find. Raises a UserError with all that is wrong.

    Data that is read in about a second is opened, so that data that is too short is found, too;
    returns its samples and notes on it. `before_data` is called first where nothing else is wrong.
    """
    config = resolved.config
    opened: list[Samples] = []
    notes: list[str] = []

    def open_small() -> None:
        if sources.is_small(config.data):
            seed, vocab_size = config.train.seed, config.model.vocab_size
            opened.append(
                sources.open_samples(
                    config.data, seed=seed, vocab_size=vocab_size, cache=cache, say=notes.append
                )
            )

    problems = untrainable(resolved, folder)
    found: list[Exception] = [ConfigError(problems)] if problems else []
    device = partial(devices.refuse_missing, config.train.device, config.plan.world_size)
    for check in (device, partial(check_headers, config), *also):
        found += found_by(check)
    data = sources.check(config.data, config.model.vocab_size)
    if not found and not data:
        before_data()
    found += [_placed(error, config, config_file) for error in data] or found_by(open_small)
    refuse_together(found)
    return next(iter(opened), None), notes


def check_room(config: RunConfig) -> None:
    """Raises TooLargeError where the ranks of a run would fill the memory of this machine."""
    if config.train.device == "cpu" or not devices.signs_of_gpus():
        refuse_too_large(config)


def check_sources(config: RunConfig) -> None:
    """Raises a UserError where the weights that a run starts from are not here."""
    if config.model_path is not None:
        check_folder(Path(config.model_path))
    if config.lora.path is not None:
        check_adapters(Path(config.lora.path))


def _placed(error: Exception, config: RunConfig, config_file: Path | None) -> Exception:
    """`error`; of a file that stands beside the configuration and not where the path points, the
    message says so."""
    data = config.data
    home = Path() if config_file is None else config_file.parent
    named = [source.path for source in data.all_sources] + [data.validation, data.tokenizer]
    for name in filter(None, named):
        is_beside = not Path(name).expanduser().exists() and (home / name).exists()
        if is_beside and re.search(rf"(?<![\w./-]){re.escape(name)}(?![\w/-])", str(error)):
            return DataError(
                f"{error}; {home / name} is there, but paths do not count from the folder of "
                f"{config_file}"
            )
    return error
