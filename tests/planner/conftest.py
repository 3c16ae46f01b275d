"""What tests of the planner share."""

from __future__ import annotations

import pytest


@pytest.fixture
def large_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """`config check` asks whether this machine could hold a run; plans are for other machines."""
    monkeypatch.setattr("moemesh.train.preparation.refuse_too_large", lambda config: None)
