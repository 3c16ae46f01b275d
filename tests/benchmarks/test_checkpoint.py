"""bench checkpoint: both kinds of saves take place, and the blocked share is what was timed."""

from __future__ import annotations

from benchmarks import checkpoint
from benchmarks.settings import CheckpointSettings
from benchmarks.text import checkpoint_text
from moemesh.comm.mesh import Mesh


def test_a_copy_takes_less_than_a_save() -> None:
    settings = CheckpointSettings(megabytes=16, ranks=1, rounds=2)
    result = checkpoint.measure(Mesh.single("cpu").control, settings)
    assert result["bytes"] == 16 * 2**20
    seconds = result["seconds"]
    assert set(seconds) == {"waiting", "behind", "behind_rest", "hash", "write"}
    assert result["blocked_ratio"] == seconds["behind"] / seconds["waiting"] < 1
    assert len(checkpoint_text(result).splitlines()) == 7
