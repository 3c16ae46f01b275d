"""The report of a soak, from what its processes noted; and a short soak."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import commands
from tests.drill import soak


def run_folder(folder: Path, seconds: list[float]) -> Path:
    folder.mkdir()
    rows = [json.dumps({"step": n, "seconds": s}) for n, s in enumerate(seconds, 1)]
    (folder / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    (folder / "events.jsonl").write_text('{"kind": "slow_rank"}\n{"kind": "note"}\n')
    return folder


def test_a_report_matches_verdicts_with_faults(tmp_path: Path) -> None:
    """A loop that is told, a verdict without a fault, and a kill that is told of the wrong rank."""
    out = run_folder(tmp_path / "run", [2.0, 2.0, 4.0])
    notes = [
        {"event": "went on", "time": 105.0, "step": 1},
        {"event": "fault", "time": 110.0, "action": "loop", "rank": 1, "step": 3},
        {"event": "verdict", "time": 113.0, "kind": "busy", "rank": 1},
        {"event": "went on", "time": 118.0, "step": 3},
        {"event": "verdict", "time": 119.0, "kind": "hung", "rank": 0},
        {"event": "went on", "time": 121.0, "step": 3},
        {"event": "fault", "time": 130.0, "action": "kill", "rank": 0, "step": 4},
        {"event": "verdict", "time": 130.5, "kind": "killed", "rank": 1},
    ]
    found = soak.report(out, notes, start=100.0, wall=40.0)
    assert (found["effective_share"], found["start_seconds"]) == (0.2, 5.0)
    assert (found["false_alarms"], found["slow_ranks"], found["steps"]) == (1, 1, 3)
    loop, kill = found["faults"]
    assert (loop["detected"], loop["resumed"], loop["good"], loop["at"]) == (3.0, 5.0, True, 10.0)
    assert (kill["detected"], kill["resumed"], kill["good"]) == (0.5, None, False)
    assert not soak.is_good({"exit_code": 143, **found})
    calm = soak.report(out, notes[:1], start=100.0, wall=40.0)
    assert soak.is_good({"exit_code": 143, **calm})
    assert not soak.is_good({"exit_code": 1, **calm})


@pytest.mark.slow
def test_a_short_soak(tmp_path: Path) -> None:
    """A fault after 25 of 50 seconds is told, and the run goes on until it is asked to stop."""
    said: list[str] = []
    found = soak.soak(
        50.0,
        every=25.0,
        out=tmp_path / "run",
        overrides=["data.seq_len=16", "train.checkpoint_every=2", "data.global_batch=4"],
        python=commands.python(),
        say=said.append,
    )
    assert len(found["faults"]) == len(said) == 1
    assert soak.is_good(found), found
    assert 0 < found["effective_seconds"] < found["wall_seconds"] and found["steps"] > 2
