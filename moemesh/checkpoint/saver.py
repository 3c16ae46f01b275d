"""The saves of a run: staged, written, read back, committed, retried; the loop waits for a copy.

What a rank does in the background is in :mod:`moemesh.checkpoint.job`. Collectives are called in
:meth:`Saver.start` and :meth:`Saver.finish` alone, by the training loop, which all ranks do at the
same points. Where the files fail as a channel (a rank that cannot even write its report on a full
disk), `finish` carries the news.
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
from typing import Any

import torch

from moemesh.checkpoint.files import CheckpointError
from moemesh.checkpoint.job import FIRST_LOOK, LONGEST_LOOK, RankPart, SaveJob, SaveOutcome
from moemesh.checkpoint.load import Shard
from moemesh.checkpoint.remote import Place
from moemesh.checkpoint.writing import check_shards, check_step
from moemesh.trace.machine import available_bytes

# Copies of a rank's shards in host memory, from which a save writes while training goes on.


#: Largest share of the memory that is free on a machine, for the buffers of all its ranks.
LARGEST_SHARE = 0.5
#: Each copy starts at a multiple of this, as torch's own tensors do.
_ALIGNMENT = 64


class Staging:
    """One buffer, as large as the largest set of shards so far; it is kept for the next save,
    because fresh memory costs more than the copy itself."""

    def __init__(self, ranks_on_machine: int = 1) -> None:
        self._ranks = ranks_on_machine
        self._buffer: torch.Tensor | None = None
        self._unpin: Callable[[], object] = lambda: None

    @property
    def num_bytes(self) -> int:
        """Size of the buffer in bytes."""
        return 0 if self._buffer is None else self._buffer.numel()

    def missing(self, keyed: Mapping[str, Shard]) -> str | None:
        """Why the copies do not fit, or None where there is a buffer for them."""
        needed = _num_bytes(keyed)
        if needed <= self.num_bytes:
            return None
        bound = int(available_bytes() * LARGEST_SHARE / self._ranks) + self.num_bytes
        if needed > bound:
            return f"{needed:,} bytes to stage, at most {bound:,} are left to this rank"
        try:
            self._reserve(needed, pins=any(shard.tensor.is_cuda for shard in keyed.values()))
        except RuntimeError:  # torch's word for no memory
            return f"{needed:,} bytes to stage, which cannot be allocated"
        return None

    def _reserve(self, needed: int, *, pins: bool) -> None:
        """Make room for so many bytes; `pins`: lock its pages, for copies at the speed of the bus.

        Not by ``pin_memory``: torch takes pinned memory in powers of two, up to twice of what was
        asked for, and keeps it when it is given back. Where they cannot be locked, copies are
        slower.
        """
        if needed <= self.num_bytes:
            return
        self._unpin()
        self._buffer = None  # first, so that there are never two
        self._buffer = buffer = torch.empty(needed, dtype=torch.uint8)
        if not pins:
            return
        cuda: Any = torch.cuda.cudart()
        if int(cuda.cudaHostRegister(buffer.data_ptr(), buffer.numel(), 0)) == 0:
            # Before the memory is given back, or its next owner could not lock it.
            self._unpin = weakref.finalize(self, cuda.cudaHostUnregister, buffer.data_ptr())
            return
        with suppress(RuntimeError):  # CUDA would give the error to the next kernel of a step
            torch.zeros(1, device="cuda")

    def copy(self, keyed: Mapping[str, Shard]) -> dict[str, Shard]:
        """The shards with copies of their tensors, until the next call."""
        on_cuda = any(shard.tensor.is_cuda for shard in keyed.values())
        self._reserve(_num_bytes(keyed), pins=on_cuda)
        copies: dict[str, Shard] = {}
        end = 0
        with torch.no_grad():
            for key, shard in keyed.items():
                tensor = shard.tensor
                if not tensor.numel() or shard.make is not None:
                    copies[key] = shard
                    continue
                assert self._buffer is not None
                part = self._buffer[end : end + tensor.nbytes].view(tensor.dtype)
                target = part.view(tensor.shape)
                target.copy_(tensor, non_blocking=on_cuda)
                copies[key] = replace(shard, tensor=target)
                end += _padded(tensor.nbytes)
        if on_cuda:
            torch.cuda.synchronize()
        return copies


def _num_bytes(keyed: Mapping[str, Shard]) -> int:
    made = (shard for shard in keyed.values() if shard.make is None)
    return sum(_padded(shard.tensor.nbytes) for shard in made)


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


Gather = Callable[[object], list[Any]]


class Saver:
    """One rank's part in the saves of a run; all ranks make one."""

    def __init__(
        self,
        folder: Place,
        *,
        rank: int,
        world_size: int,
        gather: Gather,
        keep: int,
        in_background: bool,
        ranks_on_machine: int = 1,
        lost: Callable[[], str | None] = lambda: None,
    ) -> None:
        """`gather` takes JSON of this rank to the JSON of all. `keep`: as of
        :func:`moemesh.checkpoint.retention.prune`. `lost`: why the folder is no more the run's, or
        None; rank 0 asks before it commits or deletes."""
        self.folder, self.keep = folder, keep
        self.rank, self.world_size = rank, world_size
        self._gather, self._lost = gather, lost
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
        atexit.register(lambda: (jobs.put(None), worker.join()))
        self._news: list[str] = []
        #: Why the last save was not in the background although it was to be.
        self.why_blocking: str | None = None

    def start(self, step: int, shards: Sequence[Shard], state: dict[str, Any]) -> None:
        """Begin to save `shards` and rank 0's `state` as ``step-<step>``; all ranks call, between
        steps and with no save under way.

        Returns when the tensors may change: after a copy of them, or, where saves are not in the
        background, after the save. Raises CheckpointError on every rank for what cannot be saved.
        """
        assert self._job is None, "finish the last save first"
        since = time.monotonic()
        final = self.folder / f"step-{step}"
        keyed, problem, missing = dict[str, Shard](), None, None
        try:
            keyed = check_shards(shards)
            check_step(final, state if self.rank == 0 else {})
            missing = self._staging.missing(keyed) if self._in_background else None
        except (CheckpointError, OSError) as error:
            problem = str(error)
        identity = uuid.uuid4().hex if self.rank == 0 else ""
        own = {"step": step, "identity": identity, "problem": problem, "missing": missing}
        replies = self._gather(own)
        assert len(replies) == self.world_size
        for rank, reply in enumerate(replies):
            if reply["problem"]:
                raise CheckpointError(f"checkpoint not saved: rank {rank}: {reply['problem']}")
        assert {reply["step"] for reply in replies} == {step}, "ranks save different steps"
        blocking = [f"rank {n}: {r['missing']}" for n, r in enumerate(replies) if r["missing"]]
        self.why_blocking = blocking[0] if blocking else None
        stages = self._in_background and not blocking
        # Of the state, text: what it holds may change with the next step.
        content = json.dumps(state) if self.rank == 0 else "{}"
        if stages:
            keyed = self._staging.copy(keyed)
        part = RankPart(
            self.folder, self.rank, self.world_size, self.keep, self._news.append, self._lost
        )
        self._job = SaveJob(part, step, replies[0]["identity"], keyed, content, since)
        self._jobs.put(self._job)
        if not stages:
            self._settle(self._job)

    def finish(self, *, hurry: bool = False) -> SaveOutcome | None:
        """Wait for the save under way; all ranks call. None where there is none.

        `hurry`: an attempt that fails now is not followed by another one. Returns the same on every
        rank.
        """
        job = self._job
        if job is None:
            return None
        if hurry:
            job.hurry()
        outcome = self._settle(job)
        job.wait()
        if self.rank == 0:
            job.sweep()
        self._job = None
        return outcome

    def _settle(self, job: SaveJob) -> SaveOutcome:
        """Wait until the save has ended on all ranks. Every rank asks all others as often."""
        pause = FIRST_LOOK
        while True:
            own = {"outcome": job.outcome and job.outcome._asdict(), "untold": job.untold}
            replies = self._gather(own)
            if all(reply["outcome"] for reply in replies):
                return SaveOutcome(**replies[0]["outcome"])
            if replies[0]["outcome"]:
                job.stop()  # rank 0 has decided: nobody needs to wait for files any more
            for rank, reply in enumerate(replies):
                if reply["untold"]:
                    attempt, problem = reply["untold"]
                    job.tell(attempt, f"rank {rank}: {problem}")
            job.wait(pause)
            pause = min(2 * pause, LONGEST_LOOK)

    def news(self) -> list[str]:
        """On rank 0: what failed since the last call, and did not end the save."""
        found, self._news = self._news, []
        return found

    def abandon(self) -> None:
        """End the save under way without a word to the others: this process is to end at once."""
        if self._job is not None:
            self._job.stop()
