"""Checkpoints of any program: `moemesh.save_checkpoint` and `moemesh.load_checkpoint`.

What is saved has no layout: a tensor by its global shape, a module's experts by global id, the
state of an optimizer by the names of parameters. So any number of ranks can load it.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moemesh.api.training import ParallelModel
from moemesh.checkpoint import store
from moemesh.checkpoint.files import CheckpointError
from moemesh.checkpoint.store import Checkpoint
from moemesh.checkpoint.tree import (
    Sharded,
    flatten,
    merged_values,
    own_shards,
    shard_of,
    unflatten,
)
from moemesh.comm.collectives import barrier, gather_json
from moemesh.comm.mesh import Axis, Mesh
from moemesh.parallel.expert.layer import sharded_state_dicts


def save_checkpoint(
    folder: str | Path,
    state: Any,
    *,
    step: int = 0,
    group: ProcessGroup | None = None,
    check_replicas: bool = True,
) -> Path:
    """Write ``folder/step-<step>``, atomically and with digests; all ranks of `group` call it.

    `state`: nested dicts and lists of tensors, DTensors, :class:`Sharded` parts, numbers, texts and
    None; also modules, models of :func:`moemesh.parallelize`, and optimizers of their parameters
    (``{"model": model, "optimizer": optimizer, "step": 7}``). A part that several ranks hold is
    saved once; plain tensors count as held by all ranks and must be equal (`check_replicas`).
    Numbers and texts are those of the lowest rank. Tensors are safetensors; nothing is pickled.

    Raises CheckpointError on every rank when any of them fails: then nothing is left, and older
    steps are as they were. A step is never overwritten.
    """
    axis = _axis(group)
    names = _names_of(state)
    leaves, problem = dict[str, Any](), None
    try:
        leaves = flatten(_expanded(state, names))
    except CheckpointError as error:
        problem = str(error)
    _agree(axis, problem)
    shards = [shard_of(path, leaf) for path, leaf in leaves.items() if _is_tensor(leaf)]
    values = {path: leaf for path, leaf in leaves.items() if not _is_tensor(leaf)}

    def gather(value: object) -> list[Any]:
        return gather_json(value, axis)

    return store.save(
        Path(folder),
        step,
        own_shards(shards, axis.index, gather, check_replicas=check_replicas),
        {"values": merged_values(values, gather)},
        rank=axis.index,
        world_size=axis.size,
        gather=gather,
        barrier=lambda: barrier(axis),
    )


def load_checkpoint(
    folder: str | Path,
    state: Any = None,
    *,
    step: int | None = None,
    strict: bool = True,
    group: ProcessGroup | None = None,
) -> Any:
    """Read ``folder/step-<step>`` (None: the newest that verifies); all ranks of `group` call it.

    Without `state`, all that was saved: nested dicts with whole tensors on the CPU (lists and
    tuples as dicts by place). With `state`, which has the structure of what was saved but may be
    sharded in any other way: its tensors, modules and optimizers are filled in place, each rank
    reading only its parts, and it is returned with the saved numbers and texts. `strict`: both hold
    the same names; else those of only one side are left alone.

    Raises CheckpointError, before anything is changed, for a checkpoint that is damaged or missing,
    for names that differ, and for tensors of another shape or dtype.
    """
    axis = _axis(group)
    checkpoint = _open(Path(folder), step, axis)
    saved = cast("dict[str, Any]", checkpoint.state.get("values", {}))
    if state is None:
        tensors = {name: checkpoint.read(name) for name in checkpoint.names()}
        return unflatten(saved | tensors)
    names = _names_of(state)
    wanted = flatten(_expanded(state, names, checkpoint=checkpoint))
    if strict:
        _compare(wanted, saved, checkpoint, axis)
    shards = [
        shard_of(path, leaf)
        for path, leaf in wanted.items()
        if _is_tensor(leaf) and (strict or path in checkpoint.manifest.tensors)
    ]
    checkpoint.load_into(shards)
    loaded = {
        path: leaf if _is_tensor(leaf) else saved.get(path, leaf) for path, leaf in wanted.items()
    }
    return _filled(state, loaded, names, "")


def _axis(group: ProcessGroup | None) -> Axis:
    if group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    return Mesh.single("cpu")["world"] if group is None else Axis.from_group(group)


def _agree(axis: Axis, problem: str | None) -> None:
    """CheckpointError on all ranks when one has a problem."""
    for rank, found in enumerate(gather_json(problem, axis)):
        if found:
            raise CheckpointError(f"rank {rank}: {found}" if axis.size > 1 else found)


def _open(folder: Path, step: int | None, axis: Axis) -> Checkpoint:
    """The checkpoint, its digests checked by the ranks together."""
    problem = None
    if axis.index == 0 and step is None:
        found = store.latest(folder, _warn)
        if found is None:
            problem = f"{folder}: holds no checkpoint that can be read"
        else:
            step = found.step
    step, problem = gather_json([step, problem], axis)[0]
    if problem is not None:
        raise CheckpointError(problem)
    assert step is not None
    checkpoint = None
    try:
        checkpoint = store.open_checkpoint(folder, step, verify="sizes")
        checkpoint.verify(axis.index, axis.size)
    except (CheckpointError, OSError) as error:
        problem = str(error)
    _agree(axis, problem)
    assert checkpoint is not None
    return checkpoint


def _warn(step: int, why: str) -> None:
    warnings.warn(f"checkpoint of step {step} skipped: {why}", stacklevel=5)


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, (Tensor, Sharded))


def _names_of(state: Any) -> dict[int, tuple[str, Any]]:
    """Of every parameter of the modules in `state`: id -> (name, its part)."""
    found: dict[int, tuple[str, Any]] = {}
    for node in _objects(state):
        if isinstance(node, ParallelModel):
            parts = node.state_dict()
            found |= {id(p): (name, parts[name]) for name, p in node.named_parameters()}
        elif isinstance(node, nn.Module):
            with sharded_state_dicts():
                parts = node.state_dict()
            found |= {
                id(p): (name, parts.get(name, p))
                for name, p in node.named_parameters(remove_duplicate=False)
            }
    return found


def _objects(node: Any) -> list[Any]:
    if isinstance(node, Mapping):
        return [found for child in node.values() for found in _objects(child)]
    if isinstance(node, (list, tuple)) and not isinstance(node, Sharded):
        return [found for child in node for found in _objects(child)]
    return [node]


def _expanded(
    node: Any,
    names: Mapping[int, tuple[str, Any]],
    path: str = "",
    checkpoint: Checkpoint | None = None,
) -> Any:
    """`node` with modules and optimizers as dicts; an optimizer that is to be filled from
    `checkpoint` gets memory for what was saved."""
    if isinstance(node, Mapping):
        return {
            key: _expanded(child, names, f"{path}{key}/", checkpoint) for key, child in node.items()
        }
    if isinstance(node, (list, tuple)) and not isinstance(node, Sharded):
        return [
            _expanded(child, names, f"{path}#{key}/", checkpoint) for key, child in enumerate(node)
        ]
    if isinstance(node, ParallelModel):
        return node.state_dict()
    if isinstance(node, nn.Module):
        with sharded_state_dicts():
            return dict(node.state_dict())
    if isinstance(node, torch.optim.Optimizer):
        return _optimizer_state(node, names, path, checkpoint)
    return node


def _optimizer_state(
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, tuple[str, Any]],
    path: str,
    checkpoint: Checkpoint | None,
) -> dict[str, Any]:
    """The state by names of parameters, its tensors placed like them."""
    state: dict[str, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise CheckpointError(
                    f"{path.rstrip('/')}: a parameter of the optimizer {list(parameter.shape)} is "
                    'of no module in the state: save both, as {"model": ..., "optimizer": ...}'
                )
            name, part = names[id(parameter)]
            own = dict(optimizer.state.get(parameter, {}))
            if checkpoint is not None:
                own = _saved_state(f"{path}state/{name}/", parameter, part, checkpoint)
            kept = {kind: _placed(value, parameter, part) for kind, value in own.items()}
            if kept:
                state[name] = kept
        groups.append({key: value for key, value in group.items() if key != "params"})
    return {"state": state, "param_groups": groups}


def _placed(value: Any, parameter: Tensor, part: Any) -> Any:
    """A tensor of the parameter's shape lies where the parameter lies."""
    if not isinstance(value, Tensor) or hasattr(value, "device_mesh"):
        return value
    if value.shape != parameter.shape:
        return value
    where = shard_of("", part)
    return Sharded(value, where.shape, where.offset)


def _saved_state(
    prefix: str, parameter: Tensor, part: Any, checkpoint: Checkpoint
) -> dict[str, Any]:
    """Memory for the tensors that were saved of one parameter's state."""
    own: dict[str, Any] = {}
    where = shard_of("", part)
    for name in checkpoint.names():
        if not name.startswith(prefix):
            continue
        dtype, shape = checkpoint.dtype(name), checkpoint.shape(name)
        if shape != tuple(where.shape):
            own[name.removeprefix(prefix)] = torch.zeros(shape, dtype=dtype)
        elif hasattr(parameter, "device_mesh"):
            own[name.removeprefix(prefix)] = torch.zeros_like(parameter, dtype=dtype)
        else:
            own[name.removeprefix(prefix)] = torch.zeros_like(where.tensor, dtype=dtype)
    return own


def _compare(
    wanted: Mapping[str, Any], saved: Mapping[str, Any], checkpoint: Checkpoint, axis: Axis
) -> None:
    """CheckpointError on all ranks where the names of all ranks together are not those saved."""
    there = {*saved, *checkpoint.names()}
    asked = set[str]().union(*gather_json(sorted(wanted), axis))
    for names, words in ((asked - there, "does not hold"), (there - asked, "also holds")):
        if names:
            first = ", ".join(sorted(names)[:5]) + (", ..." if len(names) > 5 else "")
            raise CheckpointError(
                f"{checkpoint.path} {words} {len(names)} of the names: {first}; strict=False "
                "leaves them alone"
            )


def _filled(
    node: Any, leaves: Mapping[str, Any], names: Mapping[int, tuple[str, Any]], path: str
) -> Any:
    """`node` after loading: optimizers have taken their state, numbers and texts are the saved."""
    below = f"{path}/" if path else ""
    if isinstance(node, torch.optim.Optimizer):
        _load_optimizer(node, leaves, names, below)
        return node
    if isinstance(node, (nn.Module, ParallelModel)):
        return node
    if isinstance(node, Mapping):
        return {k: _filled(v, leaves, names, f"{below}{_key(k)}") for k, v in node.items()}
    if isinstance(node, (list, tuple)) and not isinstance(node, Sharded):
        return type(node)(
            _filled(v, leaves, names, f"{below}#{place}") for place, v in enumerate(node)
        )
    return leaves.get(path, node)


def _key(key: object) -> str:
    return f"#{key}" if isinstance(key, int) else str(key)


def _load_optimizer(
    optimizer: torch.optim.Optimizer,
    leaves: Mapping[str, Any],
    names: Mapping[int, tuple[str, Any]],
    below: str,
) -> None:
    """Give `optimizer` the state whose tensors have been filled."""
    state: dict[int, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    number = 0
    for place, group in enumerate(optimizer.param_groups):
        options = {key: value for key, value in group.items() if key != "params"}
        kept = _filled(options, leaves, names, f"{below}param_groups/#{place}")
        groups.append(kept | {"params": list(range(number, number + len(group["params"])))})
        for parameter in group["params"]:
            prefix = f"{below}state/{names[id(parameter)][0]}/"
            own = {
                path.removeprefix(prefix): leaf.tensor if isinstance(leaf, Sharded) else leaf
                for path, leaf in leaves.items()
                if path.startswith(prefix)
            }
            if own:
                state[number] = own
            number += 1
    optimizer.load_state_dict({"state": state, "param_groups": groups})
