"""Examples and pictures in docstrings equal the output of the code."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import moemesh
import moemesh.config
import moemesh.report
import moemesh.schedule
import moemesh.trace
from moemesh.report.timeline_text import draw
from moemesh.schedule.simulate import simulate

MODULES = [
    name
    for package in (moemesh.config, moemesh.report, moemesh.schedule, moemesh.trace)
    for _, name, _ in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
]
#: Modules whose functions draw a schedule, and how many do.
DRAWN = {"ampnet": 1, "dualpipe": 2, "generators": 9, "terapipe": 1}


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    names = {"draw": draw, "simulate": simulate}
    done = doctest.testmod(importlib.import_module(name), extraglobs=names)
    assert done.failed == 0
    package, _, module = name.rpartition(".")
    if package == "moemesh.schedule" and module in DRAWN:
        assert done.attempted >= DRAWN[module], "a picture is missing"
