"""One save on one rank: written beside training, told to the other ranks by files, tried again.

A writer thread calls no collective, because threads of different ranks would enter theirs at
different points between the collectives of training, and every group, a group of its own included,
would need the same order on all ranks. So the ranks talk through files of the temporary folder:

- rank 0 makes ``step-N.tmp-<id>``; the id of every attempt follows from the step's, which all know;
- every rank writes and reads back its file there, then ``report-NNNNN.json``, by a rename;
- rank 0 commits when it has all reports, by the rename that the others wait for. When something
  fails it removes the folder, waits, and makes that of the next attempt, in which all write again.

In an object store every attempt writes files of its own names into ``step-N``. The manifest,
created only where there is none, is the commit. No attempt writes over or deletes anything there: a
run that was thought dead may still be writing, and requests that failed may still arrive.

Rank 0 looks whether the folder is still the run's before it commits and before each deletion.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from moemesh.checkpoint.files import (
    CheckpointError,
    explain,
    is_committed,
    list_names,
    make_folder,
    make_folders,
    read_start,
    remove_file,
    remove_folder,
    replace_file,
)
from moemesh.checkpoint.load import Shard
from moemesh.checkpoint.manifest import MANIFEST, MANIFEST_LIMIT, Manifest
from moemesh.checkpoint.remote import Place as Folder
from moemesh.checkpoint.remote import RemotePath
from moemesh.checkpoint.retention import Standing, prune, remember
from moemesh.checkpoint.stored import read_manifest
from moemesh.checkpoint.writing import Report, commit, part_name, read_back, write_part

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


class SaveOutcome(NamedTuple):
    """The end of a save: `problem` None where it was committed, `seconds` from its start to there,
    `nonfinite` the tensors with numbers that are not finite, `is_lost` whether the folder is that
    of another run now."""

    step: int
    problem: str | None
    seconds: float
    nonfinite: Sequence[str] = ()
    is_lost: bool = False


class _Stopped(Exception):
    """This save is not to be finished."""


class _Lost(Exception):
    """The folder is that of another run now."""


class RankPart(NamedTuple):
    """The part of one rank of `world_size` in the saves below `folder`, of which `keep` stay;
    `note` takes what failed and did not end a save; `lost` says why the folder is no more the
    run's, or None."""

    folder: Folder
    rank: int
    world_size: int
    keep: int
    note: Callable[[str], None]
    lost: Callable[[], str | None] = lambda: None


class SaveJob:
    """One save on one rank: :meth:`run` it in another thread than the one that waits for it."""

    def __init__(
        self,
        place: RankPart,
        step: int,
        identity: str,
        keyed: Mapping[str, Shard],
        state: str,
        since: float,
    ) -> None:
        self._place, self._step, self._identity = place, step, identity
        self._keyed, self._state, self._since = keyed, state, since
        self._final = place.folder / f"step-{step}"
        self._stop, self._hurry = threading.Event(), threading.Event()
        self._ended = threading.Event()
        self._told: dict[int | None, str] = {}
        self._num_failed = 0
        self.outcome: SaveOutcome | None = None
        #: What this rank could not report, and in which attempt (None: in any), because the folder
        #: takes nothing any more.
        self.untold: tuple[int | None, str] | None = None

    def wait(self, seconds: float | None = None) -> None:
        """Until it has ended, or so long."""
        self._ended.wait(seconds)

    def stop(self) -> None:
        self._stop.set()

    def hurry(self) -> None:
        self._hurry.set()

    def tell(self, attempt: int | None, problem: str) -> None:
        """Rank 0 learns by another way what it waits for in vain."""
        self._told[attempt] = problem

    def run(self) -> None:
        try:
            problem: str | None
            nonfinite: Sequence[str] = ()
            is_lost = False
            try:
                if self._place.rank == 0:
                    problem, nonfinite = self._lead()
                else:
                    problem = self._follow()
            except _Stopped:
                problem = "stopped"
            except _Lost as error:
                problem, is_lost = str(error), True
            except Exception as error:  # whatever it is: the others must not wait for this rank
                problem = f"{type(error).__name__}: {error}"
                self.untold = None, problem
            seconds = time.monotonic() - self._since
            self.outcome = SaveOutcome(self._step, problem, seconds, nonfinite, is_lost)
        finally:
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
                self._num_failed = number + 1
            else:
                found = Standing(self._step, manifest.digest, True, not manifest.nonfinite)
                self._clean(found, manifest)
                return None, manifest.nonfinite or ()
            if pause is None or self._hurry.is_set():
                break
            self._place.note(f"{problem}; trying again in {pause:g} s")
            end = time.monotonic() + pause
            look = _Looks(self)
            while time.monotonic() < end and not self._hurry.is_set():
                look.wait()
            if self._hurry.is_set():
                break
        return problem, ()

    def _attempt(self, number: int) -> Manifest:
        temporary = self._temporary(number)
        try:
            self._check_owner()
            if is_committed(self._final):
                # By an earlier attempt, although a request of it failed, or by somebody else.
                if isinstance(self._final, RemotePath):
                    manifest = read_manifest(self._final)
                    own = {
                        self._part_name(n, r)
                        for n in range(len(PAUSES) + 1)
                        for r in range(self._place.world_size)
                    }
                    if own.issuperset(manifest.files):
                        return manifest
                raise CheckpointError(f"{self._final} exists; a checkpoint is never overwritten")
            make_folders(self._place.folder)
            make_folder(temporary)
        except OSError as error:
            raise explain(error, temporary) from error
        reports = [self._part(number), *self._collected(number)]
        try:
            for rank in range(1, self._place.world_size):
                remove_file(temporary / _report_name(rank))
            state = json.loads(self._state)
            self._check_owner()
            manifest = commit(self._parts(number), self._final, self._step, reports, state)
            if isinstance(temporary, RemotePath):
                remove_folder(temporary)
            return manifest
        except OSError as error:
            raise explain(error, temporary) from error

    def _check_owner(self) -> None:
        """Raises where this run may neither commit nor delete here any more."""
        if (why := self._place.lost()) is not None:
            raise _Lost(why)

    def _collected(self, number: int) -> list[Report]:
        """The reports of the other ranks in an attempt, in their order."""
        temporary = self._temporary(number)
        waiting, reports = set(range(1, self._place.world_size)), dict[int, Report]()
        look = _Looks(self)
        while waiting:
            names = set(list_names(temporary))
            for rank in sorted(rank for rank in waiting if _report_name(rank) in names):
                path = temporary / _report_name(rank)
                try:
                    reply = json.loads(read_start(path, MANIFEST_LIMIT))
                except (OSError, ValueError) as error:
                    if look.seconds > REPORT_SECONDS:
                        raise CheckpointError(f"{path}: cannot be read ({error})") from error
                    continue
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

    def _clean(self, found: Standing, manifest: Manifest) -> None:
        """Retention; what fails here costs space, no checkpoint."""
        folder = self._place.folder
        try:
            if isinstance(self._final, RemotePath):
                # What other attempts and runs that died have left beside the committed files.
                names = self._final.names()
                self._check_owner()
                for name in sorted({*names} - {MANIFEST, *manifest.files}):
                    (self._final / name).remove()
            self._check_owner()
            remember(folder, [found])
            prune(folder, self._place.keep, check=self._check_owner)
        except (CheckpointError, OSError) as error:
            self._place.note(f"older checkpoints were not cleaned up: {error}")

    # --- the other ranks ---

    def _follow(self) -> str | None:
        """Write and report this rank's part in every attempt, until rank 0 has committed."""
        number, is_told = 0, False
        is_remote, look = isinstance(self._final, RemotePath), _Looks(self)
        while True:
            # In an object store rank 0 may still take the manifest back, until it has removed the
            # folder of the attempt.
            folders = map(self._temporary, range(len(PAUSES) + 1 if is_remote else 0))
            if is_committed(self._final) and not any(folder.is_dir() for folder in folders):
                return None
            # Attempts may have come and gone between two looks.
            later = range(len(PAUSES), number, -1)
            if newer := [n for n in later if self._temporary(n).is_dir()]:
                number, is_told, self.untold = newer[0], False, None
                look.found_something()
            temporary = self._temporary(number)
            if not is_told and temporary.is_dir():
                is_told = True
                reply: dict[str, Any]
                try:
                    reply = {"problem": None, "report": self._part(number)}
                except (CheckpointError, OSError) as error:
                    reply = {"problem": str(error), "report": None}
                    with suppress(OSError):  # its space is needed for the report
                        remove_file(self._parts(number) / self._part_name(number, self._place.rank))
                try:
                    text = json.dumps(reply).encode()
                    replace_file(temporary / _report_name(self._place.rank), text)
                except OSError as error:
                    self.untold = number, reply["problem"] or str(explain(error, temporary))
                look.found_something()
            if not is_told and number == 0 and look.seconds > FOLDER_SECONDS:
                problem = f"{temporary} did not appear in {FOLDER_SECONDS:g} s"
                self.untold = None, f"{problem}: is it on a file system that all ranks share?"
            look.wait()

    # --- all of them ---

    def _part(self, number: int) -> Report:
        folder = self._parts(number)
        name = self._part_name(number, self._place.rank)
        report = write_part(folder, name, self._keyed, self.check)
        # Before the commit, not after it: what reads back wrong is written again from memory.
        read_back(folder, report)
        return report

    def _parts(self, number: int) -> Folder:
        """The folder of an attempt's parts: without renames, under the final name."""
        return self._final if isinstance(self._final, RemotePath) else self._temporary(number)

    def _part_name(self, number: int, rank: int) -> str:
        """The name of a rank's file in an attempt."""
        is_remote = isinstance(self._final, RemotePath)
        return part_name(rank, self._id(number) if is_remote else "")

    def _temporary(self, number: int) -> Folder:
        """The folder of an attempt; the name of the first is that of any save."""
        return self._final.with_name(f"{self._final.name}.tmp-{self._id(number)}")

    def _id(self, number: int) -> str:
        """The id of an attempt; that of the first is the step's."""
        if not number:
            return self._identity
        return uuid.uuid5(uuid.UUID(self._identity), str(number)).hex

    def sweep(self) -> None:
        """Remove what is left of failed attempts, in which other ranks may have written longer than
        rank 0 did; now all have ended."""
        for number in range(self._num_failed):
            remove_folder(self._temporary(number))

    def check(self) -> None:
        """Raises where this save is not to be finished."""
        if self._stop.is_set():
            raise _Stopped


class _Looks:
    """The pauses between looks at a folder, a tenth of the time since something was found. They end
    a save whose process has ended otherwise, when nothing new has come for a while."""

    def __init__(self, job: SaveJob) -> None:
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
        time.sleep(min(max(self.seconds / 10, FIRST_LOOK), LONGEST_LOOK))


def _report_name(rank: int) -> str:
    return f"report-{rank:05d}.json"
