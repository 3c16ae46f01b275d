"""Adapters in PEFT's format: the mapping of its tensors to our factors, without torch.

Legend: E experts, R rank, I inputs, O outputs.

A projection has ``<module>.lora_A.weight`` [R, I] and ``lora_B.weight`` [O, R]. In transformers 5
all experts of a layer are one parameter, with gate and up fused. PEFT adapts such a parameter
(``target_parameters``) with A [E R, I], ordered by expert, then rank, and B [O, R E], ordered by
rank, then expert. If ``down_proj`` has an adapter, too, names of the adapter of ``gate_up_proj``
have ``base_layer``. Our separate adapters of gate and up become one of rank 2 R whose B is block
diagonal, with twice the alpha. If only stacks are adapted, all adapters have rank 2 R, padded with
zeros, because PEFT warns of a ``rank_pattern`` that matches no module.

Whole weights of the ends of a model (embedding, last norm, head) are ``<module>.weight``: those of
``modules_to_save``, which train with the adapters, and those that PEFT saves with a vocabulary.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from moemesh.checkpoint.files import CheckpointError, check_folder
from moemesh.checkpoint.header import read_header
from moemesh.checkpoint.huggingface.contents import plain_file, read_json
from moemesh.checkpoint.huggingface.logical import ENDS, pieces, table_piece
from moemesh.checkpoint.huggingface.pieces import TensorPiece
from moemesh.config.huggingface.adapters import OWN_PAIR
from moemesh.config.huggingface.folder import EMBEDDING, HEAD, differ
from moemesh.config.lora import ADAPTER_CONFIG as CONFIG
from moemesh.config.lora import ADAPTER_WEIGHTS as WEIGHTS
from moemesh.config.lora import (
    ALL_LINEAR,
    PEFT_DEFAULTS,
    LoraConfig,
    TargetPart,
    factor_name,
    is_adapter,
    parts_of,
)
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.config.tuning import Tuning
from moemesh.sharding.parameters import ParameterTensor, tensors

if TYPE_CHECKING:
    from torch import Tensor

#: Upper bound of adapter_config.json in bytes.
_CONFIG_LIMIT = 1 << 20
#: Names that PEFT takes for projections of experts in any model with experts.
_OF_EXPERTS = frozenset({"gate_proj", "up_proj", "gate_up_proj", "down_proj", "w1", "w2", "w3"})
#: Prefix of the names in PEFT's folders; name of the head's module.
_PREFIX, _HEAD_MODULE = "base_model.model.", HEAD.removesuffix(".weight")
#: Part of the names of adapters of single experts, which PEFT saved for models of transformers 4.
_ONE_EXPERT = re.compile(r"\.experts\.\d+\.")
#: Name of a factor, and the last part of its module's name.
_LEAF = re.compile(r"\.(\w+(?:\.base_layer)?)\.lora_[AB]\.weight$")

#: Fields of PEFT's LoraConfig that are read here, that follow from the names of tensors, or that do
#: not change the output of stored adapters. Others must be empty.
KNOWN_FIELDS = frozenset(
    {
        "peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern",
        "target_modules", "target_parameters", "exclude_modules", "layers_to_transform",
        "layers_pattern",
        "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision",
        "inference_mode", "lora_dropout", "fan_in_fan_out", "megatron_config", "megatron_core",
        "loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size",
        "runtime_config", "ensure_weight_tying", "modules_to_save",
    }
)  # fmt: skip
#: Initializations that leave the weights of the base as they are.
SAME_BASE = (None, True, False, "gaussian", "eva", "orthogonal")
#: The supported value of the field "bias".
_NO_BIAS = ("bias", "none")
#: Adapters of all targets.
_EVERY = LoraConfig(rank=1)


class Adaptation(NamedTuple):
    """One adapter of PEFT for the `parts` of our `weight` in the family `kind`; in our model each
    part has a separate adapter of rank `rank`. `module`: PEFT's name of the adapted module, for
    experts followed by the parameter. `wraps`: whether the adapter of ``down_proj`` wraps the
    module of this one. `layout`: :attr:`~moemesh.config.architecture.ParameterRecord.layout` of a
    weight of transformers."""

    weight: ParameterTensor
    parts: tuple[TargetPart, ...]
    kind: str
    rank: int
    module: str
    wraps: bool = False
    layout: str = ""

    @property
    def target(self) -> str:
        """Name in ``adapter_config.json``, the same for all layers."""
        block, leaf = self.module.split(".")[-2:]
        return f"{block}.{leaf}" if self.weight.is_expert else leaf

    @property
    def total_rank(self) -> int:
        """Rank of PEFT's adapter."""
        return self.rank * len(self.parts)

    def name(self, factor: str) -> str:
        """Name of PEFT's tensor; `factor` is A or B."""
        module = self.module
        if self.weight.is_expert:
            module = module.rpartition(".")[0] + (".base_layer" if self.wraps else "")
        return f"{_PREFIX}{module}.lora_{factor}.weight"

    def factor(self, part: TargetPart, factor: str) -> str:
        """Name of our factor of a part."""
        return f"{self.weight.name.rpartition('.')[0]}.{factor_name(part.target, factor)}"

    def shape(self, factor: str, rank: int) -> tuple[int, ...]:
        """Shape of PEFT's tensor at PEFT's `rank`."""
        experts = self.weight.shape[0] if self.weight.is_expert else 1
        if factor == "A":
            return (rank * experts, self.weight.shape[-1])
        return (math.prod(self._piece(1).view) // experts, rank * experts)

    def store(self, factor: str, factors: Sequence[Tensor]) -> Tensor:
        """PEFT's tensor from our factors of all parts."""
        rank = self.total_rank
        if factor == "A":
            import torch  # late: folders are checked before torch is imported

            joined = torch.cat(list(factors), dim=1) if self.weight.is_expert else factors[0]
            return joined.reshape(self.shape("A", rank))
        piece = self._piece(rank)
        if not self.weight.is_expert:
            return piece.store(factors[0])
        joined = factors[0].new_zeros((*self.weight.shape[:-1], rank))
        for index, (part, weight_B) in enumerate(zip(self.parts, factors, strict=True)):
            _rows(joined, part)[..., index * self.rank : (index + 1) * self.rank] = weight_B
        stored = piece.store(joined)
        by_expert = stored.transpose(1, 2) if _is_transposed(piece) else stored
        return by_expert.permute(1, 2, 0).reshape(self.shape("B", rank))

    def load(self, factor: str, stored: Tensor) -> list[Tensor]:
        """Our factors of all parts from PEFT's tensor; a smaller rank is padded with zeros, whose
        gradients are zero. If PEFT's rank is not the sum of the ranks of all parts, gate and up
        share A. Raises CheckpointError if B of a part is not zero outside of the part's ranks."""
        experts = self.weight.shape[0] if self.weight.is_expert else 1
        rank = stored.shape[0 if factor == "A" else 1] // experts
        if rank < self.rank:
            whole = stored.new_zeros(self.shape(factor, self.rank))
            view = (experts, -1, whole.shape[1]) if factor == "A" else (len(whole), -1, experts)
            whole.view(view)[:, :rank] = stored.reshape(view)
            stored, rank = whole, self.rank
        starts = range(0, rank, self.rank) if rank == self.total_rank else [0] * len(self.parts)
        if factor == "A":
            by_expert = stored.reshape(experts, rank, -1) if self.weight.is_expert else stored
            return [by_expert.narrow(-2, start, self.rank) for start in starts]
        if self.weight.is_expert:
            stored = stored.reshape(-1, rank, experts).permute(2, 0, 1)
            if _is_transposed(self._piece(rank)):
                stored = stored.transpose(1, 2)
        piece = self._piece(rank)
        by_expert = stored.contiguous()
        joined = piece.read(piece.box, lambda name, ranges: by_expert)
        factors: list[Tensor] = []
        for part, start in zip(self.parts, starts, strict=True):
            rows = _rows(joined, part) if self.weight.is_expert else joined
            outside = [rows[..., :start], rows[..., start + self.rank :]]
            if any(bool(other.any()) for other in outside):
                raise CheckpointError(
                    f"{self.name('B')}: has other rows of A than its own: set lora.rank = {rank} "
                    "and lora.alpha to the number that leaves the scaling as it is"
                )
            factors.append(rows[..., start : start + self.rank])
        return factors

    def _piece(self, rank: int) -> TensorPiece:
        """Piece of a factor B of `rank`, in the layout of the weight."""
        if self.layout:
            shape = (*self.weight.shape[:-1], rank)
            return table_piece(self.module, ["", self.layout], shape)
        places = pieces(self.weight.name, (*self.weight.shape[:-1], rank), self.kind, fused=True)
        if self.weight.is_expert:
            return places[0]
        every = parts_of(self.weight.name.rpartition(".")[2], self.weight.shape)
        return places[every.index(self.parts[0])]


def _rows(joined: Tensor, part: TargetPart) -> Tensor:
    """The rows of a part in a stack of experts."""
    return joined if part.dim is None else joined.narrow(part.dim + 1, part.start, part.size)


def _is_transposed(piece: TensorPiece) -> bool:
    """Whether the family stores experts as [E, I, O]."""
    return piece.order[-1] != len(piece.order) - 1


def adaptations(model: ModelConfig, kind: str) -> Iterator[Adaptation]:
    """PEFT's adapters of `model` in the family `kind`, without extra prediction layers."""
    if model.architecture is not None:
        # PEFT wraps the experts once for each adapted parameter; the last wrapper is outermost.
        last: dict[str, str] = {}
        for record in model.architecture.parameters:
            if record.adapted(model.lora):
                last[record.module] = record.name
        for record in model.architecture.parameters:
            if not (parts := record.adapted(model.lora)):
                continue
            module = record.name if record.is_expert else record.name.rpartition(".")[0]
            module = model.architecture.name_in_folder(module)
            weight = ParameterTensor(
                name=f"{record.module}.{module.rpartition('.')[2]}",
                shape=record.logical_shape,
                summed_over="edp" if record.is_expert else "stage",
            )
            wraps = record.is_expert and record.name != last[record.module]
            yield Adaptation(weight, parts, kind, model.lora.rank, module, wraps, record.layout)
        return
    lora = model.lora
    for weight in tensors(model, Plan()):
        owner, index, *rest = weight.name.split(".")
        parts = parts_of(rest[-1], weight.shape) if rest else ()
        if owner != "layers" or int(index) >= model.num_layers:
            continue
        adapted = tuple(part for part in parts if lora.adapts(part.target))
        every = pieces(weight.name, weight.shape, kind, fused=True) if adapted else []
        if weight.is_expert and adapted:
            wraps = rest[-1] == "gate_up" and lora.adapts("down_proj")
            yield Adaptation(weight, adapted, kind, lora.rank, every[0].source, wraps)
            continue
        for part in adapted:
            module = every[parts.index(part)].source.removesuffix(".weight")
            yield Adaptation(weight, (part,), kind, lora.rank, module)


class EndWeight(NamedTuple):
    """A weight outside of the layers: our name, the name in transformers, and its shape."""

    ours: str
    theirs: str
    shape: tuple[int, ...]

    @property
    def stored(self) -> str:
        """Name of PEFT's tensor."""
        return _PREFIX + self.theirs

    @property
    def module(self) -> str:
        """Name of the module, an entry of ``modules_to_save``."""
        return self.theirs.rpartition(".")[0]


def weights_of_ends(model: ModelConfig) -> list[EndWeight]:
    """The weights of `model` outside of its layers; each is one tensor of transformers."""
    named = model.architecture.name_in_folder if model.architecture is not None else str
    return [
        EndWeight(weight.name, named(ENDS.get(weight.name, weight.name)), weight.shape)
        for weight in tensors(model, Plan())
        if weight.unit in ("embedding", "head") and not is_adapter(weight.name)
        if weight.name in ENDS or model.architecture is not None
    ]


def peft_config(
    model: ModelConfig, kind: str, base: str | None, saved: Sequence[EndWeight] = ()
) -> dict[str, Any]:
    """``adapter_config.json``; `base` is the folder or name of the base model, `saved` are the
    weights that train as a whole."""
    lora, every = model.lora, list(adaptations(model, kind))
    modules, parameters = set[str](), set[str]()
    for adaptation in every:
        if adaptation.weight.is_expert:
            parameters.add(adaptation.target)
        elif model.num_experts and adaptation.target in _OF_EXPERTS:
            # As target_modules, PEFT would take these names for projections of experts.
            parameters.add(".".join(adaptation.module.split(".")[-2:]) + ".weight")
        else:
            modules.add(adaptation.target)
    targets: str | list[str] = sorted(modules)
    if modules and model.architecture is not None and (around := model.architecture.around):
        # Encoders may have modules of the same names.
        targets = rf"{re.escape(around)}\..*\.({'|'.join(targets)})"
    rank, alpha = lora.rank, int(lora.alpha) if lora.alpha.is_integer() else lora.alpha
    double = 2 * lora.rank, lora.alpha * (math.sqrt(2) if lora.rslora else 2)
    patterns: dict[str, tuple[int, float]] = {}
    is_doubled = any(len(adaptation.parts) > 1 for adaptation in every)
    if is_doubled and not modules:
        rank, alpha = double
    elif is_doubled:
        # The first match counts. The second pattern includes a module because PEFT warns of a
        # pattern that matches parameters only.
        module = min(modules)
        patterns = {module: (rank, alpha), rf".*\.{OWN_PAIR}{module}": double}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "use_rslora": lora.rslora,
        "target_modules": targets or None,
        "target_parameters": sorted(parameters) or None,
        "modules_to_save": sorted({weight.module for weight in saved}) or None,
        "rank_pattern": {pattern: rank for pattern, (rank, _) in patterns.items()},
        "alpha_pattern": {pattern: alpha for pattern, (_, alpha) in patterns.items()},
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }


class StoredAdapter(NamedTuple):
    """A folder's adapter for an :class:`Adaptation`: its rank (0 if the folder has none), and the
    ratio of its scaling to that of [lora]."""

    adaptation: Adaptation
    rank: int
    ratio: float


class AdapterContents(NamedTuple):
    """Contents of PEFT's folder: adapters; `ends`, whole weights of the ends of the model; `saved`,
    those of `ends` that train in PEFT."""

    adapters: list[StoredAdapter]
    ends: list[EndWeight]
    saved: list[EndWeight]

    def check_tuning(self, tuning: Tuning) -> None:
        """Raises CheckpointError if `tuning` freezes a weight that trains in PEFT."""
        if frozen := [weight.ours for weight in self.saved if not tuning.trains(weight.ours)]:
            names = ", ".join(f'"{name}"' for name in frozen)
            raise CheckpointError(
                f"{CONFIG} has modules_to_save = {sorted({w.module for w in self.saved})}, which "
                f"train in PEFT beside the adapters: set train.train_only = [{names}]"
            )


def check_adapter_folder(
    path: Path, model: ModelConfig, kind: str, *, trains: bool
) -> AdapterContents:
    """Contents of PEFT's folder `path` for `model`, from its adapter_config.json and the header of
    its weights. Single modules may have no adapter, or one of a smaller rank. With
    patterns the scaling of each adapter may differ from that of [lora], unless the model `trains`:
    B is then multiplied by the ratio. Raises CheckpointError if the folder does not belong to
    `model`."""
    check_folder(path.resolve())
    file, header = path / CONFIG, path / WEIGHTS
    if not header.exists() and (pickled := path / "adapter_model.bin").exists():
        raise CheckpointError(
            f"{path} holds no {WEIGHTS}; {pickled.name} is never read, since reading it runs code "
            "of its author: load it with PEFT where that is safe, and write it by save_pretrained"
        )
    shapes = {name: entry.shape for name, entry in read_header(plain_file(path, WEIGHTS)).items()}
    part = model.architecture
    if part is not None and not any(name.startswith(_PREFIX + part.around) for name in shapes):
        # Adapters of the text part alone have its names.
        model = model.with_architecture(replace(part, around=""))
    # The fields of adapter_config.json.
    given = PEFT_DEFAULTS | read_json(plain_file(path, CONFIG), _CONFIG_LIMIT)
    written = peft_config(model, kind, None)
    patterns = _check_fields(file, given, written, model.lora)
    adapted = list(adaptations(model, kind))
    if (single := next(filter(_ONE_EXPERT.search, shapes), None)) is not None:
        raise CheckpointError(
            f"{header}: {single} adapts one expert, as saved over transformers 4: load the folder "
            "with PEFT over transformers 5, and write it by save_pretrained"
        )
    by_name = {adaptation.name(factor): adaptation for adaptation in adapted for factor in "AB"}
    # Modules that have an adapter in the folder, and the targets of these adapters.
    held = {adaptation.module for name, adaptation in by_name.items() if name in shapes}
    targets = {
        part.target
        for adaptation in adapted
        if adaptation.module in held
        for part in adaptation.parts
    }
    of_folder = sorted({match[1] for name in shapes if (match := _LEAF.search(name))})
    advice = f"; the folder has adapters of {', '.join(of_folder)}"
    missing = [
        name
        for name, adaptation in by_name.items()
        if name not in shapes
        and (adaptation.module in held or not {x.target for x in adaptation.parts} <= targets)
    ]
    if missing:
        raise CheckpointError(
            f"{header}: {missing[0]} is missing ({len(missing)} such tensors), which "
            f"lora.targets requires{advice}"
        )
    # Modules that the fields name, against those with adapters: PEFT ignores an adapter of another
    # module; a named module without one is zero, or, with init_lora_weights = false, random.
    is_random = given.get("init_lora_weights") is False
    for adaptation in adaptations(model.with_lora(_EVERY), kind) if is_random else adapted:
        is_held, is_targeted = adaptation.module in held, _is_targeted(given, adaptation, file)
        if is_held and not is_targeted:
            raise CheckpointError(
                f"{header}: {adaptation.name('A')} belongs to a module that {CONFIG} does not "
                "name, and PEFT ignores it: add the module to target_modules, or remove its tensors"
            )
        if is_targeted and is_random and not is_held:
            raise CheckpointError(
                f"{header}: {adaptation.name('A')} is missing, and {CONFIG} names its module: with "
                "init_lora_weights = false PEFT would compute with random numbers"
            )
    # Tensors that belong to nothing.
    ends, saved = _stored_ends(file, given, shapes, model)
    known = by_name.keys() | {weight.stored for weight in ends}
    if model.tied_embeddings and not differ(path, _PREFIX + EMBEDDING, _PREFIX + HEAD, WEIGHTS):
        known |= {_PREFIX + HEAD}  # PEFT saves a tied table under both names
    if extra := [name for name in shapes if name not in known]:
        raise CheckpointError(
            f"{header}: {extra[0]} does not belong to this model or to lora.targets "
            f"({len(extra)} such tensors){advice}"
        )
    adapters = [
        StoredAdapter(adaptation, 0, 1.0)
        if adaptation.module not in held
        else _stored_adapter(path, adaptation, shapes, patterns, model.lora, trains=trains)
        for adaptation in adapted
    ]
    return AdapterContents(adapters, ends, saved)


class _Patterns(NamedTuple):
    """Rank and alpha of a folder, and the exceptions from them by patterns of names."""

    rank: int
    alpha: float
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    #: Field "r" of the folder that this package would write.
    written_rank: int


def _check_fields(
    file: Path, given: Mapping[str, Any], written: Mapping[str, Any], lora: LoraConfig
) -> _Patterns:
    """The ranks and scalings of the fields `given` by `file`. Raises CheckpointError for other
    adapters than those of `lora`, which this package writes as `written`, and for a field whose
    effect is not known here."""
    if given.get("peft_type") != "LORA":
        raise CheckpointError(f"{file}: is of the type {given.get('peft_type')}, not LORA")
    ranks = _numbers(given, "r", "rank_pattern", file)
    alphas = _numbers(given, "lora_alpha", "alpha_pattern", file)
    expected = {"r": lora.rank, "lora_alpha": lora.alpha, "use_rslora": lora.rslora}
    if given.get("r") == written["r"]:  # the form that this package writes
        expected = {key: written[key] for key in expected}
    for key, ours in zip(expected, ("rank", "alpha", "rslora"), strict=True):
        is_free = key != "use_rslora" and (ranks or alphas)
        if not is_free and given.get(key, False) != expected[key]:
            raise CheckpointError(
                f"{file}: has {key} = {given.get(key)}, and lora.{ours} is {getattr(lora, ours)}"
            )
    if (init := given.get("init_lora_weights")) not in SAME_BASE:
        raise CheckpointError(
            f"{file}: init_lora_weights = {init!r} changes the weights beside the adapters: "
            "save them with PEFT's `path_initial_model_for_weight_conversion`, as plain ones"
        )
    for key, value in given.items():
        is_known = key in KNOWN_FIELDS or key == "init_lora_weights" or (key, value) == _NO_BIAS
        if not is_known and value not in (None, False):
            raise CheckpointError(f"{file}: uses {key}, which is not known here")
    return _Patterns(given["r"], given["lora_alpha"], ranks, alphas, written["r"])


def _stored_adapter(
    path: Path,
    adaptation: Adaptation,
    shapes: Mapping[str, tuple[int, ...]],
    patterns: _Patterns,
    lora: LoraConfig,
    *,
    trains: bool,
) -> StoredAdapter:
    """The adapter in the folder `path`, whose tensors have these `shapes`; `patterns` and `trains`
    as in :func:`check_adapter_folder`. Raises CheckpointError for a rank, scaling or shape that
    does not fit."""
    file = path / CONFIG
    rank = _of_pattern(patterns.ranks, adaptation.module, patterns.rank, file)
    alpha = _of_pattern(patterns.alphas, adaptation.module, patterns.alpha, file)
    ratio = alpha / (math.sqrt(rank) if lora.rslora else rank) / lora.scaling
    if rank > lora.rank and rank not in (adaptation.total_rank, patterns.written_rank):
        raise CheckpointError(
            f"{file}: {adaptation.target} has rank {rank}, and lora.rank is {lora.rank}: "
            "lora.rank must be the largest rank"
        )
    if trains and not math.isclose(ratio, 1):
        raise CheckpointError(
            f"{file}: {adaptation.target} has rank {rank} and alpha {alpha}, another scaling "
            f"than lora.alpha {lora.alpha} with lora.rank {lora.rank}: it would train at "
            "another pace than in PEFT; `moemesh evaluate` and `generate` take it"
        )
    for factor in "AB":
        name, shape = adaptation.name(factor), adaptation.shape(factor, rank)
        if shapes[name] != shape:
            raise CheckpointError(
                f"{path / WEIGHTS}: {name} has shape {list(shapes[name])}, its rank of {rank} "
                f"makes it {list(shape)}"
            )
    return StoredAdapter(adaptation, rank, ratio)


def _stored_ends(
    file: Path, given: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], model: ModelConfig
) -> tuple[list[EndWeight], list[EndWeight]]:
    """Whole weights in a folder with these `shapes`, and those of them that ``modules_to_save``
    names: an entry matches each module whose name ends with it."""
    ends = [weight for weight in weights_of_ends(model) if weight.stored in shapes]
    for weight in ends:
        if shapes[weight.stored] != weight.shape:
            raise CheckpointError(
                f"{file.parent / WEIGHTS}: {weight.stored} has shape "
                f"{list(shapes[weight.stored])}, and the model's is {list(weight.shape)}: resize "
                "the base to the vocabulary of the adapters first"
            )
    entries = [str(item) for item in given.get("modules_to_save") or ()]
    saved = [weight for weight in ends if weight.module.endswith(tuple(entries))]
    modules = {weight.module for weight in saved}
    unknown = [entry for entry in entries if not any(name.endswith(entry) for name in modules)]
    tables = [weight for weight in saved if len(weight.shape) > 1]
    if model.tied_embeddings and (tables or any(map(_HEAD_MODULE.endswith, unknown))):
        raise CheckpointError(
            f"{file}: has modules_to_save = {entries}, and the embedding of this model is its "
            "head: PEFT trains a copy for one of them, which is not supported"
        )
    if unknown:
        known = sorted({weight.module for weight in weights_of_ends(model)})
        raise CheckpointError(
            f"{file}: modules_to_save has {unknown[0]}, and the folder no weights of it for an end "
            f"of this model ({', '.join(known)})"
        )
    return ends, saved


def _numbers(given: Mapping[str, Any], default: str, key: str, file: Path) -> Mapping[str, Any]:
    """The table of patterns `key`. Raises CheckpointError unless its values, and that of the field
    `default`, are numbers, and ranks are whole and positive."""
    table: object = given.get(key) or {}
    if not isinstance(table, Mapping):
        raise CheckpointError(f"{file}: {key} must be an object, not {table!r}")
    patterns = cast("Mapping[str, Any]", table)
    is_rank = default == "r"
    named = {default: given[default], **{f"{key}.{name}": patterns[name] for name in patterns}}
    for name, value in named.items():
        is_number = isinstance(value, int if is_rank else (int, float))
        if isinstance(value, bool) or not is_number or (is_rank and value < 1):
            kind = "a whole number of at least 1" if is_rank else "a number"
            raise CheckpointError(f"{file}: {name} = {value!r} must be {kind}")
    return patterns


def _is_targeted(given: Mapping[str, Any], adaptation: Adaptation, file: Path) -> bool:
    """Whether PEFT adapts a module or parameter with the fields `given`, by the rules of its
    `check_target_module_exists` and `_inject_parameters`."""

    def matches(key: str, name: str) -> bool:
        entries: object = given.get(key) or ()
        if isinstance(entries, str):
            return entries == ALL_LINEAR or re.fullmatch(entries, name) is not None
        return any(f".{name}".endswith(f".{entry}") for entry in cast("Sequence[str]", entries))

    try:
        suffix = "" if adaptation.weight.is_expert else ".weight"
        if matches("target_parameters", adaptation.module + suffix):
            return True
        saved = given.get("modules_to_save") or ()
        if adaptation.weight.is_expert or matches("exclude_modules", adaptation.module):
            return False
        if any(re.match(rf"(^|.*\.){entry}($|\..*)", adaptation.module) for entry in saved):
            return False
        layers: object = given.get("layers_to_transform")
        if isinstance(given.get("target_modules"), str) or layers in (None, []):
            return matches("target_modules", adaptation.module)
        parents = given.get("layers_pattern") or r"[^.]*"
        parents = [parents] if isinstance(parents, str) else parents
        places = (
            re.match(rf"(?:^|.*?\.){parent}\.(\d+)\.", adaptation.module) for parent in parents
        )
        layer = next((int(place[1]) for place in places if place is not None), None)
        numbers = cast("Sequence[int]", [layers] if isinstance(layers, int) else layers)
        return layer in numbers and matches("target_modules", adaptation.module)
    except (re.error, TypeError) as error:
        raise CheckpointError(f"{file}: the names of modules are broken ({error})") from error


def _of_pattern(table: Mapping[str, Any], module: str, default: Any, file: Path) -> Any:
    """The value of the first pattern that matches `module` by PEFT's rule, or `default`."""
    try:
        for pattern, value in table.items():
            if re.match(rf"(.*\.)?({pattern})$", module):
                return value
    except re.error as error:
        raise CheckpointError(f"{file}: the pattern {pattern!r} is broken ({error})") from error
    return default
