"""Lower bounds of the largest load: mean, quotients, pigeonhole arguments as linear programs.

For a trial load T, a weight function p is chosen such that every legal content of a GPU (exactly k
replicas, together at most T) weighs at most `room`. If the lightest choice of replica counts weighs
more than `room` x GPUs, T cannot be reached. Three families of such functions (k slots):

* HEAVY j = 2 .. k: 1 for a replica over T/j. A GPU holds at most j - 1 of them.
* EXCESS 0 < x <= T/k: with h = T - (k-1) x, max(load - h, 0) + min(load - x, 0).
  Room 0: a GPU with a heavy replica needs k - 1 light companions (x = T/k: the mean is the bound).
* STEPS 0 < x < T/2, for k = 2: 1 over T - x, 1/2 over x, else 0. Room 1 (Hall's condition).

The lightest counts are bounded by a linear program: per expert the lower convex hull of
count x p(load / count), then slots to the steepest descents first.
"""

from __future__ import annotations

import numpy as np

from moemesh.balance.compiled import Floats, Ints, compiled
from moemesh.balance.packing import counts_by_quotient, slots_at, total

HEAVY, EXCESS, STEPS = 0, 1, 2
#: Numbers of tried values of x: in equal distances, in shrinking distances, and loads of experts.
NUM_EQUAL, NUM_SHRINKING, NUM_LOADS = 12, 10, 14
#: Relative precision of the bound.
PRECISION = 2e-4
#: Relative slack against rounding: a bound may be too low by this, but never too high.
SLACK = 1e-9


@compiled
def quick_bound(weight: Floats, num_slots: int, num_gpus: int) -> float:
    """max(mean load of a GPU, smallest possible largest replica)."""
    bound = total(weight) / num_gpus
    if bound <= 0.0 or slots_at(weight, bound) <= num_slots:
        return bound * (1.0 - SLACK)  # all replicas can be at most as heavy as the mean
    counts = counts_by_quotient(weight, num_slots, num_slots)
    return max(bound, (weight / counts).max()) * (1.0 - SLACK)


@compiled
def box_bound(weight: Floats, num_slots: int, num_gpus: int, low: float, high: float) -> float:
    """A lower bound of the largest load; `low` is one, too, and `high` a load that was reached, or
    infinite."""
    per_gpu = num_slots // num_gpus
    if per_gpu < 2 or low >= high * (1.0 - PRECISION) or low <= 0.0:
        return low
    if not impossible(weight, num_slots, num_gpus, low * (1.0 + PRECISION)):
        return low
    low *= 1.0 + PRECISION
    step = 0.05
    while 2.0 * step * low < high - low and impossible(
        weight, num_slots, num_gpus, (1.0 + step) * low
    ):
        low *= 1.0 + step
        step *= 2.0
    high = min(high, (1.0 + step) * low)
    while high > low * (1.0 + PRECISION):
        middle = 0.5 * (low + high)
        if impossible(weight, num_slots, num_gpus, middle):
            low = middle
        else:
            high = middle
    return low


@compiled
def impossible(weight: Floats, num_slots: int, num_gpus: int, limit: float) -> bool:
    """Whether some weight function proves that a GPU exceeds `limit` in every placement."""
    per_gpu = num_slots // num_gpus
    segments = np.empty((2, 8 * len(weight)))
    shares = light_shares(weight, limit / per_gpu)
    # HEAVY for each j, then EXCESS for each x, then STEPS for each x with two slots per GPU.
    num_heavy = per_gpu - 1
    families = 2 if per_gpu == 2 else 1
    for index in range(num_heavy + families * len(shares)):
        if index < num_heavy:
            family = HEAVY
            at = limit / (index + 2)
            room = float(num_gpus * (index + 1))
        else:
            share = shares[(index - num_heavy) % len(shares)]
            at = share * limit / per_gpu
            family = EXCESS if index - num_heavy < len(shares) else STEPS
            room = 0.0 if family == EXCESS else float(num_gpus)
            if family == STEPS:
                at -= 4.0 * SLACK * limit  # a companion of exactly this load is not light enough
                if share >= 1.0 or at <= 0.0:
                    continue
        slack = SLACK * (limit * num_gpus if family == EXCESS else room)
        if lightest(weight, num_slots, per_gpu, limit, family, at, segments) > room + slack:
            return True
    return False


@compiled
def light_shares(weight: Floats, most: float) -> Floats:
    """Values of x to try, as shares of `most`: a grid, and loads of light experts."""
    shares = np.empty(NUM_EQUAL + NUM_SHRINKING + NUM_LOADS)
    for place in range(NUM_EQUAL):
        shares[place] = (place + 1) / NUM_EQUAL
    for place in range(NUM_SHRINKING):
        shares[NUM_EQUAL + place] = 0.7 ** (place + 1) + 1e-3
    ascending = np.argsort(weight, kind="mergesort")
    light = (weight <= most).sum()
    num_tried = min(NUM_LOADS, light)
    for place in range(num_tried):
        expert = ascending[place * (light - 1) // max(num_tried - 1, 1)]
        shares[NUM_EQUAL + NUM_SHRINKING + place] = weight[expert] / most
    return shares[: NUM_EQUAL + NUM_SHRINKING + num_tried]


@compiled
def weigh(load: float, per_gpu: int, limit: float, family: int, at: float) -> float:
    """The weight of a replica of `load`, with T = `limit`. `at`: T/j of HEAVY, x of the others."""
    edge = SLACK * limit
    if family == HEAVY:
        return 1.0 if load > at + edge else 0.0
    if family == STEPS:
        return 1.0 if load > limit - at + edge else (0.5 if load > at + edge else 0.0)
    return max(load - (limit - (per_gpu - 1) * at), 0.0) + min(load - at, 0.0)


@compiled
def lightest(
    weight: Floats,
    num_slots: int,
    per_gpu: int,
    limit: float,
    family: int,
    at: float,
    segments: Floats,
) -> float:
    """Smallest weight of all replicas over all (fractional) counts; infinite if slots run out.
    `segments` [2, at least 8 x experts] is scratch: slopes and widths of the hulls' edges."""
    most = num_slots - len(weight) + 1
    points = np.empty(9, np.int64)
    values = np.empty(9)
    used = 0
    result = 0.0
    num_segments = 0
    for expert in range(len(weight)):
        num_points = corners(weight[expert], per_gpu, limit, family, at, most, points)
        if num_points == 0:
            return np.inf
        size = 0
        for index in range(num_points):
            copies = points[index]
            value = copies * weigh(weight[expert] / copies, per_gpu, limit, family, at)
            # The lower convex hull, built in place: drop points above the new edge.
            while size >= 2 and (value - values[size - 1]) * (
                points[size - 1] - points[size - 2]
            ) <= (values[size - 1] - values[size - 2]) * (copies - points[size - 1]):
                size -= 1
            points[size] = copies
            values[size] = value
            size += 1
        used += points[0]
        result += values[0]
        for index in range(1, size):
            width = points[index] - points[index - 1]
            segments[0, num_segments] = (values[index] - values[index - 1]) / width
            segments[1, num_segments] = width
            num_segments += 1
    left = float(num_slots - used)
    if left < 0.0:
        return np.inf
    for index in np.argsort(segments[0, :num_segments], kind="mergesort"):
        if left <= 0.0:
            break
        taken = min(left, segments[1, index])
        result += taken * segments[0, index]
        left -= taken
    return result


@compiled
def corners(
    load: float, per_gpu: int, limit: float, family: int, at: float, most: int, points: Ints
) -> int:
    """Fill `points` with ascending counts between which an expert's weight is linear or rises.
    Returns their number, 0 if even `most` replicas are over the limit."""
    fewest = max(1, int(np.ceil(load / limit - SLACK)))
    if fewest > most:
        return 0
    points[0] = fewest
    size = 1
    upper = limit - at if family == STEPS else at
    if family == EXCESS:
        upper = limit - (per_gpu - 1) * at
    for edge in (upper, at):
        # The quotient can be huge: compare it as a float before the conversion to an integer.
        quotient = np.ceil(load / edge - SLACK) if edge > 0.0 else np.inf
        if quotient > most + 1.0:
            continue
        count = int(quotient)
        for candidate in range(count - 1, count + 2):
            # A step is at `count` itself, a bend of EXCESS beside it.
            is_corner = family == EXCESS or candidate == count
            if is_corner and points[size - 1] < candidate < most:
                points[size] = candidate
                size += 1
    if points[size - 1] < most:
        points[size] = most
        size += 1
    return size
