"""The reducer: gradients are summed over their axis, in buckets, while the backward still runs.

One reducer serves the parameters of :mod:`moemesh.sharding.parameters`, whose sums have three axes
(dp_cp, stage, edp). torch's DistributedDataParallel and FSDP2 have one process group per module,
divide by its size and support neither deferred weight gradients nor fp32 sums of bf16 gradients
(docs/log.md has the reasons). When the last gradient has filled a bucket, its sum over ranks
starts, always in the order of the list, which is the same on every rank. Gradients of parameters
that two pipeline ranks hold (axis ``mirror``) are summed over the pair at the end.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from moemesh.comm.mesh import Mesh
from moemesh.config.plan import SHARDED_STATES, DataStrategy
from moemesh.parallel.data.buckets import (
    GatheredBucket,
    GatheredWeights,
    ReplicatedBucket,
    ScatteredBucket,
    ShardedBucket,
)
from moemesh.parallel.placement import OwnRange, Placement
from moemesh.sharding.buckets import MOST_UNDER_WAY, Member, buckets

#: `plan.data` -> how parameters are held.
BUCKETS: dict[str, type[ReplicatedBucket]] = {
    "replicate": ReplicatedBucket,
    "zero1": ShardedBucket,
    "zero2": ScatteredBucket,
    "zero3": GatheredBucket,
    # The same, but all ranges belong to a few ranks: gradients are pushed there, weights come back.
    "parameter_server": ShardedBucket,
}
#: Buckets of parameters that do not train; ReplicatedBucket under the other strategies.
FROZEN_BUCKETS: dict[str, type[ReplicatedBucket]] = {"zero3": GatheredBucket}


T = TypeVar("T")


def call_after_gradients(
    leaf: Tensor, owner: T, take: Callable[[ReferenceType[T], Tensor], None]
) -> None:
    """Call ``take(ref(owner), leaf)`` after each gradient of the leaf. The reference is weak,
    because the owner refers to the leaf: torch (2.13) never frees a leaf and its hooks that refer
    to each other, and models would live as long as the process."""
    leaf.register_post_accumulate_grad_hook(partial(take, ref(owner)))


class GradientReducer:
    """Owns the gradients of all parameters that train. One step::

    reducer.begin()
    for each microbatch: (if it is the last: reducer.arm(parameters)); loss.backward()
    reducer.finish()            # sums are complete

    (under zero2 and zero3: for each microbatch expect(...), arm(...), loss.backward(), close())

    reducer.gradients[name]     # complete gradients of owned ranges, views of the buckets
    ...                         # an optimizer changes `reducer.weights`
    reducer.publish()           # all ranks have the updated weights

    `owned`: the range of each flattened parameter that this rank owns. Under ``data = replicate``
    it owns all, and gradients have the shape of the local parameter.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, nn.Parameter, Placement]],
        mesh: Mesh,
        *,
        data: DataStrategy = "replicate",
        owners: Callable[[str, int], int] = lambda axis, ranks: ranks,
        exact: bool = False,
        stages: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        """`owners` (axis, its ranks) -> number of ranks that own sharded states. `stages`: stages
        of this rank that use each parameter, by name (None: there is one stage). Parameters without
        ``requires_grad`` have no gradient: their buckets hold weights only."""
        self.mesh, self.data = mesh, data
        members = [
            Member(
                name=name,
                unit=placement.unit,
                numbers=parameter.numel(),
                weight_bytes=parameter.element_size(),
                axis=placement.summed_over,
                mirrored=len(placement.holders) > 1,
                stages=(0,) if stages is None else stages[name],
                trains=parameter.requires_grad,
            )
            for name, parameter, placement in parameters
        ]
        named = {name: parameter for name, parameter, _ in parameters}
        all_buckets = [
            (BUCKETS[data] if rule.trains else FROZEN_BUCKETS.get(data, ReplicatedBucket))(
                rule,
                [named[member.name] for member in rule.members],
                mesh,
                owners=owners(rule.axis, mesh[mesh.layout.sharding_axes(rule.axis)[0]].size),
                exact=exact,
            )
            # An exact sum depends on the parameter's class, not on its ranks alone.
            for rule in buckets(members, data, None if exact else mesh.layout.same_ranks)
        ]
        #: Buckets of trainable and of frozen parameters.
        self.buckets = [bucket for bucket in all_buckets if bucket.rule.trains]
        self.frozen = [bucket for bucket in all_buckets if not bucket.rule.trains]
        #: Bucket of each parameter that trains, by `id`: the hash of a tensor is slow Python code.
        self._home: dict[int, ReplicatedBucket] = {}
        #: Complete gradients and weights to update that this rank owns, by name.
        self.gradients: dict[str, Tensor] = {}
        self.weights: dict[str, nn.Parameter] = {}
        self.owned: dict[str, OwnRange] = {}
        self._by_name: dict[str, ReplicatedBucket] = {}
        #: Weights of frozen parameters that this rank owns, by name.
        self.frozen_weights: dict[str, nn.Parameter] = {}
        self.frozen_owned: dict[str, OwnRange] = {}
        for bucket in all_buckets:
            self._by_name |= dict.fromkeys(bucket.names, bucket)
        for bucket in self.frozen:
            self.frozen_weights |= bucket.own_weights()
            self.frozen_owned |= bucket.owned()
        for bucket in self.buckets:
            self.gradients |= bucket.own_gradients()
            self.weights |= bucket.own_weights()
            self.owned |= bucket.owned()
            for parameter in bucket.parameters:
                self._home[id(parameter)] = bucket
                parameter.grad_dtype = None  # any: the bucket converts while it adds
                call_after_gradients(parameter, self, self.take)
        # In the order of the model, not of the buckets.
        order = [name for name, _, _ in parameters]
        self.gradients = {name: self.gradients[name] for name in order if name in self.gradients}
        self.weights = {name: self.weights[name] for name in order if name in self.weights}
        #: Whether gradients are summed over ranks after every backward, not once a step.
        self.is_per_backward = "gradients" in SHARDED_STATES[data]
        #: Ids of the parameters whose next gradient is their last before the next sum over ranks.
        self._armed: set[int] = set()
        #: Buckets whose sums have not started, in order; buckets whose started sums hold memory.
        self._queue: deque[ReplicatedBucket] = deque()
        self._in_flight: deque[ReplicatedBucket] = deque()
        #: Bytes that buckets hold for sums over ranks, and the most that they held at once.
        self._buffers: dict[ReplicatedBucket, int] = {}
        self.most_buffer_bytes = self._buffer_bytes = 0
        #: Optional hook (parameter, grad), called before accumulation.
        self.watch: Callable[[nn.Parameter, Tensor], None] | None = None
        #: Optional hook, called once a step with each bucket when its sums are complete.
        self.on_complete: Callable[[ReplicatedBucket], None] | None = None
        #: Buckets whose sums have started; those with which `on_complete` has been called.
        self._launched: deque[ReplicatedBucket] = deque()
        self._completed: set[ReplicatedBucket] = set()
        #: Weights that are gathered for a step (zero3).
        self.units: GatheredWeights | None = None

    @property
    def held(self) -> dict[str, OwnRange]:
        """The ranges that this rank owns of all its parameters, whether they train or not."""
        return self.owned | self.frozen_owned

    @property
    def held_weights(self) -> dict[str, nn.Parameter]:
        """The weights that belong to :attr:`held`."""
        return self.weights | self.frozen_weights

    def has(self, parameter: nn.Parameter) -> bool:
        """Whether a bucket of this reducer sums the parameter's gradient."""
        return id(parameter) in self._home

    def accumulate(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Add one microbatch's gradient that did not come through autograd."""
        parameter.grad = gradient
        self.take(ref(self), parameter)

    @staticmethod
    def take(owner: ReferenceType[GradientReducer], parameter: Any) -> None:
        """Add ``parameter.grad`` to its bucket; None is deferred, and comes another way."""
        self, gradient = owner(), parameter.grad
        if self is None or gradient is None:
            return
        parameter.grad = None
        if self.watch is not None:
            self.watch(parameter, gradient)
        key = id(parameter)
        bucket = self._home[key]
        if key in bucket.filled:
            bucket.views[key] += gradient
        elif bucket.views:
            bucket.views[key].copy_(gradient)
            bucket.filled.add(key)
        else:
            bucket.add(parameter, gradient)
        if self.is_per_backward:  # other buckets add into memory that they always keep
            self._count_buffers(bucket)
        if key in self._armed:
            self._armed.remove(key)
            bucket.waiting -= 1
            if not bucket.waiting or self._launched:
                self._launch(only_full=True)

    def begin(self) -> None:
        """Discard the last step's gradients."""
        self._armed.clear()
        self._queue.clear()
        self._launched.clear()
        self._completed.clear()
        for bucket in self.buckets:
            bucket.begin()
        if not self.is_per_backward:
            self._queue.extend(self.buckets)
            for bucket in self.buckets:
                bucket.waiting = len(bucket.parameters)

    def expect(self, parameters: Iterable[nn.Parameter]) -> None:
        """Queue the buckets of `parameters`, the ones with a gradient in the next backward. The sum
        of a bucket starts when each of these has had its last gradient. Called under zero2 and
        zero3: before every backward, and after every deferred one."""
        assert not self._queue
        counts = Counter(map(self._home.__getitem__, map(id, parameters)))
        for bucket in self.buckets:
            if counts[bucket]:
                bucket.waiting = counts[bucket]
                self._queue.append(bucket)

    def arm(self, parameters: Iterable[nn.Parameter]) -> None:
        """The next gradient of each of `parameters` is its last before the sum of its bucket."""
        self._armed.update(map(id, parameters))

    def complete(self, parameters: Iterable[nn.Parameter]) -> None:
        """All of `parameters` have had their last gradient: start full buckets."""
        for parameter in parameters:
            self._home[id(parameter)].waiting -= 1
        self._launch(only_full=True)

    def close(self) -> None:
        """Start the sums that have not started; a missing gradient counts as zero."""
        self._launch(only_full=False)
        self._armed.clear()

    def finish(self) -> None:
        """Start the sums that have not started, and wait for all."""
        self.close()
        self._in_flight.clear()
        for bucket in self.buckets:
            self._wait(bucket)
        for bucket in self.buckets:
            bucket.finish()
            if self.on_complete is not None:
                self._complete(bucket)
        if self.units is not None:
            self.units.free_all()

    def renew(self) -> None:
        """Copy the weights that train to new memory; tensors saved for backward keep the old."""
        for bucket in self.buckets:
            bucket.renew()

    def publish(self) -> None:
        """Send the updated weights to all ranks that need them; all ranks call."""
        if self.data == "replicate":  # each rank has updated them itself
            return
        works = [bucket.publish() for bucket in self.buckets]
        for wait in works:
            if wait is not None:
                wait()

    def whole(self, name: str, part: Tensor | None) -> Tensor:
        """A state of the parameter `name` in its local shape, from the parts that ranks own (None:
        this rank owns none). All ranks that share the states call."""
        bucket = self._by_name[name]
        if part is None:
            part = torch.empty(0, dtype=bucket.dtype, device=bucket.device)
        return bucket.whole(name, part)

    def whole_weights(self, name: str) -> Tensor:
        """The whole local tensor of the weight `name`: the memory of the weight, or a copy if the
        weights are sharded. All ranks that share the states call."""
        return self._by_name[name].whole_weights(name)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients that this rank keeps from one backward to the next."""
        return sum(bucket.gradient_bytes for bucket in self.buckets)

    def weight_bytes(self, *, experts: bool) -> int:
        """Bytes of weights kept between steps: of routed experts, or of all others."""
        total = 0
        for bucket in (*self.buckets, *self.frozen):
            kept = bucket.kept_weights
            of_experts = bucket.rule.expert_numbers(kept)
            numbers = of_experts if experts else len(kept) - of_experts
            total += numbers * bucket.rule.weight_bytes
        return total

    @property
    def gathered_bytes(self) -> int:
        """Peak bytes of gathered weights on this rank, own shares included."""
        return 0 if self.units is None else self.units.most_bytes

    def _launch(self, *, only_full: bool) -> None:
        """Start sums in the order of the queue, which is the same on every rank: all of them, or up
        to the first bucket that is not full. Then report complete buckets, in the same order."""
        while self._queue and not (only_full and self._queue[0].waiting > 0):
            bucket = self._queue.popleft()
            # Sums of one unit at a time (zero3): vectors of two units would be the peak of a step.
            while self._in_flight and self._in_flight[0].rule.unit != bucket.rule.unit:
                self._wait(self._in_flight.popleft())
            if self.data == "replicate":
                bucket.launch()
            else:
                bucket.prepare()
                self._count_buffers(bucket)
                bucket.launch()
                self._count_buffers(bucket)
                self._in_flight.append(bucket)
            if len(self._in_flight) > MOST_UNDER_WAY:
                self._wait(self._in_flight.popleft())
            if self.on_complete is not None and not self.is_per_backward:
                self._launched.append(bucket)
        while self._launched and self._launched[0].is_complete():
            bucket = self._launched.popleft()
            self._wait(bucket)
            self._complete(bucket)

    def _complete(self, bucket: ReplicatedBucket) -> None:
        if self.on_complete is not None and bucket not in self._completed:
            self._completed.add(bucket)
            self.on_complete(bucket)

    def _wait(self, bucket: ReplicatedBucket) -> None:
        bucket.wait()
        if self.data != "replicate":
            self._count_buffers(bucket)

    def _count_buffers(self, bucket: ReplicatedBucket) -> None:
        now = bucket.buffer_bytes
        self._buffer_bytes += now - self._buffers.get(bucket, 0)
        self._buffers[bucket] = now
        self.most_buffer_bytes = max(self.most_buffer_bytes, self._buffer_bytes)
