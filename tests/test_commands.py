"""The fake interpreter behaves like the interpreter."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import commands
from tests.waiting import PATIENCE, ended, until

EVERYTHING = """
import os, sys
print(sys.argv, os.getcwd(), os.environ.get("SAID"), sys.stdin.read(), __name__)
print("an error", file=sys.stderr)
sys.exit(3)
"""
ENDS = {
    "nothing": "pass",
    "code": "raise SystemExit(7)",
    "words": "raise SystemExit('so it ends')",
    "exception": "raise KeyError('lost')",
    "interrupt": "raise KeyboardInterrupt",
    "kill": "import os; os.kill(os.getpid(), 9)",
    "atexit": "import atexit; atexit.register(print, 'last')",
    "thread": "import threading, time\n"
    "threading.Thread(target=lambda: (time.sleep(0.2), print('late'))).start()",
    "module": "import moemesh.__main__ as m; print(m.__name__)",
}


def run(python: str, *arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    return ended([python, *arguments], **options)


def test_arguments_folder_environment_and_streams_arrive(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(EVERYTHING)
    (tmp_path / "helper.py").write_text("")
    for arguments in (["-c", EVERYTHING], ["script.py"], ["-m", "script"], ["-u", "script.py"]):
        options = {"cwd": tmp_path, "env": os.environ | {"SAID": "this"}, "input": "typed"}
        ours = run(commands.python(), *arguments, "one", "--two", **options)
        theirs = run(sys.executable, *arguments, "one", "--two", **options)
        assert ours.returncode == theirs.returncode == 3
        assert ours.stderr == theirs.stderr == "an error\n"
        assert (
            ours.stdout.split()[-3:] == theirs.stdout.split()[-3:] == ["this", "typed", "__main__"]
        )
        assert str(tmp_path) in ours.stdout and "'one', '--two'" in ours.stdout
    for python in (commands.python(), sys.executable):
        assert "No module named script" in run(python, "-P", "-m", "script", cwd=tmp_path).stderr


@pytest.mark.parametrize("name", ENDS)
def test_it_ends_as_the_interpreter_ends(name: str) -> None:
    ours, theirs = (run(python, "-c", ENDS[name]) for python in (commands.python(), sys.executable))
    assert (ours.returncode, ours.stdout) == (theirs.returncode, theirs.stdout)
    assert ours.stderr.splitlines()[-1:] == theirs.stderr.splitlines()[-1:]


def test_nothing_of_one_command_reaches_the_next(tmp_path: Path) -> None:
    change = "import os, torch, moemesh; torch.set_default_dtype(torch.float64); moemesh.x = 1"
    assert run(commands.python(), "-c", change + "; os.environ['LEFT'] = 'yes'").returncode == 0
    look = "import os, torch, moemesh; print(torch.get_default_dtype(), hasattr(moemesh, 'x'))"
    done = run(commands.python(), "-c", look + "; print(os.environ.get('LEFT'))")
    assert done.stdout.split() == ["torch.float32", "False", "None"], done.stderr


def test_a_signal_arrives(tmp_path: Path) -> None:
    wait = "import sys, time\ntry:\n  print('ready', flush=True)\n  time.sleep(60)\n"
    wait += "except KeyboardInterrupt: sys.exit(5)"
    process = subprocess.Popen([commands.python(), "-c", wait], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 5


def test_the_process_ends_with_its_client(tmp_path: Path) -> None:
    wait = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    process = subprocess.Popen([commands.python(), "-c", wait], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    assert Path(f"/proc/{pid}").exists() and pid != process.pid
    process.kill()
    process.communicate()
    until(lambda: not Path(f"/proc/{pid}").exists())


def test_what_a_command_starts_is_preloaded_too() -> None:
    ask = "import subprocess, sys; loaded = 'import sys; print(\"torch\" in sys.modules)'\n"
    ask += "subprocess.run([sys.executable, '-c', loaded], check=True)"
    done = run(commands.python(), "-c", ask)
    assert done.stdout == "True\n", done.stderr
