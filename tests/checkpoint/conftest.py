"""Saves that are tried again pause for a moment only."""

import pytest

from moemesh.checkpoint import saver


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saver, "PAUSES", (0.01, 0.01))
