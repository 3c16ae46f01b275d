"""Bounds on the speed of a run: a table of causes, each with its text and its remedies.

Causes are ranked by their share of a step (:class:`Evidence`); a cause without a recorded share is
left out.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from moemesh.report.bars import by_axis_and_phase, sent_in_training, step_parts
from moemesh.report.document import plural
from moemesh.report.facts import RunFacts
from moemesh.report.timeline_picture import KINDS
from moemesh.trace.memory_profile import format_bytes
from moemesh.trace.run import Run
from moemesh.trace.step_seconds import DATA, OPTIMIZER, flop_rate, is_communication
from moemesh.trace.timeline import Timeline, of_blocks

#: Smallest efficient matrix product. With fewer rows or columns it is bound by reading its weights
#: or by its launch: a current GPU does about 300 bfloat16 operations while it reads one byte.
ENOUGH_ROWS, ENOUGH_COLUMNS = 300, 1024
#: Share of the peak (MFU) below which a reason is given.
_LOW_MFU = 0.3

#: Axes of gradient sums and of gathered weights: once a step, or (:func:`_sums_each`) once a
#: microbatch.
GRADIENT_AXES = ("dp_cp", "stage", "edp", "dp", "world")
#: Number of last steps (or bins of steps) whose loads count as current.
_LAST_LOADS = 20
#: `--set` arguments of one change.
Overrides = tuple[str, ...]
#: Sentence on a cause with its numbers, advice, and configuration changes to try, the best first
#: (the first legal one is proposed).
Judgement = tuple[str, str, Sequence[Overrides]]


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Evidence from the files of a run. `shares`: share of a step's time by cause, for causes with
    a record. `facts`: name -> (number, source file)."""

    run: Run
    of_run: RunFacts
    shares: Mapping[str, float]
    facts: Mapping[str, tuple[float, str]] = field(default_factory=dict[str, tuple[float, str]])

    @property
    def seconds(self) -> float | None:
        """Median time of a step under the current plan, without its first step unless it has no
        other."""
        return self.of_run.medians.get("seconds")

    def fact(self, name: str) -> float | None:
        """The number of a fact; None without a record."""
        fact = self.facts.get(name)
        return None if fact is None else fact[0]

    @property
    def plan(self) -> Mapping[str, object]:
        return self.run.plan or self.run.section("plan")

    def degree(self, name: str) -> int:
        """An integer of the plan; 1 if it is missing."""
        degree = self.plan.get(name, 1)
        return degree if isinstance(degree, int) else 1


def evidence_of(run: Run) -> Evidence:
    """Evidence for the causes of :data:`BOUNDS`, from the files of a run."""
    rows, of_run = run.current, RunFacts.of(run)
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
        if (median := of_run.medians.get(key)) is not None:
            facts[key] = median, "metrics.jsonl"
    if run.timeline is not None and run.timeline.records:
        _from_timeline(run, run.timeline.last_step(), shares, facts)
    elif "communication" in shares or ("data" in shares and run.plan.get("world_size") == 1):
        shares["compute"] = max(1.0 - sum(shares.values()), 0.0)
    if of_run.shared_cores is not None and "communication" in shares:
        # While a rank waits, its core computes for other ranks: the waits are not communication.
        shares["shared cores"] = shares.pop("communication") + shares.pop("imbalance", 0.0)
    loads = [load for load in run.loads if load.first_step >= run.plans[-1].first]
    newest = sorted({load.step for load in loads})[-_LAST_LOADS:]
    if items := [load for load in loads if load.step in newest]:
        ratios = [load.rank_max_over_mean for load in items if len(load.tokens_per_rank) > 1]
        if ratios:
            facts["fullest rank over mean"] = statistics.fmean(ratios), "loads.jsonl"
        ratios = [load.expert_max_over_mean for load in items]
        facts["fullest expert over mean"] = statistics.fmean(ratios), "loads.jsonl"
    # Bytes of training per step, by axis.
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
    return Evidence(run=run, of_run=of_run, shares=shares, facts=facts)


def _from_timeline(
    run: Run, last: Timeline, shares: dict[str, float], facts: dict[str, tuple[float, str]]
) -> None:
    """Adds the parts of the mean rank's last step, and the imbalance between ranks, to `shares` and
    `facts`."""
    parts = step_parts(last)
    if not (span := sum(parts.values())):
        return
    busy = parts["forward and backward"]
    # Imbalance: mean time that a rank has `lost` by waiting for the slowest rank of its stage.
    pp = run.section("plan").get("pp", 1)
    stages = pp if isinstance(pp, int) and pp > 0 else 1
    of_rank: defaultdict[int, float] = defaultdict(float)
    for record in of_blocks(record for record in last.records if record.kind in KINDS):
        of_rank[record.rank] += record.duration
    per_stage = max(len(last.ranks) // stages, 1)
    lost = 0.0
    for first in range(0, len(last.ranks), per_stage):
        work = [of_rank[rank] for rank in last.ranks[first : first + per_stage]]
        lost += sum(max(work) - value for value in work)
    lost /= max(len(last.ranks), 1)
    # Bubble: the simulated idle time, scaled to the measured passes; other waits are for messages.
    waiting = parts["waiting"]
    simulated = step_parts(run.simulated) if run.simulated is not None else None
    bubble = 0.0
    if simulated is not None and sum(simulated.values()):
        bubble = min(
            waiting, simulated["waiting"] * busy / (simulated["forward and backward"] or 1)
        )
        facts["simulated bubble"] = (
            simulated["waiting"] / sum(simulated.values()),
            "timeline_simulated.json",
        )
    shares.setdefault("data", parts["data"] / span)
    shares["bubble"] = bubble / span
    shares["imbalance"] = lost / span
    shares["optimizer"] = parts["optimizer"] / span
    # Ranks that finish early wait in the sums of gradients: that is not communication.
    exposed = (max(parts["reduce"] - lost, 0.0) + waiting - bubble) / span
    # Waits that are neither for stages nor in the sums of gradients are inside the passes.
    inside = shares.get("communication", 0.0) - (waiting + parts["reduce"]) / span
    # On one rank "reduce" is only the local sums of gradients.
    shares["communication"] = 0.0 if run.plan.get("world_size") == 1 else exposed + max(inside, 0.0)
    # Seconds by part cover more steps than the timeline: they replace its shares.
    if run.seconds is not None:
        mean = run.seconds.mean()
        total = sum(mean.values()) or 1.0
        shares["data"] = mean.get(DATA, 0.0) / total
        shares["optimizer"] = mean.get(OPTIMIZER, 0.0) / total
        waited = sum(seconds for part, seconds in mean.items() if is_communication(part)) / total
        # Waits for other stages and for slower ranks are parts of all waits.
        shares["bubble"] = min(shares["bubble"], waited)
        shares["imbalance"] = min(shares["imbalance"], waited - shares["bubble"])
        shares["communication"] = waited - shares["bubble"] - shares["imbalance"]
    measured = ("data", "bubble", "imbalance", "optimizer", "communication")
    # A forward is a third of forward and backward, so a quarter of both with a second forward.
    recomputed = busy / 4 if run.section("plan").get("recompute") == "full" else 0.0
    if recomputed:
        shares["memory"] = recomputed / span
    shares["compute"] = max(1.0 - sum(shares[name] for name in measured) - recomputed / span, 0.0)
    for name in ("forward and backward", "waiting", "reduce", "optimizer"):
        facts[f"{name} share"] = parts[name] / span, "timeline.json"


def _share(evidence: Evidence, name: str) -> str:
    return f"{evidence.shares[name]:.0%} of a step"


def _data(evidence: Evidence) -> Judgement:
    text = f"Rank 0 waits for its data in {_share(evidence, 'data')}."
    advice = "Keep the data and its token cache on a disk of the machine."
    return text, advice, [("data.cache=/tmp/moemesh-tokens",)]


def _communication(evidence: Evidence) -> Judgement:
    text = f"Ranks wait for communication with others in {_share(evidence, 'communication')}"
    axis, prefix = "", "bytes over "
    sizes = {
        name.removeprefix(prefix): size
        for name, (size, _) in evidence.facts.items()
        if name.startswith(prefix)
    }
    if total := sum(sizes.values()):
        axis = max(sizes, key=lambda name: (sizes[name], name))
        size, share = format_bytes(sizes[axis]), sizes[axis] / total
        text += f"; most bytes cross the axis {axis} ({size} a step of all ranks, {share:.0%})"
        if axis in GRADIENT_AXES and not _sums_each(evidence):
            text += ", once a step: a larger data.global_batch needs fewer, and learns otherwise"
        elif axis in GRADIENT_AXES:
            text += ", once a microbatch: fewer and larger microbatches need fewer"
    tp, changes = evidence.degree("tp"), list[Overrides]()
    microbatches = evidence.degree("microbatches")
    if axis in GRADIENT_AXES and _sums_each(evidence) and microbatches % 2 == 0:
        changes.append((f"plan.microbatches={microbatches // 2}",))
    if axis in ("ep", "etp", "ep_etp"):
        changes.append((f"plan.dispatch_chunks={2 * evidence.degree('dispatch_chunks')}",))
    if axis == "tp" and tp % 2 == 0:
        changes.append((f"plan.tp={tp // 2}", f"plan.dp={2 * evidence.degree('dp')}"))
    if axis == "pp" and evidence.plan.get("schedule") == "1f1b":
        changes.append(("plan.schedule=zb_h1",))
    return f"{text}.", "Send less over that axis, or overlap it with computation.", changes


def _sums_each(evidence: Evidence) -> bool:
    """Whether gradients are summed after every microbatch."""
    plan = evidence.plan
    return plan.get("data") in ("zero2", "zero3") or plan.get("schedule") == "pipedream"


def _bubble(evidence: Evidence) -> Judgement:
    schedule, microbatches = evidence.plan.get("schedule", "1f1b"), evidence.degree("microbatches")
    batch = evidence.run.section("data").get("global_batch")
    most = batch // evidence.degree("dp") if isinstance(batch, int) else 0
    wanted = (4 * microbatches, 2 * microbatches)
    changes = [(f"plan.microbatches={n}",) for n in wanted if n <= most]
    if schedule in ("1f1b", "gpipe"):
        changes.append(("plan.schedule=zb_h1",))
    return (
        f"The pipeline leaves ranks idle in {_share(evidence, 'bubble')}: {evidence.degree('pp')} "
        f"pipeline ranks, {microbatches} microbatches, schedule {schedule}.",
        "More microbatches, or a schedule with a smaller bubble, fill the pipeline.",
        changes,
    )


def _imbalance(evidence: Evidence) -> Judgement:
    share = _share(evidence, "imbalance")
    text = f"Ranks of the same stage wait for the slowest of them in {share}"
    if (ratio := evidence.fact("fullest rank over mean")) is not None:
        text += f"; the fullest expert-parallel rank computes {ratio:.2f} times the mean"
    changes: list[Overrides] = []
    if evidence.degree("ep") > 1:
        if not evidence.run.section("train").get("rebalance_every"):
            changes.append(("train.rebalance_every=50",))
        if not evidence.plan.get("spare_slots"):
            changes.append(("plan.spare_slots=1",))
    advice = "Even out the ranks: move experts between them, or replicate the busy ones."
    return f"{text}.", advice, changes


def _shared_cores(evidence: Evidence) -> Judgement:
    ranks, cores = evidence.of_run.shared_cores or (0, 0)
    text = (
        f"{ranks} ranks share {plural(cores, 'core')} and wait for one another in "
        f"{_share(evidence, 'shared cores')}: a rank that waits has given its core to another, so "
        "the waits include the computation of other ranks."
    )
    advice = f"With at most {plural(cores, 'rank')} on this machine the speed can be measured."
    return text, advice, []


def _optimizer(evidence: Evidence) -> Judgement:
    is_whole = evidence.plan.get("data", "replicate") == "replicate" and evidence.degree("dp") > 1
    text = f"The optimizer takes {_share(evidence, 'optimizer')}."
    advice = "Share the optimizer's work over the data-parallel ranks."
    return text, advice, [("plan.data=zero1",)] if is_whole else []


def _memory(evidence: Evidence) -> Judgement:
    memory = evidence.run.memory
    peak = f"; {memory.peak_words}: {format_bytes(memory.peak)}" if memory is not None else ""
    text = (
        "Layers are computed a second time to save memory (plan.recompute = full), about "
        f"{_share(evidence, 'memory')}{peak}."
    )
    changes = [("plan.recompute=selective",), ("plan.recompute=none",)]
    return text, "Recompute less if memory is left.", changes


def _compute(evidence: Evidence) -> Judgement:
    text = f"Forward and backward passes take {_share(evidence, 'compute')}"
    mfu, rate = evidence.fact("mfu"), evidence.fact("tflops_per_rank")
    small: list[str] = []  # reasons why products are too small for the device
    if mfu is not None and mfu < _LOW_MFU:
        model, data = evidence.run.section("model"), evidence.run.section("data")
        hidden, experts = model.get("hidden_size"), model.get("num_experts")
        numbers = [data.get("global_batch"), data.get("seq_len"), model.get("experts_per_token")]
        choices = [number for number in numbers if isinstance(number, int)]
        if isinstance(experts, int) and experts >= 1 and len(choices) == len(numbers):
            copies = evidence.degree("edp") * evidence.degree("dispatch_chunks")
            # Rows of one product of an expert with uniform routing.
            rows = prod(choices) / (experts * copies * evidence.degree("microbatches"))
            if rows < ENOUGH_ROWS:
                small.append(
                    f"an expert multiplies {rows:,.0f} rows at once (enough are {ENOUGH_ROWS})"
                )
        if isinstance(hidden, int) and hidden < ENOUGH_COLUMNS:
            small.append(f"a row has {hidden:,} columns (enough are {ENOUGH_COLUMNS:,})")
    if mfu is not None:
        text += f", at {mfu:.1%} of the device's peak (MFU)"
        text += f": its products are small, {' and '.join(small)}" if small else ""
    elif rate is not None:
        text += f", at {flop_rate(rate)} a rank"
    inside = [axis for axis in ("tp", "cp", "ep") if evidence.degree(axis) > 1]
    if inside and "communication share" not in evidence.facts:
        text += f"; exchanges over {', '.join(inside)} inside the passes are part of it"
    microbatches = evidence.degree("microbatches")
    fewer = bool(small) and microbatches > 1 and evidence.degree("pp") == 1
    advice = "No other layout removes this; larger microbatches, or what a profile shows, can."
    return f"{text}.", advice, [(f"plan.microbatches={microbatches // 2}",)] if fewer else []


#: Cause -> function that describes it for a run.
BOUNDS: dict[str, Callable[[Evidence], Judgement]] = {
    "data": _data,
    "communication": _communication,
    "bubble": _bubble,
    "imbalance": _imbalance,
    "shared cores": _shared_cores,
    "optimizer": _optimizer,
    "memory": _memory,
    "compute": _compute,
}
