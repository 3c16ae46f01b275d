"""Replica checksums: ranks that hold copies of the same weights compare digests of them.

A bit that flips in the memory of one rank changes gradient norms and losses too little to notice
for a while; the copies then drift apart, and a checkpoint holds the copy of the rank that writes
it. So every ``train.vote_every`` steps, and before each checkpoint, every rank adds up the bits of
each of its parameters and buffers (one pass over the weights). A maximum of these digests, over the
ranks of each axis on which gradients are summed and of tied tables, shows whether the copies are
equal. Only if they differ, the digests themselves are exchanged: if more than half of the copies
are equal, the ranks with other copies are at fault; of two copies either may be wrong. Weights of a
single rank cannot be compared.

The exchange is not part of a plan's prediction and is not entered in the ledger.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moemesh.comm.collectives import all_reduce_, gather_json
from moemesh.comm.transfers import broadcast
from moemesh.config.run import RunConfig
from moemesh.config.train import TrainConfig
from moemesh.monitor import progress
from moemesh.monitor.progress import CHECK
from moemesh.parallel.parallelize import RankModel
from moemesh.train.optimizer import Optimizer
from moemesh.train.step import StepBoundary

#: Bytes of an element -> integer dtype of that width.
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
#: Axes whose ranks hold copies, in the same order on every rank.
_AXES = ("stage", "dp_cp", "edp", "edp_etp", "mirror")
#: Largest number of parameters in a message.
_MOST_NAMED = 4


class Mismatch(NamedTuple):
    """Copies of `parameter` on `ranks` that differ. `culprits`: ranks whose copy is not that of
    more than half of them; `majority`: a rank with that copy; () and None if there is none."""

    parameter: str
    ranks: tuple[int, ...]
    culprits: tuple[int, ...]
    majority: int | None

    def __str__(self) -> str:
        who = f"ranks {', '.join(map(str, self.ranks))}"
        if not self.culprits:
            return f"{self.parameter}: the copies of {who} differ, and none is in the majority"
        odd = ", ".join(map(str, self.culprits))
        return f"{self.parameter}: of {who}, the copy of {odd} differs from the others"


class CopiesDiffer(RuntimeError):
    """Weights that must be equal are not; `facts` for failure.json."""

    def __init__(self, step: int, mismatches: Sequence[Mismatch]) -> None:
        left = len(mismatches) - _MOST_NAMED
        more = f"; and {left} more" if left > 0 else ""
        super().__init__(f"step {step}: " + "; ".join(map(str, mismatches[:_MOST_NAMED])) + more)
        first = mismatches[0]
        culprits = sorted({rank for mismatch in mismatches for rank in mismatch.culprits})
        self.facts: dict[str, Any] = {
            "phase": "check",
            "parameter": first.parameter,
            "parameters": [mismatch.parameter for mismatch in mismatches[: 4 * _MOST_NAMED]],
            "ranks": culprits or list(first.ranks),
            "advice": "the memory of the ranks named is suspect; the same command resumes from the "
            "newest checkpoint, which was compared before it was written"
            + ("; train.on_mismatch = majority takes the copy of most ranks" if culprits else ""),
        }
        if culprits:
            self.facts["rank"] = culprits[0]


class ReplicaChecksums:
    """Compares the copies of this rank's weights; all ranks call its methods together."""

    def __init__(
        self,
        parallel: RankModel,
        optimizer: Optimizer,
        train: TrainConfig,
        log: Callable[[str, str], None],
    ) -> None:
        """`log`: called with text and kind of an event."""
        self._parallel, self._optimizer, self._train, self._log = parallel, optimizer, train, log
        copies: dict[str, dict[str, Tensor]] = {axis: {} for axis in _AXES}
        for name, parameter in parallel.model.named_parameters():
            placement = parallel.placements[name]
            if parallel.reducer.data != "zero3" and parameter.numel():
                copies[placement.summed_over][name] = parameter
                if len(placement.holders) > 1:
                    copies["mirror"][name] = parameter
        copies["stage"] |= dict(parallel.model.named_buffers())
        #: Axis -> tensors of which its ranks hold copies, in the order of the model.
        self._held = {
            axis: held for axis, held in copies.items() if held and parallel.mesh[axis].size > 1
        }

    def compare(self) -> list[Mismatch]:
        """The copies that differ, the same list on every rank."""
        local: list[Mismatch] = []
        with self._parallel.mesh.ledger.paused():
            for axis_name, held in self._held.items():
                axis = self._parallel.mesh[axis_name]
                sums = torch.stack([digest(tensor) for tensor in held.values()])
                # Copies are equal if the maximum of x is its minimum, which is ~(maximum of ~x).
                maxima = torch.stack([sums, ~sums])
                all_reduce_(maxima, axis, op="max", caller="vote", phase="control")
                unequal = (maxima[0] != ~maxima[1]).nonzero().flatten().tolist()
                if not unequal:
                    continue
                by_rank = gather_json([int(sums[index]) for index in unequal], axis)
                names = list(held)
                for index, digests in zip(unequal, zip(*by_rank, strict=True), strict=True):
                    common, votes = Counter(digests).most_common(1)[0]
                    culprits, majority = (), None
                    if 2 * votes > axis.size:
                        culprits = tuple(
                            r for r, sum_ in zip(axis.ranks, digests, strict=True) if sum_ != common
                        )
                        majority = axis.ranks[digests.index(common)]
                    local.append(Mismatch(names[index], axis.ranks, culprits, majority))
        reports = gather_json([list(mismatch) for mismatch in local], self._parallel.mesh.control)
        unique = {
            (name, tuple(ranks)): Mismatch(name, tuple(ranks), tuple(culprits), majority)
            for mismatches in reports
            for name, ranks, culprits, majority in mismatches
        }
        return list(unique.values())

    def after(self, boundary: StepBoundary) -> None:
        """Compare before a checkpoint, and every ``train.vote_every`` steps. Raises CopiesDiffer,
        on all ranks, if copies differ, unless ``train.on_mismatch`` is majority and there is a
        majority."""
        every, step = self._train.vote_every, boundary.number
        # Some schedules reach a boundary only after several steps: is one of these a multiple?
        if not every or not (boundary.saves or step // every > boundary.began // every):
            return
        progress.phase(CHECK)
        if not (mismatches := self.compare()):
            return
        if self._train.on_mismatch == "stop" or not self.take_majority(mismatches):
            raise CopiesDiffer(step, mismatches)
        text = "; ".join(map(str, mismatches[:_MOST_NAMED]))
        self._log(f"step {step}: {text}: the copy of the others is taken", "copies")

    def take_majority(self, mismatches: Sequence[Mismatch]) -> bool:
        """Copy the most common copy of each parameter over the others, with masters and moments if
        ranks hold copies of these, too; returns whether every mismatch had a majority."""
        if any(mismatch.majority is None for mismatch in mismatches):
            return False
        rank = self._parallel.mesh["world"].ranks[self._parallel.mesh.rank]
        optimizer = self._optimizer
        with self._parallel.mesh.ledger.paused():
            for axis_name, held in self._held.items():
                axis = self._parallel.mesh[axis_name]
                for mismatch in mismatches:
                    name = mismatch.parameter
                    if name not in held or mismatch.ranks != axis.ranks or rank not in axis.ranks:
                        continue
                    assert mismatch.majority is not None
                    source, states = axis.ranks.index(mismatch.majority), [held[name]]
                    if self._parallel.reducer.data == "replicate" and name in optimizer.masters:
                        kinds = optimizer.state().values()
                        states += [optimizer.masters[name], *(k[name] for k in kinds if name in k)]
                    for tensor in states:
                        copy = tensor.detach().clone()
                        sent = broadcast(copy, axis, source, phase="control", caller="vote")
                        tensor.data.copy_(sent)
        return True


def digest(tensor: Tensor) -> Tensor:
    """An int64 that changes with any single element of `tensor`: the sum of its bits as integers of
    its width, modulo 2 to the 64."""
    words = tensor.detach().view(_WORDS[tensor.element_size()])
    return words.sum(dtype=torch.int64)


def what_is_compared(config: RunConfig) -> str:
    """A line for the start of a run: the number of copies that are compared."""
    plan = config.plan
    if not config.train.vote_every:
        return "copies of weights are not compared: train.vote_every is 0"
    if plan.world_size == 1 or plan.data == "zero3":
        return "every weight is on one rank alone: without copies nothing is compared"
    kinds = {"dense": plan.dp * plan.cp}
    kinds |= {"expert": plan.edp} if config.model.num_experts else {}
    words = {
        1: "are on one rank alone, with no copy to compare",
        2: "have 2 copies, and a difference is reported",
    }
    text = "; ".join(
        f"{kind} weights {words.get(n, f'have {n} copies, and one that differs is named')}"
        for kind, n in kinds.items()
    )
    return f"replica checksums are compared every {config.train.vote_every} steps: {text}"
