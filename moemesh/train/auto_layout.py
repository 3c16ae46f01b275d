"""`moemesh train --auto-layout`: a plan for the present ranks, if the plan needs another number.

The search of `moemesh plan`, restricted to plans that `moemesh train` carries out, picks the
layout. Cases outside of the search (a global batch that no number of replicas divides) fall back to
the legal plan that is nearest to the old one. Model, data order and global batch stay; a
checkpoint can be read in any layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from moemesh.comm.slurm import ranks_of
from moemesh.config.cluster import load_cluster
from moemesh.config.errors import ConfigError, UserError
from moemesh.config.plan import DEGREES, Plan
from moemesh.config.rules import ASYNCHRONOUS_SCHEDULES
from moemesh.config.run import RunConfig
from moemesh.config.suggest import divisors
from moemesh.config.toml import format_value
from moemesh.config.trainable import refusals
from moemesh.monitor.devices import num_visible_gpus
from moemesh.planner.layout_sources import plan_of
from moemesh.planner.requests import PlanRequest
from moemesh.planner.search.command import NothingFits, plan_named
from moemesh.planner.search.search import Candidate

#: Clusters by which layouts are compared if `train.cluster` names none.
_CPUS, _GPUS = "laptop_cpu", "dgx_h100"
#: Plan keys that depend on the degrees: for them a nearest plan tries the defaults, too.
_DEPENDENT = (
    "schedule", "stages_per_rank", "layers_per_stage", "ranks_per_node", "shard_group", "servers",
    "slices", "spare_slots", "etp", "microbatches",
)  # fmt: skip
#: Plan keys that are kept: they change the results or the order of sums.
_KEPT = ("combine", "payload")
#: Plan keys that may be unset; `--set` cannot unset a key that has a value.
_WITHOUT_VALUE = tuple(name for name, field in Plan.model_fields.items() if field.default is None)


class NoLayout(UserError):
    """No plan of these ranks can be trained."""


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """A `plan` for `ranks` ranks in place of the one `before`. `how`: its origin, for the user."""

    before: Plan
    plan: Plan
    ranks: int
    how: str
    #: Whether this process prints the layout.
    is_printed: bool = True

    def overrides(self) -> list[str]:
        """Values of ``--set`` that turn the old plan into the new one."""
        return [f"plan.{name}={format_value(value)}" for name, value in _changes(self).items()]

    def text(self) -> str:
        """Both plans side by side."""
        changed = list(dict.fromkeys([*DEGREES, *_changes(self)]))
        lines = [
            f"layout   for {self.ranks} ranks in place of {self.before.world_size}: {self.how}"
        ]
        for title, plan in (("before", self.before), ("now", self.plan)):
            values = "  ".join(f"{name}={getattr(plan, name)}" for name in changed)
            lines.append(f"{title:<9}{values}")
        return "\n".join(lines)


def _changes(fitted: Fitted) -> dict[str, object]:
    before = dict(fitted.before)
    return {name: value for name, value in fitted.plan if value != before[name]}


def fit_here(config: RunConfig, ranks: int | None, environment: Mapping[str, str]) -> Fitted:
    """:func:`fit` for the ranks that torchrun or Slurm started; without them for `ranks` ranks of
    this machine (None: one on each GPU). Raises NoLayout if the number is unknown."""
    joined = ranks_of(environment)
    gpus = num_visible_gpus(environment) if config.train.device != "cpu" else 0
    on_gpus = gpus > 0
    if joined:
        world, per_node = int(joined["WORLD_SIZE"]), int(joined["LOCAL_WORLD_SIZE"])
        fitted = fit(config, world, per_node, on_gpus=on_gpus)
        return replace(fitted, is_printed=int(joined["RANK"]) == 0)
    if ranks is None and not on_gpus:
        raise NoLayout("without GPUs the number of ranks is unknown: give --ranks N")
    return fit(config, ranks or gpus, None, on_gpus=on_gpus)


def fit(config: RunConfig, ranks: int, ranks_per_node: int | None, *, on_gpus: bool) -> Fitted:
    """A plan for `config` on `ranks` ranks: the plan of `config` if it has this number.

    Raises NoLayout if none can be trained.
    """
    if config.plan.world_size == ranks:
        return Fitted(before=config.plan, plan=config.plan, ranks=ranks, how="as it was")
    if config.plan.schedule in ASYNCHRONOUS_SCHEDULES:
        raise NoLayout(
            f"with plan.schedule = {config.plan.schedule} other degrees change what is learned: "
            f"start {config.plan.world_size} ranks, or choose a plan of {ranks} yourself"
        )
    per_node = ranks_per_node if ranks_per_node and not ranks % ranks_per_node else ranks
    name = config.train.cluster or (_GPUS if on_gpus else _CPUS)
    machine = load_cluster(name).model_copy(
        update={"nodes": ranks // per_node, "gpus_per_node": per_node}
    )
    candidates: Sequence[Candidate] = ()
    with suppress(ConfigError, NothingFits):
        data = config.data
        # The search assumes bfloat16 for trained weights, whatever train.dtype is.
        request = PlanRequest(
            config.model, machine, data.seq_len, data.global_batch, trainable=True
        )
        candidates = plan_named(request).candidates
    for candidate in candidates:
        plan = plan_of(candidate.layout)
        kept = {name: getattr(config.plan, name) for name in _KEPT}
        if plan.ranks_per_node is None and config.plan.ranks_per_node is not None:
            kept["ranks_per_node"] = plan.world_size  # `--set` cannot unset the key
        plan = plan.model_copy(update=kept)
        if is_trained(config, plan):
            how = f"the best of the search on {name}"
            return Fitted(before=config.plan, plan=plan, ranks=ranks, how=how)
    for plan in nearest(config, ranks):
        how = "the nearest legal plan, for the search found none"
        return Fitted(before=config.plan, plan=plan, ranks=ranks, how=how)
    given = [name for name in _WITHOUT_VALUE if getattr(config.plan, name) is not None]
    hint = f", or leave out plan.{', plan.'.join(given)}" if given else ""
    raise NoLayout(
        f"no plan of {ranks} ranks trains this configuration: start another number{hint}"
    )


def is_trained(config: RunConfig, plan: Plan) -> bool:
    """Whether `moemesh train` carries out `plan` with all else of `config`."""
    if any(
        getattr(plan, name) is None and getattr(config.plan, name) is not None
        for name in _WITHOUT_VALUE
    ):
        return False  # `--set` cannot unset a key
    other = replace(config, plan=plan)
    return not other.check() and not refusals(other)


def nearest(config: RunConfig, ranks: int) -> Iterator[Plan]:
    """Legal plans of `ranks` ranks, the nearest to the degrees of `config` first."""
    old = config.plan
    defaults = {name: type(old).model_fields[name].default for name in _DEPENDENT}

    def distance(degrees: tuple[int, ...]) -> tuple[float, tuple[int, ...]]:
        olds = (old.pp, old.cp, old.tp, old.ep, old.dp)
        ratios = [abs(math.log2(a / b)) for a, b in zip(degrees, olds, strict=True)]
        # Other replicas change the computation least: a change of dp counts half.
        return sum(ratios) - ratios[-1] / 2, degrees

    candidates = [
        (pp, cp, tp, ep, ranks // (pp * cp * tp))
        for pp in divisors(ranks)
        for cp in divisors(ranks // pp)
        for tp in divisors(ranks // (pp * cp))
        for ep in divisors(ranks // pp)
    ]
    for pp, cp, tp, ep, dp in sorted(candidates, key=distance):
        degrees = {"pp": pp, "cp": cp, "tp": tp, "ep": ep, "dp": dp}
        for others in ({}, defaults, defaults | {"dispatcher": "all_to_all"}):
            try:
                plan = Plan(**{**dict(old), **others, **degrees})
            except ValueError:
                continue
            if is_trained(config, plan):
                yield plan
                break
