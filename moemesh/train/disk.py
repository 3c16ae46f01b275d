"""Room on the disk for the checkpoints of a run, asked for before its first step; without torch."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import NamedTuple

from moemesh.checkpoint.files import file_limit, free_bytes
from moemesh.checkpoint.remote import Place
from moemesh.config.errors import UserError
from moemesh.config.run import RunConfig
from moemesh.config.tuning import tuned_tensors
from moemesh.trace.memory_profile import format_bytes

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
    """What the run needs in the folder `checkpoints`, which need not exist yet."""
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
