"""Parameter tensors of each rank and stage, their buckets, and their gathers under ZeRO-3."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import chain

from moemesh.config.layout import Layout, shard_range, shard_sizes
from moemesh.config.model import ModelConfig
from moemesh.config.optimizer_table import has_matrices
from moemesh.config.plan import Plan
from moemesh.config.tuning import FULL, Tuning
from moemesh.planner.traffic.dispatch_traffic import Routing, SentRows, uniform_routing
from moemesh.schedule.action import Schedule
from moemesh.schedule.plan_schedule import build_step
from moemesh.schedule.terapipe import slice_lengths
from moemesh.sharding.boxes import Part, logical_parts
from moemesh.sharding.buckets import Bucket, Member, buckets, owned_sizes
from moemesh.sharding.context import context_sizes
from moemesh.sharding.parameters import (
    ParameterTensor,
    first_stage,
    first_unit,
    next_units,
    tuned_tensors,
    unit_orders,
    units_without_backward,
)
from moemesh.sharding.stages import cut_layers

#: Bytes per number of a weight, by dtype of a run.
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float64": 8}


class StagePlacement:
    """Parameters that each pipeline rank holds, under the plan's schedule of one step (also for
    schedules whose steps overlap).

    `tuning` selects the parameters that train. Raises ValueError, with the numbers, for an
    impossible schedule or cut.
    """

    def __init__(
        self, model: ModelConfig, plan: Plan, seq_len: int = 0, tuning: Tuning = FULL
    ) -> None:
        self.model, self.plan, self.seq_len, self.tuning = model, plan, seq_len, tuning
        self.layout: Layout = plan.layout
        self.coordinates = cache(self.layout.coordinates)
        #: (axis, rank) -> ranks of the rank's group, ascending.
        self.members = cache(self.layout.group_of)
        schedule = build_step(plan, model, seq_len)
        self.layers = cut_layers(model, schedule.num_stages, plan.layers_per_stage)
        #: Unit at whose input the backward ends.
        self.first_trained_unit = first_unit(tuning, model, plan)
        first_trained = first_stage(self.first_trained_unit, self.layers)
        self.schedule: Schedule = replace(schedule, first_trained_stage=first_trained)
        #: The parameters of the whole model.
        self.tensors: list[ParameterTensor] = list(tuned_tensors(model, plan, tuning))
        #: Units that no backward reaches.
        self.frozen_units = units_without_backward(self.first_trained_unit, model)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each slice of a sequence; one slice if the schedule does not cut it."""
        if self.schedule.num_slices == 1:
            return (self.seq_len,)
        # Frozen pydantic models are hashable, but their types do not declare it.
        return slice_lengths(self.model, self.plan, self.seq_len)  # pyright: ignore[reportArgumentType]

    def sequences(self, global_batch: int, dp: int, microbatch: int) -> int:
        """Sequences of one microbatch of one data-parallel rank."""
        local_batch = len(shard_range(global_batch, self.plan.dp, dp))
        return len(shard_range(local_batch, self.plan.microbatches, microbatch))

    def positions(self, cp: int, slice: int = 0) -> int:
        """Positions of a sequence that a context-parallel rank holds, in one slice of it."""
        if self.plan.cp == 1:
            return self.lengths[slice]
        return context_sizes(self.seq_len, self.plan.cp)[cp]

    def stages(self, pp_rank: int) -> list[int]:
        """The stages that a pipeline rank runs in any pipe, without duplicates."""
        return sorted({stage for _, stage in self.schedule.stages_of(pp_rank)})

    def layers_of(self, stage: int) -> list[int]:
        """The layers of a stage, extra prediction layers of the last one included."""
        is_last = stage == self.schedule.num_stages - 1
        return [*self.layers[stage], *(self.model.mtp_layers if is_last else ())]

    def has_backward(self, unit: str) -> bool:
        """Whether the backward reaches a unit: "embedding", "layers.3", "head"."""
        return unit not in self.frozen_units

    def users(self, tensor: ParameterTensor, pp_rank: int) -> tuple[int, ...]:
        """The stages of a pipeline rank that use `tensor`; a rank holds (a slice of) the tensors
        that its stages use."""
        unit = tensor.unit
        users = {first_stage(unit, self.layers)}
        if unit == "embedding" and self.model.ends_share_a_table:
            users.add(self.schedule.num_stages - 1)
        return tuple(stage for stage in self.stages(pp_rank) if stage in users)

    def held(self, pp_rank: int) -> list[ParameterTensor]:
        """The parameters of one pipeline rank, in the model's order."""
        return [tensor for tensor in self.tensors if self.users(tensor, pp_rank)]


@dataclass(kw_only=True, eq=False)
class RankStep:
    """One training step of one rank: its forwards, numbered by microbatch and, inside it, by slice
    of the sequences; and the rows that tokens send to experts."""

    placement: StagePlacement
    global_batch: int
    #: Bytes of a number of the model.
    w: int
    rank: int
    #: Rows that tokens send to experts; None: uniform routing.
    given_routing: Routing | None = None

    def __post_init__(self) -> None:
        self.model, self.plan = self.placement.model, self.placement.plan
        self.layout, self.schedule = self.placement.layout, self.placement.schedule
        self.coordinates = self.placement.coordinates(self.rank)
        #: Bytes of a number in at least fp32, as in norms and sums.
        self.wide = max(self.w, 4)
        #: Axis of the ranks that share sequences.
        self.sharing = "cp_tp" if self.plan.cp > 1 else "tp"
        self.routing = self.given_routing or uniform_routing(self.model, self.layout)
        self.max_tokens = self.plan.tokens_per_rank(self.placement.seq_len, self.global_batch)
        # Exact sums and experts on the rank itself take all tokens in one chunk.
        is_whole = self.plan.combine == "exact" or self.plan.ep * self.plan.etp == 1
        self.chunks = 1 if is_whole else self.plan.dispatch_chunks

    def tokens(self, forward: int, rank: int | None = None) -> tuple[int, int]:
        """Tokens of a forward before and after tp cuts them: on the ranks that share its positions,
        and in the residual stream of `rank` (by default this one)."""
        placement = self.placement
        at = placement.coordinates(self.rank if rank is None else rank)
        microbatch, part = divmod(forward, len(placement.lengths))
        whole = placement.sequences(self.global_batch, at["dp"], microbatch)
        whole *= placement.positions(at["cp"], part)
        return whole, shard_sizes(whole, self.plan.tp)[at["tp"]]

    def blocks(self, tokens: int, channels: int | None = None) -> list[float]:
        """Bytes that each tensor-parallel rank has of `tokens` rows of `channels`, by default those
        of the residual stream."""
        width = (self.model.hidden_size if channels is None else channels) * self.w
        return [float(rows * width) for rows in shard_sizes(tokens, self.plan.tp)]

    def sequences(self, forward: int) -> int:
        """Number of sequences of which this rank computes a part, in one forward."""
        microbatch = forward // self.schedule.num_slices
        return self.placement.sequences(self.global_batch, self.coordinates["dp"], microbatch)

    def scopes(self, forward: int) -> int:
        """Number of scopes of the auxiliary losses in one forward."""
        return self.sequences(forward) if self.model.aux_loss_scope == "sequence" else 1

    def sent_by(self, forward: int, layer: int, chunk: int) -> Callable[[int], SentRows]:
        """Function rank -> rows that it sends for the tokens of one chunk."""

        @cache
        def sent(rank: int) -> SentRows:
            _, tokens = self.tokens(forward, rank)
            return self.routing(rank, forward, layer, tokens, chunk, self.chunks)

        return sent


def data_buckets(placement: StagePlacement, rank: int, element_bytes: int) -> tuple[Bucket, ...]:
    """Buckets of the parameters of one rank; weights have `element_bytes` per number."""
    layout, at = placement.layout, placement.coordinates(rank)
    members: list[Member] = []
    for tensor in placement.held(at["pp"]):
        numbers = tensor.local_elements(layout, at)
        if not numbers:
            continue
        holders = sum(bool(placement.users(tensor, other)) for other in range(layout.pp))
        members.append(
            Member(
                name=tensor.name,
                unit=tensor.unit,
                numbers=numbers,
                weight_bytes=tensor.weight_bytes(element_bytes),
                axis=tensor.summed_over,
                mirrored=holders > 1,
                stages=placement.users(tensor, at["pp"]),
                trains=tensor.trains,
            )
        )
    plan = placement.plan
    is_exact = plan.combine == "exact"
    return buckets(members, plan.data, same_ranks=None if is_exact else layout.same_ranks)


def owned(placement: StagePlacement, bucket: Bucket, rank: int) -> tuple[tuple[int, ...], int]:
    """(numbers of `bucket` that each rank of the sharding group owns, index of `rank` in it)."""
    plan, layout = placement.plan, placement.layout
    ranks = placement.members(layout.sharding_axes(bucket.axis)[0], rank)
    sizes = owned_sizes(bucket.numbers, len(ranks), plan.owners(bucket.axis, len(ranks)))
    return sizes, ranks.index(rank)


def owned_range(placement: StagePlacement, bucket: Bucket, rank: int) -> range:
    """The numbers of `bucket` whose states `rank` keeps."""
    if placement.plan.data == "replicate":
        return range(bucket.numbers)
    sizes, index = owned(placement, bucket, rank)
    return range(sum(sizes[:index]), sum(sizes[: index + 1]))


def matrix_parts(placement: StagePlacement, rank: int, element: int) -> Iterator[Part]:
    """The parts of matrices whose states `rank` keeps, as
    :class:`moemesh.train.muon.MatrixUpdates` cuts them."""
    tensors = {tensor.name: tensor for tensor in placement.tensors}
    layout, at = placement.layout, placement.coordinates(rank)
    for bucket in data_buckets(placement, rank, element):
        for member, numbers in bucket.parts(owned_range(placement, bucket, rank)):
            if not (member.trains and has_matrices(member.name)):
                continue
            tensor = tensors[member.name]
            slices, shape, experts = tensor.slices_at(layout, at), tensor.shape, None
            if tensor.is_expert:
                experts, slices, shape = slices[0], slices[1:], shape[1:]
            for part, _ in logical_parts(member.name, shape, [slices], numbers, experts):
                yield part


# Gathers of ZeRO-3 from a walk over the operations of a rank: their number, and the peak bytes of
# gathered weights.
#
# The walk follows `moemesh.parallel.data.buckets`: a unit is gathered before it is used, together
# with the next one, and freed after each use, unless `plan.reshard` keeps it for the step.


def gathered_units(
    placement: StagePlacement, rank: int, element_bytes: int
) -> tuple[Counter[tuple[Bucket, str]], int]:
    """Gathers of one step of `rank` under ``plan.data = zero3``: (bucket, phase) -> number of
    gathers of the bucket's weights; and the peak bytes of weights that are gathered or in
    flight."""
    model, schedule = placement.model, placement.schedule
    pp_rank = placement.coordinates(rank)["pp"]
    units: dict[str, list[Bucket]] = {}
    for bucket in data_buckets(placement, rank, element_bytes):
        assert bucket.unit is not None
        if len(owned(placement, bucket, rank)[0]) > 1:
            units.setdefault(bucket.unit, []).append(bucket)
    if model.tied_embeddings:
        units["head"] = [*units.get("head", ()), *units.get("embedding", ())]
    #: Stage -> orders of the units that a forward reads: the main one, then one for each extra
    #: prediction layer.
    orders = {
        stage: unit_orders(
            placement.layers[stage],
            first=stage == 0,
            last=stage == schedule.num_stages - 1,
            ahead=model.mtp_layers,
        )
        for stage in placement.stages(pp_rank)
    }
    following = next_units(chain.from_iterable(orders.values()), placement.frozen_units)
    uses: list[tuple[str, str]] = []
    for op in schedule.ops(pp_rank):
        main, *ahead = orders[op.stage]
        if op.kind == "F":
            uses += [("forward", unit) for unit in chain(main, *ahead)]
        elif op.kind == "B":
            reached = [unit for unit in main if placement.has_backward(unit)]
            # An extra prediction layer reads the embedding, its layer and the head.
            for _, layer, head in ahead:
                reached += [layer, head] if placement.has_backward(layer) else []
            # The backward of the embedding reads no weights.
            uses += [("backward", unit) for unit in reversed(reached) if unit != "embedding"]
    gathers: Counter[tuple[Bucket, str]] = Counter()
    gathered: set[Bucket] = set()
    most = 0
    for phase, unit in uses:
        used = units.get(unit, [])
        for bucket in (*used, *units.get(following.get((phase, unit), ""), ())):
            if bucket not in gathered:
                gathered.add(bucket)
                gathers[bucket, phase] += 1
        most = max(most, sum(bucket.numbers * bucket.weight_bytes for bucket in gathered))
        if placement.plan.reshard != "step":
            gathered.difference_update(used)
    return gathers, most
