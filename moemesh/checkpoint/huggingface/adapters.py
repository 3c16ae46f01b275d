"""Adapters in PEFT's format: which of its tensors holds which of our factors, and a folder of them.

Legend: E experts, R rank, I inputs, O outputs.

A projection has ``<module>.lora_A.weight`` [R, I] and ``lora_B.weight`` [O, R]. In transformers 5
all experts of a layer are one parameter, and gate with up is one, too. PEFT adapts such a parameter
(``target_parameters``) with A [E R, I], the experts one after the other, and B [O, R E], the
experts of a rank side by side; the adapter of ``gate_up_proj`` lies under ``base_layer`` where
``down_proj`` has one. Separate adapters of gate and up are then one of rank 2 R whose B is block
diagonal, with twice the alpha. Where no module but stacks are adapted, all are "wide": of rank 2 R,
the others with zeros behind their own, for PEFT warns of a ``rank_pattern`` that fits no module.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from moemesh.checkpoint.files import CheckpointError, check_folder, replace_by
from moemesh.checkpoint.header import read_header
from moemesh.checkpoint.huggingface.contents import read_json
from moemesh.checkpoint.huggingface.convert import write_json
from moemesh.checkpoint.huggingface.names import pieces
from moemesh.checkpoint.huggingface.pieces import Read, TensorPiece
from moemesh.checkpoint.huggingface.weight_folder import EXPERT
from moemesh.checkpoint.load import DeferredTensor, safetensors_bytes
from moemesh.checkpoint.store import Shard
from moemesh.config.lora import ADAPTER_CONFIG as CONFIG
from moemesh.config.lora import ADAPTER_WEIGHTS as WEIGHTS
from moemesh.config.lora import LoraConfig, TargetPart, factor_name, parts_of
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.sharding.parameters import ParameterTensor, tensors

#: Upper bound of adapter_config.json in bytes.
_CONFIG_LIMIT = 1 << 20
_FUSED = "gate_up_proj"


class Adaptation(NamedTuple):
    """One adapter of PEFT's, of the parts `parts` of our `weight` in the family `kind`, each of
    which has an adapter of its own here, of rank `rank`. `module`: PEFT's name of what it adapts,
    without the names of tensors; `wraps`: another adapter is around it."""

    weight: ParameterTensor
    parts: tuple[TargetPart, ...]
    kind: str
    rank: int
    module: str
    wraps: bool = False

    @property
    def target(self) -> str:
        """Its name in ``adapter_config.json``, in every layer."""
        block, leaf = self.module.split(".")[-2:]
        return f"{block}.{leaf}" if self.is_stack else leaf

    @property
    def is_stack(self) -> bool:
        """Whether it is that of all experts of a layer."""
        return self.weight.is_expert

    @property
    def total_rank(self) -> int:
        """The rank of PEFT's adapter."""
        return self.rank * len(self.parts)

    def name(self, factor: str) -> str:
        """The name of PEFT's tensor; `factor` is A or B."""
        module = self.module
        if self.is_stack:
            module = module.rpartition(".")[0] + (".base_layer" if self.wraps else "")
        return f"base_model.model.{module}.lora_{factor}.weight"

    def factor(self, part: TargetPart, factor: str) -> str:
        """The name of our factor of a part."""
        return f"{self.weight.name.rpartition('.')[0]}.{factor_name(part.target, factor)}"

    def shape(self, factor: str, rank: int) -> tuple[int, ...]:
        """The shape of PEFT's tensor, at a rank of PEFT's."""
        experts = self.weight.shape[0] if self.is_stack else 1
        if factor == "A":
            return (rank * experts, self.weight.shape[-1])
        return (math.prod(self._piece(1).view) // experts, rank * experts)

    def store(self, factor: str, factors: Sequence[Tensor]) -> Tensor:
        """PEFT's tensor from our factors of all parts."""
        rank = self.total_rank
        if factor == "A":
            joined = torch.cat(list(factors), dim=1) if self.is_stack else factors[0]
            return joined.reshape(self.shape("A", rank))
        piece = self._piece(rank)
        if not self.is_stack:
            return piece.store(factors[0])
        joined = factors[0].new_zeros((*self.weight.shape[:-1], rank))
        for index, (part, own) in enumerate(zip(self.parts, factors, strict=True)):
            _rows(joined, part)[..., index * self.rank : (index + 1) * self.rank] = own
        stored = piece.store(joined)
        by_expert = stored.transpose(1, 2) if _is_transposed(piece) else stored
        return by_expert.permute(1, 2, 0).reshape(self.shape("B", rank))

    def load(self, factor: str, stored: Tensor) -> list[Tensor]:
        """Our factors of all parts from PEFT's tensor. Where its A serves gate and up together,
        both get it. Raises CheckpointError where it serves them in part, or has numbers behind
        their rank."""
        experts = self.weight.shape[0] if self.is_stack else 1
        rank = stored.shape[0 if factor == "A" else 1] // experts
        places = range(0, rank, self.rank) if rank == self.total_rank else [0] * len(self.parts)
        if factor == "A":
            by_expert = stored.reshape(experts, rank, -1) if self.is_stack else stored
            return [by_expert.narrow(-2, start, self.rank) for start in places]
        if self.is_stack:
            stored = stored.reshape(-1, rank, experts).permute(2, 0, 1)
            if _is_transposed(self._piece(rank)):
                stored = stored.transpose(1, 2)
        piece = self._piece(rank)
        by_expert = stored.contiguous()
        joined = piece.read(piece.box, lambda name, ranges: by_expert)
        found: list[Tensor] = []
        for part, start in zip(self.parts, places, strict=True):
            own = _rows(joined, part) if self.is_stack else joined
            outside = [own[..., :start], own[..., start + self.rank :]]
            if any(bool(other.any()) for other in outside):
                raise CheckpointError(f"{self.name('B')}: has other rows of A than its own")
            found.append(own[..., start : start + self.rank])
        return found

    def _piece(self, rank: int) -> TensorPiece:
        """The place of a factor B of that rank, as if it were the weight."""
        found = pieces(self.weight.name, (*self.weight.shape[:-1], rank), self.kind, fused=True)
        if self.is_stack:
            return found[0]
        every = parts_of(self.weight.name.rpartition(".")[2], self.weight.shape)
        return found[every.index(self.parts[0])]


def _rows(joined: Tensor, part: TargetPart) -> Tensor:
    """The rows of a part, of a stack of experts."""
    return joined if part.dim is None else joined.narrow(part.dim + 1, part.start, part.size)


def _is_transposed(piece: TensorPiece) -> bool:
    """Whether the family stores [E, in, out]."""
    return piece.order != tuple(range(len(piece.order)))


def adaptations(model: ModelConfig, kind: str) -> Iterator[Adaptation]:
    """PEFT's adapters of `model`, a model of the family `kind`. Extra prediction layers are left
    out: transformers has none."""
    lora = model.lora
    for weight in tensors(model, Plan()):
        owner, index, *rest = weight.name.split(".")
        parts = parts_of(rest[-1], weight.shape) if rest else ()
        if owner != "layers" or int(index) >= model.num_layers:
            continue
        own = tuple(part for part in parts if lora.adapts(part.target))
        every = pieces(weight.name, weight.shape, kind, fused=True) if own else []
        if weight.is_expert and own:
            wraps = rest[-1] == "gate_up" and lora.adapts("down_proj")
            yield Adaptation(weight, own, kind, lora.rank, every[0].source, wraps)
            continue
        for part in own:
            module = every[parts.index(part)].source.removesuffix(".weight")
            yield Adaptation(weight, (part,), kind, lora.rank, module)


def peft_config(model: ModelConfig, kind: str, base: str | None) -> dict[str, Any]:
    """``adapter_config.json``; `base` is the folder or name of the weights beside the adapters."""
    lora, every = model.lora, list(adaptations(model, kind))
    stacks = {one.target for one in every if one.is_stack}
    modules, parameters = set[str](), set(stacks)
    for one in (one for one in every if not one.is_stack):
        # Beside stacks PEFT takes the name of any other MLP for that of the experts, unless it is
        # given as a parameter.
        if stacks and ".feed_forward." in one.weight.name:
            parameters.add(".".join(one.module.split(".")[-2:]) + ".weight")
        else:
            modules.add(one.target)
    rank, alpha = lora.rank, int(lora.alpha) if lora.alpha.is_integer() else lora.alpha
    double = 2 * lora.rank, lora.alpha * (math.sqrt(2) if lora.rslora else 2)
    patterns: dict[str, tuple[int, float]] = {}
    is_doubled = any(len(one.parts) > 1 for one in every)
    if is_doubled and not modules:
        rank, alpha = double
    elif is_doubled:
        # The first that matches counts. The second names a module, too: PEFT warns of a pattern
        # that fits parameters alone.
        module = min(modules)
        patterns = {module: (rank, alpha), rf".*\.{_FUSED}|{module}": double}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "use_rslora": lora.rslora,
        "target_modules": sorted(modules) or None,
        "target_parameters": sorted(parameters) or None,
        "rank_pattern": {key: one for key, (one, _) in patterns.items()},
        "alpha_pattern": {key: one for key, (_, one) in patterns.items()},
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }


def write_adapters(
    weights: Read,
    model: ModelConfig,
    kind: str,
    out: Path,
    *,
    dtype: torch.dtype,
    base: str | None,
) -> None:
    """Write the adapters among `weights` as a folder that PEFT loads beside a model of transformers
    5 of the family `kind`."""
    shapes = {tensor.name: tensor.shape for tensor in tensors(model, Plan())}
    config = peft_config(model, kind, base)
    every = list(adaptations(model, kind))
    if config["r"] != model.lora.rank:
        every = [one._replace(rank=2 * one.rank // len(one.parts)) for one in every]

    def make(one: Adaptation, factor: str) -> Tensor:
        names = [one.factor(part, factor) for part in one.parts]
        own = [weights(name, [range(size) for size in shapes[name]]) for name in names]
        more = one.rank - model.lora.rank
        pad = (0, 0, 0, more) if factor == "A" else (0, more)
        own = [torch.nn.functional.pad(factor_of, pad) for factor_of in own]
        return one.store(factor, own).to(dtype).contiguous()

    made = {
        one.name(factor): DeferredTensor(
            dtype, one.shape(factor, one.total_rank), partial(make, one, factor)
        )
        for one in every
        for factor in "AB"
    }
    out.mkdir(parents=True, exist_ok=True)
    replace_by(out / WEIGHTS, safetensors_bytes(made, {"format": "pt"}))
    write_json(out / CONFIG, config)


class AdapterFolder:
    """An opened folder of PEFT's. Raises CheckpointError unless it holds the adapters of `model`
    and no others, before any is read."""

    def __init__(self, path: Path, model: ModelConfig, kind: str) -> None:
        check_folder(path)
        self.path = path
        given = read_json(path / CONFIG, _CONFIG_LIMIT)
        found = {name: entry.shape for name, entry in read_header(path / WEIGHTS).items()}
        self._adaptations = list(adaptations(model, kind))
        self._check_config(given, model.lora, peft_config(model, kind, None))
        self._check_tensors(found, given["r"])
        self._places = {
            one.factor(part, factor): (one, index, factor)
            for one in self._adaptations
            for index, part in enumerate(one.parts)
            for factor in "AB"
        }
        self._file: Any = safe_open(path / WEIGHTS, framework="pt", device="cpu")
        self._last: tuple[str, list[Tensor]] = "", []

    def load_into(self, shards: Sequence[Shard]) -> None:
        """Fill the shards of adapters, in place; names are those of a checkpoint. Factors that the
        folder has none of (of extra prediction layers) stay as they are."""
        with torch.no_grad():
            for shard in shards:
                name, expert = shard.name.removeprefix("model."), None
                if (match := EXPERT.fullmatch(name)) is not None:
                    name, expert = f"{match[1]}.{match[3]}", int(match[2])
                if name not in self._places:
                    continue
                one, index, factor = self._places[name]
                stored = one.name(factor)
                if self._last[0] != stored:
                    self._last = stored, one.load(factor, self._file.get_tensor(stored))
                whole = self._last[1][index]
                ends = zip(shard.offset, shard.tensor.shape, strict=True)
                box = tuple(slice(start, start + size) for start, size in ends)
                shard.tensor.copy_((whole if expert is None else whole[expert])[box])

    def _check_config(
        self, given: dict[str, Any], lora: LoraConfig, written: dict[str, Any]
    ) -> None:
        """`written`: what this package would have written."""
        path = self.path / CONFIG
        if given.get("peft_type") != "LORA":
            raise CheckpointError(f"{path}: is of the type {given.get('peft_type')}, not LORA")
        expected = {"r": lora.rank, "lora_alpha": lora.alpha, "use_rslora": lora.rslora}
        if given.get("r") == written["r"]:
            expected = {key: written[key] for key in expected}
        for key, ours in zip(expected, ("rank", "alpha", "rslora"), strict=True):
            if given.get(key, False) != expected[key]:
                raise CheckpointError(
                    f"{path}: has {key} = {given.get(key)}, and lora.{ours} is "
                    f"{getattr(lora, ours)}"
                )
        for key in ("use_dora", "modules_to_save", "lora_bias", "layer_replication"):
            if given.get(key):
                raise CheckpointError(f"{path}: uses {key}, which is not known here")
        ranks, alphas = (given.get(key) or {} for key in ("rank_pattern", "alpha_pattern"))
        root = math.sqrt if lora.rslora else float
        for key in sorted(ranks.keys() | alphas.keys()):
            rank, alpha = ranks.get(key, given["r"]), alphas.get(key, given["lora_alpha"])
            if not math.isclose(alpha / root(rank), lora.scaling):
                raise CheckpointError(
                    f"{path}: {key} has rank {rank} and alpha {alpha}, another scaling than "
                    f"rank {lora.rank} and alpha {lora.alpha} of the rest"
                )

    def _check_tensors(self, found: dict[str, tuple[int, ...]], rank: int) -> None:
        path = self.path / WEIGHTS
        expected = {one.name(factor): (one, factor) for one in self._adaptations for factor in "AB"}
        of_folder = sorted({match[1] for name in found if (match := _LEAF.search(name))})
        advice = f"; the folder has adapters of {', '.join(of_folder)}"
        if missing := [name for name in expected if name not in found]:
            raise CheckpointError(
                f"{path}: {missing[0]} is missing ({len(missing)} such tensors), which "
                f"lora.targets asks for{advice}"
            )
        if extra := [name for name in found if name not in expected]:
            raise CheckpointError(
                f"{path}: {extra[0]} is no adapter of this model ({len(extra)} such tensors), or "
                f"of no target of lora.targets{advice}"
            )
        for name, (one, factor) in expected.items():
            legal = {one.shape(factor, each) for each in (one.total_rank, one.rank, rank)}
            if found[name] not in legal:
                raise CheckpointError(
                    f"{path}: {name} has shape {list(found[name])}, this model makes it "
                    f"{list(one.shape(factor, one.total_rank))}"
                )


_LEAF = re.compile(r"\.(\w+(?:\.base_layer)?)\.lora_[AB]\.weight$")
