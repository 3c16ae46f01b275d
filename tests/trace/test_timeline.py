"""Timelines: statistics by hand-computed values, round trips, merging, recording."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moemesh.trace.timeline import Timeline, TimelineRecorder, WorkRecord


def record(
    rank: int, start: float, end: float, name: str = "work", **details: object
) -> WorkRecord:
    return WorkRecord(rank=rank, start=start, end=end, name=name, **details)


def timeline(*records: WorkRecord, ranks: tuple[int, ...] = (0, 1), **details: object) -> Timeline:
    known = {"source": "simulated", "unit": "ticks"} | details
    return Timeline(ranks=ranks, records=records, **known)


def gpipe_2x2() -> Timeline:
    """Two stages, two microbatches, forward 1 tick, backward 2 ticks.

    rank 0: F0 F1 .  .  .  B0 B0 B1 B1      rank 1: .  F0 F1 B0 B0 B1 B1
    """
    starts = {
        0: [("F", 0, 0), ("F", 1, 1), ("B", 0, 5), ("B", 1, 7)],
        1: [("F", 0, 1), ("F", 1, 2), ("B", 0, 3), ("B", 1, 5)],
    }
    records = [
        record(
            rank,
            start,
            start + (1 if kind == "F" else 2),
            f"{rank}{kind}{microbatch}",
            kind=kind,
            stage=rank,
            microbatch=microbatch,
        )
        for rank, entries in starts.items()
        for kind, microbatch, start in entries
    ]
    return timeline(*records)


class TestStatistics:
    def test_pipeline_by_hand(self):
        # Span 9 on rank 0 and 6 on rank 1, both busy 2*1 + 2*2 = 6.
        ranks = gpipe_2x2().statistics()
        assert [(r.span, r.busy, r.idle) for r in ranks] == [(9, 6, 3), (6, 6, 0)]
        assert gpipe_2x2().span == 9
        assert gpipe_2x2().bubble_rate == pytest.approx((9 - 6) / 9)

    def test_blocks_and_nested_spans_are_not_counted_twice(self):
        block = timeline(record(0, 0, 4, "0F1", kind="F"), record(0, 0, 4, "0B0", kind="B"))
        assert block.statistics()[0].busy == 4
        nested = timeline(record(0, 0, 10, "step"), record(0, 2, 5), record(0, 9, 12))
        assert nested.statistics()[0].busy == 12

    def test_wait_is_not_busy(self):
        ranks = timeline(record(0, 0, 1), record(0, 4, 5, wait=3.0)).statistics()
        assert (ranks[0].busy, ranks[0].idle, ranks[0].wait) == (2, 3, 3)

    def test_rank_without_records(self):
        assert timeline(record(0, 1, 2)).statistics()[1] == (1, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        assert timeline().bubble_rate == 0.0
        assert timeline(record(0, 1, 2)).bubble_rate == 0.5


class TestJson:
    def test_round_trip_of_every_field(self):
        full = record(
            1, 0.1, 1 / 3, "b", wait=0.05, kind="B", stage=3, microbatch=7, pipe=1, slice=2, step=9
        )
        before = timeline(full, record(0, 0, 1), digest="abc", source="measured", unit="seconds")
        after = Timeline.from_json(json.loads(json.dumps(before.to_json())))
        assert after == before

    @given(
        st.lists(
            st.tuples(
                st.integers(0, 3),
                st.floats(0, 1e6),
                st.floats(0, 1e3),
                st.sampled_from("FBIW"),
                st.none() | st.integers(0, 9),
            ),
            max_size=8,
        )
    )
    def test_any_timeline_round_trips(self, entries):
        records = [
            record(rank, start, start + length, kind, kind=kind, microbatch=microbatch)
            for rank, start, length, kind, microbatch in entries
        ]
        before = timeline(*records, ranks=(0, 1, 2, 3))
        assert Timeline.from_json(json.loads(json.dumps(before.to_json()))) == before
        shuffled = timeline(*reversed(records), ranks=(3, 2, 1, 0))
        assert shuffled == before

    @pytest.mark.parametrize(
        "change",
        [
            {"source": "guessed"},
            {"unit": "weeks"},
            {"ranks": [0]},
            {"ranks": [0, 1, 1]},
            {"records": [{"rank": 0, "start": 2, "end": 1, "name": "x"}]},
            {"records": [{"rank": 0, "start": 0, "end": float("inf"), "name": "x"}]},
            {"records": [{"rank": 0, "start": float("nan"), "end": 1, "name": "x"}]},
            {"records": [{"rank": 0, "start": 0, "end": 1, "name": "x", "wait": -1}]},
        ],
    )
    def test_what_cannot_be(self, change):
        with pytest.raises(ValueError):
            Timeline.from_json(gpipe_2x2().to_json() | change)


class TestMerge:
    def test_ranks_come_together(self):
        parts = [timeline(record(rank, rank, rank + 1), ranks=(rank,)) for rank in (2, 0, 1)]
        merged = Timeline.merge(parts)
        assert merged.ranks == (0, 1, 2)
        assert [r.rank for r in merged.records] == [0, 1, 2]

    def test_clashes_are_refused(self):
        one = timeline(ranks=(0,))
        with pytest.raises(ValueError, match="twice"):
            Timeline.merge([one, one])
        with pytest.raises(ValueError, match="different"):
            Timeline.merge([one, timeline(ranks=(1,), unit="seconds")])
        with pytest.raises(ValueError):
            Timeline.merge([])

    def test_last_step(self):
        both = timeline(record(0, 0, 1, step=1), record(0, 3, 5, step=2))
        assert [r.start for r in both.last_step().records] == [3]
        assert (both.last_step().start, both.last_step().end) == (3, 5)
        assert gpipe_2x2().last_step() == gpipe_2x2()


class TestRecorder:
    def test_injected_clock(self):
        times = iter([16.0, 20.0])
        recorder = TimelineRecorder(3, clock=lambda: next(times))
        recorder.add(name="forward", start=12.0, end=15.0, wait=2.0, kind="F", stage=1)
        with recorder.span("backward"):
            pass
        forward, backward = recorder.timeline().records
        assert (forward.start, forward.end, forward.wait) == (12.0, 15.0, 2.0)
        assert (forward.rank, forward.kind, forward.stage) == (3, "F", 1)
        assert (backward.start, backward.end, backward.wait) == (16.0, 20.0, 0.0)
        assert recorder.timeline().source == "measured"

    def test_records_that_end_with_an_exception_are_kept(self):
        recorder = TimelineRecorder(0)
        recorder.step = 2
        with pytest.raises(RuntimeError), recorder.span("outer"), recorder.span("inner"):
            raise RuntimeError
        records = recorder.timeline().records
        assert {(r.name, r.step) for r in records} == {("outer", 2), ("inner", 2)}
        outer, inner = (next(r for r in records if r.name == n) for n in ("outer", "inner"))
        assert outer.start <= inner.start <= inner.end <= outer.end
