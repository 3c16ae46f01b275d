"""Bounds on the speed of a run: a table of causes, each with its words and its remedies.

A cause is judged by its share of a step (:mod:`moemesh.report.evidence`); a cause of whose share no
file tells is not named.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

from moemesh.report.evidence import GRADIENT_AXES, Evidence, busiest_axis
from moemesh.trace.duration import flop_rate
from moemesh.trace.memory_profile import format_bytes

#: A product of fewer rows, or shorter ones, is bound by reading its weights, or by starting it: a
#: GPU of today does about 300 operations of bfloat16 in the time in which it reads one byte.
ENOUGH_ROWS, ENOUGH_COLUMNS = 300, 1024
#: A lower share of the peak (MFU) asks for a reason.
_LOW_MFU = 0.3

#: `--set` arguments of one change.
Overrides = tuple[str, ...]
#: The sentence that states a cause with its numbers, and changes of the configuration to try, the
#: best first (the first that is legal is proposed).
Judgement = tuple[str, Sequence[Overrides]]


@dataclass(frozen=True)
class Bound:
    """A cause: its name, the advice, and what it says of a run that it bounds."""

    name: str
    advice: str
    judge: Callable[[Evidence], Judgement]


def _share(evidence: Evidence, name: str) -> str:
    return f"{evidence.shares[name]:.0%} of a step"


def small_products(evidence: Evidence) -> str:
    """Why products are too small for the device, where the shape tells; "" where they are not."""
    model, data = evidence.run.section("model"), evidence.run.section("data")
    hidden, experts = model.get("hidden_size"), model.get("num_experts")
    numbers = [data.get("global_batch"), data.get("seq_len"), model.get("experts_per_token")]
    choices = [number for number in numbers if isinstance(number, int)]
    found: list[str] = []
    if isinstance(experts, int) and experts >= 1 and len(choices) == len(numbers):
        copies = evidence.degree("edp") * evidence.degree("dispatch_chunks")
        # Rows of one product of an expert with uniform routing.
        rows = prod(choices) / (experts * copies * evidence.degree("microbatches"))
        if rows < ENOUGH_ROWS:
            found.append(
                f"an expert multiplies {rows:,.0f} rows at once (enough are {ENOUGH_ROWS})"
            )
    if isinstance(hidden, int) and hidden < ENOUGH_COLUMNS:
        found.append(f"a row has {hidden:,} columns (enough are {ENOUGH_COLUMNS:,})")
    return " and ".join(found)


def _communication(evidence: Evidence) -> Judgement:
    text = f"Ranks wait for communication with others in {_share(evidence, 'communication')}"
    axis = ""
    if (busiest := busiest_axis(evidence)) is not None:
        axis, share = busiest
        size = format_bytes(evidence.facts[f"bytes over {axis}"][0])
        text += f"; most bytes cross the axis {axis} ({size} a step of all ranks, {share:.0%})"
        if axis in GRADIENT_AXES:
            text += ", once a step: a larger data.global_batch needs fewer, and learns otherwise"
    tp, changes = evidence.degree("tp"), list[Overrides]()
    if axis in ("ep", "etp", "ep_etp"):
        changes.append((f"plan.dispatch_chunks={2 * evidence.degree('dispatch_chunks')}",))
    if axis == "tp" and tp % 2 == 0:
        changes.append((f"plan.tp={tp // 2}", f"plan.dp={2 * evidence.degree('dp')}"))
    if axis == "pp" and evidence.plan.get("schedule") == "1f1b":
        changes.append(("plan.schedule=zb_h1",))
    return f"{text}.", changes


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
    return f"{text}.", changes


def _optimizer(evidence: Evidence) -> Judgement:
    is_whole = evidence.plan.get("data", "replicate") == "replicate" and evidence.degree("dp") > 1
    text = f"The optimizer takes {_share(evidence, 'optimizer')}."
    return text, [("plan.data=zero1",)] if is_whole else []


def _memory(evidence: Evidence) -> Judgement:
    memory = evidence.run.memory
    found = f"; {memory.peak_words}: {format_bytes(memory.peak)}" if memory is not None else ""
    text = (
        "Layers are computed a second time to save memory (plan.recompute = full), about "
        f"{_share(evidence, 'memory')}{found}."
    )
    return text, [("plan.recompute=selective",), ("plan.recompute=none",)]


def _compute(evidence: Evidence) -> Judgement:
    text = f"Forward and backward passes take {_share(evidence, 'compute')}"
    mfu, rate = evidence.fact("mfu"), evidence.fact("tflops_per_rank")
    small = small_products(evidence) if mfu is not None and mfu < _LOW_MFU else ""
    if mfu is not None:
        text += f", at {mfu:.1%} of the device's peak (MFU)"
        text += f": its products are small, {small}" if small else ""
    elif rate is not None:
        text += f", at {flop_rate(rate)} a rank"
    inside = [axis for axis in ("tp", "cp", "ep") if evidence.degree(axis) > 1]
    if inside and "communication share" not in evidence.facts:
        text += f"; exchanges over {', '.join(inside)} inside the passes are part of it"
    microbatches = evidence.degree("microbatches")
    fewer = bool(small) and microbatches > 1 and evidence.degree("pp") == 1
    return f"{text}.", [(f"plan.microbatches={microbatches // 2}",)] if fewer else []


BOUNDS: tuple[Bound, ...] = (
    Bound(
        "data",
        "Keep the data and its token cache on a disk of the machine.",
        lambda evidence: (
            f"Rank 0 waits for its data in {_share(evidence, 'data')}.",
            [("data.cache=/tmp/moemesh-tokens",)],
        ),
    ),
    Bound(
        "communication",
        "Send less over that axis, or hide it behind computation.",
        _communication,
    ),
    Bound(
        "bubble",
        "More microbatches, or a schedule with a smaller bubble, fill the pipeline.",
        _bubble,
    ),
    Bound(
        "imbalance",
        "Even out the ranks: move experts between them, or replicate the busy ones.",
        _imbalance,
    ),
    Bound("optimizer", "Share the optimizer's work over the data-parallel ranks.", _optimizer),
    Bound("memory", "Compute less again where memory is left.", _memory),
    Bound(
        "compute",
        "No other layout removes this; larger microbatches, or what a profile shows, can.",
        _compute,
    ),
)
