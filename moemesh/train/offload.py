"""Gradients in host memory, for an optimizer with states in host memory.

ZeRO-Offload (Ren et al., 2021, arXiv:2101.06840). The order of a step on an accelerator:

1. The gradients of a bucket are copied to the host when their sum over ranks is complete. For
   buckets that are summed once a step this happens while the backward is running.
2. The device computes the norm. The host waits for the copies, clips them and steps the optimizer.
3. The updated weights are copied back in their own dtype.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from moemesh.monitor import progress
from moemesh.parallel.data.buckets import ReplicatedBucket
from moemesh.parallel.data.reducer import GradientReducer


class HostGradients:
    """The gradients that a rank owns, in page-locked memory of its host. After the update the same
    memory holds the rounded weights for their copy to the device."""

    def __init__(self, reducer: GradientReducer) -> None:
        #: The page-locked memory of each bucket, and views of it by name of the parameter.
        self._flat: dict[ReplicatedBucket, Tensor] = {}
        self._tensors: dict[str, Tensor] = {}
        for bucket in reducer.buckets:
            sums, gradients = bucket.own_sums(), bucket.own_gradients()
            flat = torch.empty(sums.numel(), dtype=sums.dtype, pin_memory=True)
            self._flat[bucket] = flat
            for name, place in bucket.own_places().items():
                self._tensors[name] = flat[place].view(gradients[name].shape)
        self._device = reducer.mesh.device
        self._stream = torch.cuda.Stream(self._device)
        #: Whether copies of weights from this memory to the device may be pending.
        self._is_sending = False
        reducer.on_complete = self._copy

    @property
    def num_bytes(self) -> int:
        """Size of the memory in bytes."""
        return sum(flat.nbytes for flat in self._flat.values())

    def _copy(self, bucket: ReplicatedBucket) -> None:
        """Start the copy of complete gradients, after all that is queued on the device."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._flat[bucket].copy_(bucket.own_sums(), non_blocking=True)

    def wait(self) -> Mapping[str, Tensor]:
        """The gradients by name; waits for their copies."""
        progress.waiting_for_device()
        self._stream.synchronize()
        progress.left()
        self._is_sending = False  # these copies began after those of the previous step's weights
        return self._tensors

    @torch.no_grad()
    def send(self, masters: Mapping[str, Tensor], weights: Mapping[str, nn.Parameter]) -> None:
        """Start to copy the masters, rounded, into the weights on the device."""
        if self._is_sending:  # the device may still read the memory
            torch.cuda.current_stream(self._device).synchronize()
        self._is_sending = True
        for name, weight in weights.items():
            # The memory of the gradient, as wide as a weight or wider, holds the rounded weight.
            memory = self._tensors[name].view(-1).view(weight.dtype)
            rounded = memory[: weight.numel()].view(weight.shape)
            rounded.copy_(masters[name])
            weight.copy_(rounded, non_blocking=True)
