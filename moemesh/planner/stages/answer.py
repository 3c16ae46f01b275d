"""The answer to `moemesh partition`: stages, operator strategies, and the plan that they imply."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from moemesh.config.plan import Plan
from moemesh.config.shown import Shown

Method = Literal["dp", "ilp", "random", "learned"]
METHODS: tuple[Method, ...] = get_args(Method)


@dataclass(frozen=True, kw_only=True)
class OperatorChoice:
    """One operator under one assignment: seconds and bytes of one device and microbatch, and
    `count`, the number of layers that have this assignment.
    """

    group: str
    operator: str
    strategy: str
    count: int
    seconds: float
    state_bytes: float
    saved_bytes: float


@dataclass(frozen=True, kw_only=True)
class LayoutChange:
    """One edge under one assignment: seconds to take a tensor from layout `before` to `after`."""

    group: str
    source: str
    target: str
    before: str
    after: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class OperatorAssignment:
    """Strategies of all operators: of one layer of each kind, the embedding and the head; or the
    devices of placed operators."""

    operators: tuple[OperatorChoice, ...]
    edges: tuple[LayoutChange, ...]


@dataclass(frozen=True, kw_only=True, repr=False)
class Stage(Shown):
    """One stage: its layers, its ranks, and which of the assignments its operators take.

    `seconds` are the forward and backward of one microbatch; `memory_bytes` is the need of one
    device with `in_flight` microbatches in flight. A placement of single operators names them in
    `operators`.
    """

    layers: range = range(0)
    operators: tuple[str, ...] = ()
    ranks: range
    seconds: float
    memory_bytes: float
    in_flight: float
    assignment: int = 0

    def to_json(self) -> dict[str, Any]:
        """This as an object of plain values; ranges as [first, last]."""
        layers = [self.layers.start, self.layers.stop - 1] if self.layers else None
        return {**asdict(self), "layers": layers, "ranks": [self.ranks.start, self.ranks.stop - 1]}


@dataclass(frozen=True, kw_only=True, repr=False)
class ImpliedPlan(Shown):
    """The plan of `moemesh train` that is nearest to a partition.

    `agreement` is the share of operator time whose strategy is the plan's; `differing` names the
    other operators. `seconds` and `memory_bytes` (of the worst rank) are the numbers that
    `moemesh estimate` prints. If `moemesh train` does not support the plan, `command` is empty and
    `not_trained` holds the reasons.
    """

    shown = ("plan", "agreement", "seconds", "memory_bytes", "fits")

    plan: Plan
    agreement: float
    differing: tuple[str, ...]
    seconds: float
    memory_bytes: float
    fits: bool
    command: str = ""
    not_trained: tuple[str, ...] = ()

    def keys(self) -> dict[str, Any]:
        """The keys of [plan] that differ from their defaults."""
        return self.plan.model_dump(exclude_defaults=True)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "plan": self.keys()}


@dataclass(frozen=True, kw_only=True, repr=False)
class Partition(Shown):
    """The answer to `moemesh partition`.

    `seconds` are the predicted seconds of one step, `optimum_seconds` those of the exact answer.
    `evaluations` counts the method's trials: runs of the inner dynamic program, nodes of the
    integer program's search tree, labels of the placement's dynamic program, divisions or
    placements. `mesh` is the logical mesh of a
    stage's devices by axis. `implied` is the plan for `moemesh train`, None for a placement, and if
    no plan is legal. `cut_seconds` is set for a placement: the seconds of cutting every operator
    over all devices instead.
    """

    shown = ("model", "cluster", "num_devices", "method", "seconds", "gap", "stages", "implied")

    model: str
    cluster: str
    num_devices: int
    method: str
    global_batch: int
    microbatches: int
    mesh: dict[str, int]
    seconds: float
    optimum_seconds: float
    evaluations: int
    wall_seconds: float
    stages: tuple[Stage, ...]
    assignments: tuple[OperatorAssignment, ...]
    implied: ImpliedPlan | None = None
    cut_seconds: float | None = None

    def summary(self) -> dict[str, Any]:
        """One row of a comparison of methods."""
        names = ("method", "seconds", "optimum_seconds", "gap", "evaluations", "wall_seconds")
        return {name: getattr(self, name) for name in names}

    def to_json(self) -> dict[str, Any]:
        """The object that ``moemesh partition --json`` prints; see docs/partition.md."""
        names = ("model", "cluster", "num_devices", "global_batch", "microbatches", "mesh")
        return {
            **{name: getattr(self, name) for name in names},
            **self.summary(),
            "stages": [stage.to_json() for stage in self.stages],
            "assignments": [asdict(assignment) for assignment in self.assignments],
            "plan": None if self.implied is None else self.implied.to_json(),
            "cut_seconds": self.cut_seconds,
        }

    @property
    def gap(self) -> float:
        """Share of seconds above the optimum; 0 for an exact answer."""
        return max(self.seconds / self.optimum_seconds - 1, 0.0)
