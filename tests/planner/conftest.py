"""Fixtures of the planner tests."""

from __future__ import annotations

import pytest


@pytest.fixture
def large_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without memory limits: `config check` compares a run with this machine's memory,
    but plans are for other machines."""
    monkeypatch.setattr("moemesh.planner.machine_memory.refuse_too_large", lambda config: None)
