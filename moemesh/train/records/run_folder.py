"""The run folder: files of a run, which can resume after a crash at any point.

    config.toml plan.json          the resolved configuration and the plan
    schedule.txt                   of a plan whose schedule is a file or searched
    metrics.jsonl loads.jsonl      rows of steps, appended (moemesh.train.records.rows)
    ledger.json timeline.json memory.json report.html failure.json
    checkpoints/step-N/            see moemesh.checkpoint.store
    lease                          locked while a run is active (moemesh.monitor.lease)
    failures/EPOCH/failure.json    of earlier failures

The process of the user, or rank 0 of torchrun, opens and locks it. Rank 0 writes rows and results;
the process that watches the ranks adds events and reports of failures.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from moemesh.checkpoint.files import CheckpointError, list_names, make_folders, replace_by
from moemesh.checkpoint.ownership import Claim
from moemesh.checkpoint.remote import Place, RemotePath, place_of
from moemesh.checkpoint.retention import VERIFIED
from moemesh.checkpoint.stored import candidates, read_manifest
from moemesh.config.changes import Change, compare, kind_of
from moemesh.config.limits import few, parse_json
from moemesh.config.schema import all_keys, explain_unknown_key
from moemesh.config.sources import INPUTS, RUN_CONFIG, RUN_PLAN, input_of_run, with_paths
from moemesh.config.train import Resume
from moemesh.data.samples import Samples
from moemesh.data.tokenizer import has_chat_template
from moemesh.monitor.lease import FILE as LEASE
from moemesh.monitor.lease import (
    Lease,
    LeaseLost,
    RunFolderError,
    read_claim,
    read_start,
    why_lost,
)
from moemesh.trace.machine import file_of
from moemesh.trace.run import EVENTS, LOADS, METRICS, Run, recorded
from moemesh.train.records.rows import RowLog

CHECKPOINTS, LOGS, DATA = "checkpoints", "logs", "data.json"
#: Files with rows of steps, which are cut back when a run resumes.
ROWS = (METRICS, LOADS)
#: Files that make a folder a run. config.toml does not: users keep their own under that name.
MARKS = (LEASE, RUN_PLAN, METRICS)
STEP = re.compile(r"step-(0|[1-9][0-9]*)")
#: Kinds of the events of a run that has saved.
_SAVED = frozenset({"saved", "resumed", "stopped", "finished"})


class Recorded(NamedTuple):
    """The record of a run so far: its configuration as TOML and the record of its data
    (:func:`record_of_data`), each None if unknown. `whose`: the source of both, in words."""

    config: str | None
    data: Any
    whose: str


class RunFolder:
    """An opened run folder. `has_run`: an earlier run has been in it; `checkpoints`:
    folder of the checkpoint store; `epoch`: that of the start that may write now, None if
    unknown."""

    def __init__(self, path: Path, *, has_run: bool, checkpoints: Place | None = None) -> None:
        self.path, self.has_run = path, has_run
        self.checkpoints = checkpoints or path / CHECKPOINTS
        self.epoch: int | None = None
        self._run: str | None = None  # identity of the run in its lease
        self._handle: int | None = None  # handle of the lease, which locates a renamed folder
        self._lease: Lease | None = None
        self._claim: Claim | None = None  # for checkpoints outside of the run folder

    @staticmethod
    def open(
        path: str | Path, resume: Resume | None = "auto", checkpoint_folder: str = ""
    ) -> RunFolder:
        """Opens or creates the folder under the rules of `train.resume`; call :meth:`lock` next.
        `resume` None: no rules, for a rank, since another process has checked them.

        Raises RunFolderError as :meth:`inspect` does, and if it cannot be created.
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
        path: str | Path, resume: Resume | None = "auto", checkpoint_folder: str = ""
    ) -> RunFolder:
        """The folder, existing or not, under the rules of `train.resume`; writes nothing.

        "auto" resumes a run or starts one, but refuses a run without its checkpoints. "never"
        refuses a folder with content, "must" one without a checkpoint; each refuses other files
        without a run. None applies none of these rules, since another rank has checked, and may
        have begun to write. Links are always refused. Raises RunFolderError.
        """
        path = Path(path).expanduser()
        names = names_in(path)
        # Writing under the name of a link would change another file. Devices (/dev/null) are
        # allowed, and checkpoints follow no links.
        for home, folders, files in os.walk(path):
            for name in (*folders, *files):
                link = Path(home, name)
                if link.is_symlink() and not link.is_char_device():
                    raise RunFolderError(
                        f"{link} is a symbolic link, through which a run does not write: remove "
                        "it, or choose another folder"
                    )
            folders[:] = [name for name in folders if name != CHECKPOINTS]
        checkpoints = place_of(checkpoint_folder) if checkpoint_folder else path / CHECKPOINTS
        if str(checkpoints).startswith("memory://"):
            raise RunFolderError(
                f"train.checkpoint_folder {checkpoints} is in the memory of each process by itself "
                "and ends with it: name a folder, or a store such as s3://bucket/prefix"
            )
        has_checkpoint = bool(_steps(checkpoints))
        has_run = has_checkpoint or any(mark in names for mark in MARKS)
        if resume == "never" and (names - {LEASE, CHECKPOINTS} or has_checkpoint):
            raise RunFolderError(
                f'{path} holds {", ".join(sorted(names)[:5])} and train.resume is "never": '
                'choose another folder, or train.resume = "auto" to resume the run in it'
            )
        if resume == "must" and not has_checkpoint:
            raise RunFolderError(
                f'{path} holds no checkpoint and train.resume is "must": check the folder, or set '
                'train.resume = "auto" to start a run'
            )
        if resume == "auto" and METRICS in names and not has_checkpoint:
            run, former = Run.load(path), checkpoints_of(path)
            # A run creates its checkpoint folder before its first step: if that is gone, it may
            # have had checkpoints.
            has_saved = _steps(former) or not former.is_dir() or (former / VERIFIED).exists()
            if run.metrics and (has_saved or any(event.kind in _SAVED for event in run.events)):
                where = f"; it kept them in {former}" if former != checkpoints else ""
                raise RunFolderError(
                    f"{path} records {run.metrics[-1].step} steps, and {checkpoints} holds none of "
                    f"its checkpoints{where}: the run would restart at step 1 and overwrite its "
                    "history: put the checkpoints back, or choose another folder for a new run, "
                    "--out"
                )
        foreign = sorted(name for name in names - {CHECKPOINTS, LOGS} if name[0] != ".")
        if resume is not None and not has_run and foreign:
            raise RunFolderError(
                f"{path} holds {few(foreign, 5)} but no run; a run would write among them: choose "
                f"a folder of its own, such as {path / 'run'}"
            )
        return RunFolder(path, has_run=has_run, checkpoints=checkpoints)

    def row_log(self, name: str, log: Callable[[str, str], None] | None = None) -> RowLog:
        """A ``.jsonl`` file to append to; `log` as in :class:`RowLog`."""
        return RowLog(self._file(name), log, lambda: self.why_lost() is None)

    def set_rows_aside(self) -> list[str]:
        """Renames the non-empty files of rows, with the first free number; returns the new
        names."""
        files = [path for path in map(self._file, ROWS) if path.exists() and path.stat().st_size]
        targets = ([x.with_stem(f"{x.stem}-{n}") for x in files] for n in itertools.count(1))
        free = next(paths for paths in targets if not any(path.exists() for path in paths))
        return [old.rename(new).name for old, new in zip(files, free, strict=True)]

    def saved_steps(self) -> set[int]:
        """The steps of the checkpoints in the folder, including unfinished ones."""
        names = (name.partition(".tmp-")[0] for name in list_names(self.checkpoints))
        return {int(match[1]) for name in names if (match := STEP.fullmatch(name))}

    @cached_property
    def recorded(self) -> Recorded:
        """The record in the newest readable checkpoint, or, if that has none (of an older version),
        in the files of the run folder. Raises RunFolderError for unreadable files, and for a store
        that does not answer."""
        text = self._read_text(RUN_CONFIG)
        for step in _steps(self.checkpoints):
            path = self.checkpoints / f"step-{step}"
            try:
                state = read_manifest(path).state
            except (CheckpointError, OSError) as error:
                if isinstance(path, RemotePath) and isinstance(error, OSError):
                    raise RunFolderError(f"{path}: cannot be read ({error})") from error
                continue  # the loader reports it, and uses an older one
            if isinstance(config := state.get("config"), str):
                # config.toml differs if a start with allowed changes ended before it saved.
                kinds, whose = ("model", "training"), f"the checkpoint {path}"
                changes = compare(config, text or config)
                if keys := [change.key for change in changes if change.kind in kinds]:
                    other = f"another {', '.join(keys)}, with which nothing was saved"
                    whose += f" (config.toml has {other})"
                return Recorded(config, state.get("data"), whose)
            break
        try:
            data = parse_json(self._read_text(DATA) or "null")
        except ValueError as error:
            raise RunFolderError(f"{self.path / DATA}: is not valid JSON ({error})") from error
        return Recorded(text, data, f"the run in {self.path}")

    def _read_text(self, name: str) -> str | None:
        """The text of a file; None if it does not exist. Raises RunFolderError for one that cannot
        be read."""
        file = self.path / name
        try:
            return file.read_bytes().decode("utf-8-sig")
        except FileNotFoundError:
            return None
        except OSError as error:
            raise RunFolderError(f"{file}: cannot be read ({error.strerror or error})") from error
        except UnicodeDecodeError as error:
            raise RunFolderError(
                f"{file}: is not UTF-8 text ({error.reason} at byte {error.start}): it is not what "
                "the run wrote; put it back, or choose another folder"
            ) from error

    def changes(self, new: str, allowed: Collection[str] = ()) -> list[Change]:
        """Differences between the configuration of the run so far (:attr:`recorded`) and the text
        `new`; empty without a run. Raises RunFolderError for forbidden differences, unless their
        keys are `allowed`."""
        if not self.has_run or self.recorded.config is None:
            return []

        def is_same_place(change: Change) -> bool:
            old = input_of_run(self.path, change.key, change.old)
            return with_paths(old, os.path.abspath) == with_paths(change.new, os.path.abspath)

        changes = [
            change
            for change in compare(self.recorded.config, new)
            if change.key not in INPUTS or not is_same_place(change)
        ]
        if _steps(self.checkpoints) == [0]:  # converted weights, which no step has trained yet
            allowed = [change.key for change in changes]
        refuse_changes(changes, frozenset(allowed), self.recorded.whose)
        return changes

    def lock(
        self, *, takeover: bool = False, log: Callable[[str], None] = lambda text: None
    ) -> None:
        """Takes the lease, and claims external checkpoints; raises RunFolderError with the
        description of their holder. `takeover` as in :meth:`Lease.take`, `log` as in
        :meth:`Claim.take`.

        The lock dies with the process (and with children forked while it is held), so a crashed run
        never blocks the next one.
        """
        assert self._lease is None, "locked already"
        self._lease = Lease.take(self.path, takeover=takeover)
        self.epoch, self._run = self._lease.epoch, self._lease.run
        self._handle = self._lease.handle
        if self.checkpoints == self.path / CHECKPOINTS:
            return
        try:
            run = self._lease.run
            self._claim = Claim.take(self.checkpoints, run, takeover=takeover, log=log)
            self._lease.note_claim(self._claim.number)
        except BaseException:
            self.release()
            raise

    def join(self) -> None:
        """Write under the lease that another process of this run holds now."""
        self._run, self.epoch = read_start(self.path)
        with suppress(OSError):
            self._handle = os.open(self.path / LEASE, os.O_RDONLY | os.O_CLOEXEC)
        if self.checkpoints != self.path / CHECKPOINTS and (claim := read_claim(self.path)):
            run, number = claim
            self._claim = Claim(self.checkpoints, run, number)

    def raise_epoch(self) -> None:
        """Begin the epoch of a restart of the ranks; raises RunFolderError if the run has lost the
        folder."""
        assert self._lease is not None
        self.check_lease()
        self._lease.raise_epoch()
        self.epoch = self._lease.epoch

    def why_lost(self) -> str | None:
        """The reason why this run may no longer write into the folder; None if it may."""
        return None if self.epoch is None else why_lost(self.path, self._run, self.epoch)

    def check_lease(self) -> None:
        """Raises LeaseLost if the run has lost the folder."""
        if (reason := self.why_lost()) is not None:
            raise self.lease_lost(reason)

    def lost(self) -> str | None:
        """The reason why this run may no longer change its checkpoints; None if it may. Raises
        OSError or CheckpointError if an external folder does not answer."""
        return self.why_lost() or (None if self._claim is None else self._claim.lost())

    def present_path(self) -> Path | None:
        """The folder of this run, even after it was renamed; None if unknown."""
        if self.why_lost() is None:
            return self.path
        lease = None if self._handle is None else file_of(self._handle)
        run = None if lease is None else lease.parent
        is_own = run is not None and read_start(run) == (self._run, self.epoch)
        return run if is_own else None

    def lease_lost(self, reason: str) -> LeaseLost:
        """The error that ends this run because of `reason`, with the path of its last
        checkpoint."""
        path, checkpoints = self.present_path(), self.checkpoints
        if checkpoints == self.path / CHECKPOINTS:
            checkpoints = None if path is None else path / CHECKPOINTS
        steps = list[int]()
        with suppress(RunFolderError):
            steps = [] if checkpoints is None else _steps(checkpoints)
        if "taken over" in reason:
            advice = (
                "the other run resumes from the newest checkpoint; to train both, give this run "
                "folders of its own (--out, train.checkpoint_folder)"
            )
        elif steps:
            advice = f"the last checkpoint of this run is {checkpoints / f'step-{steps[0]}'}"
            advice += "" if path is None else f"; --out {shlex.quote(str(path))} resumes from it"
        else:
            advice = "no checkpoint of this run is left: the same command starts from the beginning"
        if path not in (None, self.path):
            reason += f": it is {path} now"
        return LeaseLost(f"{reason}: this run stops and writes nothing more", advice, path)

    def release(self) -> None:
        """Releases lease and claim, if held."""
        if self._claim is not None:
            self._claim.release()
        if self._lease is not None:
            self._lease.release()
            self._lease = self._handle = None

    def write_text(self, name: str, text: str) -> None:
        """Writes a file atomically: readers and crashes see the old or the new content. Raises
        LeaseLost if the run has lost the folder."""
        self.check_lease()
        replace_by(self._file(name), [text.encode()])

    def write_json(self, name: str, value: object) -> None:
        """Writes a JSON file atomically."""
        self.write_text(name, json.dumps(value, indent=1) + "\n")

    def _file(self, name: str) -> Path:
        assert name == Path(name).name and not name.startswith("."), f"not a plain name: {name}"
        return self.path / name


#: Name for --allow-change that accepts data that were changed in place.
DATA_CHANGE = "data"


def refuse_changes(
    changes: list[Change],
    allowed: frozenset[str] = frozenset(),
    whose: str = "the run in this folder",
) -> None:
    """Raises RunFolderError for changes of the model, and for changes of the training whose key is
    not `allowed`. `whose`: the run that they differ from, in words."""
    model = [change for change in changes if change.kind == "model"]
    training = [c for c in changes if c.kind == "training" and c.key not in allowed]
    if not model and not training:
        return
    lines = [f"this is not the configuration of {whose}:"]
    lines += [f"  {change}" for change in model + training]
    other = "choose another folder for it, --out (and train.checkpoint_folder where that is set)"
    if model:
        lines.append(f"the model cannot change on resume: {other}")
    if training:
        lines.append(f"to train it beside the other: {other}")
        keys = " ".join(f"--allow-change {change.key}" for change in training)
        lines.append(f"to resume with another course of training: {keys}")
    raise RunFolderError("\n".join(lines))


def refuse_unknown_permissions(names: Iterable[str]) -> None:
    """Raises RunFolderError for a name of --allow-change without effect."""
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
            f" ({DATA_CHANGE} is for data that were changed in place)"
        )


def names_in(path: Path) -> set[str]:
    """The names in a folder; empty if it does not exist. Raises RunFolderError for a file."""
    try:
        return set(os.listdir(path))
    except FileNotFoundError:
        return set()
    except OSError as error:
        raise RunFolderError(f"{path}: cannot be read as a folder ({error.strerror})") from error


def checkpoints_of(run: Path) -> Place:
    """The checkpoint folder of the run in a folder, from its config.toml."""
    kept_at = recorded(run, "train", "checkpoint_folder")
    return place_of(kept_at) if isinstance(kept_at, str) and kept_at else run / CHECKPOINTS


def _steps(checkpoints: Place) -> list[int]:
    try:
        return candidates(checkpoints)
    except (CheckpointError, OSError) as error:
        raise RunFolderError(f"{checkpoints}: cannot be read ({error})") from error


def now() -> str:
    """The time of a record."""
    return datetime.now(UTC).isoformat(timespec="seconds")


class Events:
    """Appends events to ``events.jsonl``, one a line; while the disk is full, they wait in
    memory."""

    def __init__(self, folder: RunFolder | None) -> None:
        """`folder` None: no events are written (on every rank but the first)."""
        self._log = None if folder is None else folder.row_log(EVENTS)

    def add(self, kind: str, text: str, step: int | None = None) -> None:
        """`kind`: a word such as "alarm"; `step`: the last finished step."""
        if self._log is None:
            return
        self._log.append([{"time": now(), "step": step, "kind": kind, "text": text}])


#: Keys of [data] without effect on the training samples and their order.
WITHOUT_EFFECT = frozenset({"global_batch", "bad_record_share", "cache"})


def record_of_data(samples: Samples) -> dict[str, Any]:
    """Each source with its tokens, training samples and share, and the fingerprint of all."""
    shares = samples.interleaving.counts / samples.interleaving.period
    return {
        "sources": [
            {
                "name": split.source.name,
                "tokens": split.num_tokens,
                "training_samples": len(split.training),
                "share": float(share),
                "without_loss": split.without_loss,
                "loss_tokens": split.num_learned,
            }
            for split, share in zip(samples.splits, shares, strict=True)
        ],
        "validation_samples": samples.num_validation,
        "notes": samples.notes,
        "fingerprint": samples.fingerprint(),
    }


def was_tuned_on_conversations(run: Path) -> bool:
    """Whether a source of the run in this folder, if any, has conversations."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        sources = parse_json((run / DATA).read_text(encoding="utf-8"))["sources"]
        return any(source.get("loss_tokens") is not None for source in sources)
    return False


def answers_chats(run: Path, tokenizer: str) -> bool:
    """Whether the run was tuned on conversations that the template of `tokenizer` renders."""
    return was_tuned_on_conversations(run) and has_chat_template(tokenizer)


def changes_samples(key: str) -> bool:
    """Whether another value of the dotted `key` changes training samples or their order."""
    section, _, name = key.partition(".")
    return key == "train.seed" or (section == "data" and name not in WITHOUT_EFFECT)


def refuse_other_data(folder: RunFolder, samples: Samples, *, allowed: bool) -> None:
    """Raises RunFolderError if a resumed run would read other samples than it began with, or in
    another order, under the same configuration."""
    recorded_data, whose = folder.recorded.data, folder.recorded.whose
    if allowed or recorded_data is None:
        return
    try:
        old, facts = dict(recorded_data["fingerprint"]), list(recorded_data["sources"])
    except (ValueError, KeyError, TypeError) as error:
        raise RunFolderError(f"{whose}: has no record of its data ({error})") from error
    new = samples.fingerprint()
    if old == new:
        return
    lines = [f"the data are not those of {whose}:"]
    for number, (split, fact) in enumerate(zip(samples.splits, facts, strict=False), start=1):
        if old.get(f"source {number}") != new[f"source {number}"]:
            before, after = fact["tokens"], split.num_tokens
            text = "the same number, but other tokens" if before == after else f"{after:,}"
            lines.append(f"  {split.source.name}: {before:,} tokens then, {text} now")
    if len(lines) == 1:
        lines.append("  the order of the samples is another one")
    lines += [
        "the text, or the tokenizer, was changed in place; put it back, or",
        "to train on the new data from the beginning: another folder, --out",
        f"to continue with the new data at the same count of samples: --allow-change {DATA_CHANGE}",
    ]
    raise RunFolderError("\n".join(lines))
