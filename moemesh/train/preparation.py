"""All that `moemesh train` can check and tell before torch is imported and a rank is started.

Settings, device, memory, data, tokenizer, weights, adapters, the run folder and its earlier run.
Nothing is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from moemesh.checkpoint.stored import candidates
from moemesh.comm import devices
from moemesh.config.errors import ConfigError
from moemesh.config.load import Resolved, resolved_toml
from moemesh.config.run import RunConfig
from moemesh.data import sources
from moemesh.data.tokenizer import DataError
from moemesh.train.disk import DiskNeed, disk_need, refuse_full_disk
from moemesh.train.folder import Change, RunFolder, refuse_unknown_permissions
from moemesh.train.kept_schedule import readable
from moemesh.train.preflight import untrainable
from moemesh.train.preflight_warnings import refuse_too_large
from moemesh.train.recorded_orders import refuse_unrecorded
from moemesh.train.weight_sources import check_adapters, check_folder


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """A run that nothing speaks against: its configuration, folder and what is found there.

    `readable`: the configuration with the run folder's copy in place of a schedule file that is
    gone; `steps`: of the checkpoints, newest first;
    `disk`: what they need.
    """

    config: RunConfig
    readable: RunConfig
    folder: RunFolder
    changes: tuple[Change, ...]
    steps: tuple[int, ...]
    disk: DiskNeed


def prepare(
    resolved: Resolved,
    config_file: Path | None,
    out: Path | None,
    allowed_changes: Sequence[str] = (),
) -> Preparation:
    """Look at everything. Raises a UserError for the first part that is wrong, all problems of
    settings together."""
    refuse_unknown_permissions(allowed_changes)
    config = resolved.config
    path = folder_of(config_file, config, out)
    kept = replace(config, plan=readable(config.plan, path))
    check_machine(replace(resolved, config=kept), config_file)
    folder = RunFolder.inspect(path, config.train.resume, config.train.checkpoint_folder)
    steps = tuple(candidates(folder.checkpoints))
    # The newest checkpoint may turn out damaged: then the run goes on from an older one.
    refuse_unrecorded(config, None if steps else 0)
    finished = config.train.epochs is None and bool(steps) and steps[0] >= config.train.steps
    look = disk_need if finished else refuse_full_disk
    return Preparation(
        config=config,
        readable=kept,
        folder=folder,
        changes=tuple(folder.changes(resolved_toml(config), allowed_changes)),
        steps=steps,
        disk=look(config, folder.checkpoints),
    )


def check_machine(resolved: Resolved, config_file: Path | None = None) -> None:
    """What a run asks of this machine: inputs, memory, weights. Raises a UserError."""
    check_inputs(resolved, config_file)
    check_room(resolved.config)
    check_sources(resolved.config)


def check_inputs(resolved: Resolved, config_file: Path | None = None) -> None:
    """What is trained at all, a device that was named, data and tokenizer. Raises a UserError."""
    config = resolved.config
    if problems := untrainable(resolved):
        raise ConfigError(problems)
    devices.refuse_missing(config.train.device, config.plan.world_size)
    _check_data(config, config_file)


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
    """`out`, or ``runs/<name of the file, of the model's folder, or of the preset>``: the same
    command finds the same run again."""
    model = config.model_preset if config.model_path is None else Path(config.model_path).name
    return (out or Path("runs") / (config_file.stem if config_file else model)).expanduser()


def _check_data(config: RunConfig, config_file: Path | None) -> None:
    """As :func:`moemesh.data.sources.check`; of a file that stands beside the configuration and not
    where the path points, the message says so."""
    data = config.data
    try:
        sources.check(data, config.model.vocab_size)
    except DataError as error:
        home = Path() if config_file is None else config_file.parent
        named = [source.path for source in data.all_sources] + [data.validation, data.tokenizer]
        for name in filter(None, named):
            if not Path(name).expanduser().exists() and (home / name).exists():
                raise DataError(
                    f"{error}; {home / name} is there, but paths do not count from the folder of "
                    f"{config_file}"
                ) from error
        raise
