"""Saves of several ranks: staged, written, read back, committed by one rename, retried.

A run saves in the background of its steps (:class:`Saver`), a script with a blocking call
(:func:`save`); both use one protocol. A thread of each rank writes. It calls no collective: threads
of different ranks would enter it at different points between the collectives of training, and all
groups, even one for saves alone, need the same order on all ranks. So the ranks communicate through
files in the temporary folder:

- rank 0 creates ``step-N.tmp-<id>``; the id of every attempt is derived from the save's shared id;
- every rank writes and reads back its file there, every other rank then ``report-NNNNN.json``, by a
  rename;
- rank 0 commits when it has all reports, by the rename that the others wait for. After a failure it
  removes the folder, waits, and creates that of the next attempt, in which all ranks rewrite.

In an object store every attempt writes files with unique names into ``step-N``, and the exclusive
creation of the manifest is the commit. No attempt overwrites or deletes the files of another: a run
that was presumed dead may still be writing, and requests that failed may still arrive. With `keep`
rank 0 deletes files that the manifest does not name, after the commit.

Rank 0 checks that the run still owns the folder before the commit and before each deletion outside
of the save's own temporary folders. Only :meth:`Saver.start` and :meth:`Saver.finish` call
collectives; all ranks call them at the same points of their loops. `finish` carries the problems
that files cannot: on a full disk a rank may fail to write even its report.
"""

from __future__ import annotations

import atexit
import json
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch

from moemesh.checkpoint import files
from moemesh.checkpoint.files import CheckpointError
from moemesh.checkpoint.load import Shard
from moemesh.checkpoint.manifest import MANIFEST, MANIFEST_LIMIT, Manifest
from moemesh.checkpoint.remote import Place, RemotePath
from moemesh.checkpoint.retention import VerifiedState, prune, remember
from moemesh.checkpoint.stored import read_manifest
from moemesh.checkpoint.writing import check_shards, check_step, commit, write_part
from moemesh.config.limits import parse_json
from moemesh.trace.machine import available_bytes

#: Seconds between the attempts of one save.
PAUSES = (0.5, 2.0, 5.0, 10.0)
#: Seconds that a rank waits for others without progress after its training ended in an error.
_LAST_WAIT = 10.0
#: Seconds in which the folder that rank 0 creates must appear on the other ranks.
FOLDER_SECONDS = 60.0
#: Seconds in which a report must become readable: file systems may show it half written.
REPORT_SECONDS = 10.0
#: Seconds between two polls of the folder, or of the other ranks: the first, and the longest.
FIRST_LOOK, LONGEST_LOOK = 0.001, 0.25
#: Largest share of a machine's free memory for the staging buffers of all its ranks.
LARGEST_SHARE = 0.5
#: Alignment of each copy in bytes, that of torch's tensors.
_ALIGNMENT = 64

#: JSON of this rank -> the JSON of all ranks, in rank order.
Gather = Callable[[object], list[Any]]


class SaveOutcome(NamedTuple):
    """Result of a save: `problem` (None if it was committed), `seconds` from its start to its end,
    `nonfinite` (names of tensors with infinities or NaN), `is_lost` (whether another run has taken
    over the folder)."""

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
    """Saves all ranks' shards and rank 0's `state` as ``folder/step-<step>``; all ranks call it.

    Raises CheckpointError on every rank when one of them fails (disk full, a hole or an overlap in
    a tensor, the step exists); then no new file is left (in an object store perhaps those of other
    ranks, which no manifest names) and older checkpoints are untouched. A process that dies leaves
    a ``.tmp`` folder, which the next :func:`moemesh.checkpoint.retention.prune` removes.
    """
    saver = Saver(folder, rank=rank, world_size=world_size, gather=gather, pauses=())
    with closing(saver):
        saver.start(step, shards, state)
        outcome = saver.finish()
    assert outcome is not None
    if outcome.problem is not None:
        who = "" if outcome.problem.startswith("rank ") else "rank 0: "
        raise CheckpointError(f"checkpoint not saved: {who}{outcome.problem}")
    return folder / f"step-{step}"


class Saver:
    """Saves of a run, on one rank; all ranks create one."""

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
        """`gather` returns the JSON of all ranks for that of this rank. `keep`: see
        :func:`moemesh.checkpoint.retention.prune`; None deletes no checkpoint. `lost`: returns the
        reason why the run no longer owns the folder, or None; rank 0 calls it before each commit
        and deletion. `pauses`: seconds between the attempts of a save, by default
        :data:`PAUSES`."""
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

        # Start the thread now: at the time of a save, memory may be too short for one.
        worker = threading.Thread(target=work, name="save", daemon=True)
        worker.start()
        weakref.finalize(self, jobs.put, None)
        # The interpreter waits for a pending save, also after an error in training.
        self._at_exit = lambda: (jobs.put(None), worker.join())
        atexit.register(self._at_exit)
        #: Returns whether a failed attempt of the pending save is its last one.
        self._hurries: Callable[[], bool] = lambda: False
        #: Failures that did not end a save; filled on rank 0 only.
        self.notes: list[str] = []
        #: Reason why the last save blocked, if it was meant to run in the background.
        self.why_blocking: str | None = None

    def start(
        self,
        step: int,
        shards: Sequence[Shard],
        state: dict[str, Any],
        *,
        hurries: Callable[[], bool] = lambda: False,
    ) -> None:
        """Begin to save `shards` and rank 0's `state` as ``step-<step>``; all ranks call it between
        steps, when no save is pending. `hurries` is called while the ranks wait for the end; it
        returns whether a failed attempt shall be the last one.

        Returns when the tensors may change (but not what a shard's `make` reads): after they are
        copied, or after the save if it blocks.
        Raises CheckpointError on every rank for shards or a state that cannot be saved.
        """
        assert self._job is None, "finish the last save first"
        since, keyed = time.monotonic(), dict[str, Shard]()  # key in this rank's file -> shard
        problem = blocks = None
        try:
            keyed = check_shards(shards)
            check_step(self.folder / f"step-{step}", state if self.rank == 0 else {})
            blocks = self._staging.reserve(keyed) if self._in_background else None
        except (CheckpointError, OSError) as error:
            problem = str(error)
        identity = uuid.uuid4().hex if self.rank == 0 else ""
        reply = {"step": step, "identity": identity, "problem": problem, "blocks": blocks}
        replies = self._gather(reply)
        num = len(replies)
        assert num == self.world_size, f"gather gave {num} replies of {self.world_size} ranks"
        for rank, reply in enumerate(replies):
            if reply["problem"]:
                raise CheckpointError(f"checkpoint not saved: rank {rank}: {reply['problem']}")
        if {reply["step"] for reply in replies} != {step}:
            raise CheckpointError(f"ranks save different steps: {[r['step'] for r in replies]}")
        reasons = [f"rank {n}: {r['blocks']}" for n, r in enumerate(replies) if r["blocks"]]
        self.why_blocking = reasons[0] if reasons else None
        stages = self._in_background and not reasons
        # Serialise the state now: its objects may change in the next step.
        content = json.dumps(state) if self.rank == 0 else "{}"
        if stages:
            keyed = self._staging.copy(keyed)
        self._job = SaveJob(self, step, replies[0]["identity"], keyed, content, since)
        self._hurries = hurries
        self._jobs.put(self._job)
        if not stages:
            self._wait(self._job)

    def finish(self, *, hurry: bool = False) -> SaveOutcome | None:
        """Wait for the pending save and return its outcome, None without one; all ranks call it.
        `hurry`: do not retry after a failed attempt. Every rank returns the same."""
        if (job := self._job) is None:
            return None
        if hurry:
            job.hurried.set()
        outcome = self._wait(job)
        job.sweep()
        self._job = None
        return outcome

    def _wait(self, job: SaveJob) -> SaveOutcome:
        """Wait until the save has ended on all ranks: each turn is a gather, the same on all."""
        pause = FIRST_LOOK
        while True:
            reply = {"outcome": job.outcome and job.outcome._asdict(), "failure": job.failure}
            replies = self._gather(reply | {"hurries": self._hurries()})
            if any(reply["hurries"] for reply in replies):
                job.hurried.set()
            if all(reply["outcome"] for reply in replies):
                return SaveOutcome(**replies[0]["outcome"])
            if replies[0]["outcome"]:
                job.stopped.set()  # rank 0 has decided: waiting for files is over
            for rank, reply in enumerate(replies):
                if reply["failure"]:
                    attempt, problem = reply["failure"]
                    job.failures[attempt] = f"rank {rank}: {problem}"
            job.ended.wait(pause)
            pause = min(2 * pause, LONGEST_LOOK)

    def news(self) -> list[str]:
        """Failures since the last call that did not end the save; empty on other ranks."""
        problems, self.notes = self.notes, []
        return problems

    def abandon(self) -> None:
        """Abort the pending save without synchronising; the process exits."""
        if self._job is not None:
            self._job.stopped.set()

    def close(self) -> None:
        """Abort a pending save and end the thread."""
        self.abandon()
        atexit.unregister(self._at_exit)
        self._jobs.put(None)


class _Stopped(Exception):
    """The save was aborted."""


class _Lost(Exception):
    """Another run has taken over the folder."""


class SaveJob:
    """One save on one rank. The worker thread calls :meth:`run`; the main thread waits for `ended`,
    sets `stopped` (abort) or `hurried` (no further attempt), and sends `failure` to all ranks."""

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
        self._since = self._last_progress = since
        self.stopped, self.hurried, self.ended = (threading.Event() for _ in range(3))
        self.outcome: SaveOutcome | None = None
        #: Attempt (None: any) and problem that this rank could not report through the folder.
        self.failure: tuple[int | None, str] | None = None
        #: Such problems of all ranks by attempt; rank 0 reads them.
        self.failures: dict[int | None, str] = {}

    def run(self) -> None:
        """Save, and set `outcome`."""
        problem, nonfinite, is_lost = None, (), False
        try:
            if self._saver.rank == 0:
                nonfinite = self._lead()
            else:
                self._follow()
        except (CheckpointError, _Stopped, _Lost) as error:
            problem, is_lost = str(error), isinstance(error, _Lost)
        except BaseException as error:  # any: the other ranks must not wait for this one
            problem = f"{type(error).__name__}: {error}"
            self.failure = None, problem
        seconds = time.monotonic() - self._since
        self.outcome = SaveOutcome(self._step, problem, seconds, nonfinite, is_lost)
        self.ended.set()

    def sweep(self) -> None:
        """Remove the folders of failed attempts, which other ranks may have written to after rank 0
        removed them; now all ranks have ended."""
        for number in range(self._num_failed):
            files.remove_folder(self._temporary(number))

    def _lead(self) -> Sequence[str]:
        """Rank 0's part: retries until a commit, then prunes; returns the names of tensors with
        infinities or NaN. Raises CheckpointError with the problem of the last attempt."""
        saver = self._saver
        for number, pause in enumerate((*saver.pauses, None)):  # None: after the last attempt
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
                saver.notes.append(f"{problem}; retrying in {pause:g} s")
                self._last_progress = time.monotonic()
                while time.monotonic() - self._last_progress < pause and not self.hurried.is_set():
                    self._pause()
            if pause is None or self.hurried.is_set():
                raise CheckpointError(problem)
        try:  # a failure to clean up costs space, not the checkpoint
            if saver.keep is not None:
                if isinstance(self._final, RemotePath):
                    # Files of other attempts and of runs that died.
                    names = self._final.names()
                    self._check_owner()
                    for name in sorted({*names} - {MANIFEST, *manifest.files}):
                        (self._final / name).remove()
                self._check_owner()
                state = VerifiedState(self._step, manifest.digest, True, not manifest.nonfinite)
                remember(saver.folder, [state])
                prune(saver.folder, saver.keep, check=self._check_owner)
        except (CheckpointError, OSError) as error:
            saver.notes.append(f"older checkpoints were not cleaned up: {error}")
        return manifest.nonfinite or ()

    def _attempt(self, number: int) -> Manifest:
        """Attempt `number` on rank 0: writes its file, waits for the reports of the other ranks,
        commits. Raises CheckpointError, or OSError, if it fails."""
        temporary, ranks = self._temporary(number), range(self._saver.world_size)
        self._check_owner()
        if files.is_committed(self._final):
            # Committed by another run, or by an earlier attempt although a request of it failed.
            if self._is_remote:
                manifest = read_manifest(self._final)
                attempts = range(self._num_attempts)
                names = {self._file(attempt, rank).name for attempt in attempts for rank in ranks}
                if names.issuperset(manifest.files):
                    return manifest
            raise CheckpointError(f"{self._final} exists; a checkpoint is never overwritten")
        files.make_folders(self._saver.folder)
        files.make_folder(temporary)
        reports = {0: write_part(self._file(number, 0), self._keyed, self._check_stopped)}
        self._last_progress = time.monotonic()
        while waiting := [rank for rank in ranks if rank not in reports]:
            names = set(files.list_names(temporary))
            for rank in (rank for rank in waiting if _report_name(rank) in names):
                path = temporary / _report_name(rank)
                try:
                    reply = parse_json(files.read_start(path, MANIFEST_LIMIT))
                except (OSError, ValueError) as error:
                    if time.monotonic() - self._last_progress > REPORT_SECONDS:
                        raise CheckpointError(f"{path}: cannot be read ({error})") from error
                    continue
                if reply["problem"]:
                    raise CheckpointError(f"rank {rank}: {reply['problem']}")
                reports[rank] = reply["report"]
                self._last_progress = time.monotonic()
            for attempt in (number, None):
                if attempt in self.failures:
                    raise CheckpointError(self.failures[attempt])
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
        """The part of other ranks: write and report in every attempt, until the commit."""
        rank, attempts = self._saver.rank, range(self._num_attempts)
        number, has_reported = 0, False
        while True:
            # In an object store rank 0 may withdraw the manifest until it has removed the folder of
            # the attempt.
            folders = [self._temporary(attempt) for attempt in attempts if self._is_remote]
            if files.is_committed(self._final) and not any(folder.is_dir() for folder in folders):
                return
            # Attempts may have started and ended between two polls.
            later = reversed(attempts[number + 1 :])
            if newer := [attempt for attempt in later if self._temporary(attempt).is_dir()]:
                number, has_reported, self.failure = newer[0], False, None
                self._last_progress = time.monotonic()
            temporary = self._temporary(number)
            if not has_reported and temporary.is_dir():
                has_reported, problem, report = True, None, None
                try:
                    report = write_part(self._file(number, rank), self._keyed, self._check_stopped)
                except (CheckpointError, OSError) as error:
                    problem = str(error)
                    with suppress(OSError):  # the report needs its space
                        files.remove_file(self._file(number, rank))
                try:
                    text = json.dumps({"problem": problem, "report": report}).encode()
                    files.replace_file(temporary / _report_name(rank), text)
                except OSError as error:
                    self.failure = number, problem or str(files.explain(error, temporary))
                self._last_progress = time.monotonic()
            waited = time.monotonic() - self._last_progress
            if not has_reported and number == 0 and waited > FOLDER_SECONDS:
                problem = f"{temporary} did not appear in {FOLDER_SECONDS:g} s"
                self.failure = None, f"{problem}: is it on a file system that all ranks share?"
            self._pause()

    def _temporary(self, number: int) -> Place:
        """The folder of an attempt; the first has the id of the save, later ones derived ids."""
        identity = self._identity
        if number:
            identity = uuid.uuid5(uuid.UUID(identity), str(number)).hex
        return self._final.with_name(f"{self._final.name}.tmp-{identity}")

    def _file(self, number: int, rank: int) -> Place:
        """The file of a rank in an attempt; in an object store under the final name."""
        temporary, name = self._temporary(number), f"rank-{rank:05d}"
        if self._is_remote:
            return self._final / f"{name}-{temporary.name[-32:]}.safetensors"
        return temporary / f"{name}.safetensors"

    def _check_owner(self) -> None:
        """Raises if this run may no longer commit or delete in the folder."""
        if (why := self._saver.lost()) is not None:
            raise _Lost(why)

    def _check_stopped(self) -> None:
        """Raises if this save was aborted."""
        if self.stopped.is_set():
            raise _Stopped("stopped")

    def _pause(self) -> None:
        """Wait between two polls, a tenth of the time since the last progress. Aborts the save if
        the main thread has ended and there was no progress for a while."""
        self._check_stopped()
        waited = time.monotonic() - self._last_progress
        if not threading.main_thread().is_alive() and waited > _LAST_WAIT:
            raise _Stopped("stopped")
        time.sleep(min(max(waited / 10, FIRST_LOOK), LONGEST_LOOK))


def _report_name(rank: int) -> str:
    return f"report-{rank:05d}.json"


class Staging:
    """Copies of a rank's shards in host memory, which a save writes while training continues. All
    saves reuse one buffer, as large as the largest set of shards so far: allocating fresh memory
    costs more than the copy."""

    def __init__(self, ranks_on_machine: int = 1) -> None:
        self._ranks = ranks_on_machine
        self._buffer: torch.Tensor | None = None
        self._unpin: Callable[[], object] = lambda: None

    @property
    def num_bytes(self) -> int:
        """Size of the buffer in bytes."""
        return 0 if self._buffer is None else self._buffer.numel()

    def reserve(self, keyed: Mapping[str, Shard]) -> str | None:
        """Allocate space for the copies; returns the reason if that fails, else None. Copies from a
        device are faster into page-locked memory. ``pin_memory`` is not used: torch rounds pinned
        allocations up to powers of two and never returns them to the system."""
        needed = sum(map(_num_bytes, keyed.values()))
        if needed <= self.num_bytes:
            return None
        bound = int(available_bytes() * LARGEST_SHARE / self._ranks) + self.num_bytes
        if needed > bound:
            return f"{needed:,} bytes to stage, at most {bound:,} are left to this rank"
        self._unpin()
        self._buffer = None  # free it first, so that two never coexist
        try:
            self._buffer = buffer = torch.empty(needed, dtype=torch.uint8)
        except RuntimeError:  # torch raises it if memory is short
            return f"{needed:,} bytes to stage, which cannot be allocated"
        if any(shard.tensor.is_cuda for shard in keyed.values()):
            cuda: Any = torch.cuda.cudart()
            if int(cuda.cudaHostRegister(buffer.data_ptr(), buffer.numel(), 0)) == 0:
                # Unlock before the memory is freed, or its next owner could not lock it.
                self._unpin = weakref.finalize(self, cuda.cudaHostUnregister, buffer.data_ptr())
            else:
                with suppress(RuntimeError):  # clears the error, which the next kernel would raise
                    torch.zeros(1, device="cuda")
        return None

    def copy(self, keyed: Mapping[str, Shard]) -> dict[str, Shard]:
        """The shards with copies of their tensors in the buffer, valid until the next call."""
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
    """Bytes of the copy of a shard; 0 for a shard computed at the time of the write."""
    size = shard.tensor.nbytes if shard.make is None else 0
    return -(-size // _ALIGNMENT) * _ALIGNMENT
