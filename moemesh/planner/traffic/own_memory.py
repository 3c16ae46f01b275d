"""The predicted memory of a run of our own library on a CPU, rank by rank, as its memory.json says.

Model states are exact, activations near (:mod:`.own_activations`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.config.tuning import FULL, Tuning
from moemesh.planner.traffic.dispatch_traffic import Routing
from moemesh.planner.traffic.own_activations import predict_activations
from moemesh.planner.traffic.tensors import (
    ELEMENT_BYTES,
    GatheredUnits,
    StagePlacement,
    data_buckets,
    owned,
)
from moemesh.schedule.closed_forms import FORMS, MicrobatchTimes, Numbers
from moemesh.sharding.buckets import MOST_UNDER_WAY
from moemesh.trace.memory_profile import MemoryProfile

# Model states: weights to snapshots.
#
# Every parameter's local shard times its bytes, or what the rank owns of it: of masters, moments
# and snapshots where `plan.data` is not replicate, of gradients under zero2 and zero3, of weights
# under zero3, which also gathers units of them. Of what does not train only the weights are there.
#
# | state | bytes a number |
# |---|---|
# | weights | those of the run's dtype; routers never below fp32 |
# | gradients | 4; 8 in float64 |
# | masters | 4 where a weight has 2 bytes, else the weight is its own master |
# | AdamW | two moments as wide as a gradient; SGD one with momentum, none without |
# | weight versions | of a stream: those that its update rule keeps beside the newest, with biases |
# | snapshots | of an update behind which the norm is validated: masters, moments, biases |
#
# Versions are those of a stream long enough to need them. A rank takes a snapshot when it steps
# before it knows the whole norm: not in the first steps of a run, nor where each is clipped.


#: Bytes of one number of a router's selection bias, in any run.
_BIAS = 4


def predict_states(
    placement: StagePlacement,
    *,
    element: int,
    optimizer: Literal["adamw", "sgd"] = "adamw",
    momentum: float = 0.0,
    rank: int = 0,
) -> MemoryProfile:
    """The part of the model on `rank`, `element` bytes a weight, without activations; `momentum` is
    that of SGD."""
    plan, pp_rank = placement.plan, placement.coordinates(rank)["pp"]
    model, schedule = placement.model, placement.schedule
    kinds = 2 if optimizer == "adamw" else int(momentum > 0)
    weights = {True: 0, False: 0}
    gradients = masters = updated = 0
    for bucket in data_buckets(placement, rank, element):
        whole = share = range(bucket.numbers)
        if plan.data != "replicate":
            sizes, index = owned(placement, bucket, rank)
            share = range(sum(sizes[:index]), sum(sizes[: index + 1]))
        kept = share if plan.data == "zero3" else whole
        of_experts = bucket.expert_numbers(kept)
        weights[True] += of_experts * bucket.weight_bytes
        weights[False] += (len(kept) - of_experts) * bucket.weight_bytes
        if bucket.trains:
            wide = bucket.gradient_bytes
            gradients += len(share if plan.data in ("zero2", "zero3") else whole) * wide
            # A weight as wide as its gradient is its own master, and copied as one.
            masters += len(share) * wide if bucket.weight_bytes < wide else 0
            updated += len(share) * wide
    biases = 0
    if model.router_selection_bias:
        # Selection biases of routers are whole on every rank.
        here = {index for stage in placement.stages(pp_rank) for index in placement.layers[stage]}
        biases = _BIAS * model.num_experts * sum(map(model.is_moe_layer, here))
    versions = 1
    if schedule.update is not None:
        # A stream keeps older versions beside the newest.
        numbers = Numbers(
            ranks=schedule.num_ranks,
            microbatches=4 * schedule.num_ranks,
            chunks=schedule.stages_per_rank,
            times=MicrobatchTimes(),
        )
        versions = FORMS[plan.schedule].copies(numbers, pp_rank)
    is_undone = plan.optimizer_validation == "after" and schedule.update is None
    gathers = plan.data == "zero3"
    return MemoryProfile(
        rank=rank,
        gathered_weights=GatheredUnits(placement, rank, element).most_bytes if gathers else 0,
        buffers=_most_buffers(placement, rank, element),
        dense_weights=weights[False],
        expert_weights=weights[True],
        gradients=gradients,
        optimizer=masters + kinds * updated,
        weight_versions=(versions - 1) * (sum(weights.values()) + biases),
        snapshots=(1 + kinds) * updated + biases if is_undone else 0,
    )


def _most_buffers(placement: StagePlacement, rank: int, element: int) -> int:
    """The most bytes at once of gradients that wait for their sum over ranks and of what is
    received for it, where states are sharded. It follows `moemesh.parallel.data.reducer` through a
    backward that brings the gradients in reversed order of the model."""
    plan, pp_rank = placement.plan, placement.coordinates(rank)["pp"]
    if plan.data == "replicate":
        return 0
    found = [one for one in data_buckets(placement, rank, element) if one.trains]
    homes = {member.name: place for place, bucket in enumerate(found) for member in bucket.members}
    received: list[int] = []
    sends: list[int] = []
    for bucket in found:
        sizes, index = owned(placement, bucket, rank)
        received.append(sizes[index] * (len(sizes) - 1) * bucket.gradient_bytes)
        # Under zero2 and zero3 the vector that is sent is another one than what the rank keeps.
        is_copied = plan.data in ("zero2", "zero3") and received[-1] > 0
        sends.append(bucket.numbers * bucket.gradient_bytes * is_copied)
    # A second backward finds the last sums of the first one under way.
    is_per_backward = plan.data in ("zero2", "zero3")
    names = [tensor.name for tensor in reversed(placement.held(pp_rank)) if tensor.name in homes]
    held, most = 0, 0
    under_way: list[int] = []
    working: set[int] = set()
    begun: set[int] = set()

    def wait(place: int) -> int:
        """The bytes that are free when the sum of a bucket has arrived."""
        if place not in working:
            return 0
        working.remove(place)
        return sends[place] + received[place]

    for _ in range(2 if is_per_backward and plan.microbatches > 1 else 1):
        waiting, launched = [len(bucket.members) for bucket in found], 0
        for place in (homes[name] for name in names):
            if plan.data == "zero3":
                held += sends[place] // len(found[place].members)
            elif place not in begun:
                begun.add(place)
                held += sends[place]
            waiting[place] -= 1
            most = max(most, held)
            while launched < len(found) and not waiting[launched]:
                while under_way and found[under_way[0]].unit != found[launched].unit:
                    held -= wait(under_way.pop(0))
                held -= wait(launched)
                most = max(most, held + (sends[launched] if plan.data == "zero3" else 0))
                held += received[launched]
                most = max(most, held)
                begun.discard(launched)
                working.add(launched)
                under_way.append(launched)
                launched += 1
                if len(under_way) > MOST_UNDER_WAY:
                    held -= wait(under_way.pop(0))
    return most


def predict_memory(
    model: ModelConfig,
    plan: Plan,
    *,
    seq_len: int,
    global_batch: int,
    dtype: str = "bfloat16",
    optimizer: Literal["adamw", "sgd"] = "adamw",
    momentum: float = 0.0,
    rank: int = 0,
    routing: Routing | None = None,
    tuning: Tuning = FULL,
) -> MemoryProfile:
    """The memory of `rank` in a training step; `peak` is the sum of the parts.

    `momentum` is that of SGD; `routing` None: uniform; `tuning`: what trains. Raises ValueError
    when the plan's schedule cannot be made.
    """
    placement = StagePlacement(model, plan, seq_len, tuning)
    element = ELEMENT_BYTES[dtype]
    states = predict_states(
        placement, element=element, optimizer=optimizer, momentum=momentum, rank=rank
    )
    kinds = predict_activations(
        placement, global_batch=global_batch, element=element, rank=rank, routing=routing
    )
    profile = replace(states, activations=sum(kinds.values()), activation_kinds=kinds)
    return replace(profile, peak=profile.total)
