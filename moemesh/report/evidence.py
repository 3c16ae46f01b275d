"""Facts about the speed of a run: the shares of a step, and the file each was read from."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from moemesh.report.beside import by_axis_and_phase, sent_in_training, step_parts
from moemesh.report.boxes import KINDS
from moemesh.trace.run import Run
from moemesh.trace.timeline import Timeline

#: Axes over which gradients are summed, and what else happens once a step.
GRADIENT_AXES = ("dp_cp", "stage", "edp", "dp", "world")
#: So many of the last steps (or bins of steps) say how loads are now.
_LAST_LOADS = 20


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """`shares` of the time of a step, by cause; what no file tells is not among them. `seconds`:
    median of the steps under the current plan but the first. `facts`: name -> (number, file that
    it was read from)."""

    run: Run
    seconds: float | None
    shares: Mapping[str, float]
    facts: Mapping[str, tuple[float, str]] = field(default_factory=dict[str, tuple[float, str]])

    def fact(self, name: str) -> float | None:
        found = self.facts.get(name)
        return None if found is None else found[0]

    @property
    def plan(self) -> Mapping[str, object]:
        return self.run.plan or self.run.section("plan")

    def degree(self, name: str) -> int:
        found = self.plan.get(name, 1)
        return found if isinstance(found, int) else 1


def evidence_of(run: Run) -> Evidence:
    """Everything that the causes of :mod:`moemesh.report.bounds` are judged by."""
    rows = run.current
    seconds = statistics.median(row.seconds for row in rows) if rows else None
    shares: dict[str, float] = {}
    facts: dict[str, tuple[float, str]] = {}
    for name, key in (("data", "data_seconds"), ("communication", "communication_seconds")):
        values = [
            value / row.seconds
            for row in rows
            if row.seconds and (value := getattr(row, key)) is not None
        ]
        if values:
            shares[name] = statistics.median(values)
            facts[f"{name} share"] = shares[name], "metrics.jsonl"
    for key in ("mfu", "tflops_per_rank"):
        values = [value for row in rows if (value := getattr(row, key)) is not None]
        if values:
            facts[key] = statistics.median(values), "metrics.jsonl"
    if run.timeline is not None and run.timeline.records:
        _from_timeline(run, run.timeline.last_step(), shares, facts)
    elif "communication" in shares or ("data" in shares and _num_ranks(run) == 1):
        shares["compute"] = max(1.0 - sum(shares.values()), 0.0)
    loads = [load for load in run.loads if load.first_step >= run.plans[-1].first]
    newest = sorted({load.step for load in loads})[-_LAST_LOADS:]
    if items := [load for load in loads if load.step in newest]:
        ratios = [load.rank_max_over_mean for load in items if len(load.tokens_per_rank) > 1]
        if ratios:
            facts["fullest rank over mean"] = statistics.fmean(ratios), "loads.jsonl"
        ratios = [load.expert_max_over_mean for load in items]
        facts["fullest expert over mean"] = statistics.fmean(ratios), "loads.jsonl"
    # Bytes a step by axis, of training alone.
    sent: defaultdict[str, float] = defaultdict(float)
    for (axis, _), size in sent_in_training(run).items():
        sent[axis] += size
    for axis, size in sent.items():
        facts[f"bytes over {axis}"] = size, "ledger.json"
    expected = by_axis_and_phase(run.predicted_ledgers)
    if expected and sent:
        facts["bytes predicted"] = sum(expected.values()), "ledger_predicted.json"
        facts["bytes measured"] = sum(sent.values()), "ledger.json"
    if run.memory is not None and run.memory.ranks:
        facts["peak bytes"] = float(run.memory.peak), "memory.json"
        predicted = {profile.rank: profile.total for profile in run.memory.predicted}
        fullest = max(run.memory.ranks, key=lambda profile: profile.total)
        if fullest.rank in predicted:
            facts["held bytes predicted"] = float(predicted[fullest.rank]), "memory.json"
            facts["held bytes measured"] = float(fullest.total), "memory.json"
    return Evidence(run=run, seconds=seconds, shares=shares, facts=facts)


def _num_ranks(run: Run) -> int | None:
    found = run.plan.get("world_size")
    return found if isinstance(found, int) else None


def _from_timeline(
    run: Run, last: Timeline, shares: dict[str, float], facts: dict[str, tuple[float, str]]
) -> None:
    """The parts of the last step, of the mean rank, and how the ranks differ."""
    parts = step_parts(last)
    if not (span := sum(parts.values())):
        return
    busy = parts["forward and backward"]
    # Mean seconds that ranks of the same stage wait for the slowest of them in the step.
    pp = run.section("plan").get("pp", 1)
    stages = pp if isinstance(pp, int) and pp > 0 else 1
    of_rank: defaultdict[int, float] = defaultdict(float)
    seen: set[tuple[int, float, float]] = set()
    for record in last.records:
        moment = record.rank, record.start, record.end
        if record.kind in KINDS and moment not in seen:
            seen.add(moment)
            of_rank[record.rank] += record.duration
    per_stage = max(len(last.ranks) // stages, 1)
    lost = 0.0
    for first in range(0, len(last.ranks), per_stage):
        work = [of_rank[rank] for rank in last.ranks[first : first + per_stage]]
        lost += sum(max(work) - value for value in work)
    lost /= max(len(last.ranks), 1)
    waiting = parts["waiting"]
    simulated = step_parts(run.simulated) if run.simulated is not None else None
    bubble = 0.0
    if simulated is not None and sum(simulated.values()):
        # What the schedule itself leaves idle; the rest of the wait is for messages.
        bubble = min(
            waiting, simulated["waiting"] * busy / (simulated["forward and backward"] or 1)
        )
        facts["simulated bubble"] = (
            simulated["waiting"] / sum(simulated.values()),
            "timeline_simulated.json",
        )
    file = "timeline.json"
    shares.setdefault("data", parts["data"] / span)
    shares["bubble"] = bubble / span
    shares["imbalance"] = lost / span
    shares["optimizer"] = parts["optimizer"] / span
    # Ranks that are done early wait in the sums of gradients: that is not communication.
    exposed = (max(parts["reduce"] - lost, 0.0) + waiting - bubble) / span
    # Of all waiting for other ranks, what is neither of these happens inside the passes.
    inside = shares.get("communication", 0.0) - (waiting + parts["reduce"]) / span
    # Of a run on one rank the same span holds its own sums of gradients, with nobody else.
    shares["communication"] = 0.0 if _num_ranks(run) == 1 else exposed + max(inside, 0.0)
    measured = ("data", "bubble", "imbalance", "optimizer", "communication")
    again = busy / 4 if run.section("plan").get("recompute") == "full" else 0.0
    if again:
        shares["memory"] = again / span
    shares["compute"] = max(1.0 - sum(shares[name] for name in measured) - again / span, 0.0)
    for name in ("forward and backward", "waiting", "reduce", "optimizer"):
        facts[f"{name} share"] = parts[name] / span, file


def busiest_axis(evidence: Evidence) -> tuple[str, float] | None:
    """The axis that most bytes of a step cross, and its share of them."""
    sizes = {
        name.removeprefix("bytes over "): size
        for name, (size, _) in evidence.facts.items()
        if name.startswith("bytes over ")
    }
    total = sum(sizes.values())
    if not total:
        return None
    axis = max(sizes, key=lambda name: (sizes[name], name))
    return axis, sizes[axis] / total
