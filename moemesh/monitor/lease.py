"""The lease of a run folder: one process may write there, by a locked file, an epoch and a counter.

The lock of the operating system (flock) decides between processes that see it. Some file systems of
several hosts do not share locks; therefore the holder raises a counter every two seconds, and a
holder whose counter does not change for seven seconds counts as dead. Clocks of two hosts are never
compared. Every start of a run has an epoch of its own; a suspended process of an earlier epoch
finds the new one in the file when it continues, and writes nothing more.
"""

from __future__ import annotations

import datetime
import fcntl
import json
import os
import socket
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from moemesh.config.errors import UserError
from moemesh.config.limits import parse_json
from moemesh.trace.machine import boot_name
from moemesh.trace.run import is_locked

FILE = "lease"
_HEARTBEAT_SECONDS = 2.0
#: Seconds without a change of the counter after which its holder counts as dead.
_OBSERVE_SECONDS = 7.0
#: Seconds in which a holder whose folder was taken over has to leave.
_TAKEOVER_SECONDS = 30.0
#: Size of every body, so that a single write replaces it.
_BYTES = 512
#: Seconds to wait before each read of a lease that may be half written.
_PAUSES = (0.0, 0.1, 0.3)


class RunFolderError(UserError):
    """The folder cannot be used; the message has the reason and the remedy. `holder`: description
    of the run that holds it, if one does."""

    def __init__(self, message: str, holder: str = "") -> None:
        super().__init__(message)
        self.holder = holder


class LeaseLost(RunFolderError):
    """The folder was taken over by another run, renamed, deleted or replaced; writing stops.
    `facts`: keys of failure.json, among them the present folder of this run."""

    def __init__(self, message: str, advice: str, folder: Path | None) -> None:
        super().__init__(message)
        self.facts = {"advice": advice, "run_folder": folder and str(folder)}


class Lease:
    """A lease that this process holds, until :meth:`release` or its end."""

    def __init__(self, handle: int, file: Path, epoch: int) -> None:
        """Use :meth:`take`."""
        self.file, self.epoch, self.handle = file, epoch, handle
        self._beats = 0
        #: Identity of the run, the same for all its starts.
        run = _read(handle).get("run")
        self.run = run if run and isinstance(run, str) else uuid.uuid4().hex
        #: Number of the run's claim to an external checkpoint folder; None without one.
        self._claim: int | None = None
        self._ended, self._lock = threading.Event(), threading.Lock()
        self._holder = holder_now()
        try:
            self._write(held=True)
        except RunFolderError:
            os.close(handle)
            raise
        self._thread = threading.Thread(target=self._beat, name="moemesh-lease", daemon=True)
        self._thread.start()

    @staticmethod
    def take(folder: Path, *, takeover: bool = False) -> Lease:
        """Take the lease of `folder`, or raise RunFolderError with the holder's description.

        `takeover`: raise the epoch and wait for the holder to leave; take the folder in any case.
        """
        file = folder / FILE
        handle = _open(file)
        try:
            epoch = _number(_read(handle), "epoch")
            if not _lock(handle, file):
                holder = describe_holder(_read(handle))
                if not takeover:
                    raise _in_use(folder, holder)
                os.close(handle)
                return Lease._take_over(file, epoch + 1)
            body = _read(handle)
            # The lock is free, so a holder on this host has ended. The lock of a holder on another
            # host may be invisible to this one: its counter shows whether it lives.
            is_foreign = bool(body.get("held")) and body.get("boot") != boot_name()
            counter, end = _number(body, "counter"), time.monotonic() + _OBSERVE_SECONDS
            while not takeover and is_foreign and time.monotonic() < end:
                time.sleep(0.2)
                if _number(_read(handle), "counter") != counter:
                    holder = describe_holder(body)
                    raise RunFolderError(
                        f"{folder} is in use by another run ({holder}), whose counter moves: stop "
                        "it, choose another folder, or take this one with --takeover",
                        holder,
                    )
        except BaseException:
            with suppress(OSError):
                os.close(handle)
            raise
        return Lease(handle, file, _number(_read(handle), "epoch") + 1)

    @staticmethod
    def refuse_held(folder: Path) -> None:
        """Raises RunFolderError, as :meth:`take` would, if a process holds the lease of `folder`
        and its lock is visible on this host; takes and writes nothing."""
        if is_locked(folder / FILE, in_doubt=False):
            raise _in_use(folder, describe_holder(body_of(folder)))

    @staticmethod
    def _take_over(file: Path, epoch: int) -> Lease:
        """Raise the epoch, so that the holder leaves; a hung holder keeps an unlinked file."""
        handle = _open(file)
        try:
            body = {**_read(handle), "epoch": epoch}
            os.pwrite(handle, json.dumps(body).encode().ljust(_BYTES), 0)
        finally:
            os.close(handle)
        end = time.monotonic() + _TAKEOVER_SECONDS
        while time.monotonic() < end:
            handle = _open(file)
            if _lock(handle, file):
                return Lease(handle, file, epoch + 1)
            os.close(handle)
            time.sleep(0.2)
        content = file.read_bytes()
        file.unlink()
        handle = _open(file)
        _lock(handle, file)
        os.pwrite(handle, content, 0)  # keeps the identity of the run
        return Lease(handle, file, epoch + 1)

    def note_claim(self, number: int) -> None:
        """Write the claim of this run to an external checkpoint folder into the lease."""
        with self._lock:
            self._claim = number
            self._write(held=True)

    def raise_epoch(self) -> None:
        """Begin a new start of the same run: ranks of the previous start may no longer write.
        Raises RunFolderError if the file cannot be written."""
        with self._lock:
            self.epoch += 1
            self._write(held=True)

    def release(self) -> None:
        """Release the lease; no-op if released."""
        if self._ended.is_set():
            return
        self._ended.set()
        self._thread.join()
        with suppress(OSError, RunFolderError):  # if the write fails, the lock is free anyway
            if _read(self.handle).get("epoch") == self.epoch:  # holds in a renamed folder, too
                self._write(held=False)
        os.close(self.handle)

    def _beat(self) -> None:
        while not self._ended.wait(_HEARTBEAT_SECONDS):
            with self._lock, suppress(OSError, RunFolderError):
                # Never overwrite the body of a new holder.
                if why_lost(self.file.parent, self.run, self.epoch) is None:
                    self._beats += 1
                    self._write(held=True)

    def _write(self, *, held: bool) -> None:
        body = {
            **self._holder,
            "boot": boot_name(),
            "epoch": self.epoch,
            "counter": self._beats,
            "held": held,
            "run": self.run,
        }
        if self._claim is not None:
            body["claim"] = self._claim
        try:
            os.pwrite(self.handle, json.dumps(body).encode().ljust(_BYTES), 0)
        except OSError as error:
            raise RunFolderError(
                f"{self.file}: cannot be written ({error.strerror}): a run needs a folder in which "
                "it can write"
            ) from error


def read_start(folder: Path) -> tuple[str | None, int | None]:
    """The identity of the run in the lease of `folder`, and the epoch of its newest start; None if
    they cannot be read."""
    body = body_of(folder)
    epoch = body.get("epoch")
    return (body.get("run"), epoch) if isinstance(epoch, int) else (None, None)


def why_lost(folder: Path, run: str | None, epoch: int) -> str | None:
    """The reason why the start `epoch` of `run` may no longer write into `folder`; None if it may,
    or if the file system does not answer."""
    for pause in _PAUSES:
        time.sleep(pause)
        try:
            body = parse_json((folder / FILE).read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            return f"{folder} was renamed, deleted or replaced"
        except OSError:
            return None
        except ValueError:
            continue
        if isinstance(body, dict) and body.get("run") == run:
            return None if body.get("epoch") == epoch else f"another run has taken over {folder}"
    return f"{folder} was replaced: its lease is not that of this run"


def read_claim(folder: Path) -> tuple[str, int] | None:
    """The identity of the run in `folder`, and its claim to an external checkpoint folder; None
    without a claim."""
    body = body_of(folder)
    run, claim = body.get("run"), body.get("claim")
    return (run, claim) if isinstance(run, str) and isinstance(claim, int) else None


def body_of(folder: Path) -> dict[str, Any]:
    """The content of the lease of `folder`; empty if it cannot be read."""
    try:
        return _parsed((folder / FILE).read_bytes())
    except OSError:
        return {}


def _in_use(folder: Path, holder: str) -> RunFolderError:
    return RunFolderError(
        f"{folder} is in use by another run ({holder}): wait for it, stop it, choose another "
        "folder, or take this one from it with --takeover",
        holder,
    )


def _open(file: Path) -> int:
    try:
        return os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise RunFolderError(f"{file}: cannot be opened ({error.strerror})") from error


def _lock(handle: int, file: Path) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise RunFolderError(
            f"{file}: cannot be locked ({error.strerror}): choose a folder on a file system that "
            "supports file locks"
        ) from error
    return True


def _read(handle: int) -> dict[str, Any]:
    return _parsed(os.pread(handle, 4096, 0))


def _parsed(text: bytes) -> dict[str, Any]:
    try:
        content = parse_json(text)
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def _number(body: dict[str, Any], key: str) -> int:
    value = body.get(key)
    return value if isinstance(value, int) else 0


def holder_now() -> dict[str, Any]:
    """This process as a holder, the input of :func:`describe_holder`."""
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"host": socket.gethostname(), "pid": os.getpid(), "started": started}


def describe_holder(body: dict[str, Any]) -> str:
    """The holder of a folder as text."""
    try:
        return f"pid {body['pid']} on {body['host']}, since {body['started']}"
    except KeyError:
        return "unknown process"
