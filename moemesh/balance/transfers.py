"""Transfers of replicas, in rounds in which every GPU exchanges with one peer at most."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple


class ReplicaTransfer(NamedTuple):
    """The weights of `expert` go from one slot (of the old placement) to another (of the new one).

    Slots are numbered over all GPUs. What a GPU receives has to be kept beside its old replicas
    until the last round: a slot may be a source after it became a target.
    """

    expert: int
    source_gpu: int
    target_gpu: int
    source_slot: int
    target_slot: int


Rounds = tuple[tuple[ReplicaTransfer, ...], ...]


def schedule_transfers(
    previous: Sequence[int], slots: Sequence[int], num_gpus: int, num_nodes: int = 1
) -> Rounds:
    """Rounds of transfers that turn the placement `previous` of one layer into `slots`.

    The source is on the target's node where there is one, then the GPU that sends least so far. In
    a round a GPU has one peer, sends it at most one replica and receives at most one from it.
    """
    waiting = _choose_sources(list(previous), list(slots), num_gpus, num_nodes)
    rounds: list[tuple[ReplicaTransfer, ...]] = []
    while waiting:
        # Longest queues first, so that few rounds are needed: each GPU's queue is its degree.
        degree: Counter[int] = Counter()
        for (low, high), transfers in waiting.items():
            # A pair needs as many rounds as the longer of its two directions.
            upwards = sum(transfer.source_gpu == low for transfer in transfers)
            rounds_needed = max(upwards, len(transfers) - upwards)
            degree[low] += rounds_needed
            degree[high] += rounds_needed
        order = sorted(
            waiting,
            key=lambda pair: (
                -max(degree[pair[0]], degree[pair[1]]),
                -min(degree[pair[0]], degree[pair[1]]),
                pair,
            ),
        )
        busy: set[int] = set()
        chosen: list[ReplicaTransfer] = []
        for pair in order:
            if busy.isdisjoint(pair):
                busy.update(pair)
                for source in pair:  # one transfer of each direction
                    queue = waiting[pair]
                    first = next((one for one in queue if one.source_gpu == source), None)
                    if first is not None:
                        chosen.append(first)
                        queue.remove(first)
                if not waiting[pair]:
                    del waiting[pair]
        rounds.append(tuple(chosen))
    return tuple(rounds)


def _choose_sources(
    previous: list[int], slots: list[int], num_gpus: int, num_nodes: int
) -> dict[tuple[int, int], list[ReplicaTransfer]]:
    """Transfers by their pair of GPUs (the lower number first)."""
    per_gpu = len(slots) // num_gpus
    node_gpus = num_gpus // num_nodes
    holders: defaultdict[int, list[int]] = defaultdict(list)
    for slot, expert in enumerate(previous):
        holders[expert].append(slot)
    sent: Counter[int] = Counter()
    found: defaultdict[tuple[int, int], list[ReplicaTransfer]] = defaultdict(list)
    for gpu in range(num_gpus):
        own = range(gpu * per_gpu, (gpu + 1) * per_gpu)
        stays = Counter(previous[slot] for slot in own if previous[slot] == slots[slot])
        held = Counter(previous[slot] for slot in own) - stays
        for slot in own:
            expert = slots[slot]
            if expert == previous[slot]:
                continue
            if held[expert]:  # only another slot of the same GPU: nothing travels
                held[expert] -= 1
                continue
            source_slot = min(
                holders[expert],
                key=lambda at: (
                    at // per_gpu // node_gpus != gpu // node_gpus,
                    sent[at // per_gpu],
                    at,
                ),
            )
            source = source_slot // per_gpu
            if source == gpu:  # a second copy on the same GPU
                continue
            sent[source] += 1
            transfer = ReplicaTransfer(expert, source, gpu, source_slot, slot)
            found[min(source, gpu), max(source, gpu)].append(transfer)
    return dict(found)
