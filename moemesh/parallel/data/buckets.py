"""The buckets of one rank at run time: memory of gradients and weights, and their exchanges.

| class | gradients kept | weights kept | exchanges of a step |
|---|---|---|---|
| :class:`ReplicatedBucket` | all | all | all_reduce |
| :class:`ShardedBucket` (zero1) | all | all | reduce_scatter; all_gather of the updated weights |
| the same (parameter_server) | all | all | the same, between all ranks and the servers |
| :class:`ScatteredBucket` (zero2) | own | all | as zero1, a reduce_scatter after every backward |
| `GatheredBucket` (zero3) | own | own | as zero2, but all_gather of weights before use |

*own*: the range of the bucket's flat vector that this rank owns.
(Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020.)
Parameters that do not train have neither gradients nor sums: their buckets hold weights only, which
are sharded and gathered under zero3. Gradients accumulate in fp32 (float64 for float64 weights).
Sums over ranks are not divided by the number of ranks; under ``combine = exact`` those of experts
are added in a tree.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from moemesh.comm.collectives import all_reduce_
from moemesh.comm.mesh import Mesh
from moemesh.comm.transfers import all_gather_start, all_reduce_in_tree_, reduce_scatter_start
from moemesh.config.plan import Reshard
from moemesh.model.seams import WeightGate
from moemesh.model.transformer import ModelPart
from moemesh.ops.permute import linear_map
from moemesh.parallel.placement import OwnRange
from moemesh.sharding.buckets import Bucket, owned_sizes
from moemesh.sharding.parameters import next_units, unit_orders

#: Waits for an exchange that has been started.
Wait = Callable[[], object]
#: Keywords of sums over ranks, for the ledger.
_SUMS: dict[str, Any] = {"phase": "backward", "caller": "gradients"}


class ReplicatedBucket:
    """Every rank keeps all gradients and weights, and all-reduces the gradients once a step."""

    #: Whether each rank of the axis owns a range of its own.
    is_sharded = False

    def __init__(
        self,
        rule: Bucket,
        parameters: Sequence[nn.Parameter],
        mesh: Mesh,
        *,
        owners: int,
        exact: bool,
    ) -> None:
        """`rule`: the members and the axis of their sums; `parameters`: the members' local tensors;
        `owners`: number of ranks, the first of the axis, that own states if these are sharded;
        `exact`: sums of experts are added in a tree."""
        self.rule, self.parameters, self.mesh = rule, tuple(parameters), mesh
        #: Axis of the ranks that divide the states of this bucket, and axis of those that hold the
        #: same part of them.
        self.axis, self.copies = (mesh[name] for name in mesh.layout.sharding_axes(rule.axis))
        #: Count of the numbers that each rank of the axis owns, if states are sharded.
        self.sizes = owned_sizes(rule.numbers, self.axis.size, owners)
        #: Ranges of the flat vector: what this rank owns, and whose weights it keeps between steps.
        self.own = self._range(self.axis.index)
        self.kept_weights = range(rule.numbers)
        self.in_tree = exact and rule.axis == "edp"
        #: Whether the sums of :meth:`launch` are the last ones of a step.
        self.sums_once = self.copies.size == 1 and not rule.mirrored
        #: Number of members whose last gradient before the next sum over ranks is pending.
        self.waiting = 0
        self.names = [member.name for member in rule.members]
        self.device = parameters[0].device
        self.dtype = torch.promote_types(parameters[0].dtype, torch.float32)
        self.allocate()

    def allocate(self) -> None:
        """Allocate gradients and weights."""
        #: Wait for the pending sum over ranks, and torch's handle of an all-reduce.
        self._work: Wait | None = None
        self._sum: Any = None
        self.allocate_gradients()

    def allocate_gradients(self) -> None:
        """Allocate the flat gradients that this rank keeps, and views of them."""
        self.total = self.zeros(self.rule.numbers)
        #: Memory for gradients by the `id` of the parameter; empty if :meth:`add` has to allocate.
        self.views = self.views_of(self.total)
        #: Ids of parameters whose view holds a gradient of this step. The first gradient is copied
        #: into the view, later ones are added.
        self.filled: set[int] = set()

    def zeros(self, numbers: int) -> Tensor:
        """Memory for `numbers` gradients: none if nothing trains."""
        numbers = numbers if self.rule.trains else 0
        return torch.zeros(numbers, dtype=self.dtype, device=self.device)

    def views_of(self, flat: Tensor) -> dict[int, Tensor]:
        """:meth:`split` by the `id` of the parameter; empty if nothing trains."""
        if not self.rule.trains:
            return {}
        return dict(zip(map(id, self.parameters), self.split(flat), strict=True))

    def split(self, flat: Tensor) -> list[Tensor]:
        """A flat vector of the bucket as tensors with the members' local shapes."""
        parts = flat.split([member.numbers for member in self.rule.members])
        return [part.view(p.shape) for part, p in zip(parts, self.parameters, strict=True)]

    def _range(self, index: int) -> range:
        """The numbers that rank `index` of the axis owns."""
        start = sum(self.sizes[:index])
        own = range(start, start + self.sizes[index])
        return own if self.is_sharded else range(self.rule.numbers)

    # Parts of members that this rank owns: by name, without empty parts.

    def ranges(self, own: range) -> Iterator[tuple[str, range, slice]]:
        """(name, range of its flattened tensor, slice of `own`) of each member that overlaps the
        range `own` of the flat vector."""
        start = 0
        for member, part in self.rule.parts(own):
            if part:
                yield member.name, part, slice(start, start + len(part))
                start += len(part)

    def owned(self) -> dict[str, OwnRange]:
        """Ranges of the members' flattened tensors that this rank owns."""
        first = self.copies.index == 0 and (self.is_sharded or self.axis.index == 0)
        return {
            name: OwnRange(numbers=numbers, is_first=first)
            for name, numbers, _ in self.ranges(self.own)
        }

    def own_places(self) -> dict[str, slice]:
        """Slice of :meth:`own_sums` with the owned gradients of every member."""
        return {name: place for name, _, place in self.ranges(self.own)}

    def own_gradients(self) -> dict[str, Tensor]:
        """Views of the gradients that this rank owns: complete after :meth:`finish`."""
        return dict(zip(self.names, self.views.values(), strict=True))

    def own_weights(self) -> dict[str, nn.Parameter]:
        """The weights that this rank owns, in the form that an optimizer steps."""
        return dict(zip(self.names, self.parameters, strict=True))

    def whole(self, name: str, part: Tensor) -> Tensor:
        """The full local tensor of a member's state, from the parts of all ranks of the axis, which
        all call."""
        return part

    def whole_weights(self, name: str) -> Tensor:
        """The full local tensor of a member; all ranks of the axis call if weights are sharded."""
        return self.parameters[self.names.index(name)].detach()

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients that this rank keeps from one backward to the next."""
        return self.total.numel() * self.total.element_size()

    @property
    def buffer_bytes(self) -> int:
        """Bytes of temporary vectors of gradients now, besides :attr:`gradient_bytes`."""
        return 0

    # A step.

    def begin(self) -> None:
        """Discard the gradients of the last step."""
        self.filled.clear()

    def add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Add a gradient of a member, of any dtype, while :attr:`views` is empty."""
        raise AssertionError(f"no memory for the gradients of {self.names}")

    def zero_missing(self) -> None:
        """Zero the gradients of members without one in this step."""
        if len(self.filled) == len(self.views):
            return
        for key, view in self.views.items():
            if key not in self.filled:
                view.zero_()
        self.filled.update(self.views)

    def prepare(self) -> None:
        """Wait for the previous sum and allocate the vector that :meth:`launch` sends, so that the
        caller can count its bytes before the launch."""

    def launch(self) -> None:
        """Start the sums over ranks."""
        self.zero_missing()
        if self.in_tree:
            # An expert has added its gradient in a tree over the ranks whose tokens it computed;
            # the sum over its copies continues this tree.
            all_reduce_in_tree_(self.total, self.axis, **_SUMS)
            return
        work = all_reduce_(self.total, self.axis, **_SUMS, async_op=True)
        self._sum, self._work = work, None if work is None else work.wait

    def is_complete(self) -> bool:
        """Whether the launched sums have ended, and :meth:`finish` will add no others."""
        return self.sums_once and (
            self._work is None or (self._sum is not None and self._sum.is_completed())
        )

    def wait(self) -> None:
        """Wait for the pending sum."""
        if self._work is not None:
            self._work()
            self._work = None

    def finish(self) -> None:
        """After :meth:`wait`: sum over the ranks with the same part of the states, then over the
        two holders of mirrored parameters (two addends: both holders get the same bits)."""
        if self.sums_once:
            return
        reduce = all_reduce_in_tree_ if self.in_tree else all_reduce_
        reduce(self.own_sums(), self.copies, **_SUMS)
        if self.rule.mirrored:
            all_reduce_(self.own_sums(), self.mesh["mirror"], **_SUMS)

    def own_sums(self) -> Tensor:
        """The flat gradients that this rank owns."""
        return self.total

    def publish(self) -> Wait | None:
        """Start to send updated weights to the ranks that need them; None: nothing is sent."""
        return None

    def renew(self) -> None:
        """Give the weights new memory with the same content."""
        for parameter in self.parameters:
            parameter.data = parameter.detach().clone()


class ShardedBucket(ReplicatedBucket):
    """Optimizer states are sharded: a rank updates its range and sends it to the others."""

    is_sharded = True

    def allocate(self) -> None:
        super().allocate()
        #: Flat weights, of which the parameters are views.
        self.weights = torch.empty(
            self.rule.numbers, dtype=self.parameters[0].dtype, device=self.device
        )
        for parameter, view in zip(self.parameters, self.split(self.weights), strict=True):
            parameter.data = view.copy_(parameter.data)

    def own_gradients(self) -> dict[str, Tensor]:
        sums = self.own_sums()
        return {name: sums[place] for name, place in self.own_places().items()}

    def own_weights(self) -> dict[str, nn.Parameter]:
        flat = self.own_flat_weights()
        self._own_parts = {
            name: nn.Parameter(flat[place], requires_grad=self.rule.trains)
            for name, _, place in self.ranges(self.own)
        }
        return self._own_parts

    def own_flat_weights(self) -> Tensor:
        """This rank's range of the flat weights."""
        return self.weights[self.own.start : self.own.stop]

    def own_sums(self) -> Tensor:
        return self.total[self.own.start : self.own.stop]

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the gradients of this rank's range received from other ranks, while a sum is
        pending: on NCCL an upper bound."""
        received = len(self.own) * (self.axis.size - 1)
        return received * self.dtype.itemsize if self._work is not None else 0

    def whole(self, name: str, part: Tensor) -> Tensor:
        sizes: list[int] = []
        for index in range(self.axis.size):
            own = self._range(index)
            sizes.append(sum(len(r) for other, r, _ in self.ranges(own) if other == name))
        wait = all_gather_start(
            part.view(-1), self.axis, sizes, phase="optimizer", caller="moe.homes"
        )
        return wait().view(self.parameters[self.names.index(name)].shape)

    def launch(self) -> None:
        self.zero_missing()
        if self.axis.size > 1:
            receive = self.scatter(self.total)
            self._work = lambda: self.own_sums().copy_(receive())

    def scatter(self, flat: Tensor) -> Callable[[], Tensor]:
        """Start the sum over ranks of this rank's range of `flat`."""
        return reduce_scatter_start(
            flat, self.axis, self.sizes, in_tree=self.in_tree, in_place=True, **_SUMS
        )

    def renew(self) -> None:
        self.weights = self.weights.clone()
        for parameter, view in zip(self.parameters, self.split(self.weights), strict=True):
            parameter.data = view
        flat = self.own_flat_weights()
        for name, _, place in self.ranges(self.own):
            self._own_parts[name].data = flat[place]

    def publish(self) -> Wait | None:
        return self.gather_weights("optimizer")

    def gather_weights(self, phase: str) -> Callable[[], Tensor]:
        """Start to all-gather the weights from the ranks that own them."""
        return all_gather_start(
            self.own_flat_weights(),
            self.axis,
            self.sizes,
            into=self.weights,
            phase=phase,
            caller="weights",
        )


class ScatteredBucket(ShardedBucket):
    """Gradients are sharded, too. One backward fills a temporary flat vector, which is
    reduce-scattered; :attr:`total` adds up this rank's range over microbatches."""

    def allocate_gradients(self) -> None:
        self.total = self.zeros(len(self.own))
        self._clear()

    def _clear(self) -> None:
        #: Flat gradients since the last sum over ranks; on a single rank, :attr:`total` itself.
        self._flat = self.total if self.axis.size == 1 else None
        self.filled = set()
        self.views = {} if self._flat is None else self.views_of(self._flat)

    def own_sums(self) -> Tensor:
        return self.total

    @property
    def buffer_bytes(self) -> int:
        """Also bytes of the vector that a backward fills, and of the one being sent."""
        vectors = (self._flat is not None) + (self._work is not None)
        num_bytes = vectors * self.rule.numbers * self.dtype.itemsize if self.axis.size > 1 else 0
        return super().buffer_bytes + num_bytes

    def begin(self) -> None:
        if self.axis.size > 1:
            self.total.zero_()
        self._clear()

    def add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        self._fill()
        self.views[id(parameter)].copy_(gradient)
        self.filled.add(id(parameter))

    def _fill(self) -> Tensor:
        """The vector that a backward fills, allocated at its first gradient."""
        if self._flat is None:
            self._flat = self.total.new_empty(self.rule.numbers)
            self.views = self.views_of(self._flat)
        return self._flat

    def prepare(self) -> None:
        self.wait()
        self._fill()

    def launch(self) -> None:
        self.zero_missing()
        if self.axis.size == 1:
            return
        receive = self.scatter(self._fill())
        self._clear()
        self._work = lambda: self.total.add_(receive())


class GatheredBucket(ScatteredBucket):
    """Weights are sharded, too: all of them exist only from :meth:`gather` to :meth:`free`.
    Parameters stay views of one flat vector, whose memory is freed and reallocated: tensors saved
    by autograd are valid in the backward."""

    def allocate(self) -> None:
        super().allocate()
        self._own_weights, self.kept_weights = super().own_flat_weights(), self.own
        self._bytes = self.weights.untyped_storage().nbytes()
        #: Number of current uses; the function that waits for the gather in flight.
        self.users, self._arriving = 0, None
        self.is_present = self.axis.size == 1
        if not self.is_present:
            self._own_weights = self._own_weights.clone()
            self._release()

    def _clear(self) -> None:
        super()._clear()
        #: Gradients of this backward. They are copied into a flat vector at launch, when the
        #: previous unit's vector has been freed: two vectors would be larger than a rank's share.
        self._waiting_gradients: dict[nn.Parameter, Tensor] = {}

    def add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        if self.axis.size == 1:
            super().add(parameter, gradient)
            return
        gradient, before = gradient.to(self.dtype), self._waiting_gradients.get(parameter)
        self._waiting_gradients[parameter] = gradient if before is None else before + gradient

    @property
    def buffer_bytes(self) -> int:
        waiting = self._waiting_gradients.values()
        return super().buffer_bytes + sum(
            tensor.numel() * tensor.element_size() for tensor in waiting
        )

    def launch(self) -> None:
        while self._waiting_gradients:
            super().add(*self._waiting_gradients.popitem())
        super().launch()

    def own_flat_weights(self) -> Tensor:
        return self._own_weights

    def whole_weights(self, name: str) -> Tensor:
        parts = {member: place for member, _, place in self.ranges(self.own)}
        part = self._own_weights[parts[name]] if name in parts else self._own_weights[:0]
        return self.whole(name, part)

    def publish(self) -> Wait | None:
        return None

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the gathered weights, besides the part that this rank always keeps."""
        return self.weights.untyped_storage().nbytes() if self.axis.size > 1 else 0

    def start_gather(self, phase: str) -> None:
        """Start to gather the weights, unless they are present or in flight."""
        if self.is_present or self._arriving is not None:
            return
        self.weights.untyped_storage().resize_(self._bytes)
        self._arriving = self.gather_weights(phase)

    def gather(self, phase: str, *, is_use: bool = True) -> None:
        """Gather the weights and count a use, for which they stay until :meth:`free`. Without
        `is_use` they stay until the next use or the step ends."""
        self.start_gather(phase)
        self.users += is_use
        self._arrive()

    def _arrive(self) -> None:
        if self._arriving is not None:
            self._arriving()
            self._arriving, self.is_present = None, True

    def free(self, *, keep: bool = False) -> None:
        """End a use; `keep`: the weights stay for later uses."""
        self.users -= 1
        if not keep:
            self.free_unused()

    def free_unused(self) -> None:
        """Free the memory if the weights are unused; a single rank keeps them."""
        if self.users == 0:
            self._arrive()
            if self.is_present and self.axis.size > 1:
                self._release()

    def _release(self) -> None:
        self.weights.untyped_storage().resize_(0)
        self.is_present = False


class GatheredWeights(WeightGate):
    """The weights of all units of one rank (ZeRO-3); a unit has a bucket for each group of ranks,
    dtype and state of training (:mod:`moemesh.sharding.buckets`).

    Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", 2023: a unit is
    gathered before its forward, freed after it, and gathered a second time for its backward; the
    next unit in either direction is in flight meanwhile. A backward reaches the units through
    identities in the autograd graph, on the residual stream before and after every unit. The
    backward of an embedding table reads no weights: it is gathered for forwards only, unless
    modules of transformers that belong to its unit read theirs (:meth:`leave`).

    | plan.reshard | gathers of a step, M microbatches | held at once |
    |---|---|---|
    | always | 2 M (embedding: M) | the unit in use and the next one |
    | step | 1 | every unit, from its first use to the end of the step |
    """

    def __init__(
        self,
        buckets: Iterable[GatheredBucket],
        parts: Iterable[ModelPart],
        *,
        ahead: Sequence[int],
        tied: bool,
        reshard: Reshard,
        without_backward: Collection[str] = (),
    ) -> None:
        """`parts`: those that this rank runs; `ahead`: extra prediction layers, which come after
        the head; `tied`: the head reads the embedding's weights; `without_backward`: units that no
        backward reaches."""
        self._keeps = reshard == "step"
        #: Peak bytes of weights, present or in flight, of buckets shared by several ranks.
        self.most_bytes = 0
        self._all = list(buckets)
        by_unit: dict[str, list[GatheredBucket]] = {}
        for bucket in self._all:
            assert bucket.rule.unit is not None
            by_unit.setdefault(bucket.rule.unit, []).append(bucket)
        self._buckets = by_unit
        parts = list(parts)
        if tied and any(part.last for part in parts):
            # Without a norm of its own, a tied head has no other bucket.
            by_unit["head"] = by_unit.get("head", []) + by_unit["embedding"]
        orders = [
            unit_orders(part.layers, first=part.first, last=part.last, ahead=ahead)
            for part in parts
        ]
        #: Unit to gather ahead, by (phase, unit in use).
        self._next = next_units(chain.from_iterable(orders), without_backward)

    def fetch(self, unit: str) -> None:
        self._gather(unit, "forward")

    def enter(self, unit: str, x: Tensor) -> Tensor:
        self.fetch(unit)
        if not torch.is_grad_enabled():
            return x
        return in_backward(x, lambda: self._free(unit, keep=self._keeps))

    def leave(self, unit: str, x: Tensor, *, read_in_backward: bool = True) -> Tensor:
        self._free(unit, keep=self._keeps and torch.is_grad_enabled())
        if not read_in_backward or not torch.is_grad_enabled():
            return x
        # Modules of transformers before the layers may need their weights in the backward. No node
        # of the graph follows that backward: their next use frees them.
        is_use = unit != "embedding"
        return in_backward(x, lambda: self._gather(unit, "backward", is_use=is_use))

    def free_all(self) -> None:
        """Free the memory of all weights at the end of a step."""
        for buckets in self._buckets.values():
            for bucket in buckets:
                bucket.free_unused()

    def _gather(self, unit: str, phase: str, *, is_use: bool = True) -> None:
        for bucket in self._buckets.get(unit, ()):
            bucket.gather(phase, is_use=is_use)
        # Start the next unit; no exchange if `reshard = step` has kept its weights.
        for bucket in self._buckets.get(self._next.get((phase, unit), ""), ()):
            bucket.start_gather(phase)
        held = sum(bucket.gathered_bytes for bucket in self._all)
        self.most_bytes = max(self.most_bytes, held)

    def _free(self, unit: str, *, keep: bool) -> None:
        for bucket in self._buckets.get(unit, ()):
            bucket.free(keep=keep)


def in_backward(x: Tensor, function: Callable[[], None]) -> Tensor:
    """`x`, as a node of autograd whose backward calls `function`."""

    def back(gradient: Tensor) -> Tensor:
        function()
        return gradient

    return linear_map(x, lambda x: x.view_as(x), back)
