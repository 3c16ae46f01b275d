"""The checkpoint store: sharded, hashed, committed by one rename, keyed by logical names.

    checkpoints/
      step-1000/                    committed, by its name (object store: by its manifest)
        manifest.json               names, slices, files with sizes and digests, state, own digest
        rank-00007.safetensors      the slices that rank 7 saved
      step-2000.tmp-<id>/           being written: never loaded
      .trash-step-500-<id>/         being deleted: never loaded
      verified.json                 steps that were read back and verified

:mod:`moemesh.checkpoint.saver` writes them; the functions below save and open them with all ranks
of an axis. The store is independent of layouts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from moemesh.checkpoint.digests import hash_bytes
from moemesh.checkpoint.files import CheckpointError
from moemesh.checkpoint.load import Checkpoint, Shard, latest, open_checkpoint
from moemesh.checkpoint.remote import Place
from moemesh.checkpoint.saver import save
from moemesh.comm.collectives import gather_json
from moemesh.comm.mesh import Axis, local_part
from moemesh.config.shown import short_repr


def save_together(
    folder: Place, step: int, shards: Sequence[Shard], state: dict[str, Any], axis: Axis
) -> Place:
    """Write ``folder/step-<step>``: the shards of all ranks of `axis`, and `state` of the lowest
    rank. Raises CheckpointError on every rank when one fails; older checkpoints are unchanged."""
    gather = partial(gather_json, axis=axis)
    return save(folder, step, shards, state, rank=axis.index, world_size=axis.size, gather=gather)


def open_together(
    folder: Place, axis: Axis, step: int | None = None, *, prefer_finite: bool = False
) -> tuple[Checkpoint | None, list[tuple[int, str]]]:
    """Open `step`, whose digests the ranks check in parts; None: the newest that verifies, with
    `prefer_finite` of :func:`moemesh.checkpoint.load.latest`. Returns the checkpoint (None if none
    verifies), and the skipped newer ones as (step, reason), the same on every rank. Raises
    CheckpointError on every rank when one rank cannot open it."""
    chosen, skipped = step, list[tuple[int, str]]()
    if step is None:

        def choose() -> tuple[int | None, list[tuple[int, str]]]:
            newest = latest(folder, lambda *why: skipped.append(why), prefer_finite=prefer_finite)
            return newest.step if newest else None, skipped

        chosen, pairs = first_of(choose, axis)
        skipped = [(number, why) for number, why in pairs]  # JSON has lists
        if chosen is None:
            return None, skipped
    assert chosen is not None
    with on_all(axis):
        checkpoint = open_checkpoint(folder, chosen, verify="sizes")
        if step is not None:  # for the newest, the lowest rank has checked all digests
            checkpoint.verify(axis.index, axis.size)
    return checkpoint, skipped


@contextmanager
def on_all(axis: Axis) -> Iterator[None]:
    """Raises CheckpointError on every rank of `axis` if the block raises on one of them, so that no
    rank waits for it; the block contains no collective. On that rank the exception is the cause."""
    problem, cause = None, None
    try:
        yield
    except Exception as error:
        cause = error
        problem = str(error) if isinstance(error, (CheckpointError, OSError)) else ""
        # TimeoutError() has no text.
        problem = problem or f"{type(error).__name__}: {error}".removesuffix(": ")
    for index, other in enumerate(gather_json(problem, axis)):
        if other and axis.size == 1:
            raise CheckpointError(other) from cause
        if other:  # the supervisor of a run reports the failure of the rank that the facts name
            facts = {"rank": axis.ranks[index]}
            raise CheckpointError(f"rank {index}: {other}", facts) from cause


def first_of(work: Callable[[], Any], axis: Axis) -> Any:
    """The result of ``work()`` of the lowest rank of `axis`, as JSON, on every rank; the other
    ranks run nothing. Raises CheckpointError on every rank if it raises."""
    result = None
    with on_all(axis):
        if axis.index == 0:
            result = work()
    return gather_json(result, axis)[0]


# Nested dicts and lists of a state as named leaves: tensors, parts of tensors, and values.
#
# A leaf is named by its path, keys joined by "/": ``model/layers.0.weight``, ``optimizer/state/3/
# exp_avg``. An integer key (and an index of a list) begins with "#", so that it is restored as an
# integer.

#: Types of leaves that JSON holds; of containers only empty ones are leaves.
_VALUES = (bool, int, float, str, type(None), Mapping, list, tuple)


class Sharded(NamedTuple):
    """This rank's part ``offset .. offset + tensor.shape`` of a tensor of global `shape`."""

    tensor: Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]

    def __repr__(self) -> str:
        return short_repr(self, self._asdict())

    def row(self, place: int) -> Sharded:
        """The part's row `place` (from 0 in the part), as a part of a tensor with one dim less."""
        return Sharded(self.tensor[place], self.shape[1:], self.offset[1:])


def is_tensor(leaf: object) -> bool:
    """Whether a leaf is saved as a tensor, otherwise as a JSON value."""
    return isinstance(leaf, (Tensor, Sharded))


def map_leaves(
    node: Any,
    function: Callable[[str, Any], Any],
    path: str = "",
    on_list: Callable[[str], object] = lambda path: None,
) -> Any:
    """Same containers, with leaves and empty containers replaced by ``function(path, leaf)``.
    `on_list` is called with the path of each filled list or tuple."""
    if is_tensor(node) or not isinstance(node, (Mapping, list, tuple)) or not node:
        return function(path, node)
    prefix = f"{path}/" if path else ""
    if isinstance(node, Mapping):
        mapped: dict[Any, Any] = {}
        for key, child in cast("Mapping[Any, Any]", node).items():
            word = f"#{key}" if isinstance(key, int) and not isinstance(key, bool) else key
            if word is key and not (isinstance(key, str) and re.fullmatch(r"[^#/][^/]*", key)):
                raise CheckpointError(
                    f"{path or 'the state'}: the key {key!r} cannot be saved; keys are integers, "
                    'or texts without "/" that do not begin with "#"'
                )
            mapped[key] = map_leaves(child, function, f"{prefix}{word}", on_list)
        return mapped
    on_list(path)
    children = enumerate(cast("Sequence[Any]", node))
    return type(node)(
        map_leaves(child, function, f"{prefix}#{i}", on_list) for i, child in children
    )


def flatten(tree: Any) -> tuple[dict[str, Any], list[str]]:
    """Path -> tensor, Sharded, or JSON value; empty containers are values. And the paths of filled
    lists and tuples."""
    lists = list[str]()
    leaves: dict[str, Any] = {}

    def take(path: str, leaf: Any) -> None:
        if not path and (is_tensor(leaf) or not isinstance(leaf, (Mapping, list, tuple))):
            raise CheckpointError(
                f"the state is of type {type(leaf).__name__}: it must be a dict or list of "
                "tensors, numbers, texts, modules and optimizers, or a module"
            )
        if not is_tensor(leaf) and not isinstance(leaf, _VALUES):
            raise CheckpointError(
                f"{path}: the type {type(leaf).__name__} is not supported; a state has tensors, "
                "numbers, texts, None, and dicts and lists of them"
            )
        leaves[path] = [] if isinstance(leaf, tuple) and not is_tensor(leaf) else leaf

    map_leaves(tree, take, on_list=lists.append)
    return leaves, lists


def unflatten(leaves: Mapping[str, Any], lists: Sequence[str] = ()) -> Any:
    """The inverse of :func:`flatten`, but for tuples, which come back as lists. Lists that are not
    among the paths `lists` come back as dicts by index."""
    if list(leaves) == [""]:
        return leaves[""]
    root: dict[Any, Any] = {}
    for path, value in leaves.items():
        node, words = root, path.split("/")
        for word in words[:-1]:
            node = node.setdefault(word, {})
        node[words[-1]] = value
    return _typed(root, frozenset(lists))


def _typed(node: Any, lists: frozenset[str], path: str = "") -> Any:
    """`node` with integers for keys that were such, and lists at the paths `lists`."""
    if not isinstance(node, dict) or not node:
        return node
    typed: dict[Any, Any] = {
        int(word[1:]) if word.startswith("#") else word: _typed(
            child, lists, f"{path}/{word}" if path else word
        )
        for word, child in cast("dict[str, Any]", node).items()
    }
    return [typed[index] for index in sorted(typed)] if path in lists else typed


def shard_of(name: str, leaf: Any) -> Shard:
    """Returns the shard of a tensor, DTensor or Sharded, which shares its memory."""
    if isinstance(leaf, Sharded):
        return Shard(name=name, shape=leaf.shape, offset=leaf.offset, tensor=leaf.tensor.detach())
    leaf = leaf.detach()
    if hasattr(leaf, "device_mesh"):
        if any(placement.is_partial() for placement in leaf.placements):
            raise CheckpointError(f"{name}: a DTensor with partial sums cannot be saved: reduce it")
        local, offset = local_part(leaf)
        return Shard(name=name, shape=tuple(leaf.shape), offset=offset, tensor=local)
    return Shard(name=name, shape=tuple(leaf.shape), offset=(0,) * leaf.ndim, tensor=leaf)


def own_shards(shards: Sequence[Shard], axis: Axis, *, check_replicas: bool) -> list[Shard]:
    """Returns the shards that this rank saves; the lowest rank saves a part held by several. With
    `check_replicas` raises CheckpointError on every rank if the copies of such a part differ."""
    # A part is identified by (name, offset, shape).
    filled = [shard for shard in shards if shard.tensor.numel()]
    own_parts = {(x.name, x.offset, tuple(x.tensor.shape)): x for x in filled}
    holders: dict[tuple[Any, ...], list[int]] = {}
    for rank, parts in enumerate(gather_json(list(own_parts), axis)):
        for name, offset, shape in parts:
            holders.setdefault((name, tuple(offset), tuple(shape)), []).append(rank)
    if check_replicas:
        shared = [shard for part, shard in own_parts.items() if len(holders[part]) > 1]
        digests: list[list[Any]] = []
        for shard in shared:
            flat = shard.tensor.detach().cpu().contiguous().clone().reshape(-1).view(torch.uint8)
            digest = hash_bytes(memoryview(flat.numpy()))
            digests.append([shard.name, *shard.offset, digest])
        digests_of_ranks = gather_json(digests, axis)
        firsts: dict[tuple[Any, ...], tuple[int, str]] = {}  # first rank with a part, its digest
        for rank, digests in enumerate(digests_of_ranks):
            for *part, digest in digests:
                first, expected = firsts.setdefault(tuple(part), (rank, digest))
                if digest != expected:
                    raise CheckpointError(
                        f"{part[0]} differs between ranks {first} and {rank}: give a DTensor or "
                        "moemesh.Sharded for a part, a name of its own for what belongs to one "
                        "rank, or check_replicas=False to save that of the lowest rank"
                    )
    empty = [shard for shard in shards if not shard.tensor.numel()]
    return empty + [shard for part, shard in own_parts.items() if holders[part][0] == axis.index]
