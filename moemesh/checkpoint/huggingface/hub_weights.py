"""The weights of a model of transformers' own modelling code, read from a folder and written back.

transformers' conversion of names and tensors is the only record of which stored tensors make a
parameter. It is applied to names and shapes first, so that a folder is checked before a number is
read. Then it is applied to numbers: to one expert of a stack at a time if the conversion keeps
experts apart, so that a rank reads only its own; else to all stored tensors of a parameter.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    Interleave,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from moemesh.checkpoint.huggingface.contents import WEIGHT_DTYPES, StoredTensor, refuse_problems
from moemesh.checkpoint.huggingface.pieces import Read, slices
from moemesh.checkpoint.huggingface.weight_folder import FolderWeights, WeightFolder, torch_dtype
from moemesh.checkpoint.load import DeferredTensor, Shard
from moemesh.config.huggingface.folder import differ, read_config
from moemesh.model.hub.build import blueprint, place_in
from moemesh.model.hub.experts import is_experts

#: Modules around a layer: ``model.language_model.`` of ``model.language_model.layers.0.mlp``.
_BEFORE_LAYERS = re.compile(r"(.*?)layers\.\d+\.")
#: One expert of a stack: ``...experts.17.gate_up_proj``.
_ROW = re.compile(r"(.*)\.(\d+)\.(\w+)")


@dataclass(frozen=True, kw_only=True)
class TensorGroup:
    """Stored tensors that become one parameter or several, together.

    `sources`: source pattern of the conversion -> names of stored tensors; `outputs`: parameter ->
    target pattern. `converter`: None if the parameter is stored as it is. `merges`: each stored
    tensor of a pattern is one row of the parameter. `is_by_row`: row i of the parameters needs only
    row i of the stored tensors.
    """

    sources: dict[str, list[str]]
    outputs: dict[str, str]
    converter: WeightConverter | None = None
    merges: bool = False
    is_by_row: bool = False

    @property
    def names(self) -> list[str]:
        """The stored tensors."""
        return [name for part in self.sources.values() for name in part]

    def converted(
        self, read: Callable[[str], Tensor], model: PreTrainedModel, rows: slice = slice(None)
    ) -> dict[str, Tensor]:
        """Pattern -> tensor, from stored tensors that `read` returns; with `merges` only `rows`."""
        tensors = {key: [read(name) for name in part[rows]] for key, part in self.sources.items()}
        return _apply(self.converter, tensors, next(iter(self.outputs)), model)

    def reverted(
        self, parameters: Mapping[str, Tensor], model: PreTrainedModel, row: int = 0
    ) -> dict[str, Tensor]:
        """Stored tensors by name, computed from `parameters`. With `merges` the parameters may be
        some rows, beginning with `row`; the result then has the stored tensors of these rows."""
        assert self.converter is not None
        inverse, patterns = self.converter.reverse_transform(), self.converter.target_patterns
        tensors = {
            inverse.source_patterns[patterns.index(pattern)]: [parameters[name]]
            for name, pattern in self.outputs.items()
        }
        results = _apply(inverse, tensors, next(iter(self.outputs)), model)
        written = zip(self.converter.source_patterns, inverse.target_patterns, strict=True)
        return {
            name: results[key]
            for source, pattern in written
            for index, name in enumerate(self.sources.get(source, ())[row:])
            if (key := pattern.replace("*", str(index))) in results
        }


def _apply(
    converter: Any, tensors: dict[str, Any], name: str, model: PreTrainedModel
) -> dict[str, Tensor]:
    """Applies the operations of a conversion in order. Returns pattern -> tensor."""
    for operation in converter.operations:
        tensors = operation.convert(
            tensors,
            source_patterns=converter.source_patterns,
            target_patterns=converter.target_patterns,
            full_layer_name=name,
            model=model,
            config=model.config,
            missing_keys=None,
        )
    return {key: value[0] if isinstance(value, list) else value for key, value in tensors.items()}


@dataclass(frozen=True, kw_only=True)
class HubTensors:
    """Mapping of stored tensors to the parameters of a model on the meta device.

    `meta`: parameters and persistent buffers by name, a tied one once; `stacks`: names of those
    with one row for each expert; `group_of`: group of each name in `meta`; `groups`: all groups,
    also those of further names of a tied parameter; `carried`: stored tensors that belong to no
    part of the model; `problems`: reasons why the stored tensors are not those of the model.
    """

    model: PreTrainedModel
    stored: Mapping[str, StoredTensor]
    meta: Mapping[str, Tensor]
    stacks: frozenset[str]
    group_of: Mapping[str, TensorGroup]
    groups: Sequence[TensorGroup]
    carried: Sequence[str]
    problems: Sequence[str]

    @classmethod
    def of(cls, values: Mapping[str, Any], stored: Mapping[str, StoredTensor]) -> HubTensors:
        """The mapping for the tensors `stored` of a model with the ``config.json`` `values`."""
        plan = blueprint(values)
        model = plan.build()
        base = f"{model.base_model_prefix}."
        # Names of the text part of a larger model may have a prefix: try each, "" first.
        matches = filter(None, map(_BEFORE_LAYERS.match, stored))
        prefixes = {match[1] for match in matches} - {"", base}
        candidates: list[HubTensors] = []
        for prefix in ("", *sorted(prefixes)):
            # `inner`: name in the model -> stored name. `prefix` is that of the base model in the
            # folder; other tensors, such as the head, have only the part `outer` of it.
            outer = prefix[: -len(prefix.split(".")[-2]) - 1] if prefix else ""
            inner = dict[str, str]()
            for name in stored:
                in_base = prefix and name.startswith(prefix)
                target = base + name.removeprefix(prefix) if in_base else name.removeprefix(outer)
                inner[target] = name
            candidates.append(_grouped(model, stored, inner))
            if not candidates[-1].problems:
                break
        else:
            if plan.around is not None:
                # The renamings of the larger model hold for its text part.
                whole = plan.around.build()
                path, names = place_in(whole, model), dict[str, Any](whole.state_dict())
                changes = get_model_conversion_mapping(whole)
                renamings = [change for change in changes if isinstance(change, WeightRenaming)]
                inner = dict[str, str]()
                for name in stored:
                    target, _ = rename_source_key(
                        name, renamings, [], whole.base_model_prefix, names
                    )
                    if path and target.startswith(f"{path}."):
                        target = model.base_model_prefix + target.removeprefix(path)
                    inner[target] = name
                candidates.append(_grouped(model, stored, inner, whole))
        return min(candidates, key=lambda candidate: len(candidate.problems))

    def tied(self) -> Iterator[list[str]]:
        """The stored tensors of each parameter: several for a tied one. Converted ones are left
        out."""
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        stored: dict[int, list[str]] = {}
        for group in self.groups:
            for name in group.outputs.keys() & parameters if group.converter is None else ():
                stored.setdefault(id(parameters[name]), []).extend(group.names)
        yield from stored.values()

    def irreversible(self) -> list[str]:
        """Stored tensors that transformers' conversion cannot compute from the parameters."""
        lost: list[str] = []
        for group in (group for group in self.groups if group.converter is not None):
            parameters, shapes = {name: self.meta[name] for name in group.outputs}, {}
            with suppress(ValueError, RuntimeError, AttributeError, NotImplementedError):
                reverted = group.reverted(parameters, self.model)
                shapes = {name: tuple(tensor.shape) for name, tensor in reverted.items()}
            lost += [name for name in group.names if shapes.get(name) != self.stored[name].shape]
        return lost

    def trained_names(self, trains: Callable[[str], bool]) -> frozenset[str]:
        """The stored tensors that hold an element of a parameter for which `trains` returns True.
        Its argument is a name in our checkpoints, where every expert of a stack has its own."""

        def holds(name: str, rows: slice) -> bool:
            if name not in self.stacks:
                return trains(name)
            module, _, leaf = name.rpartition(".")
            return any(
                trains(f"{module}.{row}.{leaf}") for row in range(len(self.meta[name]))[rows]
            )

        return frozenset(
            name
            for group in self.groups
            for names in group.sources.values()
            for index, name in enumerate(names)
            for rows in (slice(index, index + 1) if group.merges else slice(None),)
            if any(holds(output, rows) for output in group.outputs)
        )


def _grouped(
    model: PreTrainedModel,
    stored: Mapping[str, StoredTensor],
    inner: Mapping[str, str],
    whole: PreTrainedModel | None = None,
) -> HubTensors:
    """The mapping of a folder's tensors. `inner`: name in the model -> stored name. `whole`: a
    larger model, whose conversions apply to its text part, too."""
    # Names of the model.
    canonical: dict[int, str] = {}  # id of a parameter -> its first name
    aliases: dict[str, str] = {}  # each of its names -> the first one
    meta: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases[name] = canonical.setdefault(id(parameter), name)
        meta[aliases[name]] = parameter
    meta |= {name: state for name, state in model.state_dict().items() if name not in aliases}
    aliases |= {name: name for name in meta}
    stacks = frozenset(
        f"{prefix}.{leaf}"
        for prefix, module in model.named_modules()
        if is_experts(module)
        for leaf, parameter in module.named_parameters(recurse=False)
        if parameter.shape[0] == module.num_experts
    )
    # Conversions of transformers, and the stored tensors of each parameter.
    mapping, outer = (
        [] if net is None else get_model_conversion_mapping(net) for net in (model, whole)
    )
    renamings = [change for change in mapping if isinstance(change, WeightRenaming)]
    converters = [change for change in (*mapping, *outer) if isinstance(change, WeightConverter)]
    by_pattern = {key: change for change in converters for key in change.source_patterns}
    sources_of, carried = _by_target(model, renamings, converters, aliases, inner)
    # A group for each parameter: its conversion, its outputs, and a check of their shapes.
    group_of: dict[str, TensorGroup] = {}
    groups: list[TensorGroup] = []
    problems: list[str] = []
    for target, sources in sources_of.items():
        group = TensorGroup(sources=sources, outputs={target: ""})
        names = group.names
        several = names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
        shapes = {target: stored[names[0]].shape}
        if (converter := by_pattern.get(next(iter(sources)))) is not None:
            merges = isinstance(converter.operations[0], MergeModulelist)
            if merges and (lost := _lost_rows(sources, meta[aliases[target]].shape[0])):
                problems += lost
                continue
            group = replace(group, converter=converter)
            try:
                converted = group.converted(
                    lambda name: torch.empty(stored[name].shape, device="meta"), model
                )
            except (ValueError, RuntimeError, AttributeError) as error:
                problems.append(f"{several} do not make {target}: {error}")
                continue
            # Parameters of the group: `target` with its pattern replaced by that of each output.
            part = next((pattern for pattern in converted if pattern in target), None)
            expanded = {
                pattern if part is None else target.replace(part, pattern, 1): pattern
                for pattern in converted
            }
            shapes = {name: tuple(converted[pattern].shape) for name, pattern in expanded.items()}
            outputs = {aliases.get(name, name): pattern for name, pattern in expanded.items()}
            # A merge, the first operation, makes each row of one stored tensor.
            rest = converter.operations[1:] if merges else converter.operations
            is_by_row = outputs.keys() <= stacks and all(map(_keeps_rows, rest))
            group = replace(group, outputs=outputs, merges=merges, is_by_row=is_by_row)
        else:
            # A tied table is trained and held under its first name.
            group = replace(group, outputs={aliases[target]: ""})
            if len(names) > 1:
                problems.append(f"{names[0]} and {names[1]} are both {target}")
        groups.append(group)
        for name, shape in shapes.items():
            if (parameter := aliases.get(name)) is None:
                problems.append(f"{several} make {name}, which the model does not have")
                continue
            if shape != (wanted := tuple(meta[parameter].shape)):
                problems.append(
                    f"{several}: {name} has shape {list(shape)}, config.json makes it "
                    f"{list(wanted)}"
                )
            if meta[parameter].is_floating_point():
                problems += [
                    f"{source} is stored as {stored[source].dtype} and config.json names no such "
                    "format"
                    for source in names
                    if stored[source].dtype not in WEIGHT_DTYPES
                ]
            if name == parameter or parameter not in group_of:
                group_of[parameter] = group
    missing = [f"{name} is missing" for name in meta if name not in group_of]
    return HubTensors(
        model=model, stored=stored, meta=meta, stacks=stacks, group_of=group_of, groups=groups,
        carried=carried, problems=problems or missing,
    )  # fmt: skip


def _by_target(
    model: PreTrainedModel,
    renamings: Sequence[WeightRenaming],
    converters: Sequence[WeightConverter],
    aliases: dict[str, str],
    inner: Mapping[str, str],
) -> tuple[dict[str, dict[str, list[str]]], list[str]]:
    """Parameter of `aliases` -> pattern of a converter ("" without one) -> the stored tensors that
    match it and make the parameter; and the stored tensors that make no parameter."""
    sources_of: dict[str, dict[str, list[str]]] = {}
    carried: list[str] = []
    for name in sorted(inner, key=dot_natural_key):
        target, pattern = rename_source_key(
            name, renamings, converters, model.base_model_prefix, aliases
        )
        if target not in aliases and name in aliases:
            target, pattern = name, None
        if target in aliases:
            sources = sources_of.setdefault(target, {})
            sources.setdefault(pattern or "", []).append(inner[name])
        else:
            carried.append(inner[name])
    return sources_of, carried


def _keeps_rows(operation: Any) -> bool:
    """Whether each row of the result depends only on that row of the operands."""
    match operation:
        case Concatenate() | Chunk() | Interleave():
            return operation.dim > 0
        case Transpose():
            return min(operation.dim0, operation.dim1) > 0 and not operation.check_dims
        case _:
            return False


def _lost_rows(sources: Mapping[str, list[str]], count: int) -> list[str]:
    """Sentences on the rows of a stack that no stored tensor holds."""
    problems: list[str] = []
    for pattern, names in sources.items():
        parts = [name.split(".") for name in names]
        # Position of the id of the expert: the first part in which the names differ.
        place = next(
            (place for place, words in enumerate(zip(*parts, strict=False)) if len({*words}) > 1),
            None,
        )
        if len(names) == count or place is None:
            continue
        lost = {*map(str, range(count))} - {words[place] for words in parts}
        first = min(lost, key=int) if lost else None
        if first is None:
            problems.append(f"{pattern} is {len(names)} tensors, config.json makes it {count}")
        else:
            name = ".".join([*parts[0][:place], first, *parts[0][place + 1 :]])
            problems.append(f"{name} is missing (one of {len(lost)} experts)")
    return problems


class HubWeights(FolderWeights):
    """An opened folder of a model of transformers. Raises CheckpointError unless it holds all
    parameters of its model, before any is read."""

    def __init__(self, path: Path) -> None:
        self.folder = WeightFolder(path)
        self.values = read_config(path)
        self.tensors = HubTensors.of(self.values, self.folder.stored)
        refuse_problems(path, self.tensors.problems)
        lines = [
            f"{first} and {other} differ, and config.json makes them one tensor: "
            "tie_word_embeddings = false makes them two"
            for first, *others in self.tensors.tied()
            for other in others
            if differ(path, first, other)
        ]
        refuse_problems(path, lines)
        #: (group, row) and results of the last conversion.
        self._last: tuple[object, dict[str, Tensor]] = None, {}

    def load_into(self, shards: Sequence[Shard]) -> None:
        super().load_into(shards)
        self._last = None, {}  # frees the last results

    def read(self, name: str, box: Sequence[range]) -> Tensor:
        """The part `box` of a parameter, a buffer, a stack of experts or one expert of it, in the
        widest dtype of its stored tensors."""
        stack = self._row(name)[0]
        stored = {self.folder.stored[source].dtype for source in self.tensors.group_of[stack].names}
        dtype = reduce(torch.promote_types, map(torch_dtype, stored))
        out = torch.empty([len(part) for part in box], dtype=dtype)
        self.read_into(name, box, out)
        return out

    def _row(self, name: str) -> tuple[str, int | None]:
        """The parameter of a name and, for the name of one expert of a stack, its row."""
        match = _ROW.fullmatch(name)
        if match is not None and (stack := f"{match[1]}.{match[3]}") in self.tensors.stacks:
            return stack, int(match[2])
        return name, None

    def read_into(self, name: str, box: Sequence[range], out: Tensor) -> None:
        name, row = self._row(name)
        if row is not None:
            box, out = [range(row, row + 1), *box], out[None]
        group = self.tensors.group_of[name]
        if group.converter is None:
            self.folder.read_into(group.names[0], box, out)
        elif not group.is_by_row:
            out.copy_(self._converted(group, name, None)[slices(box)])
        else:
            for place, index in enumerate(box[0]):
                part = slices([range(1), *box[1:]])
                out[place : place + 1].copy_(self._converted(group, name, index)[part])

    def _converted(self, group: TensorGroup, name: str, row: int | None) -> Tensor:
        """A parameter of a group, or one row of it; converts unless the last call did the same."""
        key = id(group), row
        if self._last[0] != key:
            self._last = None, {}  # freed before the next one is read
            rows = slice(row, row + 1) if row is not None and group.merges else slice(None)

            def read(source: str) -> Tensor:
                box = [range(size) for size in self.folder.stored[source].shape]
                if row is not None and not group.merges:
                    box[0] = range(row, row + 1)
                return self.folder.read(source, box)

            self._last = key, group.converted(read, self.tensors.model, rows)
        return self._last[1][group.outputs[name]]


def stored_hub_tensors(
    weights: Read, tensors: HubTensors, dtype_of: Callable[[str], torch.dtype]
) -> Iterator[tuple[str, DeferredTensor]]:
    """The stored tensors of the parameters and buffers of `weights`, computed at the write."""
    # (group, row) of the last conversion, and its results that are not written yet.
    last: tuple[object, dict[str, Tensor]] = None, {}

    def reverted(group: TensorGroup, row: int | None, name: str) -> Tensor:
        nonlocal last
        if last[0] != (id(group), row) or name not in last[1]:
            last = None, {}
            parameters: dict[str, Tensor] = {}
            for output in group.outputs:
                box = [range(size) for size in tensors.meta[output].shape]
                if row is not None:
                    box[0] = range(row, row + 1)
                parameters[output] = weights(output, box)
            last = (id(group), row), group.reverted(parameters, tensors.model, row or 0)
        return last[1].pop(name)

    for group in tensors.groups:
        for names in group.sources.values():
            for index, name in enumerate(names):
                if group.converter is None:
                    (output,) = group.outputs
                    box = [range(size) for size in tensors.meta[output].shape]
                    make = partial(weights, output, box)
                else:
                    row = index if group.merges and group.is_by_row else None
                    make = partial(reverted, group, row, name)
                shape, dtype = tensors.stored[name].shape, dtype_of(name)
                yield (
                    name,
                    DeferredTensor(dtype, shape, lambda make=make, dtype=dtype: make().to(dtype)),
                )
