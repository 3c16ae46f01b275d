"""`pytest -p tests.seconds` prints processor seconds, those of all processes that a test starts
included: of each folder, and of the tests that take most.

They depend little on what else the machine does. Linux only: they are read in ``/proc``.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path

import pytest

_NUM_SHOWN = 40
_PROPERTY = "processor seconds"
#: Ticks at the start of a test, and seconds of the tests that have ended.
_starts: dict[str, int] = {}
_seconds: dict[str, float] = {}


def ticks() -> int:
    """Ticks of this process and its descendants, with those whose end a parent has noticed."""
    children: dict[int, list[int]] = {}
    used: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(folder.name))
            used[int(folder.name)] = sum(map(int, fields[11:15]))
    total, waiting = 0, [os.getpid()]
    while waiting:
        process = waiting.pop()
        total += used.get(process, 0)
        waiting += children.get(process, [])
    return total


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    _starts[item.nodeid] = ticks()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if call.when == "teardown" and (start := _starts.pop(item.nodeid, None)) is not None:
        seconds = (ticks() - start) / os.sysconf("SC_CLK_TCK")
        report.user_properties.append((_PROPERTY, seconds))
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if _PROPERTY in (values := dict(report.user_properties)):
        _seconds[report.nodeid] = float(str(values[_PROPERTY]))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    folders = Counter[str]()
    for name, seconds in _seconds.items():
        folders["/".join(name.split("::")[0].split("/")[:2])] += seconds
    terminalreporter.section(f"{sum(_seconds.values()):.0f} processor seconds")
    for name, seconds in folders.most_common():
        terminalreporter.write_line(f"{seconds:8.2f} {name}")
    terminalreporter.section("tests that take most")
    for name, seconds in Counter(_seconds).most_common(_NUM_SHOWN):
        terminalreporter.write_line(f"{seconds:8.2f} {name}")
