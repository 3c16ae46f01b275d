"""Owner of a checkpoint folder outside of the run folder: the run that may commit and delete there.

An object store has no locks. So every start of a run claims the folder by a new object
``owner-N.json``, with N above all existing numbers: the highest number is the owner. The object is
created exclusively if the store supports that; elsewhere the last of two writers wins. The owner
checks before every commit and every deletion, and stops if a higher number exists: no other process
can stop it.

A run whose process died leaves its object. A start with the same identity, which the run folder
stores, takes over immediately. A run of another identity watches a heartbeat counter: an owner
whose counter does not change for a while is dead. Two clocks are never compared.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from moemesh.checkpoint import files
from moemesh.checkpoint.files import CheckpointError
from moemesh.checkpoint.remote import Place
from moemesh.config.limits import parse_json
from moemesh.monitor.lease import RunFolderError, describe_holder, holder_now

#: Name of the object of a claim.
_NAME = re.compile(r"owner-([1-9][0-9]{0,17})\.json")
#: Seconds between heartbeats of an owner.
_HEARTBEAT_SECONDS = 10.0
#: Seconds without a heartbeat after which an owner is dead; stores may take seconds.
_OBSERVE_SECONDS = 35.0
#: Seconds between reads of another run's claim.
_LOOK_SECONDS = 1.0
#: Pauses in seconds between reads of an unreadable claim: a file system may show it half written,
#: or a higher claim may have replaced it.
_PAUSES = (0.0, 0.1, 0.3, 0.6)
#: Largest number of bytes that are read of a claim.
_LIMIT = 4096


class Claim:
    """Claim `number` of the run `run` to `folder`, for any process of this run. The process that
    called :meth:`take` sends heartbeats until :meth:`release` or its exit."""

    def __init__(
        self, folder: Place, run: str, number: int, body: dict[str, Any] | None = None
    ) -> None:
        """`body`: content of the claim, given in the process that sends its heartbeats."""
        self.folder, self.run, self.number, self._body = folder, run, number, body
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="moemesh-owner", daemon=True)
        if body is not None:
            self._thread.start()

    def lost(self) -> str | None:
        """Reason why this run may no longer commit or delete; None while it is the owner. Raises
        OSError or CheckpointError if the folder cannot be read."""
        is_gone = isinstance(self.folder, Path) and not self.folder.exists()
        number, body = (0, {}) if is_gone else _highest(self.folder)
        if number < self.number:
            return f"{self.folder} was renamed, deleted or replaced"
        if number > self.number or body.get("run", self.run) != self.run:
            who = describe_holder(body)
            return f"{self.folder} was taken over by another run or another start of this ({who})"
        return None

    @staticmethod
    def take(
        folder: Place,
        run: str,
        *,
        takeover: bool = False,
        log: Callable[[str], None] = lambda text: None,
    ) -> Claim:
        """Claim `folder` for the run with the identity `run`.

        Raises RunFolderError if a live run of another identity keeps checkpoints there, unless
        `takeover`, if another run claims it first, and if the owner cannot be read. `log` is called
        with a line before a long wait.
        """
        try:
            files.make_folders(folder)
            number, body = _highest(folder)
            if body.get("held") and body.get("run") != run and not takeover:
                # Wait for a heartbeat of the owner.
                log(
                    f"{folder} belongs to another run ({describe_holder(body)}): waiting "
                    f"{_OBSERVE_SECONDS:g} s for its heartbeat"
                )
                end = time.monotonic() + _OBSERVE_SECONDS
                while time.monotonic() < end:
                    time.sleep(_LOOK_SECONDS)
                    highest, now = _highest(folder)
                    if not now.get("held"):
                        break
                    if (highest, now) != (number, body):  # a heartbeat, or a newer claim
                        raise _owned(folder, now)
            number += 1
            content: dict[str, Any] = {"run": run, **holder_now(), "counter": 0, "held": True}
            with suppress(FileExistsError):  # another run was first: the comparison below fails
                files.create_file(_file(folder, number), json.dumps(content).encode())
            highest, body = _highest(folder)
            if (highest, body) != (number, content):
                raise _owned(folder, body)
            for name in files.list_names(folder):
                if (match := _NAME.fullmatch(name)) and int(match[1]) < number:
                    files.remove_file(folder / name)
        except (CheckpointError, OSError) as error:
            raise RunFolderError(f"{folder}: its owner cannot be determined ({error})") from error
        return Claim(folder, run, number, content)

    def release(self) -> None:
        """Release the folder; a no-op after the first call, and in a process that did not
        :meth:`take` it."""
        if self._ended.is_set() or self._body is None:
            return
        self._ended.set()
        self._thread.join()
        self._write(held=False)

    def _beat(self) -> None:
        while not self._ended.wait(_HEARTBEAT_SECONDS):
            assert self._body is not None
            self._body["counter"] += 1
            self._write(held=True)

    def _write(self, *, held: bool) -> None:
        with suppress(CheckpointError, OSError):  # the next beat may succeed
            if self.lost() is None:  # a newer owner's claim must not be replaced
                body = json.dumps({**(self._body or {}), "held": held}).encode()
                files.replace_file(_file(self.folder, self.number), body)


def _owned(folder: Place, body: dict[str, Any]) -> RunFolderError:
    holder = describe_holder(body)
    return RunFolderError(
        f"{folder} is in use by another run ({holder}): choose another folder "
        "(train.checkpoint_folder), or take this one from it with --takeover",
        holder,
    )


def has_owner(folder: Place) -> bool:
    """Whether a run has ever claimed `folder`."""
    return any(map(_NAME.fullmatch, files.list_names(folder)))


def _highest(folder: Place) -> tuple[int, dict[str, Any]]:
    """Number and content of the highest claim; (0, {}) without one. An unreadable claim, whose run
    died while it wrote, has an empty content."""
    highest = 0
    for pause in (*_PAUSES, None):
        numbers = [
            int(match[1]) for name in files.list_names(folder) if (match := _NAME.fullmatch(name))
        ]
        if not numbers:
            return 0, {}
        highest = max(numbers)
        with suppress(CheckpointError, ValueError):
            body = parse_json(files.read_start(_file(folder, highest), _LIMIT))
            return highest, body if isinstance(body, dict) else {}
        if pause is not None:
            time.sleep(pause)
    return highest, {}


def _file(folder: Place, number: int) -> Place:
    return folder / f"owner-{number}.json"
