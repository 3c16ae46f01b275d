"""Expert migration: every few steps experts move to other ranks, to even out recent loads.

The loads are an exponential moving average of the exact counts, which are equal on all ranks. Rank
0 plans for all ranks (:func:`moemesh.balance.rebalance_incremental`). Layers move one after the
other, at a step boundary, with everything that belongs to an expert: weights, masters and moments.

Legend: L MoE layers of the model, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moemesh.balance import rebalance_incremental
from moemesh.balance.compiled import plain_loops
from moemesh.comm.collectives import gather_json
from moemesh.parallel.expert.homes import move_experts, set_homes, stacks_of_experts
from moemesh.parallel.parallelize import RankModel
from moemesh.parallel.placement import OwnRange
from moemesh.train.optimizer import Optimizer, has_master
from moemesh.train.step import StepBoundary

#: Experts stay where they are as long as the load of the hottest rank exceeds the lower bound of
#: all placements by at most this share.
TOLERANCE = 0.05
#: Largest product of experts and ranks that is planned in plain Python, without compilation.
LARGEST_UNCOMPILED = 256


class ExpertMigration:
    """Averages loads, and moves experts after every `every`-th step (0: never).
    ``parallel.homes[layer]`` has the ids of the layer's experts in the order of their ranks and of
    their places on a rank; a layer without an entry has them in ascending order."""

    def __init__(
        self, parallel: RankModel, optimizer: Optimizer, every: int, log: Callable[[str, str], None]
    ) -> None:
        """`log`: called with text and kind of an event."""
        self._parallel, self._optimizer, self._mesh = parallel, optimizer, parallel.mesh
        config = parallel.model.config
        self._layers, self._num_experts = list(config.routed_layers), config.num_experts
        moves = self._mesh["ep"].size > 1 and bool(self._layers)
        self._every, self._log = every if moves else 0, log
        self._average_LE: np.ndarray[Any, np.dtype[np.float64]] | None = None

    def after(self, boundary: StepBoundary) -> None:
        """Average the loads of a step, and migrate experts if due; all ranks call."""
        if num_moved := self.update(boundary.number, boundary.step.result.counts_LE):
            text = f"step {boundary.number}: {num_moved} experts of all layers moved"
            self._log(text, "experts")

    def update(self, step: int, counts_LE: Tensor) -> int:
        """Add the loads of `step`: tokens of each expert; returns the number of migrated experts.

        All ranks call, after the update of `step`.
        """
        if not self._every:
            return 0
        counts = counts_LE.cpu().numpy().astype(np.float64)
        if self._average_LE is None:
            self._average_LE = counts
        else:
            self._average_LE += (counts - self._average_LE) / self._every
        if step % self._every:
            return 0
        ordered = tuple(range(self._num_experts))
        before = [list(self._parallel.homes.get(layer, ordered)) for layer in self._layers]
        # Rank 0 plans for all: floats may round differently on another kind of machine.
        plan: list[list[int]] | None = None
        if self._mesh.rank == 0:
            num_ranks = self._mesh["ep"].size
            small = self._num_experts * num_ranks <= LARGEST_UNCOMPILED
            with plain_loops() if small else nullcontext():
                placement = rebalance_incremental(
                    self._average_LE, np.array(before), TOLERANCE, num_gpus=num_ranks
                )
            plan = placement.physical_to_logical.tolist()
        after: list[list[int]] = gather_json(plan, self._mesh.control)[0]
        num_moved = 0
        for layer, old, new in zip(self._layers, before, after, strict=True):
            if old != new:
                self._move(layer, old, new)
                num_moved += sum(a != b for a, b in zip(old, new, strict=True))
        return num_moved

    def state(self) -> dict[str, Any]:
        """Placement and loads for a checkpoint, as JSON; input of :meth:`load_state`."""
        if not self._every:
            return {}
        loads = None if self._average_LE is None else self._average_LE.tolist()
        homes = {str(layer): list(places) for layer, places in self._parallel.homes.items()}
        return {"expert_homes": homes, "expert_loads": loads}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the placement of a checkpoint of any layout; call it before weights are read."""
        if not self._every:
            return
        homes = state.get("expert_homes", {})
        for layer in set(self._parallel.homes) - set(map(int, homes)):
            self._set(layer, range(self._num_experts))
        for layer, places in homes.items():
            self._set(int(layer), places)
        if state.get("expert_loads") is not None:
            self._average_LE = np.array(state["expert_loads"])

    @torch.no_grad()
    def _move(self, layer: int, old: Sequence[int], new: Sequence[int]) -> None:
        parallel, optimizer = self._parallel, self._optimizer
        if layer in parallel.model.moe_layers():
            reducer, moments = parallel.reducer, optimizer.state()
            # For each stack of experts (weights, moments, separate masters) the full tensor,
            # [places, ...], and the part of it that this rank owns: the full tensor itself, a flat
            # range, or nothing. All ranks that share the experts call.
            states: list[tuple[Tensor, Tensor | None, OwnRange | None]] = []
            for name in stacks_of_experts(parallel.placements, layer):
                weights = reducer.whole_weights(name)
                states.append((weights, reducer.held_weights.get(name), reducer.held.get(name)))
                if not parallel.placements[name].trains:
                    continue
                parts = [moments.get(kind, {}).get(name) for kind in optimizer.kinds()]
                if has_master(weights.dtype):
                    parts.append(optimizer.masters.get(name))
                local = reducer.owned.get(name)
                states += [(reducer.whole(name, part), part, local) for part in parts]
            move_experts([full for full, _, _ in states], old, new, self._mesh["ep"])
            for full, part, local in states:
                # If the full tensor is a copy, write this rank's part back.
                if part is None or local is None:
                    continue
                if part.untyped_storage().data_ptr() != full.untyped_storage().data_ptr():
                    numbers = slice(local.numbers.start, local.numbers.stop)
                    part.view(-1).copy_(full.view(-1)[numbers])
        self._set(layer, new)

    def _set(self, layer: int, places: Sequence[int]) -> None:
        parallel = self._parallel
        set_homes(
            parallel.model, parallel.placements, parallel.homes, layer, places, self._mesh.device
        )
