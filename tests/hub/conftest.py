"""The architecture of a family is read once in a session, by a process with torch loaded."""

import sys

import pytest

from tests import commands, sandbox


@pytest.fixture(autouse=True)
def _architectures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(sandbox.shared("cache")))
    monkeypatch.setattr(sys, "executable", commands.python())
