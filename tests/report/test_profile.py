"""Profiles: clocks, the merged trace, the verdict, and the verb on a real run."""

import json
import os
import sys
import time
from dataclasses import replace

import pytest

from moemesh.config.errors import UserError
from moemesh.report.verdict import MARK, pauses_of, verdict
from moemesh.trace.profile import Profile, RankProfile, offset_of, read_profile
from moemesh.trace.timeline import WorkRecord
from tests.waiting import ended


def exchanges(ahead: float) -> list[list[tuple[float, float]]]:
    """Readings of two ranks around three exchanges; the second clock is `ahead`, and each rank is
    late to another one."""
    begins = [(0.0, 0.4), (1.3, 1.0), (2.0, 2.01)]
    clocks: list[list[tuple[float, float]]] = [[], []]
    for first, second in begins:
        over = max(first, second)
        clocks[0].append((first, over + 0.02))
        clocks[1].append((second + ahead, over + 0.03 + ahead))
    return clocks


@pytest.mark.parametrize("ahead", [0.0, 3600.0, -0.25])
def test_clocks(ahead):
    offset = offset_of(*exchanges(ahead))
    # The third exchange, to which both come at once, bounds it to a few hundredths of a second.
    assert abs(offset.seconds - ahead) <= offset.uncertainty <= 0.03
    with pytest.raises(ValueError, match="at least 1"):
        offset_of([], [])


def event(name, start, length, *, tid=5, cat="cpu_op"):
    return {"ph": "X", "cat": cat, "name": name, "pid": 77, "tid": tid, "ts": start, "dur": length}


def rank_of(rank, *, length=1000.0, pause=400.0, offset=None):
    """A forward of `length` microseconds, with a pause after an all-gather inside it."""
    begin = 1e6
    events = [
        event("_Pair", begin, 150 + pause),
        event(f"{MARK}all_gather over tp (mlp.enter)", begin + 10, 1, cat="user_annotation"),
        event("aten::empty", begin + 20, 80),
        event("aten::sum", begin + 100 + pause, 50),
        event("aten::linear", begin + 150 + pause, length - 150 - pause),
        event("aten::mm", begin + 150 + pause, length - 150 - pause),
        # An operation inside a product: the product stays the longest, and its rest is not a pause.
        event("aten::resolve_conj", begin + 151 + pause, 1),
        event("aten::resolve_conj", begin + length - 2, 1),
        event("aten::mm", begin + 5000, 10),
    ]
    place = {"kind": "F", "stage": 0, "microbatch": 0, "step": 3}
    end = (begin + length) / 1e6
    phases = [
        WorkRecord(rank=rank, start=begin / 1e6, end=end, name="0F0", **place),
        WorkRecord(rank=rank, start=end, end=end + 0.001, name="optimizer", step=3),
    ]
    return RankProfile(rank=rank, host="node", events=events, phases=phases, offset=offset)


def test_pauses_belong_to_the_collective_before_them():
    pauses = pauses_of(rank_of(0))
    # The gap after the forward lies in no phase that communicates.
    assert [(p.microseconds, p.collective, p.axis) for p in pauses] == [
        (400.0, "all_gather over tp (mlp.enter)", "tp")
    ]
    assert pauses_of(rank_of(0, pause=90.0)) == []


def test_the_verdict_by_hand():
    profile = Profile(ranks=[rank_of(0), rank_of(1, length=1800.0)], num_steps=1)
    lines = verdict(profile)
    assert len(lines) + 1 <= 20
    text = "\n".join(lines)
    # Spans of 2.0 and 2.8 ms; 1 and 1.8 ms of it in the forward, of which 0.4 ms are the pause.
    assert "1 step on 2 ranks, 2.4 ms a step" in text
    assert "forward 58.3%  optimizer 41.7%" in text
    assert "waits       tp 16.7%" in text
    (first, *_) = [line for line in lines if line.startswith("operation")]
    assert first == "operation   aten::mm: 0.86 ms a step and rank, 2 calls"
    assert "operation   aten::linear: 0.00 ms" in text
    assert "0.4 ms on rank 0, all_gather over tp (mlp.enter)" in text
    assert "rank 1 works 1.40 times the mean, rank 0 0.60 times" in text
    assert "share a clock" in text
    # Shares are those of the steps without the profiler, where these were measured.
    plain = [WorkRecord(rank=0, start=0.0, end=0.3, name="data", step=2)]
    plain += [WorkRecord(rank=0, start=0.3, end=1.2, name="optimizer", step=2)]
    ranks = [replace(one, plain=plain, waited=share)
             for one, share in zip(profile.ranks, (0.1, 0.3), strict=True)]  # fmt: skip
    text = "\n".join(verdict(replace(profile, ranks=ranks)))
    assert "without it  400.0 ms a step, of which the shares are" in text
    assert "phases      optimizer 75.0%  data 25.0%  (mean rank)" in text
    assert "waits       tp 20.0%  (for other ranks" in text
    ranks = [replace(one, events=[], waited=0.25) for one in ranks]
    assert "waits       25.0%  (for other ranks" in "\n".join(
        verdict(replace(profile, ranks=ranks))
    )
    empty = [RankProfile(rank=rank, host="node", events=[], phases=[]) for rank in (0, 1)]
    assert "no rank recorded" in "\n".join(verdict(Profile(ranks=empty, num_steps=1)))


def write_rank(folder, rank, boot, readings, start):
    """Files of a rank: its trace, and the notes that align it. `start` is the start of its one
    operation, in microseconds of its own clock."""
    trace = {
        "baseTimeNanoseconds": 2_000_000_000,
        "traceEvents": [
            event("aten::mm", start - 2e6, 100),
            {"ph": "X", "cat": "Trace", "name": "x", "pid": "Spans", "tid": "s", "ts": 0, "dur": 1},
            {"ph": "M", "name": "process_name", "pid": 77},
        ],
    }
    (folder / f"rank-{rank:05d}.json").write_text(json.dumps(trace))
    record = WorkRecord(
        rank=rank, start=start / 1e6 - 1000, end=start / 1e6 - 999, name="data", step=1
    )
    note = {"rank": rank, "host": f"h{rank}", "boot": boot, "trace": f"rank-{rank:05d}.json"}
    note |= {"num_steps": 1, "readings": readings, "epoch_minus_monotonic": 1000.0}
    note["phases"] = [record.to_json()]
    (folder / f"rank-{rank:05d}.notes.json").write_text(json.dumps(note))


@pytest.mark.parametrize("ahead", [0.0, 7.0])
def test_traces_of_two_machines_are_on_one_clock(tmp_path, ahead):
    first, second = exchanges(ahead)
    write_rank(tmp_path, 0, "a", first, 5e6)
    write_rank(tmp_path, 1, "b", second, 5e6 + ahead * 1e6)
    profile = read_profile(tmp_path)
    events = [one.events[0] for one in profile.ranks]
    assert [len(one.events) for one in profile.ranks] == [1, 1]
    uncertainty = profile.ranks[1].offset.uncertainty
    assert abs(events[0]["ts"] - events[1]["ts"]) <= uncertainty * 1e6 <= 30_000
    starts = [one.phases[0].start for one in profile.ranks]
    assert abs(starts[0] - starts[1]) <= uncertainty
    merged = profile.to_json()["traceEvents"]
    names = {e["args"]["name"] for e in merged if e["name"] == "process_name"}
    assert names == {"rank 0 on h0", "rank 1 on h1"}
    shown = [e for e in merged if e["ph"] == "X"]
    assert {e["pid"] for e in shown} == {0, 1}
    assert min(e["ts"] for e in shown) == pytest.approx(0, abs=1)
    assert "aligned to rank 0: h1" in verdict(profile)[-1]


def test_ranks_of_one_machine_share_a_clock(tmp_path):
    first, second = exchanges(0.0)
    write_rank(tmp_path, 0, "a", first, 5e6)
    write_rank(tmp_path, 1, "a", second, 5e6)
    assert read_profile(tmp_path).ranks[1].offset is None
    with pytest.raises(ValueError, match="no profile"):
        read_profile(tmp_path / "none")


@pytest.mark.parametrize(
    ("replaced", "by", "message"),
    [
        # Notes of rank 0.
        ('"host": "h0", "boot": "a", ', "", "no 'boot'"),
        ('"trace": "rank-00000.json"', '"trace": "gone.json"', "No such file"),
        ('"num_steps": 1', '"num_steps": "many"', "many"),
        ('"readings": [[', '"readings": [[null, ', "not make a profile"),
        # The trace of rank 1.
        ('"traceEvents"', '"events"', "no 'traceEvents'"),
        ('"dur": 100', '"length": 100', "no 'dur'"),
        ('"ts": 3000000.0', '"ts": "soon"', "soon"),
        ('"baseTimeNanoseconds": 2000000000', '"baseTimeNanoseconds": []', "not make a profile"),
        ('[{"ph": "X"', '[7, {"ph": "X"', "not make a profile"),
        ("}", "", "not make a profile"),
    ],
)
def test_foreign_files_are_named(tmp_path, replaced, by, message):
    first, second = exchanges(0.0)
    write_rank(tmp_path, 0, "a", first, 5e6)
    write_rank(tmp_path, 1, "b", second, 5e6)
    paths = [tmp_path / name for name in ("rank-00000.notes.json", "rank-00001.json")]
    path = next(path for path in paths if replaced in path.read_text())
    path.write_text(path.read_text().replace(replaced, by))
    with pytest.raises(UserError, match=message) as caught:
        read_profile(tmp_path)
    assert "notes.json and its trace" in str(caught.value)


def profiled(tmp_path, *plan):
    arguments = ["--set", "model.num_layers=2", "--set", "data.seq_len=32"]
    arguments += ["--set", "data.global_batch=4", "--steps", "2", "--out", str(tmp_path / "run")]
    command = [sys.executable, "-m", "moemesh", "profile", *plan, *arguments]
    process = ended(command, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert process.returncode == 0, process.stderr
    assert "profiler_start" not in process.stderr + process.stdout
    assert "\nwithout it  " in process.stdout and " -" not in process.stdout
    lines = process.stdout.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("profile "))
    assert len(lines) - start <= 20
    trace = json.loads((tmp_path / "run" / "profile.json").read_text())["traceEvents"]
    assert not list((tmp_path / "run" / "checkpoints").glob("step-*"))
    return "\n".join(lines[start:]), trace


@pytest.mark.slow
def test_profile_of_a_run(tmp_path):
    text, trace = profiled(tmp_path)
    assert "2 steps on 1 rank," in text and "imbalance" not in text and "operation   aten::" in text
    steps = [e for e in trace if str(e["name"]).startswith("step ") and e["pid"] == 0]
    phases = [e for e in trace if e.get("cat") == "phase"]
    assert len(steps) == 2 and {e["name"] for e in phases} >= {"data", "optimizer", "0F0", "0B0"}
    # The phases lie in the steps of the profiler's own clock.
    begin, end = min(e["ts"] for e in steps), max(e["ts"] + e["dur"] for e in steps)
    assert all(begin - 5e3 <= e["ts"] and e["ts"] + e["dur"] <= end + 5e3 for e in phases)


@pytest.mark.slow
def test_profile_of_several_ranks(tmp_path):
    begin = time.monotonic()
    plan = ("--set", "plan.tp=2", "--set", "plan.ep=2")
    text, trace = profiled(tmp_path, *plan)
    assert "2 steps on 2 ranks" in text and "share a clock" in text
    assert {e["pid"] for e in trace} == {0, 1}
    marks = {str(e["name"]) for e in trace if str(e["name"]).startswith(MARK)}
    assert any("over tp" in name for name in marks) and any("over ep" in name for name in marks)
    assert time.monotonic() - begin < 300


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys", ["schedule=pipedream", "schedule=ampnet", "optimizer_validation=after"]
)
def test_steps_are_counted_where_a_pipeline_runs_several_before_it_drains(tmp_path, keys):
    words = ["plan.pp=2", "plan.microbatches=2", f"plan.{keys}"]
    text, trace = profiled(tmp_path, *(word for key in words for word in ("--set", key)))
    assert "2 steps on 2 ranks" in text
    forwards = [e["name"] for e in trace if e.get("cat") == "phase" and "F" in e["name"]]
    assert len(forwards) == 2 * 2 * 2
