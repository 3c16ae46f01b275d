"""Memory of a schedule: live contexts, activations and deferred weight gradients per rank.

A forward adds M_a, the activation of its microbatch; ``B`` gives it back; ``I`` gives back
M_a - M_w and leaves M_w (inputs and output gradients of the linear layers) to ``W``. In a block
the forwards count before anything is given back. Order alone decides, not time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from moemesh.schedule.action import Schedule
from moemesh.schedule.costs import exact_list

#: A number for a microbatch on all v stages of a rank (each holds 1/v of it), or a list with the
#: amount on each stage. A slice holds 1/num_slices of either.
Amount = float | Sequence[float]

#: Relative rounding error: a sum of fractions may exceed its cap by this share.
ROUNDING = 1e-9


class HeldActivations(NamedTuple):
    """The most that one rank holds at any time: contexts between ``F`` and ``B`` or ``I``,
    activation in the unit of M_a, and weight gradients between ``I`` and ``W``."""

    contexts: int
    activation: float
    weight_backlog: int


def peak_memory(
    schedule: Schedule, *, activation: Amount = 1, weight_memory: Amount = 1
) -> tuple[HeldActivations, ...]:
    """Peaks of every rank, for M_a = `activation` and M_w = `weight_memory`. M_w = M_a, as by
    default, never underestimates: nothing is given back before the weight gradient. Raises
    ValueError for lists of another length than the stages, and for amounts below 0."""
    whole, kept, parts = amounts(schedule, activation, weight_memory)
    peaks: list[HeldActivations] = []
    for order in schedule.orders:
        contexts = backlog = most_contexts = most_backlog = 0
        held = most_held = 0.0
        for entry in order:
            # Forwards of a block come first.
            ops = entry if len(entry) == 1 else sorted(entry, key=lambda op: op.kind != "F")
            for op in ops:
                kind, stage = op.kind, op.stage
                if kind == "F":
                    contexts += 1
                    held += whole[stage]
                    if contexts > most_contexts:
                        most_contexts = contexts
                    if held > most_held:
                        most_held = held
                elif kind == "B":
                    contexts -= 1
                    held -= whole[stage]
                elif kind == "I":
                    contexts -= 1
                    backlog += 1
                    held -= whole[stage] - kept[stage]
                    if backlog > most_backlog:
                        most_backlog = backlog
                else:
                    backlog -= 1
                    held -= kept[stage]
        peaks.append(HeldActivations(most_contexts, most_held / parts, most_backlog))
    return tuple(peaks)


def amounts(
    schedule: Schedule, activation: Amount = 1, weight_memory: Amount = 1
) -> tuple[list[float], list[float], float]:
    """M_a and M_w of every stage, and the divisor of their sums that gives the unit of M_a. Without
    lists the undivided numbers are used for one slice of one stage, and the divisor is stages of a
    rank times slices: sums of integers are exact. With a list it is the slices alone."""
    whole, kept = (
        exact_list(amount, name, schedule.num_stages, "amounts", "stages")
        for name, amount in (("activation", activation), ("weight_memory", weight_memory))
    )
    chunks = schedule.num_stages / schedule.num_ranks
    lists = isinstance(activation, Sequence), isinstance(weight_memory, Sequence)
    if not any(lists):
        return whole, kept, chunks * schedule.num_slices
    if not lists[0]:
        whole = [item / chunks for item in whole]
    if not lists[1]:
        kept = [item / chunks for item in kept]
    return whole, kept, schedule.num_slices
