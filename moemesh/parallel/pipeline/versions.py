"""Weight versions of one stage: a master that the optimizer steps, and the copies still in use.

Version 0 is the weights at the start; every update makes the next one. The update rule
determines which version an operation uses (table and papers: :mod:`moemesh.schedule.versions`).

The newest version is the memory of the master, not a copy. It is copied before an update only if a
later operation needs it: the number of copies, master included, is at most that of the table.
Buffers that change the forward (a router's selection bias) are versioned like weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from weakref import ReferenceType

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from moemesh.parallel.data.reducer import call_after_gradients
from moemesh.schedule.action import UpdateRule

#: Receiver of gradients: (the master's parameter, a gradient of one of its versions).
Collect = Callable[[nn.Parameter, Tensor], None]


class WeightVersions:
    """The versions of the parameters and buffers of `module`, from the current one.

    Gradients of every version go to `collect`; ``renew()`` copies the parameters to new memory, and
    leaves the old memory to older versions. `in_place` (only under the rule ``newest``) keeps one
    version in one memory: an update changes the weights that a forward has saved, and the backward
    reads the changed weights.
    """

    def __init__(
        self,
        module: nn.Module,
        rule: UpdateRule,
        collect: Collect,
        *,
        renew: Callable[[], None],
        in_place: bool = False,
    ) -> None:
        assert not in_place or rule.kind == "newest"
        self.rule, self.newest = rule, 0
        #: Largest number of updates between a forward and the use of its gradient, and of copies.
        self.lag, self.most_copies = 0, 1
        self._in_place, self._collect, self._renew = in_place, collect, renew
        #: Entries of modules' parameters and buffers: (dict of the module, key, full name).
        self._slots: list[tuple[dict[str, Tensor | None], str, str]] = []
        #: The master's parameters and buffers by full name.
        self._own: dict[str, Tensor] = {}
        for prefix, owner in module.named_modules():
            for slots in (owner._parameters, owner._buffers):
                for leaf, tensor in slots.items():
                    if tensor is not None:
                        name = f"{prefix}.{leaf}"
                        self._slots.append((slots, leaf, name))
                        self._own[name] = tensor
        #: Leaf of a version -> parameter of the master. A deferred weight gradient may need the
        #: entry after the version has been dropped: the entry lives as long as the leaf.
        self._originals = WeakTensorKeyDictionary()
        #: Version -> its leaf tensors by name, and the number of its forwards with a pending
        #: backward.
        self._copies = {0: self._snapshot()}
        self._users = Counter[int]()

    def take(self, microbatch: int) -> int:
        """The version for the forward of `microbatch`; it stays until :meth:`release`.

        Under the rule ``newest`` nothing is kept: backwards use the newest version.
        """
        version = self.newest
        if self.rule.kind == "two_versions":
            version = max(microbatch // self.rule.window - 1, 0)
        assert version in self._copies, (
            f"microbatch {microbatch} needs version {version}, there are {sorted(self._copies)}"
        )
        if self.rule.kind != "newest":
            self._users[version] += 1
        return version

    def release(self, version: int) -> None:
        """End the use of `version` by one microbatch, after its backward."""
        self.lag = max(self.lag, self.newest - version)
        if self.rule.kind != "newest":
            self._users[version] -= 1
            self._drop_unused()

    @contextmanager
    def using(self, version: int) -> Iterator[None]:
        """Context in which the module has the weights of `version`. Backwards need it as well: a
        layer that is recomputed must read the weights of its forward."""
        tensors = self._copies[version]
        for slots, leaf, name in self._slots:
            slots[leaf] = tensors[name]
        try:
            yield
        finally:
            for slots, leaf, name in self._slots:
                slots[leaf] = self._own[name]

    def update(self, step: Callable[[], None]) -> None:
        """Make the next version: `step` changes the module's own parameters and buffers."""
        newest = self._copies[self.newest]
        self.newest += 1
        if self._in_place:
            self._copies = {self.newest: newest}
            step()
            return
        if self._is_needed(self.newest - 1):
            # Tensors saved by forwards keep the old memory.
            self._renew()
            for tensor in self._own.values():
                if not isinstance(tensor, nn.Parameter):
                    tensor.data = tensor.detach().clone()
        step()
        self._copies[self.newest] = self._snapshot()
        self._drop_unused()
        self.most_copies = max(self.most_copies, len(self._copies))

    def close(self) -> None:
        """Drop all versions but the newest, after the last backward."""
        assert not +self._users, f"versions still in use: {+self._users}"
        self._copies = {self.newest: self._copies[self.newest]}

    @property
    def most_bytes(self) -> int:
        """Peak bytes of copies besides the newest version."""
        version_bytes = sum(x.numel() * x.element_size() for x in self._own.values())
        return (self.most_copies - 1) * version_bytes

    def original(self, weight: Tensor) -> nn.Parameter:
        """The master's parameter of which `weight` is a version."""
        return self._originals[weight]

    def _is_needed(self, version: int) -> bool:
        # Under two versions, later forwards of this window use the version before the newest.
        num_usable = 2 if self.rule.kind == "two_versions" else 1
        return self._users[version] > 0 or version > self.newest - num_usable

    def _drop_unused(self) -> None:
        for version in [v for v in self._copies if not self._is_needed(v)]:
            del self._copies[version], self._users[version]

    def _snapshot(self) -> dict[str, Tensor]:
        """New leaf tensors on the master's memory, with version counters of their own."""
        leaves: dict[str, Tensor] = {}
        for name, tensor in self._own.items():
            leaf = leaves[name] = tensor.data
            if isinstance(tensor, nn.Parameter):
                leaf.requires_grad_()
                leaf.grad_dtype = tensor.grad_dtype
                call_after_gradients(leaf, self, self._take)
                self._originals[leaf] = tensor
        return leaves

    @staticmethod
    def _take(owner: ReferenceType[WeightVersions], leaf: Tensor) -> None:
        if (self := owner()) is not None and leaf.grad is not None:
            gradient, leaf.grad = leaf.grad, None
            self._collect(self._originals[leaf], gradient)
