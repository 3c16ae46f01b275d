"""One layout of one model on one cluster: parameters, FLOPs, memory, traffic and seconds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import ceil, prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from moemesh.config.cluster import Cluster
from moemesh.config.dispatcher_table import dispatcher_row
from moemesh.config.errors import ConfigError, Problem
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.config.run import RunConfig
from moemesh.config.suggest import nearest_choice
from moemesh.planner.intervals import Interval, fits_chance
from moemesh.planner.layout_sources import exact_plan, from_plan, read_plan, trained_shares
from moemesh.planner.memory import MemoryEstimate, PeakMemory, RankMemory, estimate_memory
from moemesh.planner.parameters import (
    Flops,
    Parameters,
    count_flops,
    count_parameters,
    hardware_flops,
)
from moemesh.planner.planned_layout import PlannedLayout
from moemesh.planner.shapes.load_shape import Model, load_both
from moemesh.planner.shapes.shape import ModelShape
from moemesh.planner.speed import (
    CacheSize,
    Speed,
    device_balance,
    kv_cache_bytes,
    layer_intensities,
    without_peak,
)
from moemesh.planner.timing.price import Pricing, pricing, with_headroom
from moemesh.planner.traffic.dispatch_traffic import capacity_of, crowded_routing
from moemesh.planner.traffic.ledger import predict_ledger
from moemesh.planner.traffic.own_memory import LayerMemory, predicted_memory
from moemesh.planner.traffic.tensors import ELEMENT_BYTES, StagePlacement
from moemesh.planner.traffic.volumes import volumes_ledger
from moemesh.sharding.dispatchers import rows_at_once
from moemesh.sharding.parameters import num_trained, tuned_tensors
from moemesh.trace.ledger import Ledger
from moemesh.trace.memory_profile import format_bytes
from moemesh.trace.run import PlannedStep

if TYPE_CHECKING:  # a search is imported only for a layout that does not fit
    from moemesh.planner.search.search import Candidate

# Memory under the worst routing: the router sends the largest possible number of rows to one rank.
#
# All received rows are kept for the backward; the experts compute at most `rows_at_once` rows of a
# chunk together, and keep gate and up only if a chunk has no more. The peak is therefore reached
# either with all rows that can be received, or with exactly `rows_at_once` in each chunk.


#: Microbatches per pipeline rank that suffice for the peak: more do not raise it.
_ENOUGH = 4
#: Copies of a rank's rows that exist during the backward of its experts, in addition to the kept
#: ones: received gradients, gradients of the experts' inputs, and these in the order of the return.
#: Each hop of a dispatch has its own copies.
_ROW_COPIES = 3
#: Numbers of a row during its computation, in widths of an expert: gate and up, their gradients,
#: the product and its gradient.
_ROW_WIDTHS = 6


@dataclass(frozen=True, kw_only=True)
class WorstRouting:
    """The fullest rank under the worst routing, in the pipeline rank with the most memory.

    It can receive `rows` of one layer and microbatch; under uniform routing it receives
    `balanced_rows`. It computes at most `rows_at_once` of them together (None: all), in `blocks`
    blocks. `dropped_choices` of the tokens of its group exceed the capacity. `activation_bytes` is
    the peak, in a run of ours with buffers of the exchange and of the experts; `more_bytes` is its
    excess over uniform routing.
    """

    rows: int
    balanced_rows: int
    rows_at_once: int | None
    blocks: int
    dropped_choices: int
    activation_bytes: float
    more_bytes: float

    @property
    def times_mean(self) -> float:
        return self.rows / self.balanced_rows if self.balanced_rows else 1.0

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "times_mean": self.times_mean}


def worst_routing(
    model: Model, layout: PlannedLayout, plan: Plan | None, rank: int
) -> WorstRouting | None:
    """The worst routing of `rank` in a run of `moemesh train` with `plan`, or in that of any
    trainer if `moemesh train` does not support the plan. None for a model without routed
    experts."""
    if not model.shape.is_moe:
        return None
    config = model.config
    if config is not None and plan is not None and layout.dtype in ELEMENT_BYTES:
        exact = exact_plan(config, plan)
        if isinstance(exact, Plan):
            return of_own_run(config, exact, **layout.step_sizes, rank=rank)
    # Other trainers keep gate and up of all rows: closed forms.
    k, per_rank = model.shape.experts_per_token, model.shape.num_experts // layout.ep
    # All tokens of the expert-parallel group choose the experts of one rank, as far as they can.
    uncapped = times = layout.ep * min(k, per_rank) / k
    if layout.capacity_factor:
        times = min(times, max(layout.capacity_factor, 1.0))
    times = max(times, layout.imbalance)
    balanced = round(layout.token_shard * k * layout.etp)
    uniform = estimate_memory(model.shape, layout).worst.activations
    crowded = estimate_memory(model.shape, layout.changed(imbalance=times)).worst.activations
    return WorstRouting(
        rows=round(balanced * times),
        balanced_rows=balanced,
        rows_at_once=None,
        blocks=1,
        dropped_choices=round(balanced * max(uncapped - times, 0.0)),
        activation_bytes=crowded,
        more_bytes=crowded - uniform,
    )


def of_own_run(
    model: ModelConfig, plan: Plan, *, seq_len: int, global_batch: int, dtype: str, rank: int
) -> WorstRouting:
    """Worst routing of `rank` in a run of `moemesh train`, with the memory of
    :class:`LayerMemory`.

    Raises ValueError if the plan's schedule is impossible.
    """
    plan, global_batch = _shortened(plan, global_batch)
    placement, layout = StagePlacement(model, plan, seq_len), plan.layout
    element = ELEMENT_BYTES[dtype]
    tokens = plan.tokens_per_rank(seq_len, global_batch)
    # Per layer: rows at the fullest rank, rows under uniform routing, and dropped choices.
    peers = plan.ep * plan.etp
    # Number of experts that one token can choose on a single rank.
    choices = min(model.experts_per_token, model.num_experts // layout.ep)
    balanced = tokens * model.experts_per_token * plan.etp
    kept = capacity_of(model, layout, tokens, seq_len) * choices
    most_rows, dropped = kept * peers, (tokens * choices - kept) * peers
    if model.router_selection == "expert_choice":
        most_rows, dropped = balanced, 0
    at_once, chunks = rows_at_once(tokens, model.experts_per_token, plan.etp), plan.dispatch_chunks
    if plan.combine == "exact":
        at_once, chunks = max(most_rows, balanced), 1
    hops = 1 + (dispatcher_row(plan.dispatcher).is_node_aware and layout.ep_rail > 1)

    def held(crowd: float | None) -> float:
        """Peak bytes under uniform routing (None), or if a share `crowd` of all tokens choose the
        rank's experts."""
        routing, rows = None, float(balanced)
        if crowd is not None:
            ep_index = layout.coordinates(rank)["ep"]
            routing = crowded_routing(model, layout, ep_index, seq_len, crowd)
            rows = crowd * most_rows
        memory = LayerMemory(
            placement=placement, global_batch=global_batch, w=element, rank=rank,
            given_routing=routing,
        )  # fmt: skip
        width = model.expert_intermediate_size / plan.etp
        copies = _ROW_COPIES * hops * rows * model.hidden_size
        working = copies + _ROW_WIDTHS * min(rows, at_once) * width
        return sum(memory.at_peak().values()) + element * working

    crowds = [1.0]
    if most_rows > at_once * chunks:
        crowds.append(at_once * chunks / most_rows)
    uniform = most = held(None)
    if most_rows > balanced:
        most = max(uniform, *map(held, crowds))
    return WorstRouting(
        rows=most_rows,
        balanced_rows=balanced,
        rows_at_once=None if plan.combine == "exact" else at_once,
        blocks=chunks * max(ceil(most_rows / chunks / at_once), 1),
        dropped_choices=dropped,
        activation_bytes=most,
        more_bytes=most - uniform,
    )


def _shortened(plan: Plan, global_batch: int) -> tuple[Plan, int]:
    """A plan with fewer microbatches of the same size and the same peak memory, and its global
    batch; the given ones if these are few, or with an update window."""
    share = ceil(ceil(global_batch / plan.dp) / plan.microbatches)
    if plan.microbatches <= _ENOUGH * plan.pp or plan.update_window is not None:
        return plan, global_batch
    plan = plan.model_copy(update={"microbatches": _ENOUGH * plan.pp})
    return plan, share * plan.dp * plan.microbatches


# Traffic of one rank by axis: number of transfers, size of one, and share of all bytes.


class AxisTraffic(NamedTuple):
    """Transfers of one operation and size over one axis in a step. `bytes_each` are the bytes that
    the rank sends in one transfer, `share` is relative to all bytes that it sends."""

    axis: str
    op: str
    transfers: int
    bytes_each: float
    total_bytes: int
    share: float


def by_axis(ledger: Ledger) -> list[AxisTraffic]:
    """The lines of a ledger with sent bytes, summed over phases and callers. Axes, and the
    operations and sizes of an axis, are sorted by bytes, largest first."""
    sums: defaultdict[tuple[str, str, int], list[int]] = defaultdict(lambda: [0, 0])
    for entry in ledger.entries():
        if entry.wire_bytes:
            key = entry.axis, entry.op, round(entry.wire_bytes / entry.count)
            sums[key][0] += entry.count
            sums[key][1] += entry.wire_bytes
    rank_bytes = sum(total for _, total in sums.values()) or 1
    rows = [
        AxisTraffic(axis, op, count, total / count, total, total / rank_bytes)
        for (axis, op, _), (count, total) in sums.items()
    ]
    axes = {row.axis: ledger.total(axis=row.axis).wire_bytes for row in rows}
    return sorted(rows, key=lambda row: (-axes[row.axis], row.axis, -row.total_bytes, row.op))


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """All predictions for a layout. `traffic` is the ledger of one rank at pipeline rank
    `traffic_rank`; `seconds` are given by part, with `total`. `instead` is set for a layout that
    does not fit: the nearest one that does, or the reason why none does."""

    shape: ModelShape
    layout: PlannedLayout
    cluster: Cluster
    parameters: Parameters
    full: Flops
    causal: Flops
    memory: MemoryEstimate
    peak: PeakMemory
    #: Calibrated constants, links and runs of the cluster.
    pricing: Pricing
    traffic: Ledger
    seconds: dict[str, float]
    notes: tuple[str, ...]
    #: Pipeline rank of `traffic`.
    traffic_rank: int
    #: Memory under the worst routing; None for a model without routed experts.
    worst_routing: WorstRouting | None = None
    instead: Candidate | str | None = None
    #: Model and plan for `moemesh train`; None if it lacks the model, or if no plan describes the
    #: layout.
    config: ModelConfig | None = None
    plan: Plan | None = None
    #: The plan's text if it has keys that the layout lacks, else "".
    text: str = ""

    def to_json(self, cache: CacheSize | None = None) -> dict[str, Any]:
        """The object that ``moemesh estimate --json`` prints; `cache` is the size of a KV cache."""
        tokens = self.layout.global_batch * self.layout.seq_len
        flops: dict[str, Any] = {"tokens": tokens}
        for counted in (self.causal, self.full):
            name = counted.convention
            flops |= {
                f"{name}_forward_per_token": counted.forward,
                f"{name}_training_per_token": counted.training,
                f"{name}_hardware_per_token": hardware_flops(self.shape, self.layout, name),
                f"{name}_step": counted.training * tokens,
            }
        crowded = None
        if self.worst_routing is not None:
            needed = self.crowded_bytes
            crowded = self.worst_routing.to_json()
            crowded |= {"needed_bytes": needed, "fits": self.fits(needed)}
        near: dict[str, Any] | None = None
        if isinstance(self.instead, str):
            near = {"plan": None, "reason": self.instead}
        elif self.instead is not None:
            near = {
                "plan": self.instead.layout.text,
                "change": self.instead.change,
                "memory_bytes": self.instead.memory.needed,
                "seconds": self.instead.seconds,
            }
        memory = self.memory
        stated: dict[str, Any] = {
            **{name: getattr(memory, name).to_json() for name in ("first", "last", "worst")},
            "peak_bytes": self.peak.allocated,
            "needed_bytes": self.peak.needed,
            "fits": self.fits(self.peak.needed),
            "memory_interval_bytes": list(self.memory_interval),
            "fits_chance": self.fits_chance,
            "usable_share": self.pricing.usable_share,
            "device_bytes": self.cluster.memory_bytes,
            "worst_routing": crowded,
            "kv_cache_bytes_per_token": kv_cache_bytes(self.shape, 1, 1),
        }
        if cache is not None:
            stated["kv_cache_bytes"] = kv_cache_bytes(self.shape, *cache)
        return {
            "model": self.shape.name,
            "plan": self.text or self.layout.key,
            "parameters": asdict(self.parameters),
            "flops": flops,
            "memory": stated,
            "traffic": self.traffic.rows(),
            "traffic_rank": self.traffic_rank,
            "traffic_by_axis": [row._asdict() for row in by_axis(self.traffic)],
            "seconds": self.seconds,
            "seconds_interval": list(self.seconds_interval),
            "speed": self.speed.to_json(),
            "arithmetic_intensity": {
                **layer_intensities(self.shape, self.layout),
                "device_balance": self.device_balance,
            },
            "nearest_that_fits": near,
            "notes": list(self.notes),
        }

    @property
    def speed(self) -> Speed:
        return Speed.of(self.shape, self.layout, self.cluster, self.seconds["total"])

    @property
    def seconds_interval(self) -> Interval:
        """80 % interval of a step's seconds."""
        return self.pricing.seconds_interval(self.seconds["total"])

    @property
    def memory_interval(self) -> Interval:
        """80 % interval of the bytes that a device needs."""
        return self.pricing.memory_interval(self.peak.needed)

    @property
    def fits_chance(self) -> float:
        capacity = self.cluster.memory_bytes * self.pricing.usable_share
        return fits_chance(self.peak.needed, capacity, self.pricing.memory_width)

    @property
    def device_balance(self) -> float:
        """FLOP per byte above which the device is bound by its arithmetic."""
        return device_balance(self.cluster, self.layout.precision)

    @property
    def crowded_bytes(self) -> float:
        """Bytes that a device needs under the worst routing."""
        worst = self.worst_routing
        return self.peak.needed + (0.0 if worst is None else worst.more_bytes)

    def fits(self, needed: float) -> bool:
        """Whether a job that needs `needed` bytes fits on a device."""
        return bool(needed <= self.cluster.memory_bytes * self.pricing.usable_share)


def estimate(
    model: Model,
    layout: PlannedLayout,
    cluster: Cluster,
    plan: Plan | None = None,
    *,
    rank: str | int = "worst",
    run: RunConfig | None = None,
) -> Estimate:
    """Price one layout, with the traffic of pipeline rank `rank`: a number, "first", "inner",
    "last", or the "worst" in memory. An exact ledger is that of `run`, by default of one that
    trains all weights with AdamW. Raises ConfigError with every rule that the layout breaks for
    this model."""
    shape = model.shape
    if problems := layout.check(shape.sizes):
        raise ConfigError(problems)
    given_plan = plan
    node = cluster.gpus_per_node
    if not layout.ranks_per_node and layout.world_size > node and not layout.world_size % node:
        # Neither layout nor plan has node borders: use those that a launcher would set.
        layout = layout.changed(ranks_per_node=node)
        if plan is not None:
            plan = plan.model_copy(update={"ranks_per_node": node})
    memory = estimate_memory(shape, layout)
    notes = list(shape.notes)
    if layout.world_size > cluster.num_devices:
        notes.append(
            f"the plan needs {layout.world_size} devices, {cluster.name} describes "
            f"{cluster.num_devices}: more nodes of the same kind are assumed"
        )
    pp_rank = pipeline_rank(rank, layout.pp, memory.worst.rank)
    settings: dict[str, Any] = {"on_accelerator": bool(cluster.accelerator)}
    if run is not None:
        settings |= {"tuning": run.tuning, "whole_matrices": run.train.updates_matrices}
    traffic, note = _traffic(model, plan, layout, pp_rank, settings)
    prices = pricing(cluster)
    peak, seconds = prices.price(shape, layout)
    notes += filter(None, (without_peak(cluster, layout.precision), prices.own_runs(shape, layout)))
    near = None
    if not peak.fits(cluster.memory_bytes, prices.usable_share):
        # Only a layout that does not fit needs a search.
        from moemesh.planner.search.rival import instead

        near = instead(shape, cluster, layout)
    return Estimate(
        shape=shape,
        layout=layout,
        cluster=cluster,
        parameters=count_parameters(shape),
        full=count_flops(shape, layout.seq_len, "full", adapters=layout.adapters),
        causal=count_flops(shape, layout.seq_len, "causal", adapters=layout.adapters),
        memory=memory,
        peak=peak,
        pricing=prices,
        traffic=traffic,
        seconds=seconds,
        notes=(*notes, note),
        traffic_rank=pp_rank,
        worst_routing=worst_routing(model, layout, plan, memory.worst.rank * layout.stage_ranks),
        instead=near,
        config=model.config,
        plan=given_plan,
    )


def _traffic(
    model: Model, plan: Plan | None, layout: PlannedLayout, pp_rank: int, settings: dict[str, Any]
) -> tuple[Ledger, str]:
    """The ledger of the first rank of pipeline rank `pp_rank`, with a note on it. It is exact to
    the byte if `moemesh train` supports the plan (`settings` are keywords of
    :func:`predict_ledger`), else it is made of closed forms."""
    exact: Plan | str
    if (config := model.config) is None:
        exact = model.why_not
    elif plan is None:
        exact = "no [plan] of `moemesh train` describes this layout"
    elif layout.dtype not in ELEMENT_BYTES:
        exact = f"`moemesh train` does not train in {layout.dtype}"
    else:
        exact = exact_plan(config, plan)
    if config is None or isinstance(exact, str):
        return volumes_ledger(model.shape, layout, pp_rank), (
            f"traffic: closed forms of the large collectives, pipeline rank {pp_rank}, uniform "
            f"routing; not to the byte: {exact}"
        )
    rank, last = pp_rank * layout.stage_ranks, (pp_rank + 1) * layout.stage_ranks - 1
    of_rank = partial(predict_ledger, config, exact, **layout.step_sizes, **settings)
    ledger = of_rank(rank=rank)
    note = f"traffic: what `moemesh train` enters on rank {rank}, uniform routing"
    if exact.data == "parameter_server" and last != rank:
        # A server and a worker send different bytes of gradients and weights.
        callers, ledgers = ("gradients", "weights"), (ledger, of_rank(rank=last))
        sums = [sum(item.total(caller=name).wire_bytes for name in callers) for item in ledgers]
        by_server, by_worker = map(format_bytes, sums)
        note += f"; it serves weights: with gradients {by_server} are sent by it, "
        note += f"{by_worker} by rank {last}"
    return ledger, note


#: Names of pipeline ranks that a user may give instead of numbers.
RANKS = ("first", "inner", "last", "worst")


def pipeline_rank(rank: str | int, pp: int, worst: int) -> int:
    """The number of a pipeline rank, from its number or name. Raises ConfigError."""
    named = {"first": 0, "last": pp - 1, "worst": worst}
    if pp > 2:
        named["inner"] = pp // 2
    text = str(rank).strip()
    if text in named:
        return named[text]
    if text.isdecimal() and int(text) < pp:
        return int(text)
    if text == "inner":
        message, fix = f"a pipeline of {pp} ranks has no inner one", "pp = 3 or more, or 0"
    else:
        message = f"a pipeline rank is {', '.join(RANKS)}, or a number below pp ({pp})"
        fix = f"--rank {pp - 1}" if text.lstrip("-").isdecimal() else nearest_choice(text, RANKS)
    raise ConfigError([Problem.of("not-a-choice", "rank", rank, message, fix)])


def estimate_named(
    model: str | Path | ModelConfig | Model,
    cluster: str | Path | Cluster,
    plan: str | Mapping[str, Any],
    seq_len: int | None,
    global_batch: int | None,
    *,
    rank: str | int = "worst",
    headroom: str | float | None = None,
    price: float | None = None,
) -> Estimate:
    """Price the layout of `plan`. Raises ConfigError."""
    problems: list[Problem] = []
    loaded, machine = load_both(model, cluster, problems)
    try:
        machine = None if machine is None else with_headroom(machine, headroom, price)
        planned = read_plan(plan, seq_len=seq_len, global_batch=global_batch, model=loaded)
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from None
    if loaded is None or machine is None:
        raise ConfigError(problems)
    priced = estimate(loaded, planned.layout, machine, planned.plan, rank=rank)
    return replace(priced, text=planned.text)


def estimate_run(
    config: RunConfig,
    cluster: str | Path | Cluster,
    *,
    rank: str | int = "worst",
    headroom: str | float | None = None,
    price: float | None = None,
) -> Estimate:
    """Price a run of `moemesh train`: the configuration's model, plan, batch, dtype and optimizer.
    Raises ConfigError."""
    problems: list[Problem] = []
    loaded, machine = load_both(config.model, cluster, problems)
    if loaded is None or machine is None:
        raise ConfigError(problems)
    machine = with_headroom(machine, headroom, price)
    train, data = config.train, config.data
    sizes = {"seq_len": data.seq_len, "global_batch": data.global_batch}
    layout = from_plan(config.plan, config.model, **sizes, dtype=train.dtype)
    # The layout has the bytes of AdamW's two states per trained number; this optimizer may have
    # fewer, on average over the tensors.
    weights = tuned_tensors(config.model, config.plan, config.tuning)
    sizes_of = {weight.name: prod(weight.shape) for weight in weights if weight.trains}
    kept = sum(size * train.num_states(name) for name, size in sizes_of.items())
    if layout.optimizer_bytes and sizes_of and (fewer := 2 - kept / sum(sizes_of.values())):
        per_number = round(layout.optimizer_bytes - fewer * layout.gradient_bytes, 2)
        layout = layout.changed(optimizer_bytes=per_number)
    text, layout = layout.text, layout.changed(**trained_shares(config))
    priced = estimate(loaded, layout, machine, config.plan, rank=rank, run=config)
    priced = replace(priced, text=text)
    layout, is_full = priced.layout, config.tuning.is_full
    plan = exact_plan(config.model, config.plan)
    if isinstance(plan, str):
        note = f"memory and traffic follow from the shares of weights that train: {plan}"
        return priced if is_full else replace(priced, notes=(*priced.notes, note))
    # Memory of the first, the last and the worst pipeline rank as the run's files predict it.
    short, batch = _shortened(plan, data.global_batch)
    short = replace(config, plan=short, data=data.model_copy(update={"global_batch": batch}))
    of_rank = partial(predicted_memory, short, on_cpu=False)
    numbers = sorted({0, priced.memory.worst.rank, layout.pp - 1})
    profiles = (of_rank(number * layout.stage_ranks) for number in numbers)
    memory = MemoryEstimate(ranks=tuple(map(RankMemory.of, profiles, numbers)))
    held, peak = memory.worst.total, priced.peak
    closed_form = peak.needed
    # Bytes of states that the closed forms count too much, if only some weights train.
    excess = 0.0 if is_full else priced.memory.worst.states - memory.worst.states
    allocated, needed = max(peak.allocated - excess, held), max(peak.needed - excess, held)
    peak = replace(peak, allocated=allocated, needed=needed)
    priced = replace(priced, memory=memory, peak=peak)
    if priced.fits(needed):
        priced = replace(priced, instead=None)
    elif priced.instead is None:
        from moemesh.planner.search.rival import instead

        # The search's closed forms predict less memory: the difference is subtracted from the
        # device.
        room = machine.memory_bytes - round(max(held - closed_form, 0.0))
        smaller = machine.model_copy(update={"memory_bytes": max(room, 1)})
        priced = replace(priced, instead=instead(priced.shape, smaller, layout))
    if is_full:
        return priced
    trained = num_trained(config.tuning, config.model, plan)
    note = f"{trained:,} parameters train: memory and traffic are those of this choice"
    if not layout.adapters:
        note += ", seconds those of training everything"
    return replace(priced, notes=(*priced.notes, note))


def planned_step(config: RunConfig, cluster: str) -> PlannedStep:
    """The planner's price of a step on `cluster`. Raises ConfigError if it cannot price it."""
    seconds = estimate_run(config, cluster).seconds
    parts = {name: value for name, value in seconds.items() if name != "total"}
    return PlannedStep(cluster=cluster, seconds=seconds["total"], parts=parts)
