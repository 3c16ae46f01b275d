"""The record of a model that the code of transformers computes, for code without torch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, cast

from moemesh.config.lora import ALL_LINEAR, LoraConfig, TargetPart, factors_of, is_adapter, parts_of

#: The lists of :attr:`Architecture.costs`, as :mod:`moemesh.model.hub.costs` counts them.
COSTS = {"flops", "flops_per_key", "ends"} | {
    f"{width}{kind}"
    for width in ("", "wide_")
    for kind in ("kept_bytes", "kept_per_key", "expert_bytes")
}


@dataclass(frozen=True, kw_only=True)
class ParameterRecord:
    """One parameter, under its name in transformers. ``unit``: the part of the forward that reads
    it ("embedding", "layers.3", "head"); ``is_expert``: a stack whose first dim is the expert;
    ``is_fp32``: float32 in a bfloat16 model; ``is_idle``: never has a gradient; ``cut``: the dim of
    a stack that etp shards, None if it cannot; the dim has ``blocks`` equal blocks (gate and up),
    and each is sharded by itself. ``layout``: the dims of a weight that may have an adapter, in the
    order of our weights and in the stored order, as einops writes them: "o i -> o i" for a linear
    layer, "e p f h -> e (p f) h" for a stack of gate and up projections; else empty."""

    name: str
    shape: tuple[int, ...]
    unit: str
    is_expert: bool = False
    is_fp32: bool = False
    is_idle: bool = False
    cut: int | None = None
    blocks: int = 1
    layout: str = ""

    @property
    def module(self) -> str:
        """Name of the module that has the weight's adapters: the parent of a linear layer, or the
        experts."""
        return ".".join(self.name.split(".")[: -1 if self.is_expert else -2])

    @property
    def parts(self) -> tuple[TargetPart, ...]:
        """The projections that the weight holds and that may have adapters."""
        if not self.layout:
            return ()
        if self.is_expert:
            return parts_of(self.name.rpartition(".")[2].removesuffix("_proj"), self.logical_shape)
        return (TargetPart(self.name.split(".")[-2]),)

    @property
    def logical_shape(self) -> tuple[int, ...]:
        """The shape of the weight in the dims of our own weights."""
        logical, stored = self.layout.split(" -> ")
        sizes = dict(zip(re.sub(r"\(.*\)", "f", stored).split(), self.shape, strict=True))
        if "p" in logical:  # gate and up in one dim
            sizes |= {"p": 2, "f": sizes["f"] // 2}
        return tuple(sizes[dim] for dim in logical.split())

    def adapted(self, lora: LoraConfig) -> tuple[TargetPart, ...]:
        """The parts with an adapter. "all-linear" leaves out a weight with a dim below the rank."""
        if not lora.rank:
            return ()
        has_all = ALL_LINEAR in lora.targets and lora.rank <= min(self.shape[-2:], default=0)
        return tuple(part for part in self.parts if has_all or part.target in lora.targets)

    def adapters(self, lora: LoraConfig) -> Iterator[ParameterRecord]:
        """The adapter parameters of the weight."""
        if parts := self.adapted(lora):
            shape, is_stack = self.logical_shape, self.is_expert
            for factor in factors_of(lora, parts, shape, {}, "", is_stack=is_stack):
                yield ParameterRecord(
                    name=f"{self.module}.{factor.leaf}",
                    shape=factor.shape,
                    unit=self.unit,
                    is_expert=self.is_expert,
                    is_fp32=self.is_fp32,
                )


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Sizes and parameters of a model of transformers. ``values``: its ``config.json``;
    ``layers``: name of the module that holds the decoder layers; ``around``: name of the text part
    if ``AutoModelForCausalLM`` makes a larger model of the folder, else empty; ``has_plain_head``:
    logits are the last hidden states times the head's weight; ``documents``: what separates the
    documents of one row ("positions", "masks", or "rows": nothing does); ``reads_between``:
    parameters outside of the layers are read between them, so that zero3 cannot free them;
    ``layer_output``: for each tensor that every layer returns, its dtype (in a bfloat16 model) and
    its sizes after [B, S], where -k means min(k, S); ``layer_items``: number of items in the tuple
    that a layer returns, of which those after the tensors are None; 0 if a layer returns the tensor
    itself; ``uncut``: the reason why pipeline stages cannot cut the layers, empty if they can;
    ``notes``: sentences that a run prints; ``costs``: figures of the planner.
    """

    model_type: str
    transformers: str
    values: dict[str, Any]
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_experts: int
    experts_per_token: int
    expert_width: int
    routed_layers: tuple[int, ...]
    max_positions: int
    tied_embeddings: bool
    has_plain_head: bool
    layers: str
    parameters: tuple[ParameterRecord, ...]
    #: Persistent buffers, name -> shape: routers' selection biases.
    buffers: dict[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    documents: str = "rows"
    reads_between: bool = False
    layer_output: tuple[tuple[str, tuple[int, ...]], ...] = ()
    layer_items: int = 0
    uncut: str = ""
    around: str = ""
    notes: tuple[str, ...] = ()
    costs: dict[str, Any] = field(default_factory=dict[str, Any])

    def name_in_folder(self, name: str) -> str:
        """The name of a parameter or module in the model that transformers makes of the folder."""
        base, _, rest = name.partition(".")
        is_inside = self.around and base == self.layers.partition(".")[0]
        return f"{self.around}.{rest}" if is_inside else name

    @property
    def cuts_experts(self) -> bool:
        """Whether the ranks of etp can share the width of each expert."""
        return all(record.cut is not None for record in self.parameters if record.is_expert)

    def with_adapters(self, lora: LoraConfig) -> Architecture:
        """The same record with the adapters `lora` in place of its own, each after its weight."""
        parameters: list[ParameterRecord] = []
        for weight in self.parameters:
            if not is_adapter(weight.name):
                parameters += [weight, *weight.adapters(lora)]
        return replace(self, parameters=tuple(parameters))

    def to_json(self) -> str:
        """The record as one line of JSON, for the cache."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Architecture:
        """The record that :meth:`to_json` wrote. Raises ValueError for any other text."""
        given = json.loads(text)
        if not isinstance(given, dict) or {field.name for field in fields(cls)} != given.keys():
            raise ValueError("not the record of an architecture")
        values = cast("dict[str, Any]", given)
        if not isinstance(values["costs"], dict) or values["costs"].keys() != COSTS:
            raise ValueError("the record has not the costs that the planner reads")
        records: list[dict[str, Any]] = values["parameters"]
        parameters = [
            ParameterRecord(**cast("dict[str, Any]", {**record, "shape": (*record["shape"],)}))
            for record in records
        ]
        values |= {
            "parameters": tuple(parameters),
            "routed_layers": tuple(values["routed_layers"]),
            "notes": tuple(values["notes"]),
            "layer_output": tuple((dtype, (*sizes,)) for dtype, sizes in values["layer_output"]),
            "buffers": {name: tuple(shape) for name, shape in values["buffers"].items()},
        }
        return cls(**values)
