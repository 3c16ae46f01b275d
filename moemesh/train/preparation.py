"""All that `moemesh train` can check and tell before torch is imported and a rank is started.

Settings, device, memory, data, tokenizer, weights, adapters, the run folder and its earlier run.
Nothing is written.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from moemesh.checkpoint.files import CheckpointError
from moemesh.checkpoint.stored import candidates, open_stored
from moemesh.config.changes import Change
from moemesh.config.errors import ConfigError, found_by, refuse_together
from moemesh.config.load import Resolved, resolved_toml, with_recorded
from moemesh.config.run import RunConfig
from moemesh.data import sources
from moemesh.data.samples import Samples
from moemesh.data.tokenizer import DataError
from moemesh.data.tokenizing import cache_beside
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
class Preparation:
    """A run that nothing speaks against: its configuration, folder and what is found there.

    `readable`: the configuration with the run folder's copy in place of a schedule file that is
    gone; `steps`: of the checkpoints, newest first;
    `disk`: what they need; `opened`: the samples, where they are read in about a second.
    """

    config: RunConfig
    readable: RunConfig
    folder: RunFolder
    changes: tuple[Change, ...]
    steps: tuple[int, ...]
    disk: DiskNeed
    opened: OpenedSamples | None


def prepare(
    resolved: Resolved,
    config_file: Path | None,
    out: Path | None,
    allowed_changes: Sequence[str] = (),
    *,
    takeover: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> Preparation:
    """Look at everything: first at the folder of the run, which a run may hold (unless it is to be
    taken by `takeover`), then at the rest. Raises a UserError with all that is wrong with settings,
    inputs and this machine together. `say` gets the first line of a run, before data is read."""
    refuse_unknown_permissions(allowed_changes)
    path = folder_of(config_file, resolved.config, out)
    config = with_recorded(resolved.config, path)
    kept = replace(config, plan=readable(config.plan, path))
    folder = RunFolder.inspect(path, config.train.resume, config.train.checkpoint_folder)
    if not takeover:
        Lease.refuse_held(path)
    changes = tuple(folder.changes(resolved_toml(config), allowed_changes))
    steps = tuple(candidates(folder.checkpoints))
    is_done = config.train.epochs is None and bool(steps) and steps[0] >= config.train.steps
    look = disk_need if is_done else refuse_full_disk
    checked = replace(resolved, config=kept)
    opened = check_inputs(
        checked,
        config_file,
        cache_beside(path),
        also=(
            lambda: None if untrainable(checked, path) else check_room(kept),
            partial(check_sources, config),
            # The newest checkpoint may turn out damaged: then the run goes on from an older one.
            partial(refuse_unrecorded, config, None if steps else 0),
            partial(look, config, folder.checkpoints),
        ),
        before_data=lambda: say(starting(config)),
        folder=path,
    )
    return Preparation(
        config=config,
        readable=kept,
        folder=folder,
        changes=changes,
        steps=steps,
        disk=look(config, folder.checkpoints),
        opened=opened,
    )


def finished(resolved: Resolved, config_file: Path | None, out: Path | None) -> str | None:
    """What is said of a run that is at its last step already, where its folder and its newest
    checkpoint say so without its data; None where there is something to do, or to find out."""
    path = folder_of(config_file, resolved.config, out)
    config = with_recorded(resolved.config, path)
    if config.train.epochs is not None or not (path / REPORT).exists():
        return None
    folder = RunFolder.inspect(path, config.train.resume, config.train.checkpoint_folder)
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
) -> OpenedSamples | None:
    """What is trained at all, a device that was named, tokenizer, data, weights that are here, and
    what the checks of `also` find. Raises a UserError with all that is wrong.

    Data that is read in about a second is opened, so that data that is too short is found, too, and
    its samples returned. `before_data` is called first where nothing else is wrong.
    """
    config = resolved.config
    found: list[Exception] = []
    if problems := untrainable(resolved, folder):
        found.append(ConfigError(problems))
    device = partial(devices.refuse_missing, config.train.device, config.plan.world_size)
    for check in (device, partial(check_headers, config), *also):
        found += found_by(check)
    data = sources.check(config.data, config.model.vocab_size)
    if not found and not data:
        before_data()
    opened: list[OpenedSamples | None] = []
    if data:
        found += [_placed(error, config, config_file) for error in data]
    else:
        found += found_by(lambda: opened.append(OpenedSamples.of(config, cache)))
    refuse_together(found)
    return opened[0]


class OpenedSamples(NamedTuple):
    """The samples of a run, and what is to be said about its data."""

    samples: Samples
    notes: tuple[str, ...]

    @staticmethod
    def of(config: RunConfig, cache: Path | None) -> OpenedSamples | None:
        """The samples of data that is read in about a second; else None. Raises DataError."""
        if not sources.is_small(config.data):
            return None
        notes: list[str] = []
        samples = sources.open_samples(
            config.data,
            seed=config.train.seed,
            vocab_size=config.model.vocab_size,
            cache=cache,
            say=notes.append,
        )
        return OpenedSamples(samples, tuple(notes))


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


def folder_of(config_file: Path | None, config: RunConfig, out: Path | None) -> Path:
    """`out`, or the folder of a run that is the configuration, or ``runs/<name of the file, of the
    model's folder, or of the preset>``: the same command finds the same run again."""
    if config_file is not None and config_file.is_dir():
        out = out or config_file
    model = config.model_preset if config.model_path is None else Path(config.model_path).name
    return (out or Path("runs") / (config_file.stem if config_file else model)).expanduser()


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
