"""Operations given to the simulated device, in order and by region, each with its line."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moemesh.ops import host_copy

#: Files and folders that are never the cause of a wait: their callers are.
_PASSED_OVER = (
    str(Path(torch.__file__).parent),
    str(Path(__file__).parent),
    host_copy.__file__,
    contextlib.__file__,
    "<",
)


class Kernel(NamedTuple):
    """One operation: its name in ATen, floating-point operations, bytes, the dtype it computes in,
    and the line of Python that launched it."""

    name: str
    flops: int
    bytes: int
    dtype: torch.dtype
    line: str


class Wait(NamedTuple):
    """Why the host waited, and the line of Python that made it."""

    why: str
    line: str


class Exchange(NamedTuple):
    """A collective or message that starts once what is queued in front of it has been computed.

    `bytes` leave this rank or reach it, whichever is more. `stream` and `number` are the same on
    all `ranks` that take part; exchanges of one stream follow one another."""

    name: str
    caller: str
    bytes: int
    ranks: tuple[int, ...]
    stream: str
    number: int


class Arrival(NamedTuple):
    """What is queued from here on waits for the end of this exchange."""

    stream: str
    number: int


Queued = Kernel | Exchange | Arrival


@dataclass
class Totals:
    """Of one region: what was queued on the device, in order, and where the host waited for it."""

    queued: list[Queued] = field(default_factory=list)
    waited: list[Wait] = field(default_factory=list)

    @property
    def launched(self) -> list[Kernel]:
        return [one for one in self.queued if isinstance(one, Kernel)]

    @property
    def kernels(self) -> int:
        return len(self.launched)

    @property
    def bytes(self) -> int:
        return sum(kernel.bytes for kernel in self.launched)

    @property
    def waits(self) -> int:
        return len(self.waited)


class Counts:
    """Totals by region, and the region that is counted in now."""

    def __init__(self) -> None:
        self.regions: dict[str, Totals] = {}
        self._region = ""
        #: Within what is compiled, whose operations are no kernels of their own.
        self.is_inside = False
        #: Ranks share the device: no backend moves its tensors.
        self.is_shared = False

    @contextmanager
    def region(self, name: str) -> Generator[Totals]:
        """Count under this name until the end; regions of one name add up."""
        before, self._region = self._region, name
        try:
            yield self.totals(name)
        finally:
            self._region = before

    def totals(self, name: str) -> Totals:
        """What was counted in the regions of this name."""
        return self.regions.setdefault(name, Totals())

    @property
    def here(self) -> Totals:
        """The region that is counted in now."""
        return self.totals(self._region)

    def queue(self, one: Queued) -> None:
        """Enter work of the device."""
        self.here.queued.append(one)

    def wait(self, why: str) -> None:
        """Count a wait that the calling line causes."""
        self.here.waited.append(Wait(why, line()))


#: The device that is on, in whatever thread of the process.
current: list[Counts] = []


def count_wait(why: str) -> None:
    """Count a wait of the device that is on, if one is."""
    if current:
        current[-1].wait(why)


def tensors_of(tree: Any) -> Iterable[Tensor]:
    """The tensors of nested tuples, lists and dicts."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        yield from tensors_of(list(tree.values()))
    elif isinstance(tree, (list, tuple)):
        for one in tree:
            yield from tensors_of(one)


def bytes_of(x: Tensor) -> int:
    """Of the numbers that are there: an expanded dim repeats them."""
    sizes = [size for size, step in zip(x.shape, x.stride(), strict=True) if step or size == 0]
    return math.prod(sizes) * x.element_size()


def line() -> str:
    """The innermost line of Python outside of torch and of this package."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_PASSED_OVER):
            return f"{'/'.join(Path(name).parts[-3:])}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"
