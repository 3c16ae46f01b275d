"""Saves of several ranks: staged, written, read back, committed by one rename, tried again.

A run saves beside its steps (:class:`Saver`), a program while it waits (:func:`save`); the protocol
is one. A thread of each rank writes. It calls no collective, because threads of different ranks
would enter theirs at different points between the collectives of training, and every group, a group
of its own included, would need the same order on all ranks. So the ranks talk through files of the
temporary folder:

- rank 0 makes ``step-N.tmp-<id>``; the id of every attempt follows from the step's, which all know;
- every rank writes and reads back its file there, then ``report-NNNNN.json``, by a rename;
- rank 0 commits when it has all reports, by the rename that the others wait for. When something
  fails it removes the folder, waits, and makes that of the next attempt, in which all write again.

In an object store every attempt writes files of its own names into ``step-N``. The manifest,
created only where there is none, is the commit. No attempt writes over or deletes anything there: a
run that was thought dead may still be writing, and requests that failed may still arrive.

Rank 0 looks whether the folder is still the run's before it commits and before each deletion.
Collectives are called in :meth:`Saver.start` and :meth:`Saver.finish` alone, by the caller's loop,
which all ranks do at the same points. Where the files fail as a channel (a rank that cannot even
write its report on a full disk), `finish` carries the news.
"""

from __future__ import annotations

import atexit
import json
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch

from moemesh.checkpoint import files
from moemesh.checkpoint.files import CheckpointError
from moemesh.checkpoint.load import Shard
from moemesh.checkpoint.manifest import MANIFEST, MANIFEST_LIMIT, Manifest
from moemesh.checkpoint.remote import Place, RemotePath
from moemesh.checkpoint.retention import Standing, prune, remember
from moemesh.checkpoint.stored import read_manifest
from moemesh.checkpoint.writing import check_shards, check_step, commit, write_part
from moemesh.config.limits import parse_json
from moemesh.trace.machine import available_bytes

#: Seconds between the attempts of one save.
PAUSES = (0.5, 2.0, 5.0, 10.0)
#: Seconds that a rank whose training has ended in an error waits for others without any news.
_LAST_WAIT = 10.0
#: Seconds in which the folder that rank 0 makes is seen by all others.
FOLDER_SECONDS = 60.0
#: Seconds in which a report that is being written becomes one that can be read: file systems that
#: are no object stores may show the half of it.
REPORT_SECONDS = 10.0
#: Seconds between two looks at the folder, or at the other ranks: the first, and the longest.
FIRST_LOOK, LONGEST_LOOK = 0.001, 0.25
#: Largest share of the memory that is free on a machine, for the buffers of all its ranks.
LARGEST_SHARE = 0.5
#: Each copy starts at a multiple of this, as torch's own tensors do.
_ALIGNMENT = 64

#: JSON of this rank -> the JSON of all ranks, in rank order.
Gather = Callable[[object], list[Any]]


class SaveOutcome(NamedTuple):
    """The end of a save: `problem` None where it was committed, `seconds` from its start to there,
    `nonfinite` the tensors with numbers that are not finite, `is_lost` whether the folder is that
    of another run now."""

    step: int
    problem: str | None
    seconds: float
    nonfinite: Sequence[str] = ()
    is_lost: bool = False


def save(
    folder: Place,
    step: int,
    shards: Sequence[Shard],
    state: dict[str, Any],
    *,
    rank: int = 0,
    world_size: int = 1,
    gather: Gather = lambda reply: [reply],
) -> Place:
    """Saves all ranks' shards and rank 0's `state` as ``folder/step-<step>``; all ranks call it,
    one where nothing is said of ranks.

    Raises CheckpointError on every rank when any of them fails (disk full, a hole or an overlap in
    a tensor, the step exists); then nothing new is left and older checkpoints are untouched. A
    process that dies instead leaves a ``.tmp`` folder, which the next
    :func:`moemesh.checkpoint.retention.prune` removes.
    """
    saver = Saver(folder, rank=rank, world_size=world_size, gather=gather, pauses=())
    try:
        saver.start(step, shards, state)
        outcome = saver.finish()
    finally:
        saver.close()
    assert outcome is not None
    if outcome.problem is not None:
        who = "" if outcome.problem.startswith("rank ") else "rank 0: "
        raise CheckpointError(f"checkpoint not saved: {who}{outcome.problem}")
    return folder / f"step-{step}"


class Saver:
    """One rank's part in the saves of a run; all ranks make one."""

    def __init__(
        self,
        folder: Place,
        *,
        rank: int,
        world_size: int,
        gather: Gather,
        keep: int | None = None,
        in_background: bool = False,
        ranks_on_machine: int = 1,
        lost: Callable[[], str | None] = lambda: None,
        pauses: Sequence[float] | None = None,
    ) -> None:
        """`gather` takes JSON of this rank to the JSON of all. `keep`: as of
        :func:`moemesh.checkpoint.retention.prune`; None: no checkpoint is deleted. `lost`: why the
        folder is no more the run's, or None; rank 0 asks before it commits or deletes. `pauses`:
        seconds between the attempts of a save, by default :data:`PAUSES`."""
        self.folder, self.keep = folder, keep
        self.rank, self.world_size = rank, world_size
        self.pauses = PAUSES if pauses is None else pauses
        self._gather, self.lost = gather, lost
        self._in_background = in_background
        self._staging = Staging(ranks_on_machine)
        self._job: SaveJob | None = None
        jobs: SimpleQueue[SaveJob | None] = SimpleQueue()
        self._jobs = jobs

        def work() -> None:
            for job in iter(jobs.get, None):
                job.run()
                del job  # and its tensors

        # Started now: at a save there may be no memory for a thread, or not enough for it to begin.
        worker = threading.Thread(target=work, name="save", daemon=True)
        worker.start()
        weakref.finalize(self, jobs.put, None)
        # The interpreter waits for the save under way, also where training ended in an error.
        self._at_exit = lambda: (jobs.put(None), worker.join())
        self._hurries: Callable[[], bool] = lambda: False
        atexit.register(self._at_exit)
        #: On rank 0: what failed, and did not end a save.
        self.notes: list[str] = []
        #: Why the last save was not in the background although it was to be.
        self.why_blocking: str | None = None

    def start(
        self,
        step: int,
        shards: Sequence[Shard],
        state: dict[str, Any],
        *,
        hurries: Callable[[], bool] = lambda: False,
    ) -> None:
        """Begin to save `shards` and rank 0's `state` as ``step-<step>``; all ranks call, between
        steps and with no save under way. While a rank waits for its end, `hurries` returns whether
        a failed attempt is the last.

        Returns when the tensors may change: after a copy of them, or, where saves are not in the
        background, after the save. Raises CheckpointError on every rank for what cannot be saved.
        """
        assert self._job is None, "finish the last save first"
        since, keyed = time.monotonic(), dict[str, Shard]()
        problem = missing = None
        try:
            keyed = check_shards(shards)
            check_step(self.folder / f"step-{step}", state if self.rank == 0 else {})
            missing = self._staging.reserve(keyed) if self._in_background else None
        except (CheckpointError, OSError) as error:
            problem = str(error)
        identity = uuid.uuid4().hex if self.rank == 0 else ""
        own = {"step": step, "identity": identity, "problem": problem, "missing": missing}
        replies = self._gather(own)
        num = len(replies)
        assert num == self.world_size, f"gather gave {num} replies of {self.world_size} ranks"
        for rank, reply in enumerate(replies):
            if reply["problem"]:
                raise CheckpointError(f"checkpoint not saved: rank {rank}: {reply['problem']}")
        if {reply["step"] for reply in replies} != {step}:
            raise CheckpointError(f"ranks save different steps: {[r['step'] for r in replies]}")
        blocking = [f"rank {n}: {r['missing']}" for n, r in enumerate(replies) if r["missing"]]
        self.why_blocking = blocking[0] if blocking else None
        stages = self._in_background and not blocking
        # Of the state, text: what it holds may change with the next step.
        content = json.dumps(state) if self.rank == 0 else "{}"
        if stages:
            keyed = self._staging.copy(keyed)
        self._job = SaveJob(self, step, replies[0]["identity"], keyed, content, since)
        self._hurries = hurries
        self._jobs.put(self._job)
        if not stages:
            self._settle(self._job)

    def finish(self, *, hurry: bool = False) -> SaveOutcome | None:
        """Wait for the save under way; all ranks call. None where there is none.

        `hurry`: an attempt that fails now is not followed by another one. Returns the same on every
        rank.
        """
        if (job := self._job) is None:
            return None
        if hurry:
            job.hurried.set()
        outcome = self._settle(job)
        job.sweep()
        self._job = None
        return outcome

    def _settle(self, job: SaveJob) -> SaveOutcome:
        """Wait until the save has ended on all ranks. Every rank asks all others as often."""
        pause = FIRST_LOOK
        while True:
            own = {"outcome": job.outcome and job.outcome._asdict(), "untold": job.untold}
            replies = self._gather(own | {"hurries": self._hurries()})
            if any(reply["hurries"] for reply in replies):
                job.hurried.set()
            if all(reply["outcome"] for reply in replies):
                return SaveOutcome(**replies[0]["outcome"])
            if replies[0]["outcome"]:
                job.stopped.set()  # rank 0 has decided: nobody needs to wait for files any more
            for rank, reply in enumerate(replies):
                if reply["untold"]:
                    attempt, problem = reply["untold"]
                    job.told[attempt] = f"rank {rank}: {problem}"
            job.ended.wait(pause)
            pause = min(2 * pause, LONGEST_LOOK)

    def news(self) -> list[str]:
        """On rank 0: what failed since the last call, and did not end the save."""
        found, self.notes = self.notes, []
        return found

    def abandon(self) -> None:
        """End the save under way without a word to the others: this process is to end at once."""
        if self._job is not None:
            self._job.stopped.set()

    def close(self) -> None:
        """End the save under way, if there is one, and the thread."""
        self.abandon()
        atexit.unregister(self._at_exit)
        self._jobs.put(None)


class _Stopped(Exception):
    """This save is not to be finished."""


class _Lost(Exception):
    """The folder is that of another run now."""


class SaveJob:
    """One save on one rank: :meth:`run` it in another thread than the one that waits for it."""

    def __init__(
        self,
        saver: Saver,
        step: int,
        identity: str,
        keyed: Mapping[str, Shard],
        state: str,
        since: float,
    ) -> None:
        self._saver, self._step, self._identity = saver, step, identity
        self._keyed, self._state = keyed, state
        self._final = saver.folder / f"step-{step}"
        self._is_remote = isinstance(self._final, RemotePath)
        self._num_attempts, self._num_failed = len(saver.pauses) + 1, 0
        self._since = self._since_news = since
        self.stopped, self.hurried, self.ended = (threading.Event() for _ in range(3))
        self.outcome: SaveOutcome | None = None
        #: What this rank could not report, and in which attempt (None: in any), because the folder
        #: takes nothing any more; and on rank 0 what others could not report, by attempt.
        self.untold: tuple[int | None, str] | None = None
        self.told: dict[int | None, str] = {}

    def run(self) -> None:
        """Save, and say how it ended in `outcome`."""
        problem, nonfinite, is_lost = None, (), False
        try:
            if self._saver.rank == 0:
                nonfinite = self._lead()
            else:
                self._follow()
        except (CheckpointError, _Stopped, _Lost) as error:
            problem, is_lost = str(error), isinstance(error, _Lost)
        except BaseException as error:  # whatever it is: the others must not wait for this rank
            problem = f"{type(error).__name__}: {error}"
            self.untold = None, problem
        seconds = time.monotonic() - self._since
        self.outcome = SaveOutcome(self._step, problem, seconds, nonfinite, is_lost)
        self.ended.set()

    def sweep(self) -> None:
        """Remove what is left of failed attempts, in which other ranks may have written longer than
        rank 0 did; now all have ended."""
        for number in range(self._num_failed):
            files.remove_folder(self._temporary(number))

    def _lead(self) -> Sequence[str]:
        """On rank 0: attempts until one is committed, and retention; the tensors that are not
        finite. Raises CheckpointError with what was wrong with the last attempt."""
        saver = self._saver
        for number, pause in enumerate((*saver.pauses, None)):
            try:
                manifest = self._attempt(number)
                break
            except (CheckpointError, OSError) as error:
                folder = self._temporary(number)
                self._check_owner()
                problem = str(files.explain(error, folder) if isinstance(error, OSError) else error)
                files.remove_folder(folder)
                self._num_failed = number + 1
            if pause is not None and not self.hurried.is_set():
                saver.notes.append(f"{problem}; trying again in {pause:g} s")
                self._since_news = time.monotonic()
                while time.monotonic() - self._since_news < pause and not self.hurried.is_set():
                    self._pause()
            if pause is None or self.hurried.is_set():
                raise CheckpointError(problem)
        try:  # what fails here costs space, no checkpoint
            if saver.keep is not None:
                if isinstance(self._final, RemotePath):
                    # What other attempts and runs that died have left beside the committed files.
                    names = self._final.names()
                    self._check_owner()
                    for name in sorted({*names} - {MANIFEST, *manifest.files}):
                        (self._final / name).remove()
                self._check_owner()
                own = Standing(self._step, manifest.digest, True, not manifest.nonfinite)
                remember(saver.folder, [own])
                prune(saver.folder, saver.keep, check=self._check_owner)
        except (CheckpointError, OSError) as error:
            saver.notes.append(f"older checkpoints were not cleaned up: {error}")
        return manifest.nonfinite or ()

    def _attempt(self, number: int) -> Manifest:
        temporary, ranks = self._temporary(number), range(self._saver.world_size)
        self._check_owner()
        if files.is_committed(self._final):
            # By an earlier attempt, although a request of it failed, or by somebody else.
            if self._is_remote:
                manifest = read_manifest(self._final)
                attempts = range(self._num_attempts)
                own = {self._file(one, rank).name for one in attempts for rank in ranks}
                if own.issuperset(manifest.files):
                    return manifest
            raise CheckpointError(f"{self._final} exists; a checkpoint is never overwritten")
        files.make_folders(self._saver.folder)
        files.make_folder(temporary)
        reports = {0: write_part(self._file(number, 0), self._keyed, self._check)}
        self._since_news = time.monotonic()
        while waiting := [rank for rank in ranks if rank not in reports]:
            names = set(files.list_names(temporary))
            for rank in (rank for rank in waiting if _report_name(rank) in names):
                path = temporary / _report_name(rank)
                try:
                    reply = parse_json(files.read_start(path, MANIFEST_LIMIT))
                except (OSError, ValueError) as error:
                    if time.monotonic() - self._since_news > REPORT_SECONDS:
                        raise CheckpointError(f"{path}: cannot be read ({error})") from error
                    continue
                if reply["problem"]:
                    raise CheckpointError(f"rank {rank}: {reply['problem']}")
                reports[rank] = reply["report"]
                self._since_news = time.monotonic()
            for attempt in (number, None):
                if attempt in self.told:
                    raise CheckpointError(self.told[attempt])
            if len(reports) < len(ranks):
                self._pause()
        for rank in ranks[1:]:
            files.remove_file(temporary / _report_name(rank))
        self._check_owner()
        state, written = parse_json(self._state), [reports[rank] for rank in ranks]
        manifest = commit(self._file(number, 0).parent, self._final, self._step, written, state)
        if self._is_remote:
            files.remove_folder(temporary)
        return manifest

    def _follow(self) -> None:
        """On the other ranks: write and report this rank's part in every attempt, until rank 0 has
        committed."""
        rank, attempts = self._saver.rank, range(self._num_attempts)
        number, is_told = 0, False
        while True:
            # In an object store rank 0 may still take the manifest back, until it has removed the
            # folder of the attempt.
            folders = [self._temporary(one) for one in attempts if self._is_remote]
            if files.is_committed(self._final) and not any(folder.is_dir() for folder in folders):
                return
            # Attempts may have come and gone between two looks.
            later = reversed(attempts[number + 1 :])
            if newer := [one for one in later if self._temporary(one).is_dir()]:
                number, is_told, self.untold = newer[0], False, None
                self._since_news = time.monotonic()
            temporary = self._temporary(number)
            if not is_told and temporary.is_dir():
                is_told, problem, report = True, None, None
                try:
                    report = write_part(self._file(number, rank), self._keyed, self._check)
                except (CheckpointError, OSError) as error:
                    problem = str(error)
                    with suppress(OSError):  # its space is needed for the report
                        files.remove_file(self._file(number, rank))
                try:
                    text = json.dumps({"problem": problem, "report": report}).encode()
                    files.replace_file(temporary / _report_name(rank), text)
                except OSError as error:
                    self.untold = number, problem or str(files.explain(error, temporary))
                self._since_news = time.monotonic()
            waited = time.monotonic() - self._since_news
            if not is_told and number == 0 and waited > FOLDER_SECONDS:
                problem = f"{temporary} did not appear in {FOLDER_SECONDS:g} s"
                self.untold = None, f"{problem}: is it on a file system that all ranks share?"
            self._pause()

    def _temporary(self, number: int) -> Place:
        """The folder of an attempt; the id of the first is the step's."""
        identity = self._identity
        if number:
            identity = uuid.uuid5(uuid.UUID(identity), str(number)).hex
        return self._final.with_name(f"{self._final.name}.tmp-{identity}")

    def _file(self, number: int, rank: int) -> Place:
        """The file of a rank in an attempt: without renames, under the final name."""
        temporary, name = self._temporary(number), f"rank-{rank:05d}"
        if self._is_remote:
            return self._final / f"{name}-{temporary.name[-32:]}.safetensors"
        return temporary / f"{name}.safetensors"

    def _check_owner(self) -> None:
        """Raises where this run may neither commit nor delete here any more."""
        if (why := self._saver.lost()) is not None:
            raise _Lost(why)

    def _check(self) -> None:
        """Raises where this save is not to be finished."""
        if self.stopped.is_set():
            raise _Stopped("stopped")

    def _pause(self) -> None:
        """Wait between two looks, a tenth of the time since something was found; ends a save whose
        process has ended otherwise, when nothing new has come for a while."""
        self._check()
        waited = time.monotonic() - self._since_news
        if not threading.main_thread().is_alive() and waited > _LAST_WAIT:
            raise _Stopped("stopped")
        time.sleep(min(max(waited / 10, FIRST_LOOK), LONGEST_LOOK))


def _report_name(rank: int) -> str:
    return f"report-{rank:05d}.json"


class Staging:
    """Copies of a rank's shards in host memory, from which a save writes while training goes on.

    One buffer, as large as the largest set of shards so far; it is kept for the next save, because
    fresh memory costs more than the copy itself.
    """

    def __init__(self, ranks_on_machine: int = 1) -> None:
        self._ranks = ranks_on_machine
        self._buffer: torch.Tensor | None = None
        self._unpin: Callable[[], object] = lambda: None

    @property
    def num_bytes(self) -> int:
        """Size of the buffer in bytes."""
        return 0 if self._buffer is None else self._buffer.numel()

    def reserve(self, keyed: Mapping[str, Shard]) -> str | None:
        """Make room for the copies; why there is none, or None.

        Copies of a device are faster from pages that are locked, but not by ``pin_memory``: torch
        takes pinned memory in powers of two, up to twice of what was asked for, and keeps it when
        it is given back.
        """
        needed = sum(map(_num_bytes, keyed.values()))
        if needed <= self.num_bytes:
            return None
        bound = int(available_bytes() * LARGEST_SHARE / self._ranks) + self.num_bytes
        if needed > bound:
            return f"{needed:,} bytes to stage, at most {bound:,} are left to this rank"
        self._unpin()
        self._buffer = None  # first, so that there are never two
        try:
            self._buffer = buffer = torch.empty(needed, dtype=torch.uint8)
        except RuntimeError:  # torch's word for no memory
            return f"{needed:,} bytes to stage, which cannot be allocated"
        if any(shard.tensor.is_cuda for shard in keyed.values()):
            cuda: Any = torch.cuda.cudart()
            if int(cuda.cudaHostRegister(buffer.data_ptr(), buffer.numel(), 0)) == 0:
                # Before the memory is given back, or its next owner could not lock it.
                self._unpin = weakref.finalize(self, cuda.cudaHostUnregister, buffer.data_ptr())
            else:
                with suppress(RuntimeError):  # else the next kernel of a step gets the error
                    torch.zeros(1, device="cuda")
        return None

    def copy(self, keyed: Mapping[str, Shard]) -> dict[str, Shard]:
        """The shards with copies of their tensors, for which there is room, until the next call."""
        on_cuda = any(shard.tensor.is_cuda for shard in keyed.values())
        copies, end = dict(keyed), 0
        with torch.no_grad():
            for key, shard in keyed.items():
                if (size := _num_bytes(shard)) and self._buffer is not None:
                    tensor, start = shard.tensor, end
                    part = self._buffer[start : start + tensor.nbytes].view(tensor.dtype)
                    target = part.view(tensor.shape)
                    target.copy_(tensor, non_blocking=on_cuda)
                    copies[key], end = replace(shard, tensor=target), start + size
        if on_cuda:
            torch.cuda.synchronize()
        return copies


def _num_bytes(shard: Shard) -> int:
    """Bytes of the copy of a shard; none of one that is made when it is written."""
    size = shard.tensor.nbytes if shard.make is None else 0
    return -(-size // _ALIGNMENT) * _ALIGNMENT
