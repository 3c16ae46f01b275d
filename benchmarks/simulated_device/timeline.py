"""Timeline of simulated devices: starts and ends of their operations, from a data sheet.

Each rank has one stream for kernels, which run in order, and each group of ranks one for its
exchanges. An exchange starts when all its ranks have computed what they queued before it and the
one before it in its group has ended; what a rank queues behind an arrival starts when the exchange
has ended. The host is taken to be always ahead: its waits are counted, and cost nothing here.

| of | seconds |
|---|---|
| a kernel | max(operations / peak, bytes / memory bandwidth) + a launch |
| an exchange | bytes / bandwidth + latency, of the link inside a node or between nodes |
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from benchmarks.simulated_device.counts import Exchange, Kernel, Queued
from moemesh.config.cluster import Cluster

#: Seconds between two small kernels that a host queues one after the other.
LAUNCH_SECONDS = 4e-6


class Transfer(NamedTuple):
    """One exchange, from its start to its end."""

    name: str
    caller: str
    start: float
    end: float


@dataclass
class RankTimeline:
    """One rank. `seconds`: when its last kernel ends; `computing`: of them in kernels; `stalls`:
    from when to when its kernels waited for an exchange, in order."""

    seconds: float = 0.0
    computing: float = 0.0
    transfers: list[Transfer] = field(default_factory=list)
    stalls: list[tuple[float, float]] = field(default_factory=list)

    def of(self, *callers: str) -> list[Transfer]:
        """The transfers whose caller starts with one of these; without any, all."""
        return [one for one in self.transfers if one.caller.startswith(callers or "")]

    def transferring(self, *callers: str) -> float:
        """Seconds in which such a transfer is under way, whatever runs beside it."""
        return sum(stop - start for start, stop in _union(self.of(*callers)))

    def exposed(self, *callers: str) -> float:
        """Seconds of such transfers in which this rank computes nothing. What it stalls beyond all
        of them it waits for another rank."""
        return sum(
            max(0.0, min(stop, until) - max(start, since))
            for start, stop in _union(self.of(*callers))
            for since, until in self.stalls
        )

    @property
    def late(self) -> float:
        """Seconds for which this rank waited for others to come to an exchange."""
        return sum(stop - start for start, stop in self.stalls) - self.exposed()


def _union(transfers: Iterable[Transfer]) -> list[tuple[float, float]]:
    """From when to when any of these is under way, in order."""
    found: list[tuple[float, float]] = []
    for start, stop in sorted((one.start, one.end) for one in transfers):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], stop)
        else:
            found.append((start, stop))
    return found


def kernel_seconds(kernel: Kernel, machine: Cluster, launch: float = LAUNCH_SECONDS) -> float:
    """The least time of a kernel on a device of `machine`, with its launch."""
    dtype = str(kernel.dtype).removeprefix("torch.")
    peak = machine.peak_flops.get(dtype, max(machine.peak_flops.values()))
    return max(kernel.flops / peak, kernel.bytes / machine.memory_bandwidth) + launch


def exchange_seconds(exchange: Exchange, machine: Cluster) -> float:
    """The time of an exchange: ranks fill nodes in their order, the slowest link counts."""
    nodes = {rank // machine.gpus_per_node for rank in exchange.ranks}
    if len(nodes) == 1:
        return exchange.bytes / machine.intra_node_bandwidth + machine.intra_node_latency
    return exchange.bytes / machine.inter_node_bandwidth + machine.inter_node_latency


class _Meeting:
    """An exchange that some of its ranks have come to."""

    def __init__(self) -> None:
        self.issued: dict[int, float] = {}
        self.cost = 0.0
        self.end: float | None = None


def simulate(
    queues: Sequence[Iterable[Queued]],
    machine: Cluster,
    *,
    launch: float = LAUNCH_SECONDS,
) -> list[RankTimeline]:
    """The timelines of all ranks of a run, from what each queued (:attr:`Totals.queued`).

    An exchange that started before the queues begin counts as ended. Raises ValueError where ranks
    wait for each other for ever.
    """
    work = [list(queue) for queue in queues]
    found = [RankTimeline() for _ in work]
    places = [0] * len(work)
    meetings: dict[tuple[str, int], _Meeting] = {}
    #: By rank: exchanges that it has started and not waited for.
    under_way: list[dict[tuple[str, int], Exchange]] = [{} for _ in work]
    free: dict[str, float] = {}

    def come(rank: int, exchange: Exchange) -> None:
        key = exchange.stream, exchange.number
        under_way[rank][key] = exchange
        meeting = meetings.setdefault(key, _Meeting())
        meeting.issued[rank] = found[rank].seconds
        # Splits differ between ranks: the one with most to move keeps the others.
        meeting.cost = max(meeting.cost, exchange_seconds(exchange, machine))
        if len(meeting.issued) == len(exchange.ranks):
            start = max(*meeting.issued.values(), free.get(exchange.stream, 0.0))
            meeting.end = free[exchange.stream] = start + meeting.cost
            for one in meeting.issued:
                found[one].transfers.append(
                    Transfer(exchange.name, exchange.caller, start, meeting.end)
                )

    def advance(rank: int) -> bool:
        """Do the next thing of a rank; whether it could be done."""
        one, own = work[rank][places[rank]], found[rank]
        if isinstance(one, Kernel):
            seconds = kernel_seconds(one, machine, launch)
            own.seconds += seconds
            own.computing += seconds
        elif isinstance(one, Exchange):
            come(rank, one)
        elif one in under_way[rank]:
            end = meetings[one].end
            if end is None:
                return False
            del under_way[rank][one]
            if end > own.seconds:
                own.stalls.append((own.seconds, end))
                own.seconds = end
        places[rank] += 1
        return True

    while open_ := [rank for rank, queue in enumerate(work) if places[rank] < len(queue)]:
        # Whoever is behind goes on first, so that streams fill in the order of time.
        if not any(advance(rank) for rank in sorted(open_, key=lambda rank: found[rank].seconds)):
            waiting = {rank: work[rank][places[rank]] for rank in open_}
            raise ValueError(f"these ranks wait for each other: {waiting}")
    return found
