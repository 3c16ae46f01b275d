"""Shares of each expert's load for the replicas of a fixed placement, with known loads.

A linear program minimises the load of the most loaded GPU, then of the next, and so on. A GPU whose
constraint has a dual price has its optimal load in every solution, so its load is fixed in the next
program.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from moemesh.balance.compiled import Floats, Ints
from moemesh.balance.inputs import check_loads, check_placement, like, scaled
from moemesh.balance.rebalance import balance_of
from moemesh.config.shown import Shown

#: Precision of the solver; loads are scaled to at most 1.
TOLERANCE = 1e-10


@dataclass(frozen=True, kw_only=True, repr=False)
class LoadSplit(Shown):
    """Split of known loads over the replicas of a placement.

    `shares` [layers, slots]: the share of its expert's load that each slot takes; shares of an
    expert sum to 1. `gpu_loads` [layers, GPUs]; `balance` [layers]: largest load of a GPU over the
    mean.
    """

    shares: Any
    gpu_loads: Any
    balance: tuple[float, ...]


def split_loads(loads: Any, placement: Any, *, num_gpus: int) -> LoadSplit:
    """Split known loads over the replicas of a fixed placement.

    `loads` [layers, experts], `placement` [layers, slots] of logical experts. The split minimises
    the largest load of a GPU, then the second largest, and so on. Results have the type of `loads`.
    Raises ValueError.
    """
    given = check_loads(loads, "loads")
    slots = check_placement(placement, given.shape[1], num_gpus, len(given), "placement")
    weights = scaled(given)
    flow = np.stack([_fair_flow(*layer, num_gpus) for layer in zip(weights, slots, strict=True)])
    # Load and number of replicas of the expert in each slot [layers, slots].
    sums = [np.bincount(*layer, given.shape[1]) for layer in zip(slots, flow, strict=True)]
    expert_loads = np.take_along_axis(np.stack(sums), slots, axis=1)
    copies = np.stack([np.bincount(row, minlength=given.shape[1])[row] for row in slots])
    shares = np.divide(flow, expert_loads, out=1.0 / copies, where=expert_loads > 0)
    slot_loads = shares * np.take_along_axis(given, slots, axis=1)
    per_gpu = slot_loads.reshape(len(slots), num_gpus, -1).sum(axis=2)
    balance = tuple(balance_of(per_gpu).tolist())
    shares, gpu_loads = like(loads, shares, per_gpu)
    return LoadSplit(shares=shares, gpu_loads=gpu_loads, balance=balance)


def _fair_flow(weight: Floats, slots: Ints, num_gpus: int) -> Floats:
    """The load of each slot [slots] of one layer. A GPU is open until its load is fixed."""
    optimize: Any = importlib.import_module("scipy.optimize")  # 0.2 s
    sparse: Any = importlib.import_module("scipy.sparse")

    # Unknowns: the load of each slot, then the largest load of the open GPUs.
    places = np.arange(len(slots))
    gpu = places // (len(slots) // num_gpus)
    ones = np.ones(len(slots))
    expert_sums = sparse.csr_array((ones, (slots, places)), shape=(len(weight), len(slots) + 1))
    gpu_sums = sparse.csr_array((ones, (gpu, places)), shape=(num_gpus, len(slots) + 1)).tolil()
    gpu_sums[:, len(slots)] = -1.0
    limits = np.zeros(num_gpus)
    is_open = np.ones(num_gpus, np.bool_)
    goal = np.append(np.zeros(len(slots)), 1.0)
    while True:
        solution: Any = optimize.linprog(
            goal,
            A_ub=gpu_sums,
            b_ub=limits,
            A_eq=expert_sums,
            b_eq=weight,
            method="highs-ds",
            options={"primal_feasibility_tolerance": TOLERANCE},
        )
        assert solution.success, solution.message
        tight = is_open & (solution.ineqlin.marginals < -TOLERANCE)  # GPUs with a dual price
        is_open &= ~tight
        if solution.fun <= TOLERANCE or not tight.any() or not is_open.any():
            return np.maximum(solution.x[:-1], 0.0)
        for index in np.flatnonzero(tight):
            gpu_sums[index, len(slots)] = 0.0
            limits[index] = solution.fun
