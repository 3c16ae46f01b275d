"""Bytes that a rank holds for sums of gradients over ranks, where states are sharded.

The gradients of one backward wait in a vector for each bucket until its sum over ranks starts
(zero3: as they come, until all of their unit have); the vector stays until the sum is waited for,
and so does what is received for it. When a sum starts follows from the order in which gradients
come (:func:`arrivals`), as `moemesh.parallel.data.reducer` goes by it. Where a backward is split,
its input half brings what no product of weights needs; sums start behind its weight half, all at
once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from moemesh.planner.traffic.tensors import StagePlacement, data_buckets, owned
from moemesh.sharding.buckets import MOST_UNDER_WAY
from moemesh.sharding.parameters import ParameterTensor, units

#: Parts of a layer in the order in which a backward brings their gradients (of names in several
#: parts the last one counts); those of one part come in the reversed order of the model.
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

    def place(numbered: tuple[int, ParameterTensor]) -> tuple[int, int, int]:
        number, tensor = numbered
        owner, *rest = tensor.name.replace("_bias", "").split(".")
        unit, part = order.index(tensor.unit), 0
        if owner == "layers":
            part = max(_PARTS.index(name) for name in rest if name in _PARTS)
        elif owner == "ahead_norms":
            unit = order.index(f"layers.{rest[0]}")
        elif owner == "embedding" and is_last and not is_first:
            # The table of the head, or of extra prediction layers, which come behind the head.
            unit, part = order.index("head"), -1
        # One operation brings those of all of a layer's experts, in the order of its inputs.
        return -unit, part, number if tensor.is_expert else -number

    held = [one for one in placement.held(pp_rank) if stage in placement.users(one, pp_rank)]
    return [tensor for _, tensor in sorted(enumerate(held), key=place)]


def most_gradient_buffers(placement: StagePlacement, rank: int, element: int) -> int:
    """The most bytes at once in a step of `rank`, beside the gradients that it keeps from one
    backward to the next."""
    plan, schedule = placement.plan, placement.schedule
    if plan.data == "replicate":
        return 0
    sums = _Sums(placement, rank, element)
    if plan.data not in ("zero2", "zero3"):
        # Gradients are summed where they are, once a step.
        sums.start(range(len(sums.buckets)))
        return sums.most
    pp_rank = placement.coordinates(rank)["pp"]
    orders = {stage: arrivals(placement, pp_rank, stage) for stage in placement.stages(pp_rank)}
    late: set[str] = set()
    if plan.overlap_blocks and any(len(entry) > 1 for entry in schedule.orders[pp_rank]):
        # Gradients in several parts, the last of which nothing announces.
        has_replicas = plan.spare_slots > 0 and plan.ep > 1
        tables = ("embedding", "head") if placement.model.num_mtp_layers else ()
        late = {
            one.name
            for one in placement.held(pp_rank)
            if (one.is_expert and has_replicas) or one.name.split(".")[0] in tables
        }
    #: An operation and what was held before it -> what is held behind it.
    known: dict[object, tuple[frozenset[int], frozenset[int], tuple[int, ...]]] = {}
    for op in schedule.ops(pp_rank):
        before = op.kind, op.stage, sums.state
        if op.kind == "F":
            continue
        if before in known:
            sums.state = known[before]
            continue
        tensors = [one for one in orders[op.stage] if one.name in sums.homes]
        if op.kind == "B":
            sums.backward([one.name for one in tensors], late)
        else:
            is_head = op.stage == schedule.num_stages - 1
            for one in tensors:
                is_product = len(one.shape) > 1 and (is_head or one.name != "embedding.weight")
                if is_product == (op.kind == "W"):
                    sums.add(one.name)
            if op.kind == "W":
                sums.start(sums.buckets_of(one.name for one in tensors))
        known[before] = sums.state
    return sums.most


class _Sums:
    """The sums of one rank: which gradients wait for theirs, and which sums are under way."""

    def __init__(self, placement: StagePlacement, rank: int, element: int) -> None:
        self.buckets = [one for one in data_buckets(placement, rank, element) if one.trains]
        self.comes_apart = placement.plan.data == "zero3"
        #: Name -> its bucket, and bytes of its gradient.
        self.homes: dict[str, tuple[int, int]] = {}
        #: Bytes of each bucket: of the vector that is sent, where it is another one than what the
        #: rank keeps; and of what is received.
        self.vectors: list[int] = []
        self.received: list[int] = []
        for place, bucket in enumerate(self.buckets):
            sizes, index = owned(placement, bucket, rank)
            is_copied = placement.plan.data in ("zero2", "zero3") and len(sizes) > 1
            size = bucket.gradient_bytes
            self.vectors.append(bucket.numbers * size * is_copied)
            self.received.append(sizes[index] * (len(sizes) - 1) * size)
            for one in bucket.members:
                self.homes[one.name] = place, one.numbers * size * is_copied
        #: Buckets whose vector has a gradient; whose sum has started and was not waited for; and
        #: the sums in the order of their waits.
        self.filled: set[int] = set()
        self.sent: set[int] = set()
        self.under_way: list[int] = []
        self.held = self.most = 0

    @property
    def state(self) -> tuple[frozenset[int], frozenset[int], tuple[int, ...]]:
        """What is held between two operations."""
        return frozenset(self.filled), frozenset(self.sent), tuple(self.under_way)

    @state.setter
    def state(self, state: tuple[frozenset[int], frozenset[int], tuple[int, ...]]) -> None:
        self.filled, self.sent, self.under_way = set(state[0]), set(state[1]), list(state[2])
        self.held = sum(self.vectors[place] for place in (*self.filled, *self.sent))
        self.held += sum(self.received[place] for place in self.sent)

    def buckets_of(self, names: Iterable[str]) -> list[int]:
        """The buckets of these parameters, in the order of their sums."""
        return sorted({self.homes[name][0] for name in names})

    def backward(self, names: Sequence[str], late: Collection[str]) -> None:
        """A whole backward, which brings the gradients of `names`; those that are `late` are known
        to be complete only when it is over."""
        queue = self.buckets_of(names)
        waiting = Counter(self.homes[name][0] for name in names)
        for name in names:
            self.add(name)
            waiting[self.homes[name][0]] -= name not in late
            while queue and not waiting[queue[0]]:
                self.start([queue.pop(0)])
        self.start(queue)

    def add(self, name: str) -> None:
        """One gradient comes."""
        place, size = self.homes[name]
        if self.comes_apart:
            self._hold(size)
        elif place not in self.filled:
            self._hold(self.vectors[place])
        self.filled.add(place)

    def start(self, places: Iterable[int]) -> None:
        """Start the sums of these buckets."""
        for place in places:
            unit = self.buckets[place].unit
            while self.under_way and self.buckets[self.under_way[0]].unit != unit:
                self._wait(self.under_way.pop(0))
            self._wait(place)
            if self.comes_apart or place not in self.filled:
                # The vector is made now, of zero3 beside the gradients that it takes up.
                self._hold(self.vectors[place])
                self.held -= self.vectors[place] * (self.comes_apart and place in self.filled)
            self._hold(self.received[place])
            self.filled.discard(place)
            self.sent.add(place)
            self.under_way.append(place)
            if len(self.under_way) > MOST_UNDER_WAY:
                self._wait(self.under_way.pop(0))

    def _hold(self, size: int) -> None:
        self.held += size
        self.most = max(self.most, self.held)

    def _wait(self, place: int) -> None:
        if place in self.sent:
            self.sent.remove(place)
            self.held -= self.vectors[place] + self.received[place]
