"""`benchmarks.tokenize`: every contender makes all documents, and ratios are to the first."""

from __future__ import annotations

import pytest

from benchmarks import tokenize
from benchmarks.settings import TokenizeSettings
from benchmarks.text import tokenize_text


@pytest.mark.slow
def test_the_contenders_take_turns_on_one_text(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tokenizers")
    settings = TokenizeSettings(megabytes=1, document_bytes=20_000, vocabulary=300, rounds=1)
    result = tokenize.run(settings)
    assert result["bytes"] >= 10**6 and result["documents"] >= 40
    rows = result["contenders"]
    assert list(rows) == ["encode_batch_fast", "encode_batch", "moemesh tokenize", "read by a run"]
    base = rows["encode_batch_fast"]
    assert base["speed_ratio"] == base["cpu_ratio"] == 1
    for row in rows.values():
        assert row["speed_ratio"] == pytest.approx(base["seconds"] / row["seconds"])
    assert len(tokenize_text(result).splitlines()) == 6
