"""Any state as shards and values: nested dicts and lists with tensors, whole or sharded, at leaves.

A leaf is named by its path, keys joined by "/": ``model/layers.0.weight``, ``optimizer/state/3/
exp_avg``. An integer key (and a place in a list) begins with "#", so that it comes back as one.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from moemesh.checkpoint.files import CheckpointError
from moemesh.checkpoint.store import Gather, Shard


class Sharded(NamedTuple):
    """This rank's part ``offset .. offset + tensor.shape`` of a tensor of global `shape`."""

    tensor: Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]


def flatten(tree: Any) -> dict[str, Any]:
    """Path -> tensor, Sharded, or a value of JSON; empty containers are values."""
    return dict(_leaves(tree, ""))


def _leaves(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(node, Sharded):
        yield path, node
        return
    children: Sequence[tuple[Any, Any]] = ()
    if isinstance(node, Mapping):
        children = list(cast("Mapping[Any, Any]", node).items())
    elif isinstance(node, (list, tuple)):
        children = list(enumerate(cast("Sequence[Any]", node)))
    elif not isinstance(node, (Tensor, bool, int, float, str, type(None))):
        raise CheckpointError(
            f"{path or 'the state'}: {type(node).__name__} cannot be saved; it takes tensors, "
            "numbers, texts, None, and dicts and lists of them"
        )
    if not children:
        yield path, [] if isinstance(node, tuple) else node
    for key, child in children:
        yield from _leaves(child, f"{path}/{_word(key, path)}" if path else _word(key, path))


def _word(key: object, path: str) -> str:
    if isinstance(key, int) and not isinstance(key, bool):
        return f"#{key}"
    if not isinstance(key, str) or not key or "/" in key or key.startswith("#"):
        raise CheckpointError(
            f"{path or 'the state'}: the key {key!r} cannot be saved; keys are integers, or texts "
            'without "/" that do not begin with "#"'
        )
    return key


def unflatten(leaves: Mapping[str, Any]) -> Any:
    """The inverse of :func:`flatten`; tuples come back as lists."""
    if list(leaves) == [""]:
        return leaves[""]
    root: dict[Any, Any] = {}
    for path, value in leaves.items():
        node, words = root, path.split("/")
        for word in words[:-1]:
            node = node.setdefault(word, {})
        node[words[-1]] = value
    return _typed(root)


def _typed(node: Any) -> Any:
    if not isinstance(node, dict) or not node:
        return node
    found = {
        int(word[1:]) if word.startswith("#") else word: _typed(child)
        for word, child in cast("dict[str, Any]", node).items()
    }
    return found


def shard_of(name: str, leaf: Any) -> Shard:
    """A tensor leaf: whole, a DTensor's part, or a part as it says. Shares its memory."""
    if isinstance(leaf, Sharded):
        return Shard(name=name, shape=leaf.shape, offset=leaf.offset, tensor=leaf.tensor.detach())
    leaf = leaf.detach()
    if hasattr(leaf, "device_mesh"):
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        if any(placement.is_partial() for placement in leaf.placements):
            raise CheckpointError(f"{name}: a DTensor with partial sums cannot be saved: reduce it")
        size, offset = compute_local_shape_and_global_offset(
            leaf.shape, leaf.device_mesh, leaf.placements
        )
        local = leaf.to_local()
        assert tuple(size) == tuple(local.shape), f"{name}: {size} is not {local.shape}"
        return Shard(name=name, shape=tuple(leaf.shape), offset=tuple(offset), tensor=local)
    return Shard(name=name, shape=tuple(leaf.shape), offset=(0,) * leaf.ndim, tensor=leaf)


def own_shards(
    shards: Sequence[Shard], rank: int, gather: Gather, *, check_replicas: bool
) -> list[Shard]:
    """Of equal parts on several ranks, those that this rank saves: the lowest one that holds them.

    Raises CheckpointError on every rank where such parts differ.
    """
    mine = {_place(shard): shard for shard in shards if shard.tensor.numel()}
    everyone = [{tuple(map(_hashable, place)) for place in held} for held in gather(list(mine))]
    holders = {place: [r for r, held in enumerate(everyone) if place in held] for place in mine}
    if check_replicas:
        shared = [shard for place, shard in mine.items() if len(holders[place]) > 1]
        said = gather([[shard.name, *shard.offset, _digest(shard.tensor)] for shard in shared])
        known: dict[tuple[Any, ...], tuple[int, str]] = {}
        for other, digests in enumerate(said):
            for *place, digest in digests:
                first, expected = known.setdefault(tuple(place), (other, digest))
                if digest != expected:
                    raise CheckpointError(
                        f"{place[0]} differs between ranks {first} and {other}: give a DTensor or "
                        "moemesh.Sharded for a part, a name of its own for what belongs to one "
                        "rank, or check_replicas=False to save that of the lowest rank"
                    )
    empty = [shard for shard in shards if not shard.tensor.numel()]
    return empty + [shard for place, shard in mine.items() if holders[place][0] == rank]


def _place(shard: Shard) -> tuple[Any, ...]:
    return shard.name, shard.offset, tuple(shard.tensor.shape)


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _digest(tensor: Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().clone().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(memoryview(flat.numpy()), digest_size=16).hexdigest()


def merged_values(values: Mapping[str, Any], gather: Gather) -> dict[str, Any]:
    """The values of all ranks by path; the lowest rank that has one decides."""
    merged: dict[str, Any] = {}
    for theirs in reversed(gather(_finite(values))):
        merged |= theirs
    return merged


def _finite(values: Mapping[str, Any]) -> dict[str, Any]:
    for path, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise CheckpointError(f"{path} is {value}: save it as a tensor")
    return dict(values)
