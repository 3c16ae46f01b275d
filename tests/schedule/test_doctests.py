"""The examples and pictures in docstrings are what the code prints."""

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

MODULES = [
    name
    for package in (moemesh.config, moemesh.report, moemesh.schedule, moemesh.trace)
    for _, name, _ in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
]
#: Modules whose functions draw a schedule.
DRAWN = (
    "ampnet",
    "chimera",
    "dualpipe",
    "gpipe",
    "interleaved_1f1b",
    "one_f_one_b",
    "pipedream",
    "pipedream_2bw",
    "terapipe",
    "zb_h1",
    "zb_h2",
    "zb_v",
)


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    done = doctest.testmod(importlib.import_module(name))
    assert done.failed == 0
    if name.rpartition(".")[2] in DRAWN and name.startswith("moemesh.schedule"):
        assert done.attempted >= 3, "the picture is missing"
