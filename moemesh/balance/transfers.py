"""Transfers of replicas, in rounds in which every GPU exchanges with at most one peer."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple


class ReplicaTransfer(NamedTuple):
    """Transfer of the weights of `expert` from a slot of the old placement to one of the new. Slots
    are numbered over all GPUs. A GPU must keep received weights separate from its old replicas
    until the last round, because a slot may be a source after it was a target."""

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

    The source is a GPU on the target's node if possible, and then the GPU with the fewest sends so
    far. In a round a GPU has one peer, to which it sends at most one replica and from which it
    receives at most one.
    """
    waiting = _choose_sources(list(previous), list(slots), num_gpus, num_nodes)
    rounds: list[tuple[ReplicaTransfer, ...]] = []
    while waiting:
        # GPUs with the most remaining rounds (their degree) first, so that few rounds are needed.
        degree: Counter[int] = Counter()
        for (low, high), transfers in waiting.items():
            # The longer of a pair's two directions determines its number of rounds.
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
                    first = next(
                        (transfer for transfer in queue if transfer.source_gpu == source), None
                    )
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
    transfers: defaultdict[tuple[int, int], list[ReplicaTransfer]] = defaultdict(list)
    for gpu in range(num_gpus):
        # Number of the GPU's old replicas of each expert: in their slot, and in other slots.
        slots_of_gpu = range(gpu * per_gpu, (gpu + 1) * per_gpu)
        stays = Counter(previous[slot] for slot in slots_of_gpu if previous[slot] == slots[slot])
        held = Counter(previous[slot] for slot in slots_of_gpu) - stays
        for slot in slots_of_gpu:
            expert = slots[slot]
            if expert == previous[slot]:
                continue
            if held[expert]:  # only another slot of the same GPU: no transfer
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
            transfers[min(source, gpu), max(source, gpu)].append(transfer)
    return dict(transfers)
