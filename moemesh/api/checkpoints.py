"""Checkpoints for any training program: `moemesh.save_checkpoint` and `moemesh.load_checkpoint`.

A checkpoint is independent of the layout: tensors are saved by global shape, a module's experts by
global id, optimizer state by the names of parameters. So any number of ranks can load it.
"""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moemesh.api.training import ParallelModel
from moemesh.checkpoint import store
from moemesh.checkpoint.files import CheckpointError
from moemesh.checkpoint.remote import Place, place_of
from moemesh.checkpoint.store import Checkpoint, Shard
from moemesh.comm.collectives import gather_json
from moemesh.comm.mesh import Axis, Mesh
from moemesh.config.errors import known_keywords
from moemesh.config.limits import few


@known_keywords
def save_checkpoint(
    folder: str | Path,
    state: Any,
    *,
    step: int = 0,
    group: ProcessGroup | None = None,
    check_replicas: bool = True,
) -> Place:
    """Write ``folder/step-<step>``, atomically and with digests; all ranks of `group` call it.
    `folder`: a path, or the address of an object store (``s3://bucket/prefix``).

    `state`: nested dicts and lists of tensors, DTensors, :class:`Sharded` parts, numbers, texts and
    None; also modules, models of :func:`moemesh.parallelize`, and optimizers of their parameters
    (``{"model": model, "optimizer": optimizer, "step": 7}``). A part that several ranks hold is
    saved once; plain tensors count as held by all ranks and must be equal (`check_replicas`).
    Numbers and texts are those of the lowest rank that has them. Tensors are safetensors; nothing
    is pickled.

    Raises CheckpointError on every rank when any of them fails; then no new file is left (an object
    store keeps files without a manifest), and older steps are unchanged. A step is never
    overwritten.
    """
    axis = _axis(group)
    _refuse_different(axis, step=step, check_replicas=check_replicas)
    with store.on_all(axis):
        place, number = place_of(folder), _step_number(step)
        leaves, lists = _ProgramState(state).leaves()
        shards = [
            store.shard_of(path, leaf) for path, leaf in leaves.items() if store.is_tensor(leaf)
        ]
        values = {path: leaf for path, leaf in leaves.items() if not store.is_tensor(leaf)}
        for path, value in values.items():
            if isinstance(value, float) and not math.isfinite(value):  # JSON cannot hold it
                raise CheckpointError(f"{path} is {value}: save it as a tensor")
    saved_shards = store.own_shards(shards, axis, check_replicas=check_replicas)
    merged, paths = dict[str, Any](), set[str]()
    for values_of_rank, lists_of_rank in reversed(gather_json([values, lists], axis)):
        merged |= values_of_rank
        paths |= {*lists_of_rank}
    content = {"values": merged, "lists": sorted(paths)}
    return store.save_together(place, number, saved_shards, content, axis)


@known_keywords
def load_checkpoint(
    folder: str | Path,
    state: Any = None,
    *,
    step: int | None = None,
    strict: bool = True,
    group: ProcessGroup | None = None,
) -> Any:
    """Read ``folder/step-<step>`` (None: the newest that verifies); all ranks of `group` call it.

    Without `state`, returns the saved state as nested dicts and lists (also for tuples) with full
    tensors on the CPU. A given `state` has the structure of the saved one, but may be
    sharded in any other way. Its tensors, modules and optimizers are filled in place, each rank
    with its parts alone, and it is returned with the saved numbers and texts. `strict`: both must
    have the same names; otherwise names of only one side are ignored.

    Raises CheckpointError on every rank, before anything is changed, for a checkpoint that is
    damaged or missing, for names that differ, and for tensors of another shape or dtype.
    """
    axis = _axis(group)
    _refuse_different(axis, step=step, strict=strict, whole=state is None)
    with store.on_all(axis):
        place = place_of(folder)
        number = None if step is None else _step_number(step)
    checkpoint, skipped = store.open_together(place, axis, number)
    with store.on_all(axis):  # a program may turn warnings into errors
        for number, why in skipped if axis.index == 0 else ():
            warnings.warn(f"checkpoint of step {number} skipped: {why}", stacklevel=2)
    if checkpoint is None:
        raise CheckpointError(f"{folder}: holds no checkpoint that can be read")
    saved = cast("dict[str, Any]", checkpoint.state.get("values", {}))
    if state is None:
        with store.on_all(axis):
            tensors = {name: checkpoint.read(name) for name in checkpoint.names()}
        return store.unflatten(saved | tensors, checkpoint.state.get("lists", ()))
    tensor_names = set(checkpoint.names())
    saved_names = saved.keys() | tensor_names
    with store.on_all(axis):
        walk = _ProgramState(state)
        leaves, _ = walk.leaves(checkpoint)
        if strict:
            _refuse_names(leaves.keys() - saved_names, f"{checkpoint.path} does not hold")
        leaves = {path: leaf for path, leaf in leaves.items() if path in saved_names}
        for path, leaf in leaves.items():
            if store.is_tensor(leaf) != (path in tensor_names):
                what = "a tensor" if path in tensor_names else f"the value {saved[path]!r}"
                kind = type(leaf).__name__
                raise CheckpointError(
                    f"{checkpoint.path}: {path} is {what}, the state has the type {kind}"
                )
        shards = [
            store.shard_of(path, leaf) for path, leaf in leaves.items() if store.is_tensor(leaf)
        ]
        checkpoint.check(shards)
    if strict:
        names_of_ranks = set[str]().union(*gather_json(sorted(leaves), axis))
        _refuse_names(saved_names - names_of_ranks, f"{checkpoint.path} also holds")
    with store.on_all(axis):
        checkpoint.load_into(shards)
        filled = walk.filled(leaves | saved)
    return filled


def _refuse_different(axis: Axis, **arguments: object) -> None:
    """Raises CheckpointError on every rank if the arguments of a call differ between them."""
    every = gather_json({name: repr(value) for name, value in arguments.items()}, axis)
    for name in arguments:
        if len({theirs[name] for theirs in every}) > 1:
            values = ", ".join(theirs[name] for theirs in every)
            raise CheckpointError(f"the ranks call with different {name}, in rank order: {values}")


def _step_number(step: object) -> int:
    try:
        number = operator.index(cast("Any", step))
    except TypeError:
        number = -1
    if isinstance(step, bool) or number < 0:
        raise CheckpointError(f"step must be an integer of at least 0, not {step!r}")
    return number


def _refuse_names(names: Set[str], words: str) -> None:
    """Raises CheckpointError with the first of `names`, if there are any."""
    if names:
        message = f"{words} {len(names)} of the names: {few(sorted(names), 5)}"
        raise CheckpointError(f"{message}; strict=False leaves them alone")


def _axis(group: ProcessGroup | None) -> Axis:
    """The ranks of `group`; None: those of the world, or this process alone."""
    if group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    return Mesh.single("cpu")["world"] if group is None else Axis.from_group(group)


class _ProgramState:
    """A program's state, with its modules and optimizers flattened to leaves."""

    def __init__(self, state: Any) -> None:
        self.state = state
        #: Id of each parameter of the modules -> its name and this rank's part.
        self.parameters: dict[int, tuple[str, Shard]] = {}

        def name_parameters(_: str, node: Any) -> None:
            if isinstance(node, (nn.Module, ParallelModel)):
                parts = dict(node.state_dict())
                # Of the names of a tied parameter in a module, the last one names its state.
                keywords = {} if isinstance(node, ParallelModel) else {"remove_duplicate": False}
                for name, parameter in node.named_parameters(**keywords):
                    part = store.shard_of(name, parts.get(name, parameter))
                    self.parameters[id(parameter)] = name, part

        store.map_leaves(state, name_parameters)

    def leaves(self, checkpoint: Checkpoint | None = None) -> tuple[dict[str, Any], list[str]]:
        """Returns path -> tensor or value, and the paths of lists. With `checkpoint`, the states of
        optimizers are zeros of the names in it, into which those of the checkpoint can be read."""

        def nested(path: str, node: Any) -> Any:
            """`node`; if it is a module or an optimizer, its tensors and values by name."""
            if isinstance(node, (nn.Module, ParallelModel)):
                return dict(node.state_dict())
            if not isinstance(node, torch.optim.Optimizer):
                return node
            state: dict[str, dict[str, Any]] = {}
            for parameter in (p for group in node.param_groups for p in group["params"]):
                if id(parameter) not in self.parameters:
                    raise CheckpointError(
                        f"{path}: a parameter of the optimizer {list(parameter.shape)} is of no "
                        'module in the state: save both, as {"model": ..., "optimizer": ...}'
                    )
                name, part = self.parameters[id(parameter)]
                values = dict(node.state.get(parameter, {}))
                if checkpoint is not None:
                    prefix, values = f"{path}/state/{name}/".lstrip("/"), {}
                    for saved in checkpoint.names():
                        if not saved.startswith(prefix):
                            continue
                        dtype, shape = checkpoint.dtype(saved), checkpoint.shape(saved)
                        if shape == tuple(part.shape):
                            zeros = torch.zeros_like(parameter, dtype=dtype)
                        else:
                            zeros = torch.zeros(shape, dtype=dtype)
                        values[saved.removeprefix(prefix)] = zeros
                for key, value in values.items():
                    # State of the parameter's shape is sharded like the parameter.
                    is_part = isinstance(value, Tensor) and value.shape == parameter.shape
                    if is_part and not hasattr(value, "device_mesh"):
                        values[key] = store.Sharded(value, part.shape, part.offset)
                if values:
                    state[name] = values
            groups = [_options(group) for group in node.param_groups]
            return {"state": state, "param_groups": groups}

        return store.flatten(store.map_leaves(self.state, nested))

    def filled(self, leaves: Mapping[str, Any]) -> Any:
        """Returns the state after loading: optimizers are filled, other leaves are replaced."""

        def fill(path: str, node: Any) -> Any:
            if not isinstance(node, torch.optim.Optimizer):
                return leaves.get(path, node)
            base = f"{path}/" if path else ""
            state, groups = {}, list[dict[str, Any]]()
            for index, group in enumerate(node.param_groups):
                options = store.map_leaves(
                    _options(group),
                    lambda path, value: leaves.get(path, value),
                    f"{base}param_groups/#{index}",
                )
                numbers = range(len(state), len(state) + len(group["params"]))
                groups.append(options | {"params": list(numbers)})
                for number, parameter in zip(numbers, group["params"], strict=True):
                    prefix = f"{base}state/{self.parameters[id(parameter)][0]}/"
                    state[number] = {
                        path.removeprefix(prefix): leaf.tensor
                        if isinstance(leaf, store.Sharded)
                        else leaf
                        for path, leaf in leaves.items()
                        if path.startswith(prefix)
                    }
            filled = {number: values for number, values in state.items() if values}
            node.load_state_dict({"state": filled, "param_groups": groups})
            return node

        return store.map_leaves(self.state, fill)


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}
