"""Generators of the schedules that follow one rule per rank, with their papers.

In formulas: p ranks, r a rank, s a stage, m microbatches, v chunks per rank; times tF, tI, tW, tB
and tFB as in :mod:`moemesh.schedule.costs`; *span bubble* and *rank idle* as in
:mod:`moemesh.schedule.simulate`.

The numbers for which a schedule is defined are in its row of
:data:`~moemesh.config.schedule_table.SCHEDULES`; :func:`~moemesh.schedule.build.build` checks them.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import replace

from moemesh.config.schedule_table import require_numbers
from moemesh.schedule.action import (
    Entry,
    Kind,
    Op,
    Schedule,
    UpdateRule,
    linear,
    looped,
    mirrored,
    one_pipe,
    single,
    v_shape,
)

# 1F1B: after a short warm-up each forward is followed by a backward.
#
# Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", 2019,
# doi:10.1145/3341301.3359646 (the order); Fan et al., "DAPPLE: A Pipelined Data Parallel
# Approach for Training Large Models", 2021, arXiv:2007.01045 (with a flush at the end of each
# step).


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """Stage r on rank r, which starts with p-1-r forwards more than backwards.

    The bubble of GPipe, (p-1)(tF+tB), with less memory: rank r holds min(m, p-r) microbatches.

    >>> print(draw(simulate(one_f_one_b(4, 4)).timeline))
    rank 0: F0 F1 F2 F3 .  .  .  .  .  .  B0--- .  B1--- .  B2--- .  B3---
    rank 1: .  F0 F1 F2 .  .  .  .  B0--- F3 B1--- .  B2--- .  B3---
    rank 2: .  .  F0 F1 .  .  B0--- F2 B1--- F3 B2--- .  B3---
    rank 3: .  .  .  F0 B0--- F1 B1--- F2 B2--- F3 B3---
    """
    orders = one_f_one_b_orders(num_ranks, num_microbatches)
    return one_pipe("1f1b", linear(num_ranks), orders, num_microbatches)


def one_f_one_b_orders(num_ranks: int, num_microbatches: int) -> tuple[tuple[Entry, ...], ...]:
    """The order of every rank, for the microbatches of one step or of a whole run."""
    orders: list[tuple[Entry, ...]] = []
    for rank in range(num_ranks):
        warm_up = min(num_microbatches, num_ranks - 1 - rank)
        ops = [Op("F", rank, microbatch) for microbatch in range(warm_up)]
        for microbatch in range(num_microbatches):
            if microbatch + warm_up < num_microbatches:
                ops.append(Op("F", rank, microbatch + warm_up))
            ops.append(Op("B", rank, microbatch))
        orders.append(single(*ops))
    return tuple(orders)


# Interleaved 1F1B: several chunks of layers per rank, so that the pipeline fills sooner.
#
# Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
# Megatron-LM", 2021, arXiv:2104.04473.


def interleaved_1f1b(num_ranks: int, num_microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """Chunk c of rank r is stage c*p + r; microbatches pass in groups of p.

    Bubble (p-1)(tF+tB)/v for v chunks a rank, and v times the messages; rank r holds
    min(mv, 2(p-1-r) + (v-1)p + 1)/v microbatches.

    >>> print(draw(simulate(interleaved_1f1b(2, 4, 2)).timeline))
    rank 0: F0 F1 f0 f1 F2 .  b0--- F3 b1--- f2 B0--- f3 B1--- .  b2--- .  b3--- B2--- B3---
    rank 1: .  F0 F1 f0 b0--- f1 b1--- F2 B0--- F3 B1--- f2 b2--- f3 b3--- B2--- B3---
    """
    chunks, total = stages_per_rank, num_microbatches * stages_per_rank
    # A rank's forwards, and its backwards, come in groups of p microbatches, in a group chunk by
    # chunk. The order of both is that of 1F1B over their numbers in this sequence.
    orders: list[tuple[Entry, ...]] = []
    for rank in range(num_ranks):
        forwards: list[Op] = []
        backwards: list[Op] = []
        for number in range(total):
            group, place = divmod(number, num_ranks * chunks)
            chunk, microbatch = place // num_ranks, group * num_ranks + place % num_ranks
            forwards.append(Op("F", chunk * num_ranks + rank, microbatch))
            backwards.append(Op("B", (chunks - 1 - chunk) * num_ranks + rank, microbatch))
        warm_up = min(total, 2 * (num_ranks - 1 - rank) + (chunks - 1) * num_ranks)
        ops = forwards[:warm_up]
        for number, backward in enumerate(backwards):
            ops += [*forwards[warm_up + number : warm_up + number + 1], backward]
        orders.append(single(*ops))
    placement = looped(num_ranks, chunks)
    return one_pipe("interleaved_1f1b", placement, tuple(orders), num_microbatches)


# PipeDream-2BW: 1F1B that never drains, with two versions of the weights.
#
# Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", 2021, arXiv:2006.09503.


def pipedream_2bw(num_ranks: int, num_microbatches: int, *, window: int | None = None) -> Schedule:
    """The order of 1F1B over the whole run; every `window` backwards update once.

    Microbatch k uses version max(k // window - 1, 0) on every stage and in both directions, so
    that two copies of the weights are enough. `window` is by default the smallest divisor of the
    microbatches that is not below p. No bubble in the steady state; rank r holds p-r microbatches.
    Raises ValueError unless window >= p and it divides the microbatches (gradients of a part of a
    window would be lost).

    >>> print(draw(simulate(pipedream_2bw(2, 6)).timeline))
    rank 0: F0 F1 .  .  B0--- F2 B1--- F3 B2--- F4 B3--- F5 B4--- .  B5---
    rank 1: .  F0 B0--- F1 B1--- F2 B2--- F3 B3--- F4 B4--- F5 B5---
    """
    if window is None:
        require_numbers("pipedream_2bw", ranks=num_ranks, microbatches=num_microbatches)
        enough = range(num_ranks, num_microbatches + 1)
        window = next((n for n in enough if num_microbatches % n == 0), num_microbatches)
    require_numbers(
        "pipedream_2bw",
        ranks=num_ranks,
        microbatches=num_microbatches,
        window=window,
    )
    orders = one_f_one_b_orders(num_ranks, num_microbatches)
    rule = UpdateRule(kind="two_versions", window=window)
    return one_pipe("pipedream_2bw", linear(num_ranks), orders, num_microbatches, update=rule)


# Evaluation: the forwards of any number of microbatches through the first pipe of a schedule.


def forward_only(schedule: Schedule, num_microbatches: int) -> Schedule:
    """Every rank runs its stages of pipe 0, microbatch after microbatch."""
    placement = schedule.placement[0]
    orders = tuple(
        single(
            *(
                Op("F", stage, microbatch)
                for microbatch in range(num_microbatches)
                for stage, owner in enumerate(placement)
                if owner == rank
            )
        )
        for rank in range(schedule.num_ranks)
    )
    return replace(
        schedule,
        name=f"{schedule.name}, forward only",
        placement=(placement,),
        orders=orders,
        num_microbatches=(num_microbatches,),
        num_slices=1,
        update=None,
    )


# GPipe: all forwards, then all backwards.
#
# Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism",
# 2019, arXiv:1811.06965.


def gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """Stage r on rank r. The last forward is the first backward.

    Bubble (p-1)(tF+tB); rank r holds all m microbatches.

    >>> print(draw(simulate(gpipe(4, 4)).timeline))
    rank 0: F0 F1 F2 F3 .  .  .  .  .  .  .  .  .  B3--- B2--- B1--- B0---
    rank 1: .  F0 F1 F2 F3 .  .  .  .  .  .  B3--- B2--- B1--- B0---
    rank 2: .  .  F0 F1 F2 F3 .  .  .  B3--- B2--- B1--- B0---
    rank 3: .  .  .  F0 F1 F2 F3 B3--- B2--- B1--- B0---
    """
    microbatches = range(num_microbatches)
    orders = tuple(
        single(
            *(Op("F", rank, microbatch) for microbatch in microbatches),
            *(Op("B", rank, microbatch) for microbatch in reversed(microbatches)),
        )
        for rank in range(num_ranks)
    )
    return one_pipe("gpipe", linear(num_ranks), orders, num_microbatches)


# PipeDream: 1F1B that never drains, every backward updates, weights are stashed.
#
# Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", 2019,
# doi:10.1145/3341301.3359646 (arXiv:1806.03377 for the first version).


def pipedream(num_ranks: int, num_microbatches: int) -> Schedule:
    """The order of 1F1B over the microbatches of the whole run.

    Microbatch k uses version max(0, k-(p-1-s)) on stage s in both directions. No bubble in the
    steady state; rank r holds p-r microbatches and p-r copies of its weights.

    >>> print(draw(simulate(pipedream(4, 6)).timeline))
    rank 0: F0 F1 F2 F3 .  .  .  .  .  .  B0--- F4 B1--- F5 B2--- .  B3--- .  B4--- .  B5---
    rank 1: .  F0 F1 F2 .  .  .  .  B0--- F3 B1--- F4 B2--- F5 B3--- .  B4--- .  B5---
    rank 2: .  .  F0 F1 .  .  B0--- F2 B1--- F3 B2--- F4 B3--- F5 B4--- .  B5---
    rank 3: .  .  .  F0 B0--- F1 B1--- F2 B2--- F3 B3--- F4 B4--- F5 B5---
    """
    orders = one_f_one_b_orders(num_ranks, num_microbatches)
    rule = UpdateRule(kind="stash")
    return one_pipe("pipedream", linear(num_ranks), orders, num_microbatches, update=rule)


# Chimera: two pipes from both ends, each filling the other's bubbles.
#
# Li and Hoefler, "Chimera: Efficiently Training Large-Scale Neural Networks with Bidirectional
# Pipelines", 2021, arXiv:2107.06925.


def chimera(num_ranks: int, num_microbatches: int) -> Schedule:
    """Stage s of pipe 0 on rank s, of pipe 1 on rank p-1-s: every stage lives twice.

    Half of the microbatches go through each pipe, in blocks of p/2. Bubble (p-2)tF where tF = tB;
    rank r holds p/2 + 1 + min(r, p-1-r) microbatches and two copies of weights, whose gradients are
    summed. With tB = 2tF the idle time is 2(p-2)tF for m = p and larger for more blocks. Pipe 1 is
    drawn in small letters:

    >>> print(draw(simulate(chimera(4, 4)).timeline))
    rank 0: F0 F1 .  f0 b0--- f1 b1--- .  B0--- .  .  B1---
    rank 1: .  F0 f0 F1 f1 .  b0--- B0--- b1--- B1---
    rank 2: .  f0 F0 f1 F1 .  B0--- b0--- B1--- b1---
    rank 3: f0 f1 .  F0 B0--- F1 B1--- .  b0--- .  .  b1---
    """
    half = num_ranks // 2
    # Per rank: time slot -> operation. All operations take one slot.
    slots: list[dict[int, Op]] = [{} for _ in range(num_ranks)]
    for pipe, ranks in enumerate(mirrored(num_ranks)):
        for microbatch in range(num_microbatches // 2):
            block, place = divmod(microbatch, half)
            first_slot = 2 * num_ranks * block + 2 * place
            for stage, rank in enumerate(ranks):
                forward = first_slot + stage
                backward = first_slot + 2 * num_ranks - 1 - stage
                assert slots[rank].keys().isdisjoint((forward, backward)), "a slot taken twice"
                slots[rank][forward] = Op("F", stage, microbatch, pipe)
                slots[rank][backward] = Op("B", stage, microbatch, pipe)
    return Schedule(
        name="chimera",
        num_ranks=num_ranks,
        num_stages=num_ranks,
        placement=mirrored(num_ranks),
        orders=tuple(single(*(taken[slot] for slot in sorted(taken))) for taken in slots),
        num_microbatches=(num_microbatches // 2,) * 2,
    )


# ZB-H1: weight gradients are deferred into the bubbles, within the memory of 1F1B.
#
# Qi et al., "Zero Bubble Pipeline Parallelism", 2024, arXiv:2401.10241.


def zb_h1(num_ranks: int, num_microbatches: int) -> Schedule:
    """ZB-H1 with stage r on rank r, which runs its k-th ``W`` after its (k+r)-th ``I``.

    Span bubble (p-1)(tF+tI-tW), exact for m >= p and tW <= tF; rank r holds p-r microbatches and
    what r weight gradients need.

    >>> print(draw(simulate(zb_h1(4, 4)).timeline))
    rank 0: F0 F1 F2 F3 .  .  .  I0 W0 I1 W1 I2 W2 I3 W3
    rank 1: .  F0 F1 F2 .  .  I0 F3 I1 W0 I2 W1 I3 W2 W3
    rank 2: .  .  F0 F1 .  I0 F2 I1 F3 I2 W0 I3 W1 W2 W3
    rank 3: .  .  .  F0 I0 F1 I1 F2 I2 F3 I3 W0 W1 W2 W3
    """
    orders = tuple(
        put_off(rank, num_microbatches, warm_up=num_ranks - rank, delay=rank)
        for rank in range(num_ranks)
    )
    return one_pipe("zb_h1", linear(num_ranks), orders, num_microbatches)


def put_off(stage: int, num_microbatches: int, *, warm_up: int, delay: int) -> tuple[Entry, ...]:
    """One rank's order: `warm_up` forwards; then in turn ``I``, the ``W`` of the microbatch `delay`
    before, ``F``; at last the remaining ``W``."""
    warm_up = min(num_microbatches, warm_up)
    ops = [Op("F", stage, microbatch) for microbatch in range(warm_up)]
    for microbatch in range(num_microbatches):
        ops.append(Op("I", stage, microbatch))
        if microbatch >= delay:
            ops.append(Op("W", stage, microbatch - delay))
        if microbatch + warm_up < num_microbatches:
            ops.append(Op("F", stage, microbatch + warm_up))
    left = range(max(num_microbatches - delay, 0), num_microbatches)
    return single(*ops, *(Op("W", stage, microbatch) for microbatch in left))


# ZB-H2: more forwards in flight and later weight gradients, until no bubble is left.
#
# Qi et al., "Zero Bubble Pipeline Parallelism", 2024, arXiv:2401.10241. One rule with ZB-H1.


def zb_h2(num_ranks: int, num_microbatches: int) -> Schedule:
    """Stage r on rank r; up to twice the microbatches of 1F1B in flight.

    Span bubble (p-1)(tF+tI-2tW), exact for m >= 2p-1 and tW <= min(tF, tI): none for equal times.
    Rank r holds 2p-2r-1 microbatches and what 2r weight gradients need. Ranks end one after the
    other, so that the optimizer must not wait for all of them (post-validation).

    >>> print(draw(simulate(zb_h2(3, 5)).timeline))
    rank 0: F0 F1 F2 F3 F4 I0 W0 I1 W1 I2 W2 I3 W3 I4 W4
    rank 1: .  F0 F1 F2 I0 F3 I1 F4 I2 W0 I3 W1 I4 W2 W3 W4
    rank 2: .  .  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 W1 W2 W3 W4
    """
    orders = tuple(
        put_off(rank, num_microbatches, warm_up=2 * (num_ranks - rank) - 1, delay=2 * rank)
        for rank in range(num_ranks)
    )
    return one_pipe("zb_h2", linear(num_ranks), orders, num_microbatches)


# ZB-V: two chunks a rank, up and back, no bubble at the memory of 1F1B.
#
# Qi et al., "Pipeline Parallelism with Controllable Memory", 2024, arXiv:2405.15362.


def zb_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """Chunk 0 of rank r is stage r, chunk 1 is stage 2p-1-r: first and last layers meet on rank 0.

    No span bubble for m >= 2p-1 and tF = tI = tW; every rank holds p microbatches. Chunk 1 is drawn
    in small letters:

    >>> print(draw(simulate(zb_v(2, 4)).timeline))
    rank 0: F0 F1 F2 f0 i0 w0 f1 i1 w1 F3 I0 W0 f2 i2 w2 I1 W1 f3 i3 w3 I2 W2 I3 W3
    rank 1: .  F0 f0 F1 f1 i0 w0 F2 I0 W0 f2 i1 w1 F3 I1 W1 f3 i2 w2 I2 i3 I3 W2 w3 W3
    """
    orders = tuple(_zb_v_order(rank, num_ranks, num_microbatches) for rank in range(num_ranks))
    return one_pipe("zb_v", v_shape(num_ranks), orders, num_microbatches)


def _zb_v_order(rank: int, num_ranks: int, num_microbatches: int) -> tuple[Entry, ...]:
    """One rank of ZB-V: each kind of operation of both chunks in order of its microbatches."""
    stages, ops = (rank, 2 * num_ranks - 1 - rank), list[Op]()
    issued = Counter[tuple[Kind, int]]()

    def put(chunk: int, *kinds: Kind) -> None:
        """Append the chunk's next operation of each of `kinds`, if its input exists."""
        for kind in kinds:
            inputs = {"F": num_microbatches, "I": issued["F", chunk], "W": issued["I", chunk]}
            if issued[kind, chunk] < inputs[kind]:
                ops.append(Op(kind, stages[chunk], issued[kind, chunk]))
                issued[kind, chunk] += 1

    # Warm-up: chunk 0 fills, then chunk 1 as its microbatches come back.
    for _ in range(2 * (num_ranks - rank) - 1):
        put(0, "F")
    for _ in range(rank):
        put(1, "F")
        put(0, "F")
    for _ in range(num_ranks - rank):
        put(1, "F", "I", "W")
    # Stable phase.
    while min(issued["F", 0], issued["F", 1]) < num_microbatches:
        put(0, "F", "I", "W")
        put(1, "F", "I", "W")
    # Drain: input gradients first, others wait for them.
    for _ in range(rank):
        put(0, "I")
        put(1, "I")
    while min(issued["I", 0], issued["I", 1]) < num_microbatches:
        put(1, "I")
        put(0, "I", "W")
    for chunk in (1, 0):
        for _ in range(num_microbatches):
            put(chunk, "W")
    return single(*ops)


# DualPipe and its V form: forward and backward of two microbatches run as one block.
#
# DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, arXiv:2412.19437 (DualPipe, two pipes from both
# ends); Sea AI Lab, "DualPipe could be better without the Dual", 2025,
# https://huggingface.co/blog/ufotalent/cut-in-half (DualPipeV: folded to one pipe, without the
# second copy of the weights). In a block one microbatch's exchange of tokens runs under the other's
# compute.


def dualpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """Stage s of pipe 0 on rank s, of pipe 1 on rank p-1-s; half of the microbatches through each.

    Rank idle (p/2-1)(tFB+tB-3tW) where tF = tI, tW <= tI, tB <= tFB <= tF+tB; every rank holds p+1
    microbatches and two copies of weights, whose gradients are summed. Pipe 1 is drawn in small
    letters:

    >>> print(draw(simulate(dualpipe(2, 4)).timeline))
    rank 0: F0 f0 F1 b0--- f1+B0--- b1--- I1 W1
    rank 1: f0 F0 f1 B0--- F1+b0--- B1--- i1 w1
    """
    half, orders = num_ranks // 2, list[tuple[Entry, ...]]()
    for rank in range(num_ranks):
        # (pipe, stage) of the pipe that enters at the end nearer to this rank, and of the other
        # pipe.
        ends = [(0, rank), (1, num_ranks - 1 - rank)]
        near, far = ends if rank < half else reversed(ends)
        depth, each = min(rank, num_ranks - 1 - rank), num_microbatches // 2
        orders.append(_dualpipe_order(near, far, num_half=half, depth=depth, num_each=each))
    return Schedule(
        name="dualpipe",
        num_ranks=num_ranks,
        num_stages=num_ranks,
        placement=mirrored(num_ranks),
        orders=tuple(orders),
        num_microbatches=(num_microbatches // 2,) * 2,
    )


def dualpipe_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """Chunk 0 of rank r is stage r, chunk 1 is stage 2p-1-r: first and last layers meet on rank 0.

    Rank idle (p-1)/2 (tFB+tB-3tW) where tF = tI, tW <= tI, tB <= tFB <= tF+tB; every rank holds
    p + 1/2 microbatches. Chunk 1 is drawn in small letters:

    >>> print(draw(simulate(dualpipe_v(2, 4)).timeline))
    rank 0: F0 F1 F2 f0 i0 w0 f1 F3+b1--- .  f2+B0--- b2--- .  f3+B1--- b3--- I2 W2 I3 W3
    rank 1: .  F0 f0 F1 f1 F2 b0--- f2+B0--- F3+b1--- f3+B1--- b2--- B2--- .  i3 I3 w3 W3
    """
    numbers = {"num_half": num_ranks, "num_each": num_microbatches}
    orders = tuple(
        _dualpipe_order((0, rank), (0, 2 * num_ranks - 1 - rank), depth=rank, **numbers)
        for rank in range(num_ranks)
    )
    return one_pipe("dualpipe_v", v_shape(num_ranks), orders, num_microbatches)


#: (pipe, stage) that microbatches pass on one rank.
_Direction = tuple[int, int]


def _dualpipe_order(
    near: _Direction, far: _Direction, *, num_half: int, depth: int, num_each: int
) -> tuple[Entry, ...]:
    """Entries of one rank: eight phases, a loop each. `depth`: ranks between this one and the end
    where `near` enters; `num_half`: ranks from that end to the middle, where the directions
    meet; `num_each`: microbatches of each direction."""
    numbers = Counter[tuple[bool, _Direction]]()
    #: Every ``I`` whose ``W`` has no entry yet.
    pending = deque[Op]()
    entries: list[Entry] = []

    def op(kind: Kind, direction: _Direction) -> Op:
        """The next forward or backward of a direction."""
        pipe, stage = direction
        numbers[kind == "F", direction] += 1
        return Op(kind, stage, numbers[kind == "F", direction] - 1, pipe)

    def put(*ops: Op) -> None:
        """One entry: a block when there are several operations."""
        entries.append(ops)
        pending.extend(op for op in ops if op.kind == "I")

    def put_weight_gradient() -> None:
        """The oldest deferred weight gradient."""
        put(pending.popleft()._replace(kind="W"))

    to_middle = num_half - depth - 1
    for _ in range(2 * to_middle):
        put(op("F", near))
    for _ in range(depth + 1):
        put(op("F", near))
        put(op("F", far))
    for _ in range(to_middle):
        put(op("I", far))
        put_weight_gradient()
        put(op("F", far))
    for index in range(num_each - 2 * num_half + depth + 1):
        if index == 0 and to_middle == 0:
            # On a rank in the middle, the first block would wait for a forward of the same rank.
            put(op("F", near))
            put(op("B", far))
        else:
            put(op("F", near), op("B", far))
        put(op("F", far), op("B", near))
    for _ in range(to_middle):
        put(op("B", far))
        put(op("F", far), op("B", near))
    for index in range(2 * (depth + 1)):
        put(op("B" if index <= depth else "I", near if index % 2 else far))
    for _ in range(to_middle):
        put_weight_gradient()
        put(op("I", near))
    for _ in range(depth + 1):
        put_weight_gradient()
    assert not pending, "a weight gradient was left over"
    return tuple(entries)
