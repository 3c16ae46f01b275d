"""New process groups, also beside a world whose NCCL communicator exists already.

torch makes a group by splitting the communicator of a world that is bound to a device
(``init_process_group(device_id=...)``), and ``ncclCommSplit`` is collective over the whole world.
Two kinds of groups would wait in it for ever: those of gloo, whose members do not call it while the
others do, and those that their members make among themselves. For them the binding is hidden; NCCL
then connects them through the store, at their first use.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from moemesh.watch import progress_words
from moemesh.watch.progress_words import Ticket

# Work of the backend whose waits are shown in the rank's progress word.


class WatchedWork:
    """As the work it wraps; :meth:`wait` says in the progress word what is waited for."""

    def __init__(self, work: Any, ticket: Ticket) -> None:
        self._work, self._ticket = work, ticket

    def wait(self) -> None:
        """Wait for the end of the operation."""
        progress_words.waiting(self._ticket)
        self._work.wait()
        progress_words.left()

    def is_completed(self) -> bool:
        """Whether the operation is over."""
        return self._work.is_completed()


def watched(work: Any, ticket: Ticket | None) -> Any:
    """`work` itself where no progress word is written, or where there is no work."""
    return work if ticket is None or work is None else WatchedWork(work, ticket)


def new_group(
    ranks: Sequence[int],
    *,
    name: str,
    timeout: timedelta | None = None,
    backend: str | None = None,
    is_local: bool = False,
) -> ProcessGroup:
    """The group of the global `ranks`; `backend` None is that of the world.

    All ranks of the world call this in one order; with `is_local` the members alone do.
    """
    world = dist.group.WORLD
    assert world is not None, "groups need a process group of all ranks"
    device = world.bound_device_id
    if is_local or backend == "gloo":
        world.bound_device_id = None
    try:
        return dist.new_group(
            list(ranks),
            timeout=timeout,
            backend=backend,
            use_local_synchronization=is_local,
            group_desc=name,
        )
    finally:
        world.bound_device_id = device
