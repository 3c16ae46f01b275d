"""Every test starts alike, in a place of its own; long grids run their representatives."""

import functools
import gc
import signal
import sys
from collections.abc import Generator
from typing import Any

import hypothesis
import pytest
from hypothesis.internal.conjecture import providers

from moemesh.cli import terminal
from tests import sandbox

sandbox.use_plain_loops()
sandbox.compile_pages_once()
# Hypothesis would parse all modules of the checkout, for constants to try.
providers.is_local_module_file = lambda path: False
# Whether a verb works for a second depends on the machine: no verb prints its progress by chance.
terminal.FIRST = 1e6
#: Signals that a run handles.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    sandbox.begin(session.config)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    sandbox.end()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Imports make objects that stay: no search for garbage among them, now or later. Tests make
    little garbage, so that a search after every 20,000 objects (by default 700) is enough; the rest
    cost a twentieth of the suite."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(20_000, 25, 25)
        gc.enable()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, object, object]:
    """Fork the server of ranks before the first test, with the streams of tests."""
    ranks = sys.modules.get("tests.ranks")
    if ranks is not None and not session.config.option.collectonly:
        capture = session.config.pluginmanager.getplugin("capturemanager")
        assert capture is not None
        capture.resume_global_capture()
        ranks.fork_the_server()
        capture.suspend_global_capture()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    sandbox.watch(item.nodeid)
    try:
        return (yield)
    finally:
        sandbox.release()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """Undo the patches of a test before pytest reports on it: they may be to functions it calls."""
    try:
        yield
    finally:
        if isinstance(item, pytest.Function) and "monkeypatch" in item.funcargs:
            item.funcargs["monkeypatch"].undo()


@pytest.fixture(scope="module", autouse=True)
def _place_of_module() -> Generator[None]:
    """Working folder of the fixtures of a module."""
    with sandbox.place():
        yield


@pytest.fixture(autouse=True)
def _same_start() -> Generator[None]:
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)
        # Not `manual_seed`, which writes down the stack for GPUs that nothing has used yet.
        torch.default_generator.manual_seed(0)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(0)
    # A run in this process may leave signals ignored, which processes of later tests would inherit.
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    with sandbox.place():
        yield
    for number, handler in handlers.items():
        if handler is not None and signal.getsignal(number) is not handler:
            signal.signal(number, handler)
    if changes := sandbox.violations():
        pytest.fail("a test leaves the checkout alone:\n" + "\n".join(changes), pytrace=False)


@pytest.fixture
def invoke(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """(exit code, stdout, stderr) of the command with these words, in this process."""
    from tests.test_cli import run  # whose imports read the environment

    return functools.partial(run, capsys, monkeypatch)


@pytest.fixture
def architectures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Architectures of transformers are read once in a session, by a process with torch loaded."""
    from tests import commands  # which starts the fork server

    monkeypatch.setenv("XDG_CACHE_HOME", str(sandbox.shared("cache")))
    monkeypatch.setattr(sys, "executable", commands.python())


# Machines are small and shared: the seconds of an example depend on their load.
hypothesis.settings.register_profile("moemesh", deadline=None, max_examples=30)
hypothesis.settings.load_profile("moemesh")


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(collector: pytest.Collector) -> Generator[None, Any, Any]:
    """Mark cases as slow: in a test with ``representative(*ids)`` those with other ids.

    The hook sees the cases of one function together, before anything is selected from them.
    """
    made = yield
    cases = {_id_of(case): case for case in made} if isinstance(made, list) else {}
    first = next(iter(cases.values()), None)
    mark = first.get_closest_marker("representative") if first is not None else None
    if mark is None:
        return made
    for unknown in set(mark.args) - set(cases):
        raise collector.CollectError(
            f"{first.nodeid.partition('[')[0]} has no case {unknown!r} for its mark "
            f"`representative`; its cases: {', '.join(map(repr, cases))}"
        )
    for case in set(cases) - set(mark.args):
        cases[case].add_marker(pytest.mark.slow)
    return made


def _id_of(case: pytest.Item) -> str:
    """Text in brackets after the name of a test."""
    return case.name.partition("[")[2].removesuffix("]")
