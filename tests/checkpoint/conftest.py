"""A retry of a save waits only for a moment."""

import pytest

from moemesh.checkpoint import saver


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saver, "PAUSES", (0.01, 0.01))
