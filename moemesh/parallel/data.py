"""Data parallelism: gradients summed over their axis, in buckets, while the backward still runs.

One reducer serves the three parameter classes of `placement.py`, each with its own axis (dp_cp,
stage, edp). torch's DistributedDataParallel knows one process group per module, divides by its
size and sees neither deferred weight gradients nor fp32 sums of bf16 gradients (docs/log.md has the
reasons). Gradients accumulate in fp32 (float64 for float64 parameters) in flat buckets; when the
last microbatch has filled a bucket, its all-reduce starts, always in the order of the list, which
is the same on every rank. What two pipeline ranks hold both (axis ``mirror``) is summed over the
pair at the end: two operands, so that both get the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moemesh.comm.collectives import all_reduce_
from moemesh.comm.mesh import Mesh
from moemesh.comm.transfers import all_reduce_in_tree_
from moemesh.parallel.placement import Placement

#: Bytes of one bucket: large enough for bandwidth, small enough to start early.
BUCKET_BYTES = 25 << 20


@dataclass
class _Bucket:
    axis: str
    dtype: torch.dtype
    mirrored: bool
    members: list[tuple[str, nn.Parameter]] = field(default_factory=list)
    flat: Tensor = field(default_factory=lambda: torch.empty(0))
    waiting: int = 0
    work: dist.Work | None = None
    launched: bool = False

    @property
    def num_elements(self) -> int:
        return sum(parameter.numel() for _, parameter in self.members)


class GradientReducer:
    """Owns the gradients of all parameters. One step::

    reducer.begin()
    for each microbatch: (if it is the last: reducer.arm(parameters)); loss.backward()
    reducer.finish()            # sums are complete
    reducer.gradients[name]     # views of the buckets, the shape of the local parameter
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, nn.Parameter, Placement]],
        mesh: Mesh,
        bucket_bytes: int = BUCKET_BYTES,
        *,
        exact: bool = False,
    ) -> None:
        self.mesh = mesh
        self._exact = exact
        self.gradients: dict[str, Tensor] = {}
        #: Parameters whose next gradient is their last of this step.
        self._armed: set[nn.Parameter] = set()
        self._buckets: list[_Bucket] = []
        self._home: dict[nn.Parameter, tuple[_Bucket, Tensor]] = {}
        # Reversed: the backward reaches the last layers first.
        open_buckets: dict[tuple[str, torch.dtype, bool], _Bucket] = {}
        for name, parameter, placement in reversed(parameters):
            dtype = torch.promote_types(parameter.dtype, torch.float32)
            key = (placement.summed_over, dtype, len(placement.holders) > 1)
            bucket = open_buckets.get(key)
            if bucket is None or bucket.num_elements * dtype.itemsize >= bucket_bytes:
                bucket = open_buckets[key] = _Bucket(*key)
                self._buckets.append(bucket)
            bucket.members.append((name, parameter))
        order = {parameter: place for place, (_, parameter, _) in enumerate(reversed(parameters))}
        self._buckets.sort(key=lambda bucket: order[bucket.members[-1][1]])
        for bucket in self._buckets:
            self._allocate(bucket)

    def _allocate(self, bucket: _Bucket) -> None:
        device = bucket.members[0][1].device
        bucket.flat = torch.zeros(bucket.num_elements, dtype=bucket.dtype, device=device)
        parts = bucket.flat.split([parameter.numel() for _, parameter in bucket.members])
        for (name, parameter), part in zip(bucket.members, parts, strict=True):
            self.gradients[name] = part.view(parameter.shape)
            self._home[parameter] = (bucket, self.gradients[name])
            parameter.grad_dtype = bucket.dtype
            parameter.register_post_accumulate_grad_hook(self._take)

    def _take(self, parameter: nn.Parameter) -> None:
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None:  # else it is deferred, and comes by another way
            self.accumulate(parameter, gradient)

    @torch.no_grad()
    def accumulate(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Add one microbatch's gradient; deferred weight gradients come here directly."""
        bucket, total = self._home[parameter]
        total += gradient
        if parameter in self._armed:
            self._armed.remove(parameter)
            bucket.waiting -= 1
            self._launch(only_full=True)

    def begin(self) -> None:
        """Forget the last step's gradients."""
        for bucket in self._buckets:
            bucket.flat.zero_()
            bucket.work, bucket.launched = None, False
            bucket.waiting = len(bucket.members)
        self._armed.clear()

    def arm(self, parameters: Iterable[nn.Parameter]) -> None:
        """The next gradient of each of these is its last of this step: buckets may start."""
        self._armed.update(parameters)

    def complete(self, parameters: Iterable[nn.Parameter]) -> None:
        """These have had their last gradient of this step."""
        for parameter in parameters:
            self._home[parameter][0].waiting -= 1
        self._launch(only_full=True)

    def finish(self) -> None:
        """Start what has not started (a missing gradient counts as zero), wait for all."""
        self._launch(only_full=False)
        for bucket in self._buckets:
            if bucket.work is not None:
                bucket.work.wait()
        for bucket in self._buckets:
            if bucket.mirrored:
                all_reduce_(bucket.flat, self.mesh["mirror"], caller="gradients", phase="backward")
        self._armed.clear()

    def _launch(self, *, only_full: bool) -> None:
        for bucket in self._buckets:
            if bucket.launched:
                continue
            if only_full and bucket.waiting > 0:
                return  # never out of order: every rank issues the same sequence
            bucket.launched = True
            if self._exact and bucket.axis == "edp":
                # Replicas' parts continue the tree in which the experts added their owners' parts.
                all_reduce_in_tree_(
                    bucket.flat, self.mesh["edp"], phase="backward", caller="gradients"
                )
                continue
            bucket.work = all_reduce_(
                bucket.flat,
                self.mesh[bucket.axis],
                caller="gradients",
                phase="backward",
                async_op=True,
            )
