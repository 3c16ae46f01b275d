"""The origin of a value that is not finite, among all that the ranks have seen of it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moemesh.comm.collectives import gather_json
from moemesh.parallel.parallelize import RankModel

#: So many sample ids, experts and parameters are named.
MOST_NAMED = 16
#: In the order of the computation; "backward" and "gradient" are compared by layer.
PHASES = ("weight", "forward", "loss", "backward", "gradient", "sum")


@dataclass(frozen=True, kw_only=True)
class Sighting:
    """Numbers that are not finite, seen on one rank. `place` orders what is in one layer;
    ``is_fresh``: what the module was given is finite; `sequences`: of the step, where known, of
    `num_looked` that were looked at there."""

    rank: int
    phase: str
    name: str
    value: str
    microbatch: int = 0
    layer: int = -1
    place: int = 0
    is_fresh: bool = False
    experts: tuple[int, ...] = ()
    sequences: tuple[int, ...] = ()
    num_looked: int = 0


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The origin of a value that is not finite, the same on every rank.

    `phase`: one of :data:`PHASES`, or "unrepeated" when a second run was finite. `name`: the
    parameter or module. `ranks`: all that saw it first, at the same place. `layer`, `microbatch`
    and `expert` are None where there is none; `samples`: ids in the data, of the sequences
    concerned; `num_alike`: how many these are where they are all that were looked at, so that no
    single one is the cause; else 0. `parameters`: those whose gradients were not finite in the
    step itself.
    ``is_damage``: other ranks hold finite copies of the same weight.
    """

    phase: str
    rank: int | None = None
    ranks: tuple[int, ...] = ()
    name: str = ""
    value: str = ""
    microbatch: int | None = None
    layer: int | None = None
    expert: int | None = None
    experts: tuple[int, ...] = ()
    samples: tuple[int, ...] = ()
    num_alike: int = 0
    parameters: tuple[str, ...] = ()
    is_damage: bool = False

    def facts(self) -> dict[str, Any]:
        """The keys of failure.json that it knows."""
        found: dict[str, Any] = {"phase": self.phase}
        is_parameter = self.phase in ("weight", "gradient", "sum")
        values: dict[str, Any] = {
            "rank": self.rank,
            "ranks": list(self.ranks),
            "microbatch": self.microbatch,
            "layer": self.layer,
            "expert": self.expert,
            "experts": list(self.experts),
            "parameter" if is_parameter else "module": self.name,
            "parameters": list(self.parameters),
            "value": self.value,
            "samples": list(self.samples),
        }
        return found | {key: value for key, value in values.items() if value not in (None, [], "")}

    def __str__(self) -> str:
        if self.phase == "unrepeated":
            text = "it does not come again with the same numbers: a fault of the hardware, perhaps"
            if self.parameters:
                named = ", ".join(self.parameters[:3])
                more = len(self.parameters) - 3
                text += f"; gradients of {named}{f' and {more} others' if more > 0 else ''}"
            return text
        what = {
            "weight": f"the weight {self.name} is",
            "forward": f"the output of {self.name} is",
            "loss": "the loss is",
            "backward": f"the gradient that leaves {self.name} is",
            "gradient": f"the gradient of {self.name} is",
            "sum": f"the sum over ranks of the gradient of {self.name} is",
        }[self.phase]
        where = [f"rank {self.rank}"]
        if len(self.ranks) > 1:
            where = ["ranks " + ", ".join(map(str, self.ranks))]
        if self.microbatch is not None:
            where.append(f"microbatch {self.microbatch}")
        if self.layer is not None:
            where.append(f"layer {self.layer}")
        if self.expert is not None:
            where.append(f"expert {self.expert}")
        if self.num_alike:
            where.append(f"all {self.num_alike} sequences alike, so none of them is the cause")
        elif self.samples:
            where.append("samples " + ", ".join(map(str, self.samples)))
        return f"{what} {self.value} first ({'; '.join(where)})"


def order(one: Sighting) -> tuple[int, ...]:
    """A sort key: the order of the computation among the sightings of one phase."""
    if one.phase == "backward":
        return one.microbatch, -one.layer, -one.place
    if one.phase in ("weight", "gradient", "sum"):
        return one.microbatch, one.place
    return one.microbatch, one.layer, one.place


def origin(
    parallel: RankModel,
    sightings: Sequence[Sighting],
    sample_ids: Sequence[int],
    parameters: tuple[str, ...],
) -> Finding:
    """The first in the order of the computation; all ranks call with what all have seen."""
    seen = {one.phase for one in sightings}
    phase = next((phase for phase in PHASES if phase in seen), None)
    if phase is None:
        return Finding(phase="unrepeated", parameters=parameters[:MOST_NAMED])
    found = [one for one in sightings if one.phase == phase]
    if phase == "backward":
        # A backward goes from the last layer to the first: the gradient of a weight of a later
        # layer, or of an earlier microbatch, comes before it.
        gradients = [one for one in sightings if one.phase == "gradient" and one.layer >= 0]
        first = min(found, key=order)
        earlier = [
            one
            for one in gradients
            if (one.microbatch, -one.layer) < (first.microbatch, -first.layer)
        ]
        found = earlier or found
    first = min(found, key=lambda one: (order(one), not one.is_fresh, one.rank))
    same = [
        one
        for one in found
        if order(one) == order(first) and one.name == first.name and one.is_fresh == first.is_fresh
    ]
    in_step = first.phase not in ("weight", "sum")
    concerned = [one for one in same if one.sequences]
    if in_step and not concerned:
        # Rows of experts are tokens of other ranks: these see them in the same layer.
        place = first.phase, first.microbatch, first.layer
        concerned = [one for one in sightings if (one.phase, one.microbatch, one.layer) == place]
    sequences = {sequence for one in concerned for sequence in one.sequences}
    are_alike = len(sequences) > 1 and all(
        len(one.sequences) == one.num_looked for one in concerned
    )
    experts = tuple(sorted({expert for one in same for expert in one.experts}))
    layer, ranks = layer_in(first.name), tuple(sorted({one.rank for one in same}))
    return Finding(
        phase=first.phase,
        rank=first.rank,
        ranks=ranks,
        name=first.name,
        value=first.value,
        microbatch=first.microbatch if in_step else None,
        layer=None if layer < 0 else layer,
        expert=experts[0] if len(experts) == 1 else None,
        experts=experts[:MOST_NAMED],
        samples=tuple(int(sample_ids[one]) for one in sorted(sequences))[:MOST_NAMED],
        num_alike=len(sequences) if are_alike else 0,
        parameters=parameters[:MOST_NAMED],
        is_damage=phase == "weight" and _is_damage(parallel, first.name, first.rank, ranks),
    )


def _is_damage(parallel: RankModel, weight: str, rank: int, ranks: tuple[int, ...]) -> bool:
    """Whether a weight has finite copies beside the one of `rank` that is not; all ranks call."""
    name = re.sub(r"^optimizer\.[^.]+\.", "", weight)
    where, data = parallel.placements.get(name), parallel.reducer.data
    if where is None or data == "zero3" or (name != weight and data != "replicate"):
        return False  # each rank has a part of its own
    copies = gather_json(parallel.mesh[where.summed_over].ranks, parallel.mesh.control)
    return not set(copies[rank]) <= set(ranks)


def layer_in(name: str) -> int:
    """The layer that the name of a parameter, of a moment or of a module has; -1: none."""
    found = re.search(r"(?:^|\.)layers\.(\d+)", name)
    return -1 if found is None else int(found[1])
