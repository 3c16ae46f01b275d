"""A fake Python interpreter that starts with torch and moemesh loaded.

`python()` is the path of an executable that takes the arguments ``-m``, ``-c`` or a script, as the
interpreter does. It requests a fork from a server, a child of the fork server of
:mod:`tests.ranks`: a process with its arguments, environment, folder and streams. It passes signals
on to that process, and ends in the same way. Ranks that such a process starts are started like it.
So a command costs its own work, not the seconds of its imports.

Tests of start, signals, kills and orphans use ``sys.executable``: the process that a test sees does
not do the work, which happens in a forked process with a session of its own.
"""

from __future__ import annotations

import atexit
import marshal
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import tempfile
import threading
import warnings
from contextlib import suppress
from functools import cache
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NoReturn

from tests.ranks import context

#: Options of the interpreter that the fake one may ignore: streams are flushed at the end anyway.
_IGNORED = ("-u", "-B")

#: Without `socket` and `signal`, whose imports take half of its time.
_CLIENT = """
import _signal as signal, _socket as socket, marshal, os, sys

connection = socket.socket(socket.AF_UNIX)
connection.connect({address!r})
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
    signal.signal(number, lambda number, frame: connection.send(bytes([number])))
request = marshal.dumps((sys.argv[1:], os.getcwd(), dict(os.environ)))
streams = b"".join(number.to_bytes(4, sys.byteorder) for number in (0, 1, 2))
head = len(request).to_bytes(8, "big")
connection.sendmsg([head], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])
connection.sendall(request)
answer = connection.recv(4)
if len(answer) < 4:
    sys.exit("the server of preloaded processes is gone")
code = int.from_bytes(answer, "big", signed=True)
if code < 0:
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""


def python() -> str:
    """Path of the fake interpreter."""
    return str(folder() / "python")


@cache
def folder() -> Path:
    """A folder with the fake `python` and `moemesh`, for the search path of a shell."""
    place = tempfile.TemporaryDirectory(prefix="preloaded-")
    path = Path(place.name)
    address = str(path / "socket")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    (path / "client.py").write_text(_CLIENT.format(address=address))
    for name, words in (("python", ""), ("moemesh", "-m moemesh ")):
        script = f'#!/bin/sh\nexec "{sys.executable}" -IS "{path}/client.py" {words}"$@"\n'
        (path / name).write_text(script)
        (path / name).chmod(0o755)
    # No daemon: what it forks may have children of its own.
    server = context.Process(target=_serve, args=(listener, str(path / "python")))
    server.start()
    listener.close()

    def end() -> None:
        server.kill()
        server.join()
        place.cleanup()

    atexit.register(end)
    return path


def _serve(listener: socket.socket, stand_in: str) -> None:
    """Fork a process for every client, pass signals to it and its end to the client, until the
    tests are over.

    One process serves all clients: a fork of it takes a fortieth of a processor second.
    """
    sys.executable = stand_in
    woken, waking = socket.socketpair()
    waking.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waking.fileno())
    clients: dict[socket.socket, int] = {}
    over = _tests_are_over()
    while over not in (ready := wait([over, listener, woken, *clients])):
        for connection in set(ready) & clients.keys():
            assert isinstance(connection, socket.socket)
            numbers = b""
            with suppress(ConnectionError):
                numbers = connection.recv(1)
            if numbers:
                _kill(clients[connection], numbers[0])
            else:  # the client was killed
                _kill(clients.pop(connection), signal.SIGKILL)
                connection.close()
        if woken in ready:
            woken.recv(1024)
            _report_ends(clients)
        if listener in ready:
            connection, _ = listener.accept()
            if (request := _request(connection)) is None:
                connection.close()
                continue
            arguments, cwd, environment, streams = request
            if (process := os.fork()) == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for other in (listener, woken, waking, connection, *clients):
                    other.close()
                _become(arguments, cwd, environment, streams)
            for stream in streams:
                os.close(stream)
            clients[connection] = process
    for process in clients.values():
        _kill(process, signal.SIGKILL)


def _tests_are_over() -> int:
    """Can be read as soon as the process of the tests is gone."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    return parent.sentinel


def _request(connection: socket.socket) -> tuple[list[str], str, dict[str, str], list[int]] | None:
    """Arguments, folder, environment and streams; None if the client was killed meanwhile."""
    head, streams, _, _ = socket.recv_fds(connection, 8, 3)
    length, request = int.from_bytes(head, "big"), b""
    while head and len(request) < length:
        if not (part := connection.recv(length - len(request))):
            break
        request += part
    if not head or len(request) < length:
        for stream in streams:
            os.close(stream)
        return None
    return *marshal.loads(request), streams


def _report_ends(clients: dict[socket.socket, int]) -> None:
    """Send the exit codes of the processes that have ended to their clients."""
    connections = {process: connection for connection, process in clients.items()}
    with suppress(ChildProcessError):
        while (end := os.waitpid(-1, os.WNOHANG))[0]:
            if (connection := connections.get(end[0])) is not None:
                code = os.waitstatus_to_exitcode(end[1])
                with suppress(OSError):  # the client was killed
                    connection.sendall(code.to_bytes(4, "big", signed=True))
                del clients[connection]
                connection.close()


def _kill(process: int, number: int) -> None:
    with suppress(ProcessLookupError):  # it ended meanwhile
        os.kill(process, number)


def _become(
    arguments: list[str], cwd: str, environment: dict[str, str], streams: list[int]
) -> NoReturn:
    """Be the interpreter with these arguments."""
    os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    code: Any = 0
    try:
        _run(arguments)
    except SystemExit as error:
        code = error.code or 0
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    if not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # pyright: ignore: ends pools of threads and waits for the others
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # its reader left, or it was closed
            stream.flush()
    os._exit(code & 0xFF)


def _run(arguments: list[str]) -> None:
    paths = [os.getcwd()]
    while arguments[0] in (*_IGNORED, "-P"):
        paths = [] if arguments[0] == "-P" else paths
        arguments = arguments[1:]
    match arguments:
        case ["-m", module, *rest]:
            sys.argv = [module, *rest]
            sys.path[:0] = paths
            warnings.filterwarnings("ignore", "'.*' found in sys.modules", RuntimeWarning)
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case ["-c", program, *rest]:
            sys.argv = ["-c", *rest]
            sys.path.insert(0, "")
            exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})
        case [script, *rest] if not script.startswith("-"):
            sys.argv = [script, *rest]
            sys.path.insert(0, str(Path(script).resolve().parent))
            runpy.run_path(script, run_name="__main__")
        case _:
            raise SystemExit(f"the stand-in for Python does not know {arguments[0]}")
