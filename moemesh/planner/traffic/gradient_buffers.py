"""Bytes that a rank holds for sums of gradients over ranks, if states are sharded.

Under zero2 the gradients of one backward are collected in a vector per bucket until its sum over
ranks starts; under zero3 they stay separate until then; under zero1 and with a parameter server the
rank's own gradients are summed, and only the receive buffer is counted. The vector and the receive
buffer live until the sum is waited for. The start of a sum depends on the order in which gradients
arrive (:func:`arrivals`), as in `moemesh.parallel.data.reducer`. The input half of a split backward
brings the gradients that need no product; all sums start after its weight half.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from moemesh.config.plan import SHARDED_STATES
from moemesh.planner.traffic.tensors import StagePlacement, data_buckets, owned
from moemesh.sharding.buckets import MOST_UNDER_WAY
from moemesh.sharding.parameters import ParameterTensor, units

#: Parts of a layer in the order in which a backward brings their gradients (the last match of a
#: name counts); gradients of one part come in the reversed order of the model.
_PARTS = (
    "feed_forward", "experts", "shared_gate", "shared", "router", "feed_forward_norm", "attention",
    "output", "sinks", "key_value_up", "query_up", "query_latent_norm", "query", "query_down",
    "key_value_latent_norm", "key_value_down", "key_norm", "query_norm", "qkv", "attention_norm",
    "projection", "stream_norm", "embedding_norm",
)  # fmt: skip


def arrivals(placement: StagePlacement, pp_rank: int, stage: int) -> list[ParameterTensor]:
    """The parameters of a stage in the order in which its backward brings their gradients."""
    is_first, is_last = stage == 0, stage == placement.schedule.num_stages - 1
    order = units(placement.model)

    def arrival(numbered: tuple[int, ParameterTensor]) -> tuple[int, int, int]:
        """Sort key of a parameter; `numbered` has its place in the model's order."""
        number, tensor = numbered
        owner, *rest = tensor.name.replace("_bias", "").split(".")
        unit, part = order.index(tensor.unit), 0
        if owner == "layers":
            part = max(_PARTS.index(name) for name in rest if name in _PARTS)
        elif owner == "ahead_norms":
            unit = order.index(f"layers.{rest[0]}")
        elif owner == "embedding" and is_last and not is_first:
            # The table of the head, or of extra prediction layers, which follow the head.
            unit, part = order.index("head"), -1
        # One operation brings the gradients of all experts of a layer, in the order of its inputs.
        return -unit, part, number if tensor.is_expert else -number

    held = [item for item in placement.held(pp_rank) if stage in placement.users(item, pp_rank)]
    return [tensor for _, tensor in sorted(enumerate(held), key=arrival)]


def most_gradient_buffers(placement: StagePlacement, rank: int, element: int) -> int:
    """Peak bytes of buffers for gradient sums in a step of `rank`, without the gradients that it
    keeps from one backward to the next."""
    plan, schedule = placement.plan, placement.schedule
    if plan.data == "replicate":
        return 0
    sums = _Sums(placement, rank, element)
    if "gradients" not in SHARDED_STATES[plan.data]:
        # Gradients are summed in place, once an update.
        sums.start(range(len(sums.buckets)))
        return sums.most
    pp_rank = placement.coordinates(rank)["pp"]
    orders = {stage: arrivals(placement, pp_rank, stage) for stage in placement.stages(pp_rank)}
    #: Parameters whose gradients arrive in several parts, complete at the end of the backward.
    late: set[str] = set()
    if plan.overlap_blocks and any(len(entry) > 1 for entry in schedule.orders[pp_rank]):
        tables = ("embedding", "head") if placement.model.num_mtp_layers else ()
        late = {
            tensor.name
            for tensor in placement.held(pp_rank)
            if (tensor.is_expert and plan.spreads_replicas) or tensor.name.split(".")[0] in tables
        }
    for op in schedule.ops(pp_rank):
        if op.kind == "F":
            continue
        tensors = [tensor for tensor in orders[op.stage] if tensor.name in sums.bucket_of]
        if op.kind == "B":
            sums.backward([tensor.name for tensor in tensors], late)
        else:
            is_head = op.stage == schedule.num_stages - 1
            for tensor in tensors:
                is_matrix = len(tensor.shape) > 1
                is_product = is_matrix and (is_head or tensor.name != "embedding.weight")
                if is_product == (op.kind == "W"):
                    sums.add(tensor.name)
            if op.kind == "W":
                sums.start(sums.buckets_of(tensor.name for tensor in tensors))
    return sums.most


class _Sums:
    """Gradient sums of one rank: buckets with gradients that wait, and sums in flight."""

    def __init__(self, placement: StagePlacement, rank: int, element: int) -> None:
        self.buckets = [item for item in data_buckets(placement, rank, element) if item.trains]
        sharded = SHARDED_STATES[placement.plan.data]
        #: Whether gradients stay separate until their sum starts.
        self.is_separate = "weights" in sharded
        #: Parameter name -> (index of its bucket, bytes of its gradient).
        self.bucket_of: dict[str, tuple[int, int]] = {}
        #: Bytes per bucket of the vector that is sent (0 if the rank keeps it anyway), and of the
        #: receive buffer.
        self.vectors: list[int] = []
        self.received: list[int] = []
        for index, bucket in enumerate(self.buckets):
            sizes, owner = owned(placement, bucket, rank)
            is_copied = "gradients" in sharded and len(sizes) > 1
            size = bucket.gradient_bytes
            self.vectors.append(bucket.numbers * size * is_copied)
            self.received.append(sizes[owner] * (len(sizes) - 1) * size)
            for member in bucket.members:
                self.bucket_of[member.name] = index, member.numbers * size * is_copied
        #: Buckets with at least one gradient, and buckets with the buffers of a sum in flight.
        self.filled: set[int] = set()
        self.sent: set[int] = set()
        #: Buckets in the order in which their sums are waited for; some sums may have ended.
        self.pending: list[int] = []
        #: Bytes of buffers now, and at the peak.
        self.held = self.most = 0

    def buckets_of(self, names: Iterable[str]) -> list[int]:
        """The buckets of these parameters, in the order of their sums."""
        return sorted({self.bucket_of[name][0] for name in names})

    def backward(self, names: Sequence[str], late: Collection[str]) -> None:
        """A whole backward, which brings the gradients of `names`; `late` ones are complete only at
        its end."""
        queue = self.buckets_of(names)
        waiting = Counter(self.bucket_of[name][0] for name in names)
        for name in names:
            self.add(name)
            waiting[self.bucket_of[name][0]] -= name not in late
            while queue and not waiting[queue[0]]:
                self.start([queue.pop(0)])
        self.start(queue)

    def add(self, name: str) -> None:
        """Arrival of one gradient."""
        index, size = self.bucket_of[name]
        if self.is_separate:
            self._hold(size)
        elif index not in self.filled:
            self._hold(self.vectors[index])
        self.filled.add(index)

    def start(self, indices: Iterable[int]) -> None:
        """Start the sums of these buckets."""
        for index in indices:
            unit = self.buckets[index].unit
            # Only sums of one unit are in flight: vectors of two units would be the peak of a step.
            while self.pending and self.buckets[self.pending[0]].unit != unit:
                self._wait(self.pending.pop(0))
            # An earlier sum of the same bucket ends first.
            self._wait(index)
            if self.is_separate or index not in self.filled:
                # The vector is allocated now; under zero3 next to the gradients copied into it.
                self._hold(self.vectors[index])
                self.held -= self.vectors[index] * (self.is_separate and index in self.filled)
            self._hold(self.received[index])
            self.filled.discard(index)
            self.sent.add(index)
            self.pending.append(index)
            if len(self.pending) > MOST_UNDER_WAY:
                self._wait(self.pending.pop(0))

    def _hold(self, size: int) -> None:
        self.held += size
        self.most = max(self.most, self.held)

    def _wait(self, index: int) -> None:
        if index in self.sent:
            self.sent.remove(index)
            self.held -= self.vectors[index] + self.received[index]
