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

_CLIENT = """
import marshal, os, signal, socket, sys

connection = socket.socket(socket.AF_UNIX)
connection.connect({address!r})
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
    signal.signal(number, lambda number, frame: connection.send(bytes([number])))
request = marshal.dumps((sys.argv[1:], os.getcwd(), dict(os.environ)))
socket.send_fds(connection, [len(request).to_bytes(8, "big")], [0, 1, 2])
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
    """Fork one keeper for every connection, until the tests are over."""
    sys.executable = stand_in
    while listener in wait([listener, _tests_are_over()]):
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            _keep(connection)
        connection.close()
        _reap()


def _tests_are_over() -> int:
    """Can be read as soon as the process of the tests is gone."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    return parent.sentinel


def _reap() -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _keep(connection: socket.socket) -> NoReturn:
    """Fork the process that a client requests, pass signals to it and its end to the client."""
    head, streams, _, _ = socket.recv_fds(connection, 8, 3)
    length, request = int.from_bytes(head, "big"), b""
    while len(request) < length:
        request += connection.recv(length - len(request))
    process = os.fork()
    if process == 0:
        connection.close()
        _become(*marshal.loads(request), streams)
    for stream in streams:
        os.close(stream)

    def report() -> None:
        _, status = os.waitpid(process, 0)
        code = os.waitstatus_to_exitcode(status)
        try:
            connection.sendall(code.to_bytes(4, "big", signed=True))
        finally:
            os._exit(0)

    reporter = threading.Thread(target=report)
    reporter.start()
    while connection in wait([connection, _tests_are_over()]) and (numbers := connection.recv(1)):
        _kill(process, numbers[0])
    _kill(process, signal.SIGKILL)
    reporter.join()
    os._exit(0)


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
