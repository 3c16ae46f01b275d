"""The saves of a run: staged, written, read back, committed, retried; the loop waits for a copy.

The ranks of a save talk through files of its temporary folder. A writer thread calls no collective,
because threads of different ranks would enter theirs at different points between the collectives of
training, and every group, a group of its own included, would need the same order on all ranks. So:

- rank 0 makes ``step-N.tmp-<id>``; the id of every attempt follows from the step's, which all know;
- every rank writes and reads back its file there, then ``report-NNNNN.json``, by a rename;
- rank 0 commits when it has all reports, by the rename that the others wait for. When something
  fails it removes the folder, waits, and makes that of the next attempt, in which all write again.

Collectives are called in :meth:`Saver.start` and :meth:`Saver.finish` alone, by the training loop,
which all ranks do at the same points. Where the files fail as a channel (a rank that cannot even
write its report on a full disk), `finish` carries the news.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from moemesh.checkpoint.files import (
    CheckpointError,
    explain,
    list_names,
    make_folder,
    read_start,
    remove_file,
    remove_folder,
    replace_file,
)
from moemesh.checkpoint.load import Shard
from moemesh.checkpoint.manifest import MANIFEST_LIMIT
from moemesh.checkpoint.retention import Standing, prune, remember
from moemesh.checkpoint.staging import Staging
from moemesh.checkpoint.writing import (
    Report,
    check_shards,
    check_step,
    commit,
    read_back,
    write_part,
)

#: Seconds between the attempts of one save.
PAUSES = (0.5, 2.0, 5.0, 10.0)
#: Seconds that a rank whose training has ended in an error waits for others without any news.
_LAST_WAIT = 10.0
#: Seconds in which the folder that rank 0 makes is seen by all others.
FOLDER_SECONDS = 60.0
#: Seconds between two looks at the folder: the first, and the longest.
_FIRST_LOOK, _LONGEST_LOOK = 0.001, 0.25

Gather = Callable[[object], list[Any]]


class Outcome(NamedTuple):
    """How a save ended: `problem` None where it was committed, `seconds` from its start to there,
    `nonfinite` the tensors with numbers that are not finite."""

    step: int
    problem: str | None
    seconds: float
    nonfinite: Sequence[str] = ()


class _Stopped(Exception):
    """This save is not to be finished."""


class Saver:
    """One rank's part in the saves of a run; all ranks make one."""

    def __init__(
        self,
        folder: Path,
        *,
        rank: int,
        world_size: int,
        gather: Gather,
        keep: int,
        in_background: bool,
        ranks_on_machine: int = 1,
    ) -> None:
        """`gather` takes JSON of this rank to the JSON of all. `keep`: as of
        :func:`moemesh.checkpoint.retention.prune`."""
        self.folder, self.keep = folder, keep
        self.rank, self.world_size = rank, world_size
        self._gather = gather
        self._in_background = in_background
        self._staging = Staging(ranks_on_machine)
        self._job: _Job | None = None
        self._news: list[str] = []
        #: Why the last save was not in the background although it was to be.
        self.why_blocking: str | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a save was started and not finished; the same on every rank."""
        return self._job is not None

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
        self._job = _Job(self, step, replies[0]["identity"], keyed, content, since)
        self._job.start()
        if not stages:
            self._settle(self._job)

    def finish(self, *, hurry: bool = False) -> Outcome | None:
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
        job.join()
        if self.rank == 0:
            job.sweep()
        self._job = None
        return outcome

    def _settle(self, job: _Job) -> Outcome:
        """Wait until the save has ended on all ranks. Every rank asks all others as often."""
        pause = _FIRST_LOOK
        while True:
            own = {"outcome": job.outcome and job.outcome._asdict(), "untold": job.untold}
            replies = self._gather(own)
            if all(reply["outcome"] for reply in replies):
                return Outcome(**replies[0]["outcome"])
            if replies[0]["outcome"]:
                job.stop()  # rank 0 has decided: nobody needs to wait for files any more
            for rank, reply in enumerate(replies):
                if reply["untold"]:
                    attempt, problem = reply["untold"]
                    job.tell(attempt, f"rank {rank}: {problem}")
            job.wait(pause)
            pause = min(2 * pause, _LONGEST_LOOK)

    def news(self) -> list[str]:
        """On rank 0: what failed since the last call, and did not end the save."""
        found, self._news = self._news, []
        return found

    def note(self, text: str) -> None:
        """For :meth:`news`."""
        self._news.append(text)

    def abandon(self) -> None:
        """End the save under way without a word to the others: this process is to end at once."""
        if self._job is not None:
            self._job.stop()


class _Job:
    """One save on one rank, in a thread of its own or not."""

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
        self._keyed, self._state, self._since = keyed, state, since
        self._final = saver.folder / f"step-{step}"
        self._stop, self._hurry = threading.Event(), threading.Event()
        self._ended = threading.Event()
        self._told: dict[int | None, str] = {}
        self.outcome: Outcome | None = None
        #: What this rank could not report, and in which attempt (None: in any), because the folder
        #: takes nothing any more.
        self.untold: tuple[int | None, str] | None = None
        # No daemon: where training ends in an error, the interpreter still waits for the save.
        self._thread = threading.Thread(target=self.run, name=f"save-{step}", daemon=False)

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        if self._thread.ident is not None:
            self._thread.join()

    def wait(self, seconds: float) -> None:
        self._ended.wait(seconds)

    def stop(self) -> None:
        self._stop.set()

    def hurry(self) -> None:
        self._hurry.set()

    def tell(self, attempt: int | None, problem: str) -> None:
        """Rank 0 learns by another way what it waits for in vain."""
        self._told[attempt] = problem

    def run(self) -> None:
        problem: str | None
        nonfinite: Sequence[str] = ()
        try:
            if self._saver.rank == 0:
                problem, nonfinite = self._lead()
            else:
                problem = self._follow()
        except _Stopped:
            problem = "stopped"
        except Exception as error:  # whatever it is: the others must not wait for this rank
            problem = f"{type(error).__name__}: {error}"
        seconds = time.monotonic() - self._since
        self.outcome = Outcome(self._step, problem, seconds, nonfinite)
        self._ended.set()

    # --- rank 0 ---

    def _lead(self) -> tuple[str | None, Sequence[str]]:
        """Attempts until one is committed; what was wrong with the last, or the tensors that are
        not finite."""
        problem = ""
        for number, pause in enumerate((*PAUSES, None)):
            try:
                manifest = self._attempt(number)
            except (CheckpointError, OSError) as error:
                problem = str(error)
                remove_folder(self._temporary(number))
            else:
                found = Standing(self._step, manifest.digest, True, not manifest.nonfinite)
                self._clean(found)
                return None, manifest.nonfinite or ()
            if pause is None or self._hurry.is_set():
                break
            self._saver.note(f"{problem}; trying again in {pause:g} s")
            self._pause(pause)
            if self._hurry.is_set():
                break
        return problem, ()

    def _attempt(self, number: int) -> Any:
        temporary = self._temporary(number)
        try:
            self._saver.folder.mkdir(parents=True, exist_ok=True)
            make_folder(temporary)
        except OSError as error:
            raise explain(error, temporary) from error
        reports = [self._part(temporary), *self._collected(number)]
        try:
            for rank in range(1, self._saver.world_size):
                remove_file(temporary / _report_name(rank))
            return commit(temporary, self._final, self._step, reports, json.loads(self._state))
        except OSError as error:
            raise explain(error, temporary) from error

    def _collected(self, number: int) -> list[Report]:
        """The reports of the other ranks in an attempt, in their order."""
        temporary = self._temporary(number)
        waiting, reports = set(range(1, self._saver.world_size)), dict[int, Report]()
        look = _Looks(self)
        while waiting:
            names = set(list_names(temporary))
            for rank in sorted(rank for rank in waiting if _report_name(rank) in names):
                reply = _read_report(temporary / _report_name(rank))
                if reply["problem"]:
                    raise CheckpointError(f"rank {rank}: {reply['problem']}")
                reports[rank] = reply["report"]
                waiting.remove(rank)
                look.found_something()
            for attempt in (number, None):
                if attempt in self._told:
                    raise CheckpointError(self._told[attempt])
            if waiting:
                look.wait()
        return [reports[rank] for rank in sorted(reports)]

    def _clean(self, found: Standing) -> None:
        """Retention; what fails here costs space, no checkpoint."""
        folder = self._saver.folder
        try:
            remember(folder, [found])
            prune(folder, self._saver.keep)
        except (CheckpointError, OSError) as error:
            self._saver.note(f"older checkpoints were not cleaned up: {error}")

    # --- the other ranks ---

    def _follow(self) -> str | None:
        """Write in every attempt, until rank 0 has committed."""
        number, is_told = 0, False
        look = _Looks(self)
        while True:
            if self._final.is_dir():
                return None
            # Attempts may have come and gone between two looks.
            later = range(len(PAUSES), number, -1)
            if newer := [n for n in later if self._temporary(n).is_dir()]:
                number, is_told, self.untold = newer[0], False, None
                look.found_something()
            temporary = self._temporary(number)
            if not is_told and temporary.is_dir():
                is_told = True
                self._report(number)
                look.found_something()
            if not is_told and number == 0 and look.seconds > FOLDER_SECONDS:
                problem = f"{temporary} did not appear in {FOLDER_SECONDS:g} s"
                self.untold = None, f"{problem}: is it on a file system that all ranks share?"
            look.wait()

    def _report(self, number: int) -> None:
        """Write this rank's part in an attempt, and what became of it."""
        temporary = self._temporary(number)
        reply: dict[str, Any]
        try:
            reply = {"problem": None, "report": self._part(temporary)}
        except (CheckpointError, OSError) as error:
            reply = {"problem": str(error), "report": None}
            with suppress(OSError):  # its space is needed for the report
                remove_file(temporary / f"rank-{self._saver.rank:05d}.safetensors")
        try:
            text = json.dumps(reply).encode()
            replace_file(temporary / _report_name(self._saver.rank), text)
        except OSError as error:
            self.untold = number, reply["problem"] or str(explain(error, temporary))

    # --- all of them ---

    def _part(self, temporary: Path) -> Report:
        report = write_part(temporary, self._saver.rank, self._keyed, self.check)
        # Before the commit, not after it: what reads back wrong is written again from memory.
        read_back(temporary, report)
        return report

    def _temporary(self, number: int) -> Path:
        """The folder of an attempt; the name of the first is that of any save."""
        identity = self._identity
        if number:
            identity = uuid.uuid5(uuid.UUID(identity), str(number)).hex
        return self._final.with_name(f"{self._final.name}.tmp-{identity}")

    def sweep(self) -> None:
        """Remove what is left of failed attempts, in which other ranks may have written longer than
        rank 0 did; now all have ended."""
        for number in range(len(PAUSES) + 1):
            if self._temporary(number).is_dir():
                remove_folder(self._temporary(number))

    def check(self) -> None:
        """Raises where this save is not to be finished."""
        if self._stop.is_set():
            raise _Stopped

    def _pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        look = _Looks(self)
        while time.monotonic() < end and not self._hurry.is_set():
            look.wait()


class _Looks:
    """The pauses between looks at a folder, a tenth of the time since something was found. They end
    a save whose process has ended otherwise, when nothing new has come for a while."""

    def __init__(self, job: _Job) -> None:
        self._job, self._since = job, time.monotonic()

    @property
    def seconds(self) -> float:
        """Since something was found."""
        return time.monotonic() - self._since

    def found_something(self) -> None:
        self._since = time.monotonic()

    def wait(self) -> None:
        self._job.check()
        if not threading.main_thread().is_alive() and self.seconds > _LAST_WAIT:
            raise _Stopped
        time.sleep(min(max(self.seconds / 10, _FIRST_LOOK), _LONGEST_LOOK))


def _report_name(rank: int) -> str:
    return f"report-{rank:05d}.json"


def _read_report(path: Path) -> dict[str, Any]:
    """What another rank wrote; CheckpointError where it is no report."""
    try:
        content = json.loads(read_start(path, MANIFEST_LIMIT))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error
    return content
