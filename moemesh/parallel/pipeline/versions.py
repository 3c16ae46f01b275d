"""Weight versions of one stage: a master that the optimizer steps, and the copies still in use.

Version 0 is the weights at the start; every update makes the next one. The update rule
determines which version an operation uses (table and papers: :mod:`moemesh.schedule.versions`).

The newest version is the memory of the master, not a copy. An update copies it first if a user of
it remains, so that the number of copies in memory, master included, never exceeds the table.
Buffers that change the forward (a router's selection bias) are versioned like weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import ReferenceType

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from moemesh.parallel.data.reducer import call_after_gradients
from moemesh.schedule.action import UpdateRule

#: Receiver of gradients: (the master's parameter, a gradient of one of its versions).
Collect = Callable[[nn.Parameter, Tensor], None]


@dataclass
class _Copy:
    """One version: leaf tensors by name, and the number of forwards with a pending backward."""

    tensors: dict[str, Tensor]
    users: int = 0


class WeightVersions:
    """The versions of the parameters and buffers of `module`, from now on.

    Gradients of every version go to `collect`; ``renew()`` copies the parameters to new memory, and
    leaves the old memory to older versions. `in_place` (only under the rule ``newest``) keeps one
    version in one place: weights saved by a forward change with it, and its backward reads the
    weights of its own time.
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
        #: Most updates between a forward and the use of its gradient; most copies alive.
        self.lag, self.most_copies = 0, 1
        self._in_place, self._collect, self._renew = in_place, collect, renew
        self._slots: list[tuple[dict[str, Tensor | None], str, str]] = []
        self._own: dict[str, Tensor] = {}
        for prefix, owner in module.named_modules():
            for slots in (owner._parameters, owner._buffers):
                for leaf, tensor in slots.items():
                    if tensor is not None:
                        name = f"{prefix}.{leaf}"
                        self._slots.append((slots, leaf, name))
                        self._own[name] = tensor
        # Weak, not by version: a deferred weight gradient may come when its version is gone.
        self._originals = WeakTensorKeyDictionary()
        self._copies = {0: self._snapshot()}

    def take(self, microbatch: int) -> int:
        """The version for the forward of `microbatch`; it stays until :meth:`release`.

        Under the rule ``newest`` it is not kept: old versions are never used.
        """
        version = self.newest
        if self.rule.kind == "two_versions":
            version = max(microbatch // self.rule.window - 1, 0)
        assert version in self._copies, (
            f"microbatch {microbatch} needs version {version}, there are {sorted(self._copies)}"
        )
        if self.rule.kind != "newest":
            self._copies[version].users += 1
        return version

    def release(self, version: int) -> None:
        """The backward of a forward on `version` has run."""
        self.lag = max(self.lag, self.newest - version)
        if self.rule.kind != "newest":
            self._copies[version].users -= 1
            self._drop_unused()

    @contextmanager
    def using(self, version: int) -> Iterator[None]:
        """Inside, the module has the weights of `version`. For backwards, too: a layer that is
        recomputed there must find the weights of its forward."""
        tensors = self._copies[version].tensors
        for slots, leaf, name in self._slots:
            slots[leaf] = tensors[name]
        try:
            yield
        finally:
            for slots, leaf, name in self._slots:
                slots[leaf] = self._own[name]

    def update(self, step: Callable[[], None]) -> None:
        """Let `step` change the module's own parameters and buffers: they are the next version."""
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
        users = {version: copy.users for version, copy in self._copies.items() if copy.users}
        assert not users, f"versions still in use: {users}"
        self._copies = {self.newest: self._copies[self.newest]}

    @property
    def most_bytes(self) -> int:
        """Peak bytes of copies besides the newest version."""
        one = sum(tensor.numel() * tensor.element_size() for tensor in self._own.values())
        return (self.most_copies - 1) * one

    def original(self, weight: Tensor) -> nn.Parameter:
        """The master's parameter of which `weight` is a version."""
        return self._originals[weight]

    def _is_needed(self, version: int) -> bool:
        # Under two versions, forwards of this window that are yet to come need the one before.
        kept = 2 if self.rule.kind == "two_versions" else 1
        return self._copies[version].users > 0 or version > self.newest - kept

    def _drop_unused(self) -> None:
        for version in [v for v in self._copies if not self._is_needed(v)]:
            del self._copies[version]

    def _snapshot(self) -> _Copy:
        """The master's memory as leaf tensors of their own, with their own version counters."""
        found: dict[str, Tensor] = {}
        for name, own in self._own.items():
            leaf = found[name] = own.data
            if isinstance(own, nn.Parameter):
                leaf.requires_grad_()
                leaf.grad_dtype = own.grad_dtype
                call_after_gradients(leaf, self, self._take)
                self._originals[leaf] = own
        return _Copy(found)

    @staticmethod
    def _take(owner: ReferenceType[WeightVersions], leaf: Tensor) -> None:
        if (self := owner()) is not None and leaf.grad is not None:
            gradient, leaf.grad = leaf.grad, None
            self._collect(self._originals[leaf], gradient)
