"""Weights that are gathered before their use and freed after it: the buckets of zero3."""

from __future__ import annotations

from torch import Tensor, nn

from moemesh.comm.transfers import all_gather_start
from moemesh.parallel.data.buckets import ScatteredBucket, Wait


class GatheredBucket(ScatteredBucket):
    """Weights are sharded, too: all of them are here only from :meth:`gather` to :meth:`free`.

    Parameters stay views of one flat vector, whose memory comes and goes: what autograd has saved
    of them finds it again in the backward.
    """

    def allocate(self) -> None:
        super().allocate()
        self._own_weights = self.weights[self.own.start : self.own.stop]
        self._bytes = self.weights.untyped_storage().nbytes()
        #: Uses at this moment; the gather that has started and was not waited for.
        self.users, self._arriving = 0, None
        self.is_here = self.axis.size == 1
        if not self.is_here:
            self._own_weights = self._own_weights.clone()
            self._release()

    def _clear(self) -> None:
        super()._clear()
        #: Gradients as they came: the vector of all is made when it is sent, behind the sums of the
        #: unit before. Two such vectors at once would be more memory than a rank's share.
        self._waiting_gradients: dict[nn.Parameter, Tensor] = {}

    def add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        if self.axis.size == 1:
            super().add(parameter, gradient)
            return
        before = self._waiting_gradients.get(parameter)
        self._waiting_gradients[parameter] = (
            gradient if before is None else before.to(self.dtype) + gradient
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

    @property
    def kept_weights(self) -> range:
        return self.own

    def publish(self) -> Wait | None:
        return None

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the weights that are here beside the own share."""
        return self.weights.untyped_storage().nbytes() if self.axis.size > 1 else 0

    def start_gather(self, phase: str) -> None:
        """Start to gather the weights, unless they are here or on their way."""
        if self.is_here or self._arriving is not None:
            return
        self.weights.untyped_storage().resize_(self._bytes)
        self._arriving = all_gather_start(
            self._own_weights,
            self.axis,
            self.sizes,
            into=self.weights,
            phase=phase,
            caller="weights",
        )

    def gather(self, phase: str) -> None:
        """One more use of the weights begins: they are here when this returns."""
        self.start_gather(phase)
        self.users += 1
        if self._arriving is not None:
            self._arriving()
            self._arriving, self.is_here = None, True

    def free(self, *, keep: bool = False) -> None:
        """A use ends; `keep`: the weights stay for others to come."""
        self.users -= 1
        if not keep:
            self.free_unused()

    def free_unused(self) -> None:
        """Give the memory back if nobody uses the weights; a rank alone keeps them."""
        if self.users == 0 and self._arriving is not None:
            self._arriving()
            self._arriving, self.is_here = None, True
        if self.users == 0 and self.is_here and self.axis.size > 1:
            self._release()

    def _release(self) -> None:
        self.weights.untyped_storage().resize_(0)
        self.is_here = False
