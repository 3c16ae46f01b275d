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
from moemesh.config.buckets import BUCKET_BYTES, Bucket, Member, buckets
from moemesh.parallel.placement import Placement


@dataclass
class _Bucket:
    rule: Bucket
    members: list[tuple[str, nn.Parameter]]
    flat: Tensor = field(default_factory=lambda: torch.empty(0))
    waiting: int = 0
    work: dist.Work | None = None
    launched: bool = False


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
        self._home: dict[nn.Parameter, tuple[_Bucket, Tensor]] = {}
        members = [
            Member(
                name=name,
                numbers=parameter.numel(),
                weight_bytes=parameter.element_size(),
                axis=placement.summed_over,
                mirrored=len(placement.holders) > 1,
            )
            for name, parameter, placement in parameters
        ]
        named = {name: parameter for name, parameter, _ in parameters}
        self._buckets = [
            _Bucket(bucket, [(member.name, named[member.name]) for member in bucket.members])
            for bucket in buckets(members, "replicate", bucket_bytes)
        ]
        for bucket in self._buckets:
            self._allocate(bucket)

    def _allocate(self, bucket: _Bucket) -> None:
        first = bucket.members[0][1]
        dtype = torch.promote_types(first.dtype, torch.float32)
        bucket.flat = torch.zeros(bucket.rule.numbers, dtype=dtype, device=first.device)
        parts = bucket.flat.split([parameter.numel() for _, parameter in bucket.members])
        for (name, parameter), part in zip(bucket.members, parts, strict=True):
            self.gradients[name] = part.view(parameter.shape)
            self._home[parameter] = (bucket, self.gradients[name])
            parameter.grad_dtype = dtype
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
            if bucket.rule.mirrored:
                all_reduce_(bucket.flat, self.mesh["mirror"], caller="gradients", phase="backward")
        self._armed.clear()

    def _launch(self, *, only_full: bool) -> None:
        for bucket in self._buckets:
            if bucket.launched:
                continue
            if only_full and bucket.waiting > 0:
                return  # never out of order: every rank issues the same sequence
            bucket.launched = True
            if self._exact and bucket.rule.axis == "edp":
                # Replicas' parts continue the tree in which the experts added their owners' parts.
                all_reduce_in_tree_(
                    bucket.flat, self.mesh["edp"], phase="backward", caller="gradients"
                )
                continue
            bucket.work = all_reduce_(
                bucket.flat,
                self.mesh[bucket.rule.axis],
                caller="gradients",
                phase="backward",
                async_op=True,
            )
