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
    """Split of known loads over the replicas of a placement. `shares` [layers, slots] of its
    expert's load that each slot takes (an expert's sum to 1), `gpu_loads` [layers, GPUs], and
    `balance` [layers], the most loaded GPU's load over the mean."""

    shares: Any
    gpu_loads: Any
    balance: tuple[float, ...]


def split_loads(loads: Any, placement: Any, *, num_gpus: int) -> LoadSplit:
    """Split known loads over the replicas of a fixed placement, with the least possible loads.

    `loads` [layers, experts], `placement` [layers, slots] of logical experts. The split minimises
    the largest load of a GPU, then the second largest, and so on. Results have the type of `loads`.
    Raises ValueError.
    """
    given = check_loads(loads, "loads")
    slots = check_placement(placement, given.shape[1], num_gpus, len(given), "placement")
    weights = scaled(given)
    flow = np.stack([_fair_flow(*layer, num_gpus) for layer in zip(weights, slots, strict=True)])
    sums = [np.bincount(*layer, given.shape[1]) for layer in zip(slots, flow, strict=True)]
    whole = np.take_along_axis(np.stack(sums), slots, axis=1)
    copies = np.stack([np.bincount(row, minlength=given.shape[1])[row] for row in slots])
    shares = np.divide(flow, whole, out=1.0 / copies, where=whole > 0)
    value = shares * np.take_along_axis(given, slots, axis=1)
    per_gpu = value.reshape(len(slots), num_gpus, -1).sum(axis=2)
    kinds = like(loads, shares, per_gpu)
    return LoadSplit(
        shares=kinds[0], gpu_loads=kinds[1], balance=tuple(balance_of(per_gpu).tolist())
    )


def _fair_flow(weight: Floats, slots: Ints, num_gpus: int) -> Floats:
    """The load of each slot [slots] of one layer."""
    optimize: Any = importlib.import_module("scipy.optimize")  # 0.2 s
    sparse: Any = importlib.import_module("scipy.sparse")

    places = np.arange(len(slots))
    gpu = places // (len(slots) // num_gpus)
    ones = np.ones(len(slots))
    of_expert = sparse.csr_array((ones, (slots, places)), shape=(len(weight), len(slots) + 1))
    of_gpu = sparse.csr_array((ones, (gpu, places)), shape=(num_gpus, len(slots) + 1)).tolil()
    of_gpu[:, len(slots)] = -1.0  # the last unknown is the largest load of the open GPUs
    limits = np.zeros(num_gpus)
    is_open = np.ones(num_gpus, np.bool_)
    goal = np.append(np.zeros(len(slots)), 1.0)
    while True:
        solution: Any = optimize.linprog(
            goal,
            A_ub=of_gpu,
            b_ub=limits,
            A_eq=of_expert,
            b_eq=weight,
            method="highs-ds",
            options={"primal_feasibility_tolerance": TOLERANCE},
        )
        assert solution.success, solution.message
        tight = is_open & (solution.ineqlin.marginals < -TOLERANCE)
        is_open &= ~tight
        if solution.fun <= TOLERANCE or not tight.any() or not is_open.any():
            return np.maximum(solution.x[:-1], 0.0)
        for index in np.flatnonzero(tight):
            of_gpu[index, len(slots)] = 0.0
            limits[index] = solution.fun
