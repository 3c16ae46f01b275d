"""The mark `representative` in a project of its own: what runs by default, what is an error."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

GRID = """
import pytest

@pytest.mark.representative("two-b", "one-a")
@pytest.mark.parametrize("letter", ["a", "b"])
@pytest.mark.parametrize("number", ["one", "two", "three"])
def test_grid(number, letter):
    pass

def test_plain():
    pass

@pytest.mark.parametrize("number", [1, 2])
def test_without_representatives(number):
    pass
"""


def collected(pytester: pytest.Pytester, program: str, *arguments: str) -> str:
    pytester.makeconftest(Path(__file__).with_name("conftest.py").read_text())
    pytester.makepyfile(test_it=program)
    pytester.makeini("[pytest]\nmarkers =\n    slow\n    representative")
    return str(pytester.runpytest("--collect-only", "-q", *arguments).stdout)


def names(output: str) -> list[str]:
    return re.findall(r"^test_it.py::(\S+)$", output, re.MULTILINE)


def test_representatives_run_by_default_and_the_others_with_slow(
    pytester: pytest.Pytester,
) -> None:
    default = names(collected(pytester, GRID, "-m", "not slow"))
    assert default[:3] == ["test_grid[one-a]", "test_grid[two-b]", "test_plain"]
    assert default[3:] == [f"test_without_representatives[{number}]" for number in (1, 2)]
    slow = names(collected(pytester, GRID, "-m", "slow"))
    assert slow == [f"test_grid[{name}]" for name in ("one-b", "two-a", "three-a", "three-b")]


def test_a_single_case_can_be_asked_for(pytester: pytest.Pytester) -> None:
    assert names(collected(pytester, GRID, "test_it.py::test_grid[three-a]")) == [
        "test_grid[three-a]"
    ]


@pytest.mark.parametrize("name", ["two-c", ""])
def test_an_id_without_a_case_is_an_error(pytester: pytest.Pytester, name: str) -> None:
    output = collected(pytester, GRID.replace("two-b", name))
    assert f"test_it.py::test_grid has no case '{name}'" in output
    assert "'one-a', 'one-b', 'two-a', 'two-b', 'three-a', 'three-b'" in output
    assert names(output) == []


def test_what_a_test_patches_does_not_reach_pytest(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(Path(__file__).with_name("conftest.py").read_text())
    pytester.makepyfile("""
        def test_patches(monkeypatch):
            for name in ("shutil.get_terminal_size", "os.fspath", "pathlib.Path.exists"):
                monkeypatch.setattr(name, None)
            raise ValueError("reported")
    """)
    pytester.runpytest("-vv").stdout.fnmatch_lines(
        ["*test_patches FAILED*", "*ValueError: reported"]
    )


def test_a_test_without_cases_has_no_representatives(pytester: pytest.Pytester) -> None:
    program = GRID.replace("def test_plain", '@pytest.mark.representative("x")\ndef test_plain')
    assert "test_it.py::test_plain has no case 'x'" in collected(pytester, program)
