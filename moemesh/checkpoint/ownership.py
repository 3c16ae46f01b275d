"""The owner of a folder of checkpoints outside of a run folder: who may commit and delete there.

An object store has no locks. So every start of a run claims the folder by an object of a new name,
``owner-N.json``, N above all that are there: the highest number is the owner. The object is created
only where it does not exist yet, which a store decides where it offers that; elsewhere the last of
two writers has it. The owner looks before every commit and every deletion, and stops where there is
a higher number than its own: it cannot be stopped from outside.

A run whose process died leaves its object. Another run of the same identity, which the run folder
keeps, goes on at once. A run of another identity watches a counter that the owner raises: one that
stands still for a while is dead. Two clocks are never compared.
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
from moemesh.watch.lease import RunFolderError, describe_holder, holder_now

_NAME = re.compile(r"owner-([1-9][0-9]{0,17})\.json")
_HEARTBEAT_SECONDS = 10.0
#: A counter that stands still for so long is that of a dead owner; stores may take seconds.
_OBSERVE_SECONDS = 35.0
_LOOK_SECONDS = 1.0
#: Pauses between reads of a claim that says nothing: it may be half written on a file system that
#: is no object store, or gone, for a higher one.
_PAUSES = (0.0, 0.1, 0.3, 0.6)
_LIMIT = 4096


class Claim:
    """The claim `number` of the run `run` to `folder`, for any process of this run. The one that
    has taken it (:meth:`take`) keeps it alive, until :meth:`release` or its end."""

    def __init__(
        self, folder: Place, run: str, number: int, body: dict[str, Any] | None = None
    ) -> None:
        """`body`: what the claim says, of the process that keeps it alive."""
        self.folder, self.run, self.number, self._body = folder, run, number, body
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="moemesh-owner", daemon=True)
        if body is not None:
            self._thread.start()

    def lost(self) -> str | None:
        """Why this run may neither commit nor delete any more; None while it is the owner. Raises
        OSError or CheckpointError where the folder does not answer."""
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
        say: Callable[[str], None] = lambda text: None,
    ) -> Claim:
        """Claim `folder` for the run of the identity `run`.

        Raises RunFolderError where a run of another identity is alive that keeps checkpoints there,
        unless `takeover`. `say` gets a line before anything that takes long.
        """
        try:
            files.make_folders(folder)
            number, body = _highest(folder)
            if body.get("held") and body.get("run") != run and not takeover:
                # The owner is alive where it gives a sign of life.
                say(
                    f"{folder} is that of another run ({describe_holder(body)}): waiting "
                    f"{_OBSERVE_SECONDS:g} s for a sign of its life"
                )
                end = time.monotonic() + _OBSERVE_SECONDS
                while time.monotonic() < end:
                    time.sleep(_LOOK_SECONDS)
                    found = _highest(folder)
                    if not found[1].get("held"):
                        break
                    if found != (number, body):
                        raise _owned(folder, found[1])
            number += 1
            own: dict[str, Any] = {"run": run, **holder_now(), "counter": 0, "held": True}
            with suppress(FileExistsError):  # another was faster, which the next look tells
                files.create_file(_file(folder, number), json.dumps(own).encode())
            highest, body = _highest(folder)
            if (highest, body) != (number, own):
                raise _owned(folder, body)
            for name in files.list_names(folder):
                if (match := _NAME.fullmatch(name)) and int(match[1]) < number:
                    files.remove_file(folder / name)
        except (CheckpointError, OSError) as error:
            raise RunFolderError(f"{folder}: its owner cannot be determined ({error})") from error
        return Claim(folder, run, number, own)

    def release(self) -> None:
        """Give the folder back; nothing happens when that was done already, or by whoever has not
        taken it."""
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
            if self.lost() is None:
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
    """The highest claim, and what it says; 0 where there is none. One that cannot be read is that
    of a run that died while it wrote it."""
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
