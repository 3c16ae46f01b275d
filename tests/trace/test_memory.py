"""Memory profiles: sums, round trip, table."""

import json
from typing import Any

import pytest

from moemesh.trace.memory_profile import PARTS, MemoryProfile, MemoryProfiles, format_bytes


def profile(rank: int = 0, **parts: Any) -> MemoryProfile:
    known = dict(zip(PARTS, range(100, 1000, 100), strict=True)) | {"peak": 2000}
    return MemoryProfile(rank=rank, **(known | parts))


def test_sums_by_hand():
    assert profile().weights == 300
    assert profile().total == 100 + 200 + 300 + 400 + 500 + 600 + 700 + 800 + 900
    both = MemoryProfiles(ranks=(profile(1, peak=2500), profile(0)))
    assert both.total == 9000
    assert both.peak == 2500
    assert [p.rank for p in both.ranks] == [0, 1]
    assert MemoryProfiles(ranks=()).peak == 0


def test_every_number_of_bytes_is_a_part_or_the_peak():
    # A field that PARTS forgets would be missing from totals and pictures.
    assert set(profile().to_json()) == {"rank", "peak", "activation_kinds", *PARTS}


def test_round_trip():
    before = MemoryProfiles(
        ranks=(profile(0, activations=2**53 + 1, activation_kinds={"head": 3}), profile(1)),
        predicted=(profile(1), profile(0)),
    )
    assert MemoryProfiles.from_json(json.loads(json.dumps(before.to_json()))) == before


def test_what_cannot_be():
    with pytest.raises(ValueError, match="optimizer"):
        profile(optimizer=-1)
    with pytest.raises(ValueError, match="twice"):
        MemoryProfiles(ranks=(profile(0), profile(0)))


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1024**2 - 1, "1.0 MiB"),
        (2.5 * 2**40, "2.5 TiB"),
        (3 * 2**60, "3072.0 PiB"),
        (0.5, "0.5 B"),
    ],
)
def test_format_bytes(size, text):
    assert format_bytes(size) == text


def test_words_say_whose_peak_was_measured() -> None:
    of_gpu = MemoryProfiles(
        ranks=(profile(0, peak_of="allocator"), profile(1, peak_of="allocator"))
    )
    assert of_gpu.peak_words == "allocator peak, measured"
    assert MemoryProfiles.from_json(of_gpu.to_json()) == of_gpu
    assert MemoryProfiles(ranks=(profile(peak_of="process"),)).peak_words.startswith("process")
    # Files of earlier versions, and mixtures.
    mixed = MemoryProfiles(ranks=(profile(0), profile(1, peak_of="process")))
    assert mixed.peak_words == MemoryProfiles(ranks=()).peak_words == "peak, measured"
