"""Transient replicas of experts for exact loads and fixed homes, with their numbers of tokens.

All ranks do the same integer arithmetic on shared counts, so every rank computes the identical
plan. The search increases a target T from the mean. Ranks above T spill their excess (largest
excess first, hottest expert first) to the rank with the most room and a free spare slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from moemesh.balance.compiled import Ints, compiled
from moemesh.balance.inputs import BalanceError, check_count, to_array
from moemesh.config.shown import Shown

#: Inverse precision of the target, relative to the mean.
PRECISION = 512


@dataclass(frozen=True, kw_only=True, repr=False)
class QuotaPlan(Shown):
    """Transient replicas of one layer and microbatch, and the tokens that each copy computes.

    `home` [experts] rank of each expert; `spare_expert` [ranks, spare slots] (-1: unused);
    `spare_quota` [ranks, spare slots] and `home_quota` [experts] tokens; all int64. Quotas of an
    expert sum to its tokens.
    """

    home: Ints
    spare_expert: Ints
    spare_quota: Ints
    home_quota: Ints

    @property
    def rank_tokens(self) -> Ints:
        """Tokens that each rank computes [ranks]."""
        tokens = self.spare_quota.sum(axis=1)
        np.add.at(tokens, self.home, self.home_quota)
        return tokens

    @property
    def balance(self) -> float:
        """Tokens of the busiest rank over the mean; 1 without tokens."""
        tokens = self.rank_tokens
        return float(tokens.max() / tokens.mean()) if tokens.any() else 1.0

    @property
    def num_replicas(self) -> int:
        """Number of used spare slots; each transfers an expert's weights and its gradients."""
        return int((self.spare_expert >= 0).sum())

    @property
    def place_rank(self) -> Ints:
        """Rank of each place: first the homes of all experts, then all spare slots."""
        ranks, spares = self.spare_expert.shape
        return np.concatenate([self.home, np.repeat(np.arange(ranks, dtype=np.int64), spares)])

    @property
    def place_expert(self) -> Ints:
        """Expert of each place, -1 for an unused spare slot."""
        return np.concatenate([np.arange(len(self.home)), self.spare_expert.reshape(-1)])


def plan_quotas(
    counts: Any, home: Any, spare_slots: int, *, num_ranks: int | None = None
) -> QuotaPlan:
    """Replicas and integer quotas such that every rank computes nearly the mean, as far as the
    spare slots allow.

    `counts` [ranks, experts] are the tokens that each rank sends to each expert, or [experts] their
    sums; `home` [experts] is the rank of each expert; each rank has `spare_slots` slots.
    `num_ranks` is needed with sums only (default: highest home + 1). The result is the same on
    every machine. Raises ValueError for negative or fractional counts and unknown homes.
    """
    table = _whole(counts, "counts")
    if table.ndim not in (1, 2) or not table.size:
        raise BalanceError(
            f"counts must be ranks x experts, or experts: {table.ndim} dims, {table.size} numbers"
        )
    totals: Ints = table.reshape(-1, table.shape[-1]).sum(axis=0)
    if table.min() < 0:
        raise BalanceError(f"counts must not be negative, and hold {table.min()}")
    homes = _whole(home, "home")
    if homes.shape != table.shape[-1:]:
        raise BalanceError(
            f"home must name a rank for each of {table.shape[-1]} experts, "
            f"and has {homes.size} numbers"
        )
    highest = int(homes.max())
    if num_ranks is None:
        num_ranks = len(table) if table.ndim == 2 else highest + 1
    if homes.min() < 0 or highest >= num_ranks:
        wrong = homes.min() if homes.min() < 0 else highest
        raise BalanceError(f"home names rank {wrong}: there are ranks 0 to {num_ranks - 1}")
    spare = check_count(spare_slots, "spare_slots") if spare_slots else 0
    expert, quota, left = choose_quotas(totals, homes, num_ranks, spare)
    return QuotaPlan(home=homes, spare_expert=expert, spare_quota=quota, home_quota=left)


def assign_tokens(plan: QuotaPlan, counts: Any, *, ranks_per_node: int | None = None) -> Ints:
    """Tokens that each rank sends to each place [ranks, experts + ranks x spare slots].

    `counts` [ranks, experts]. Places are numbered as in `QuotaPlan.place_rank`. A rank's tokens of
    an expert go to places in ascending order: the first run to the first place, and so on. Tokens
    stay on the rank, then on the node, as far as quotas allow; the rest is cut by prefix sums over
    ranks and places. Integer arithmetic only, so the result is deterministic.
    """
    table = _whole(counts, "counts")
    num_ranks = len(plan.spare_expert)
    if table.shape != (num_ranks, len(plan.home)):
        shape = " x ".join(str(size) for size in table.shape)
        raise BalanceError(
            f"counts must be {num_ranks} ranks x {len(plan.home)} experts, and are {shape}"
        )
    quota = np.concatenate([plan.home_quota, plan.spare_quota.reshape(-1)])
    expert = plan.place_expert
    if not np.array_equal(
        table.sum(axis=0),
        np.bincount(expert[expert >= 0], quota[expert >= 0], minlength=len(plan.home)),
    ):
        raise BalanceError("counts are not those that the plan was made for")
    node = check_count(ranks_per_node, "ranks_per_node") if ranks_per_node else 1
    return cut_runs(table, expert, plan.place_rank, quota, node)


def _whole(value: Any, name: str) -> Ints:
    """`value` as contiguous int64. Raises BalanceError for fractions."""
    array = to_array(value, name)
    if array.dtype == np.int64 and array.flags.c_contiguous:
        return array
    with np.errstate(invalid="ignore"):  # NaN and large numbers differ from their integers
        whole: Ints = np.ascontiguousarray(array, np.int64)
    if np.any(whole != array):
        raise BalanceError(f"{name} must hold whole numbers")
    return whole


@compiled
def choose_quotas(totals: Ints, home: Ints, num_ranks: int, spares: int) -> tuple[Ints, Ints, Ints]:
    """Expert of each spare slot and its quota [ranks, spare slots], and quota at home [experts]."""
    load = np.zeros(num_ranks, np.int64)
    for expert in range(len(totals)):
        load[home[expert]] += totals[expert]
    # Experts by rank; those of rank r are at the places first[r] to first[r + 1] - 1.
    experts_by_home = np.argsort(home, kind="mergesort")
    first = np.searchsorted(home[experts_by_home], np.arange(num_ranks + 1))
    num_tokens = int(totals.sum())
    order = np.argsort(load, kind="mergesort")
    low = (num_tokens + num_ranks - 1) // num_ranks
    high = int(load[order[num_ranks - 1]])
    best = (
        np.full((num_ranks, spares), -1),
        np.zeros((num_ranks, spares), np.int64),
        totals.copy(),
    )
    if high <= low or spares == 0:
        return best
    step = max(num_tokens // (num_ranks * PRECISION), 1)
    target = low
    bottom = low - 1  # largest target known to be out of reach
    while bottom + step < high or target == low:
        fits, trial = spill(target, totals, load, order, first, experts_by_home, spares)
        if fits:
            high = target
            best = trial
            if target == low:
                break
        else:
            bottom = target
        # The least target is usually just above the mean: the distance from the mean doubles until
        # a target is reached, then the interval is halved.
        target = min(bottom + max(step, bottom - low + step), (bottom + high + 1) // 2)
        if target >= high:
            break
    return best


@compiled
def spill(
    target: int,
    totals: Ints,
    load: Ints,
    order: Ints,
    first: Ints,
    experts_by_home: Ints,
    spares: int,
) -> tuple[bool, tuple[Ints, Ints, Ints]]:
    """Whether every rank gets at most `target` tokens, and the results of :func:`choose_quotas`.
    `load` [ranks] are tokens at home, `order` the ranks by load, least first."""
    num_ranks = len(load)
    spare_expert = np.full((num_ranks, spares), -1)
    spare_quota = np.zeros((num_ranks, spares), np.int64)
    home_quota = totals.copy()
    results = (spare_expert, spare_quota, home_quota)
    # Receivers, most room first, at the places `head` to `length` - 1 of `queue`; their rooms.
    queue, room, length = order.copy(), target - load[order], (load < target).sum()
    head = 0
    used = np.zeros(num_ranks, np.int64)
    for place in range(num_ranks - 1, -1, -1):
        rank = order[place]
        excess = load[rank] - target
        if excess <= 0:
            break
        while excess > 0:
            hottest = -1
            for index in range(first[rank], first[rank + 1]):
                if hottest < 0 or home_quota[experts_by_home[index]] > home_quota[hottest]:
                    hottest = experts_by_home[index]
            while excess > 0 and home_quota[hottest] > 0:
                if head == length:
                    return False, results
                taker = queue[head]
                tokens = min(excess, room[head], home_quota[hottest])
                spare_expert[taker, used[taker]] = hottest
                spare_quota[taker, used[taker]] = tokens
                used[taker] += 1
                home_quota[hottest] -= tokens
                excess -= tokens
                rest = room[head] - tokens
                if rest == 0 or used[taker] == spares:
                    head += 1
                    continue
                # Reinsert after the receivers with more room (ties keep their order).
                slot = head
                while slot + 1 < length and room[slot + 1] >= rest:
                    queue[slot] = queue[slot + 1]
                    room[slot] = room[slot + 1]
                    slot += 1
                queue[slot] = taker
                room[slot] = rest
    return True, results


@compiled
def cut_runs(counts: Ints, place_expert: Ints, place_rank: Ints, quota: Ints, node: int) -> Ints:
    """Tokens [ranks, places]; see `assign_tokens`. `node`: number of ranks of a node."""
    num_ranks, num_experts = counts.shape
    num_places = len(place_expert)
    sent = np.zeros((num_ranks, num_places), np.int64)
    left = counts.copy()
    room = quota.copy()
    # Tokens that stay on the rank, then tokens that stay inside the node.
    for width in (1, node):
        for place in range(num_places):
            expert = place_expert[place]
            if expert < 0:
                continue
            start = place_rank[place] - place_rank[place] % width
            for rank in range(start, min(start + width, num_ranks)):
                tokens = min(left[rank, expert], room[place])
                sent[rank, place] += tokens
                left[rank, expert] -= tokens
                room[place] -= tokens
    # The rest: ranks and places in order, cut by both prefix sums. Ranks before the cursor of an
    # expert have no tokens left for it.
    cursor = np.zeros(num_experts, np.int64)
    for place in range(num_places):
        expert = place_expert[place]
        if expert < 0:
            continue
        while room[place] > 0:
            rank = cursor[expert]
            tokens = min(left[rank, expert], room[place])
            sent[rank, place] += tokens
            left[rank, expert] -= tokens
            room[place] -= tokens
            if left[rank, expert] == 0:
                cursor[expert] += 1
    return sent


def shadow_experts(
    counts: Any, home: Any, *, shadow_rows: float, max_shadows: int | None = None
) -> QuotaPlan:
    """Replicate the most loaded experts on every rank, as long as that saves time (FasterMoE).

    `counts` [ranks, experts] tokens that each rank sends to each expert, `home` [experts]. Every
    rank computes its own tokens of a shadowed expert. With S shadows a layer costs
    `max over ranks of rows + S x shadow_rows`: `shadow_rows` is the number of rows that are
    computed and sent in the time of sending one expert's weights and gradients. The next hottest
    expert is added until the cost no longer falls, or there are `max_shadows`. In the result,
    shadows are in spare slots. Raises ValueError. He et al., "FasterMoE" (PPoPP 2022).
    """
    if not shadow_rows >= 0:
        raise BalanceError(f"shadow_rows must not be negative, and is {shadow_rows}")
    table = np.asarray(counts)
    if table.ndim != 2:
        raise BalanceError(f"counts must be ranks x experts, and have {table.ndim} dims")
    plan = plan_quotas(table, home, 0)
    table = table.astype(np.int64)
    totals = table.sum(axis=0)
    rows = plan.rank_tokens
    shadows: list[int] = []
    best = float(rows.max())
    hottest = np.argsort(-totals, kind="stable")
    for expert in hottest[: len(totals) if max_shadows is None else max_shadows]:
        trial = rows + table[:, expert]
        trial[plan.home[expert]] -= totals[expert]
        cost = float(trial.max()) + (len(shadows) + 1) * shadow_rows
        if cost >= best:
            break
        best, rows = cost, trial
        shadows.append(int(expert))
    spare_expert = np.tile(np.array(shadows, np.int64), (len(table), 1))
    at_home = plan.home[spare_expert] == np.arange(len(table))[:, None]
    spare_expert[at_home] = -1
    spare_quota = np.where(at_home, 0, table[:, shadows])
    home_quota = totals.copy()
    home_quota[shadows] = table[plan.home[shadows], shadows]
    return QuotaPlan(
        home=plan.home,
        spare_expert=np.ascontiguousarray(spare_expert),
        spare_quota=np.ascontiguousarray(spare_quota),
        home_quota=home_quota,
    )
