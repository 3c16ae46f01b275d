"""The trace that Perfetto opens: complete events, flows along messages, counters."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import product

import pytest

from moemesh.report.timeline_picture import to_perfetto
from moemesh.schedule.action import messages
from moemesh.schedule.build import build
from moemesh.schedule.simulate import simulate
from moemesh.trace.timeline import Timeline, WorkRecord
from tests.report.fake_run import shifted


def test_complete_events_in_microseconds() -> None:
    seconds = Timeline(
        ranks=(0, 1),
        records=(
            WorkRecord(rank=0, start=100.0, end=100.5, name="f", kind="F", microbatch=2),
            WorkRecord(rank=1, start=100.25, end=101.0, name="g", wait=0.125),
        ),
        source="measured",
        unit="seconds",
    )
    trace = json.loads(json.dumps(to_perfetto(seconds)))
    first, second = (event for event in trace["traceEvents"] if event["ph"] == "X")
    assert (first["ts"], first["dur"], first["pid"], first["tid"]) == (0, 500_000, 0, 0)
    assert (first["cat"], first["args"]) == ("F", {"microbatch": 2})
    assert (second["ts"], second["dur"], second["pid"], second["tid"]) == (250_000, 750_000, 0, 1)
    assert second["args"] == {"wait": 125_000}
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"]
    assert names == ["rank 0", "rank 1"]


@pytest.mark.parametrize("name", ["zb_v", "dualpipe", "gpipe"])
def test_every_message_is_a_flow_between_its_records(name: str) -> None:
    schedule = build(name, 4, 8)
    events = to_perfetto(simulate(schedule).timeline)["traceEvents"]
    boxes = [event for event in events if event["ph"] == "X"]
    assert len(boxes) == sum(len(entry) for order in schedule.orders for entry in order)
    starts, ends = ({e["id"]: e for e in events if e["ph"] == kind} for kind in "sf")
    wanted = {(str(m.producer), str(m.consumer)) for m in messages(schedule).values()}
    assert starts.keys() == ends.keys() and len(starts) == len(wanted)

    def around(event: dict[str, float]) -> set[str]:
        """The records that enclose an event; those of a block have one time."""
        at, rank = event["ts"], event["tid"]
        on_rank = (box for box in boxes if box["tid"] == rank)
        return {box["name"] for box in on_rank if box["ts"] <= at < box["ts"] + box["dur"]}

    flows = set[tuple[str, str]]()
    for number, start in starts.items():
        assert start["ts"] < ends[number]["ts"] and ends[number]["bp"] == "e"
        flows |= set(product(around(start), around(ends[number]))) & wanted
    assert flows == wanted


def test_counters_follow_memory_and_put_off_work() -> None:
    events = to_perfetto(simulate(build("zb_h2", 4, 8)).timeline, held=0.5)["traceEvents"]
    most: defaultdict[str, float] = defaultdict(float)
    for event in events:
        if event["ph"] == "C":
            most[event["name"]] = max(most[event["name"]], event["args"]["value"])
    # (2p-2r-1) + 2r M_w/M_a, and 2r + 1 at the moment between I and W.
    assert [most[f"activations, rank {rank}"] for rank in range(4)] == [7, 6, 5, 4]
    assert [most[f"weight gradients put off, rank {rank}"] for rank in range(4)] == [1, 3, 5, 7]


def test_two_timelines_are_two_processes() -> None:
    timeline = simulate(build("gpipe", 2, 2)).timeline
    events = to_perfetto(timeline, shifted(timeline, 100))["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    times = [[e["ts"] for e in events if e["pid"] == pid and e["ph"] == "X"] for pid in (0, 1)]
    assert times[0] == times[1]
    flow_ids = [event["id"] for event in events if event["ph"] == "s"]
    assert len(flow_ids) == len(set(flow_ids)) == 8
