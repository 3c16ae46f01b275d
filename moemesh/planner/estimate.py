"""One layout of one model on one cluster: parameters, FLOPs, memory, traffic and seconds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moemesh.config.cluster import Cluster, load_cluster
from moemesh.config.errors import ConfigError, Problem
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.planner.flops import Flops, count_flops, hardware_flops
from moemesh.planner.kv_cache import kv_bytes_per_token
from moemesh.planner.layout import PlannedLayout
from moemesh.planner.memory import MemoryEstimate, estimate_memory
from moemesh.planner.parameters import Parameters, count_parameters
from moemesh.planner.plan_text import read_plan
from moemesh.planner.shapes.load import Model, load_model
from moemesh.planner.shapes.shape import ModelShape
from moemesh.planner.traffic.carried_out import resolved, why_not_exact
from moemesh.planner.traffic.ledger import predict_ledger
from moemesh.planner.traffic.volumes import volumes_ledger
from moemesh.trace.ledger import Ledger
from moemesh.trace.memory import format_bytes

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
        instead=None if peak["fits"] else _instead(shape, cluster, layout),
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


def _instead(shape: ModelShape, cluster: Cluster, layout: PlannedLayout) -> Nearest | str:
    # As above: only a layout that does not fit has to wait for a search.
    from moemesh.planner.search.nearest import instead

    return instead(shape, cluster, layout)


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


def estimate_named(
    model: str | Path | ModelConfig | Model,
    cluster: str | Path | Cluster,
    plan: str | Mapping[str, Any],
    seq_len: int | None,
    global_batch: int | None,
) -> Estimate:
    """Price the layout that `plan` names. Raises ConfigError with every problem found."""
    problems: list[Problem] = []
    found: dict[str, Any] = {}
    readers = {"model": lambda: load_model(model), "cluster": lambda: load_cluster(cluster)}
    for name, read in readers.items():
        try:
            found[name] = read()
        except ConfigError as error:
            problems += error.problems
    known = found.get("model")
    try:
        planned = read_plan(plan, seq_len=seq_len, global_batch=global_batch, model=known)
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from None
    if problems:
        raise ConfigError(problems)
    result = estimate(found["model"], planned.layout, found["cluster"], planned.plan)
    return replace(result, text=planned.text)


def command(
    model: str,
    cluster: str,
    plan: str,
    seq_len: int | None,
    global_batch: int | None,
    *,
    as_json: bool = False,
) -> str:
    """The text that ``moemesh estimate`` prints."""
    result = estimate_named(model, cluster, plan, seq_len, global_batch)
    return json.dumps(result.to_json(), indent=2) if as_json else table(result)


def table(result: Estimate) -> str:
    """The estimate for a person."""
    lines = [
        f"model       {_count(result.parameters.total)} parameters, "
        f"{_count(result.parameters.active)} active   ({result.shape.name})"
    ]
    lines.append(
        f"plan        {result.layout.world_size} devices   {result.text or result.layout.key}"
    )
    causal, full = result.causal.training / 1e9, result.full.training / 1e9
    lines.append(f"arithmetic  {causal:.2f} GFLOP a token (causal), {full:.2f} (full attention)")
    fits = "fits" if result.peak.get("fits") else "does NOT fit"
    device = format_bytes(result.cluster.memory_bytes)
    needed = format_bytes(result.peak.get("needed_bytes", result.memory.worst.total))
    lines += ["", f"memory      {needed} needed, {device} there: {fits}"]
    if result.instead is not None:
        from moemesh.planner.search.nearest import describe

        lines.append(f"            {describe(result.instead, result.seconds['total'])}")
    if result.peak:
        lines.append("            (the exact parts below, and what an allocator adds to them)")
    lines += _memory_lines(result)
    lines += ["", "traffic     of one rank and step", *_traffic_lines(result.traffic)]
    lines += ["", f"step        {result.seconds['total']:.4g} s"]
    parts = {key: value for key, value in result.seconds.items() if key != "total" and value}
    lines += [f"  {key:<14}{value:>10.4g} s" for key, value in parts.items()]
    return "\n".join([*lines, "", *result.notes])


def _count(number: int) -> str:
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6)):
        if number >= size:
            return f"{number / size:.3f} {unit}"
    return str(number)


_PARTS = ("dense_weights", "expert_weights", "gradients", "optimizer", "activations", "logits",
          "buffers", "total")  # fmt: skip


def _memory_lines(result: Estimate) -> list[str]:
    memory = result.memory
    ranks = {"first": memory.first, "last": memory.last, "worst": memory.worst}
    lines = ["  " + " " * 16 + "".join(f"{name:>14}" for name in ranks)]
    for part in _PARTS:
        cells = (format_bytes(getattr(rank, part)) for rank in ranks.values())
        lines.append(f"  {part.replace('_', ' '):<16}" + "".join(f"{cell:>14}" for cell in cells))
    return lines


def _traffic_lines(ledger: Ledger) -> list[str]:
    lines = [f"  {'axis':<9}{'operation':<16}{'phase':<11}{'caller':<22}{'count':>7}{'sent':>13}"]
    for entry in ledger.entries():
        lines.append(
            f"  {entry.axis:<9}{entry.op:<16}{entry.phase:<11}{entry.caller:<22}"
            f"{entry.count:>7}{format_bytes(entry.wire_bytes):>13}"
        )
    return lines
