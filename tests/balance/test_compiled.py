"""Compiled and plain loops give equal results; without numba, or a cache, all still works."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.balance import load_shapes
from moemesh.balance import (
    assign_tokens,
    lower_bound,
    plan_quotas,
    rebalance_experts,
    rebalance_incremental,
    rebalance_published,
    split_loads,
)
from moemesh.balance import compiled as loops
from tests.ranks import run_on_ranks


def everything(name: str, place: tuple[int, int, int, int]) -> list[Any]:
    """A result of every solver, for one shape of loads."""
    _, groups, nodes, gpus = place
    loads = load_shapes(1, 32, seed=2)[name]
    later = load_shapes(1, 32, seed=3)[name]
    slots = rebalance_experts(loads, *place)[0]
    again = rebalance_incremental(later, slots, num_gpus=gpus, num_groups=groups, num_nodes=nodes)
    split = split_loads(later, slots, num_gpus=gpus)
    counts = np.outer(np.arange(1, 9), loads[0]).astype(np.int64)
    plan = plan_quotas(counts, np.arange(32) // 4, 2)
    return [
        slots,
        rebalance_experts(loads, *place, effort="fast")[1],
        rebalance_published(loads, *place)[0],
        lower_bound(loads, *place),
        again.physical_to_logical,
        split.shares,
        plan.spare_expert,
        plan.spare_quota,
        assign_tokens(plan, counts, ranks_per_node=4),
    ]


def is_compiled() -> bool:
    """True if loops that are called here run as compiled code."""
    return not loops._plain.get() and loops._compiler() is not loops._unchanged


def assignment() -> list[Any]:
    """Results of the loops that are compiled in the least time, of every call of a router."""
    counts = np.outer(np.arange(1, 9), load_shapes(1, 32, seed=2)["uniform"][0]).astype(np.int64)
    with loops.plain_loops():
        plan = plan_quotas(counts, np.arange(32) // 4, 2)
    return [assign_tokens(plan, counts, ranks_per_node=4)]


def fast_and_plain(rank: int, function: Callable[..., list[Any]], *args: Any) -> list[list[Any]]:
    loops._plain = ContextVar("plain loops", default=False)
    assert is_compiled()
    fast = function(*args)
    with loops.plain_loops():
        assert not is_compiled()
        return [fast, function(*args)]


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (assignment, ()),
        *(
            pytest.param(everything, (name, place), marks=pytest.mark.slow)
            for place in [(48, 4, 2, 24), (48, 1, 1, 16), (40, 4, 2, 8)]
            for name in ["uniform", "zipf 1.0", "bursty"]
        ),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_compiled_equals_plain(function: Callable[..., list[Any]], args: tuple[Any, ...]) -> None:
    pytest.importorskip("numba")
    ((fast, plain),) = run_on_ranks(1, fast_and_plain, function, *args, fresh=True)
    for one, two in zip(fast, plain, strict=True):
        assert np.array_equal(one, two), "not one bit may differ"


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A state in which the search for a compiler has not run."""
    loops._compiler.cache_clear()
    monkeypatch.setattr(loops, "_plain", ContextVar("plain loops", default=False))
    yield monkeypatch
    monkeypatch.undo()
    loops._compiler.cache_clear()


def halved() -> Callable[[float], float]:
    """A compiled loop without a call so far, and the compiled function that it calls."""

    @loops.compiled
    def half(value: float) -> float:
        return value / 2

    return half


def test_without_numba(fresh: pytest.MonkeyPatch) -> None:
    real = importlib.import_module

    def refuse(name: str, package: str | None = None) -> Any:
        if name == "numba":
            raise ImportError(name)
        return real(name, package)

    fresh.setattr(importlib, "import_module", refuse)
    assert not is_compiled()
    assert halved()(3.0) == 1.5


def test_numba_that_does_not_work(fresh: pytest.MonkeyPatch) -> None:
    numba = pytest.importorskip("numba")

    def broken(**options: Any) -> Any:
        raise RuntimeError("no compiler")

    fresh.setattr(numba, "njit", broken)
    with pytest.warns(UserWarning, match="numba cannot compile on this machine: .*no compiler"):
        assert not is_compiled()
    assert halved()(3.0) == 1.5


def test_a_cache_that_cannot_be_written(fresh: pytest.MonkeyPatch, tmp_path: Path) -> None:
    numba = pytest.importorskip("numba")
    file = tmp_path / "a-file"
    file.write_text("")
    fresh.setattr(numba.config, "CACHE_DIR", str(file / "folder"))
    assert is_compiled() and halved()(3.0) == 1.5


def test_the_first_compilation_is_announced_once(
    fresh: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    numba = pytest.importorskip("numba")
    fresh.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    assert is_compiled() and not caplog.messages, "nothing is compiled yet"
    assert halved()(3.0) == halved()(3.0) == 1.5
    assert len(caplog.messages) == 1 and "tens of seconds" in caplog.messages[0]
    loops._compiler.cache_clear()  # as another process, which finds the folder
    assert halved()(3.0) == 1.5
    assert len(caplog.messages) == 1


def test_the_cache_changes_with_the_sources(fresh: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Numba compares only the file of a function, not the files of its callees: the folder must
    change."""
    numba = pytest.importorskip("numba")
    fresh.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    read = Path.read_bytes
    for count, end in ((1, b""), (1, b""), (2, b"#")):
        fresh.setattr(Path, "read_bytes", lambda self, end=end: read(self) + end)
        loops._compiler.cache_clear()
        assert is_compiled() and len(list(tmp_path.iterdir())) == count


def test_neither_torch_nor_numba_is_imported_before_it_is_needed() -> None:
    code = (
        "import sys, moemesh.balance\n"
        "print([name for name in ('torch', 'numba') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
