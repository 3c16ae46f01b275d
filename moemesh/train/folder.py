"""The run folder: files of a run, written so that a crash at any point loses nothing.

    config.toml plan.json          the resolved configuration and the plan
    schedule.txt                   of a plan whose schedule is a file or searched
    metrics.jsonl loads.jsonl      rows of steps, appended (moemesh.train.row_log)
    ledger.json timeline.json memory.json report.html failure.json
    checkpoints/step-N/            see moemesh.checkpoint.store
    lease                          locked while a run is at work (moemesh.train.lease)
    failures/EPOCH/failure.json    of earlier failures

One process, rank 0, opens and writes it.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Literal

from moemesh.checkpoint.files import CheckpointError, list_names, make_folders, sync_folder
from moemesh.checkpoint.ownership import Claim, Ownership
from moemesh.checkpoint.remote import Place, place_of
from moemesh.checkpoint.stored import candidates
from moemesh.config.changes import Change, compare, kind_of
from moemesh.config.schema import all_keys
from moemesh.config.suggest import explain_unknown_key
from moemesh.train.lease import FILE as LEASE
from moemesh.train.lease import Lease, LeaseLost, RunFolderError, read_claim, read_epoch
from moemesh.train.row_log import Cut, RowLog, cut_after

CHECKPOINTS, LOGS, CONFIG = "checkpoints", "logs", "config.toml"
#: Any of these makes a folder a run. config.toml does not: users keep their own under that name.
MARKS = (LEASE, "plan.json", "metrics.jsonl")
STEP = re.compile(r"step-(0|[1-9][0-9]*)")


class RunFolder:
    """An opened run folder. `has_run` says whether an earlier run left something to resume."""

    def __init__(self, path: Path, *, has_run: bool, checkpoints: Place | None = None) -> None:
        self.path, self.has_run = path, has_run
        #: Where the checkpoint store keeps its steps.
        self.checkpoints = checkpoints or path / CHECKPOINTS
        self._lease: Lease | None = None
        self._ownership: Ownership | None = None
        #: To checkpoints that are not in the run folder.
        self._claim: Claim | None = None
        #: Of the start of the run that may write here now; None where that is not known.
        self.epoch: int | None = None

    @staticmethod
    def open(
        path: str | Path,
        resume: Literal["auto", "never", "must"] = "auto",
        checkpoint_folder: str = "",
    ) -> RunFolder:
        """Opens or creates the folder under the rules of `train.resume`; call :meth:`lock` next.

        Raises RunFolderError as :meth:`inspect` does, and where it cannot be created.
        """
        folder = RunFolder.inspect(path, resume, checkpoint_folder)
        try:
            make_folders(folder.path)
            make_folders(folder.checkpoints)
        except OSError as error:
            message = f"{folder.path}: cannot be created ({error.strerror})"
            raise RunFolderError(message) from error
        return folder

    @staticmethod
    def inspect(
        path: str | Path,
        resume: Literal["auto", "never", "must"] = "auto",
        checkpoint_folder: str = "",
    ) -> RunFolder:
        """The folder as it is, or is not yet, under the rules of `train.resume`; writes nothing.

        auto resumes a run or starts one; never refuses a folder with anything in it; must refuses
        one without a checkpoint. Raises RunFolderError.
        """
        path = Path(path).expanduser()
        names = _names(path)
        checkpoints = place_of(checkpoint_folder) if checkpoint_folder else path / CHECKPOINTS
        has_checkpoint = bool(_steps(checkpoints))
        has_run = has_checkpoint or any(mark in names for mark in MARKS)
        if resume == "never" and (names - {LEASE, CHECKPOINTS} or has_checkpoint):
            raise RunFolderError(
                f'{path} holds {", ".join(sorted(names)[:5])} and train.resume is "never": '
                'choose another folder, or train.resume = "auto" to go on with the run in it'
            )
        if resume == "must" and not has_checkpoint:
            raise RunFolderError(
                f'{path} holds no checkpoint and train.resume is "must": check the folder, or set '
                'train.resume = "auto" to start a run'
            )
        foreign = sorted(name for name in names - {CHECKPOINTS, LOGS} if name[0] != ".")
        if not has_run and foreign:
            held = ", ".join(foreign[:5]) + (", ..." if len(foreign) > 5 else "")
            raise RunFolderError(
                f"{path} holds {held} but no run; a run would write among them: choose a folder of "
                f"its own, such as {path / 'run'}"
            )
        return RunFolder(path, has_run=has_run, checkpoints=checkpoints)

    def row_log(self, name: str, say: Callable[[str, str], None] | None = None) -> RowLog:
        """A ``.jsonl`` file to append to; `say` as of :class:`RowLog`."""
        return RowLog(self._file(name), say)

    def cut_after(self, name: str, step: int) -> Cut:
        """Cut a ``.jsonl`` file back to the rows up to `step`; see :func:`row_log.cut_after`."""
        return cut_after(self._file(name), step)

    def saved_steps(self) -> set[int]:
        """The steps of the checkpoints in the folder, whole or not, those being written too."""
        names = (name.partition(".tmp-")[0] for name in list_names(self.checkpoints))
        found = (STEP.fullmatch(name) for name in names)
        return {int(match[1]) for match in found if match}

    def changes(self, new: str, allowed: Collection[str] = ()) -> list[Change]:
        """What differs between the configuration of the run in this folder and the text `new` of
        another; none where there is no run. Raises RunFolderError for what must not differ, unless
        its key is `allowed`."""
        if not self.has_run or (earlier := read_recorded(self.path)) is None:
            return []
        found = compare(earlier, new)
        refuse_changes(found, frozenset(allowed))
        return found

    def lock(
        self, *, takeover: bool = False, say: Callable[[str], None] = lambda text: None
    ) -> None:
        """Takes the lease, and claims checkpoints that are kept elsewhere; raises RunFolderError or
        OwnedError saying who holds them. `takeover` as of :meth:`Lease.take`, `say` as of
        :meth:`Ownership.take`.

        The lock dies with the process (and with children forked while it is held), so a crashed run
        never blocks the next one.
        """
        assert self._lease is None, "locked already"
        self._lease = Lease.take(self.path, takeover=takeover)
        self.epoch = self._lease.epoch
        if self.checkpoints == self.path / CHECKPOINTS:
            return
        try:
            run = self._lease.run
            self._ownership = Ownership.take(self.checkpoints, run, takeover=takeover, say=say)
            self._claim = self._ownership.claim
            self._lease.note_claim(self._claim.number)
        except BaseException:
            self.release()
            raise

    def join(self) -> None:
        """Write under the lease of another process of this run, which holds it now."""
        self.epoch = read_epoch(self.path)
        if self.checkpoints != self.path / CHECKPOINTS and (found := read_claim(self.path)):
            run, number = found
            self._claim = Claim(folder=self.checkpoints, run=run, number=number)

    def raise_epoch(self) -> None:
        """The same run starts its ranks anew."""
        assert self._lease is not None
        self._lease.raise_epoch()
        self.epoch = self._lease.epoch

    def is_ours(self) -> bool:
        """Whether no other run has taken the folder over."""
        return self.epoch is None or read_epoch(self.path) in (self.epoch, None)

    def check_lease(self) -> None:
        """Raises LeaseLost where another run has taken the folder over."""
        if not self.is_ours():
            raise LeaseLost(self._taken_over())

    def lost(self) -> str | None:
        """Why this run may not change its checkpoints any more; None where it may. Raises OSError
        or CheckpointError where a folder elsewhere does not answer."""
        if not self.is_ours():
            return self._taken_over()
        return None if self._claim is None else self._claim.lost()

    def _taken_over(self) -> str:
        return f"another run has taken over {self.path}: this one stops and writes nothing more"

    def release(self) -> None:
        """Gives lease and claim back; nothing happens when they are not held."""
        if self._ownership is not None:
            self._ownership.release()
            self._ownership = None
        if self._lease is not None:
            self._lease.release()
            self._lease = None

    def write_text(self, name: str, text: str) -> Path:
        """Writes a file whole: readers and crashes meet the old or the new content, never half."""
        target = self._file(name)
        temporary = target.with_name(f".{name}.tmp")
        try:
            with temporary.open("w", encoding="utf-8", newline="\n") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
            sync_folder(target.parent)
        except OSError as error:  # that of a full disk names no file
            with suppress(OSError):
                temporary.unlink()
            raise OSError(error.errno, error.strerror, str(target)) from error
        return target

    def write_json(self, name: str, value: object) -> Path:
        """Writes a JSON file whole."""
        return self.write_text(name, json.dumps(value, indent=1) + "\n")

    def _file(self, name: str) -> Path:
        assert name == Path(name).name and not name.startswith("."), f"not a plain name: {name}"
        return self.path / name


#: The name by which --allow-change accepts data that were changed in place.
DATA_CHANGE = "data"


def read_recorded(path: Path) -> str | None:
    """The text of the ``config.toml`` in a run folder; None where there is none. Raises
    RunFolderError for a file that cannot be read."""
    file = path / CONFIG
    try:
        return file.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RunFolderError(f"{file}: cannot be read ({error.strerror or error})") from error
    except UnicodeDecodeError as error:
        raise RunFolderError(
            f"{file}: is not UTF-8 text ({error.reason} at byte {error.start}): it is not what the "
            "run wrote; put it back, or choose another folder"
        ) from error


def refuse_changes(changes: list[Change], allowed: frozenset[str] = frozenset()) -> None:
    """Raises RunFolderError for model changes and for training changes with a key not allowed."""
    model = [change for change in changes if change.kind == "model"]
    training = [c for c in changes if c.kind == "training" and c.key not in allowed]
    if not model and not training:
        return
    lines = ["this is not the configuration that the run in this folder was started with:"]
    lines += [f"  {change}" for change in model + training]
    if model:
        lines.append("the model cannot change on resume: choose another folder for it, --out")
    if training:
        lines.append("to train it beside the other: another folder, --out")
        keys = " ".join(f"--allow-change {change.key}" for change in training)
        lines.append(f"to go on with another course of training: {keys}")
    raise RunFolderError("\n".join(lines))


def refuse_unknown_permissions(names: Iterable[str]) -> None:
    """Raises RunFolderError for a name of --allow-change that permits nothing."""
    keys = all_keys()
    for name in names:
        if name == DATA_CHANGE or (name in keys and kind_of(name, {}, {}) != "model"):
            continue
        if name in keys:
            raise RunFolderError(
                f"--allow-change {name}: the model cannot change on resume; choose another folder "
                "for it, --out"
            )
        message, fix = explain_unknown_key(name)
        raise RunFolderError(
            f"--allow-change {name}: {message}; {fix or 'name a key, such as train.lr'}"
            f" ({DATA_CHANGE} stands for data that were changed in place)"
        )


def _names(path: Path) -> set[str]:
    """The names in a folder; none when it does not exist. RunFolderError for anything else."""
    try:
        return set(os.listdir(path))
    except FileNotFoundError:
        return set()
    except OSError as error:
        raise RunFolderError(f"{path}: cannot be a run folder ({error.strerror})") from error


def checkpoints_of(run: Path) -> Place:
    """Where the run in a folder keeps its checkpoints, as its config.toml says."""
    try:
        with (run / CONFIG).open("rb") as file:
            kept_at = tomllib.load(file)["train"]["checkpoint_folder"]
    except (OSError, ValueError, KeyError, TypeError):
        kept_at = ""
    return place_of(kept_at) if isinstance(kept_at, str) and kept_at else run / CHECKPOINTS


def _steps(checkpoints: Place) -> list[int]:
    try:
        return candidates(checkpoints)
    except (CheckpointError, OSError) as error:
        raise RunFolderError(f"{checkpoints}: cannot be read ({error})") from error
