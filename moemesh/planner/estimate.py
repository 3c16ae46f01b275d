"""One layout of one model on one cluster: parameters, FLOPs, memory, traffic and seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moemesh.config.cluster import Cluster
from moemesh.config.errors import ConfigError, Problem
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.config.run import RunConfig
from moemesh.config.tuning import num_trained
from moemesh.planner.flops import Flops, count_flops, hardware_flops
from moemesh.planner.kv_cache import kv_bytes_per_token
from moemesh.planner.layout import PlannedLayout
from moemesh.planner.layout_sources import from_plan
from moemesh.planner.memory import MemoryEstimate, RankMemory, estimate_memory
from moemesh.planner.parameters import Parameters, count_parameters
from moemesh.planner.plan_text import read_plan
from moemesh.planner.shapes.load import Model, load_both
from moemesh.planner.shapes.shape import ModelShape
from moemesh.planner.traffic.carried_out import resolved, why_not_exact
from moemesh.planner.traffic.ledger import predict_ledger
from moemesh.planner.traffic.own_memory import ELEMENT_BYTES
from moemesh.planner.traffic.own_states import predict_states
from moemesh.planner.traffic.tensors import StagePlacement
from moemesh.planner.traffic.volumes import volumes_ledger
from moemesh.trace.ledger import Ledger

if TYPE_CHECKING:
    from moemesh.planner.search.nearest import Nearest


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Everything that is known of a layout before it runs. `traffic` is that of one rank of the
    pipeline rank with the most memory; `seconds` by part, with `total`; `instead`, where it does
    not fit: the nearest layout that does, or why there is none."""

    shape: ModelShape
    layout: PlannedLayout
    cluster: Cluster
    parameters: Parameters
    full: Flops
    causal: Flops
    memory: MemoryEstimate
    peak: dict[str, float]
    traffic: Ledger
    seconds: dict[str, float]
    notes: tuple[str, ...]
    instead: Nearest | str | None = None
    #: What `moemesh train` would be given (None: it has no such model, no plan says the layout).
    config: ModelConfig | None = None
    plan: Plan | None = None
    #: The plan as it was given, where that says more than the layout.
    text: str = ""

    def to_json(self) -> dict[str, Any]:
        """The object that ``moemesh estimate --json`` prints."""
        return {
            "model": self.shape.name,
            "plan": self.text or self.layout.key,
            "parameters": self.parameters.to_json(),
            "flops": self._flops(),
            "memory": self._memory(),
            "traffic": self.traffic.rows(),
            "seconds": self.seconds,
            "nearest_that_fits": self._nearest(),
            "notes": list(self.notes),
        }

    def _nearest(self) -> dict[str, Any] | None:
        """None where the layout fits; `plan` is None where nothing does."""
        match self.instead:
            case None:
                return None
            case str() as reason:
                return {"plan": None, "reason": reason}
            case near:
                return {
                    "plan": near.layout.text,
                    "change": near.change,
                    "memory_bytes": near.needed,
                    "seconds": near.seconds,
                }

    def _flops(self) -> dict[str, Any]:
        tokens = self.layout.global_batch * self.layout.seq_len
        found: dict[str, Any] = {"tokens": tokens}
        for flops in (self.causal, self.full):
            name = flops.convention
            found |= {
                f"{name}_forward_per_token": flops.forward,
                f"{name}_training_per_token": flops.training,
                f"{name}_hardware_per_token": hardware_flops(flops, self.layout.recompute),
                f"{name}_step": flops.training * tokens,
            }
        return found

    def _memory(self) -> dict[str, Any]:
        memory = self.memory
        return {
            "first": memory.first.to_json(),
            "last": memory.last.to_json(),
            "worst": memory.worst.to_json(),
            **self.peak,
            "device_bytes": self.cluster.memory_bytes,
            "kv_cache_bytes_per_token": kv_bytes_per_token(self.shape),
        }


def estimate(
    model: Model, layout: PlannedLayout, cluster: Cluster, plan: Plan | None = None
) -> Estimate:
    """Price one layout. Raises ConfigError with every rule that it breaks for this model."""
    shape = model.shape
    if problems := layout.check(shape.sizes):
        raise ConfigError(problems)
    given = plan
    layout, plan = _on_nodes(layout, plan, cluster)
    memory = estimate_memory(shape, layout)
    notes = list(shape.notes)
    if layout.world_size > cluster.num_devices:
        notes.append(
            f"the plan needs {layout.world_size} devices, {cluster.name} describes "
            f"{cluster.num_devices}: as many more nodes of the same kind are assumed"
        )
    traffic, note = _traffic(shape, model.config, plan, layout, memory.worst.rank)
    peak, seconds = _measured_models(shape, layout, cluster)
    near = None
    if not peak["fits"]:
        # As for prices: only a layout that does not fit has to wait for a search.
        from moemesh.planner.search.nearest import instead

        near = instead(shape, cluster, layout)
    return Estimate(
        shape=shape,
        layout=layout,
        cluster=cluster,
        parameters=count_parameters(shape),
        full=count_flops(shape, layout.seq_len, "full"),
        causal=count_flops(shape, layout.seq_len, "causal"),
        memory=memory,
        peak=peak,
        traffic=traffic,
        seconds=seconds,
        notes=(*notes, note),
        instead=near,
        config=model.config,
        plan=given,
    )


def _on_nodes(
    layout: PlannedLayout, plan: Plan | None, cluster: Cluster
) -> tuple[PlannedLayout, Plan | None]:
    """With the cluster's node borders where neither names any, as a launcher would set them."""
    node = cluster.gpus_per_node
    if layout.ranks_per_node or layout.world_size <= node or layout.world_size % node:
        return layout, plan
    if plan is not None:
        plan = plan.model_copy(update={"ranks_per_node": node})
    return layout.changed(ranks_per_node=node), plan


def _traffic(
    shape: ModelShape,
    config: ModelConfig | None,
    plan: Plan | None,
    layout: PlannedLayout,
    pp_rank: int,
) -> tuple[Ledger, str]:
    """The ledger of one rank: to the byte where our own library would run the plan."""
    if config is None:
        reason = "`moemesh train` does not have this model"
    elif plan is None:
        reason = "no [plan] of `moemesh train` says this layout"
    else:
        reason = why_not_exact(config, plan)
        plan = resolved(plan)
    if config is not None and plan is not None and not reason:
        rank = pp_rank * layout.stage_ranks
        ledger = predict_ledger(
            config,
            plan,
            seq_len=layout.seq_len,
            global_batch=layout.global_batch,
            dtype=layout.dtype,
            rank=rank,
        )
        return ledger, f"traffic: what `moemesh train` enters on rank {rank}, uniform routing"
    return volumes_ledger(shape, layout, pp_rank), (
        f"traffic: closed forms of the large collectives, pipeline rank {pp_rank}, uniform "
        f"routing; not to the byte: {reason}"
    )


def _measured_models(
    shape: ModelShape, layout: PlannedLayout, cluster: Cluster
) -> tuple[dict[str, Any], dict[str, float]]:
    """(peak memory, seconds by part) of the calibrated models."""
    # numpy is imported here: `moemesh --help` and the counts above do without.
    from moemesh.planner.timing.price import pricing

    known = pricing(cluster)
    memory, seconds = known.price(shape, layout)
    peak = {
        "peak_bytes": memory.allocated,
        "needed_bytes": memory.needed,
        "fits": memory.fits(cluster.memory_bytes, known.usable_share),
    }
    return peak, seconds


def estimate_run(config: RunConfig, cluster: str | Path | Cluster) -> Estimate:
    """Price what `moemesh train` would run: the configuration's model, plan, batch, dtype and
    optimizer. Raises ConfigError with every problem found."""
    problems: list[Problem] = []
    known, machine = load_both(config.model, cluster, problems)
    if known is None or machine is None:
        raise ConfigError(problems)
    train, data = config.train, config.data
    layout = from_plan(
        config.plan,
        config.model,
        seq_len=data.seq_len,
        global_batch=data.global_batch,
        dtype=train.dtype,
    )
    if train.optimizer == "sgd" and layout.optimizer_bytes:
        moments = layout.gradient_bytes * (2 - (train.momentum > 0))
        layout = layout.changed(optimizer_bytes=layout.optimizer_bytes - moments)
    found = replace(estimate(known, layout, machine, config.plan), text=layout.text)
    return found if config.tuning.is_full else _of_what_trains(found, config)


def _of_what_trains(found: Estimate, config: RunConfig) -> Estimate:
    """The estimate of a run of which some weights do not train: their model states and traffic."""
    # numpy is imported here, as for prices.
    from moemesh.planner.timing.price import pricing

    train, layout = config.train, found.layout
    if reason := why_not_exact(config.model, config.plan):
        note = f"memory and traffic are those of training every weight: {reason}"
        return replace(found, notes=(*found.notes, note))
    plan = resolved(config.plan)
    assert plan is not None  # there is a reason why not, else
    placement = StagePlacement(config.model, plan, layout.seq_len, config.tuning)
    element = ELEMENT_BYTES[train.dtype]
    ranks: list[RankMemory] = []
    for memory in found.memory.ranks:
        rank = memory.rank * layout.stage_ranks
        states = predict_states(
            placement,
            plan.layout,
            element=element,
            optimizer=train.optimizer,
            momentum=train.momentum,
            rank=rank,
        )
        ranks.append(
            replace(
                memory,
                dense_weights=states.dense_weights + states.gathered_weights,
                expert_weights=states.expert_weights,
                gradients=states.gradients,
                optimizer=states.optimizer,
            )
        )
    tuned = MemoryEstimate(ranks=tuple(ranks))
    less = found.memory.worst.total - tuned.worst.total
    needed = found.peak["needed_bytes"] - less
    peak = {
        "peak_bytes": found.peak["peak_bytes"] - less,
        "needed_bytes": needed,
        "fits": bool(needed <= found.cluster.memory_bytes * pricing(found.cluster).usable_share),
    }
    ledger = predict_ledger(
        config.model,
        plan,
        seq_len=layout.seq_len,
        global_batch=layout.global_batch,
        dtype=train.dtype,
        rank=tuned.worst.rank * layout.stage_ranks,
        tuning=config.tuning,
    )
    trained = num_trained(config.tuning, config.model, plan)
    note = (
        f"{trained:,} parameters train: weights, gradients, optimizer and traffic are those of "
        "this choice, activations and seconds those of training everything"
    )
    instead = None if peak["fits"] else found.instead
    return replace(
        found, memory=tuned, peak=peak, traffic=ledger, instead=instead, notes=(*found.notes, note)
    )


def estimate_named(
    model: str | Path | ModelConfig | Model,
    cluster: str | Path | Cluster,
    plan: str | Mapping[str, Any],
    seq_len: int | None,
    global_batch: int | None,
) -> Estimate:
    """Price the layout that `plan` names. Raises ConfigError with every problem found."""
    problems: list[Problem] = []
    known, machine = load_both(model, cluster, problems)
    try:
        planned = read_plan(plan, seq_len=seq_len, global_batch=global_batch, model=known)
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from None
    if known is None or machine is None:
        raise ConfigError(problems)
    found = estimate(known, planned.layout, machine, planned.plan)
    return replace(found, text=planned.text)
