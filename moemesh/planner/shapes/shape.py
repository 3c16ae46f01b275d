"""The shape of any model that the planner can price: sizes of every layer, in any framework."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import ValidationError

from moemesh.config.attention_keys import MLA_SIZES, HeadSizes
from moemesh.config.errors import ConfigError, Problem
from moemesh.config.experts import MOST_LAYERS
from moemesh.config.huggingface.sizes import read_sizes
from moemesh.config.load import type_problems
from moemesh.config.model import ModelConfig
from moemesh.config.rules import CutSizes
from moemesh.config.section import LARGEST_SIZE
from moemesh.config.sources import Leaf

#: Learned numbers per channel of one norm: a scale; a scale and a shift; nothing.
_NORM_WEIGHTS = {"rms": 1, "layer": 1, "layer_bias": 2, "plain": 0}


class LayerKind(NamedTuple):
    """Properties in which layers of one model differ: experts or a dense MLP, and the attention
    window in tokens (0: the whole sequence)."""

    moe: bool
    window: int


class Counted(NamedTuple):
    """Means over the layers of one kind, counted in their code (:mod:`moemesh.model.hub.costs`);
    or, with `weights` alone, the parameters outside of layers.

    `weights` are the parameters outside of the routed experts, which every rank holds,
    `expert_weights` those of the routed experts. `flops` are the forward FLOPs of a token without
    attention scores, `kept_bytes` the bytes per token that the layer keeps for its backward,
    outside of the routed experts.
    """

    weights: float = 0.0
    expert_weights: float = 0.0
    flops: float = 0.0
    kept_bytes: float = 0.0


class ModelShape(HeadSizes):
    """Every size of a decoder-only transformer. Fields shared with ModelConfig have its names.

    Widths are in channels, `intermediate_size` that of a dense MLP, `expert_intermediate_size` of
    one expert, `shared_intermediate_size` of all shared experts of a layer together. Raises
    ConfigError with every value of a wrong type, else every size out of range, else every other
    broken rule.
    """

    section: ClassVar[str] = "model"

    name: str = "model"
    num_layers: int
    hidden_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int = 0
    #: "swiglu" has a gate projection (three matrices), "gelu" has none (two).
    activation: Literal["swiglu", "gelu"] = "swiglu"

    attention: Literal["gqa", "mla"] = "gqa"
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rotary_head_dim: int = 0
    v_head_dim: int = 0
    #: Norms of queries and keys: over each head (one scale of `head_dim`), or over all heads.
    qk_norm: Literal["none", "head", "full"] = "none"
    #: Bias of the query, key and value projections, and of the output projection.
    qkv_bias: bool = False
    output_bias: bool = False
    #: One learned logit per head that takes part in the softmax (gpt-oss).
    attention_sinks: bool = False
    #: A second query projection that gates the attention output.
    attention_gate: bool = False
    #: Attention window of every layer in tokens, 0 for none; empty when no layer has one.
    windows: tuple[int, ...] = ()

    #: Layers (from 0) with experts.
    moe_layers: tuple[int, ...] = ()
    num_experts: int = 0
    experts_per_token: int = 0
    expert_intermediate_size: int = 0
    shared_intermediate_size: int = 0
    #: A learned gate h -> 1 on the output of the shared experts (Qwen2-MoE).
    shared_gate: bool = False
    router_logit_bias: bool = False
    #: A buffer, not a parameter: one number per expert, added to scores for the choice
    #: (DeepSeek-V3).
    router_selection_bias: bool = False
    router_groups: int = 1
    router_groups_kept: int = 1
    mlp_bias: bool = False
    expert_bias: bool = False

    norm: Literal["rms", "layer", "layer_bias", "plain"] = "rms"
    norms_per_layer: int = 2
    #: A norm after the embedding.
    embedding_norm: bool = False
    final_norm: bool = True
    tied_embeddings: bool = False
    head_bias: bool = False
    #: Rows of a learned table of positions; 0: rotary or none.
    learned_positions: int = 0
    dropout: bool = False
    num_mtp_layers: int = 0
    #: Means of dense layers, means of MoE layers, and everything outside of layers, for a model
    #: whose code was counted; empty for a model that the sizes describe.
    counted: tuple[Counted, Counted, Counted] | tuple[()] = ()
    #: Properties that the shape leaves out, as notes for the user.
    notes: tuple[str, ...] = ()

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            leaves = {f"model.{key}": Leaf(value=x, origin="") for key, x in values.items()}
            raise ConfigError(type_problems(ModelShape, leaves, error).values()) from None
        # Sizes that must be at least 1.
        needed = [*_SIZES]
        if self.attention == "mla":
            needed += MLA_SIZES
        if self.moe_layers:
            needed += _EXPERT_SIZES
        if self.num_layers > len(self.moe_layers):
            needed.append("intermediate_size")
        problems: list[Problem] = []

        def complain(key: str, message: str, fix: str = "") -> None:
            problems.append(Problem.of("shape", f"model.{key}", getattr(self, key), message, fix))

        for key, value in self.to_json().items():
            if isinstance(value, int) and not isinstance(value, bool):
                least = 1 if key in needed else 0
                most = MOST_LAYERS if key == "num_layers" else LARGEST_SIZE
                if not least <= value <= most:
                    bound = f"at least {least}" if value < least else f"at most {most}"
                    fix = f"{key} = {min(max(value, least), most)}"
                    complain(key, f"{key} must be {bound}, not {value}", fix)
        if problems:
            raise ConfigError(problems)
        heads, kv_heads, experts = self.num_heads, self.num_kv_heads, self.num_experts
        if self.attention == "gqa" and heads % kv_heads:
            complain("num_kv_heads", f"num_kv_heads ({kv_heads}) must divide num_heads ({heads})")
        if self.windows and len(self.windows) != self.num_layers:
            message = f"{len(self.windows)} windows for {self.num_layers} layers"
            complain("windows", message, f"windows = {self.windows[0]}, one for all of them")
        if any(window < 0 for window in self.windows):
            complain("windows", "a window is a number of tokens; 0 is the whole sequence")
        if any(not 0 <= layer < self.num_layers for layer in self.moe_layers):
            complain("moe_layers", f"layers are numbered 0 to {self.num_layers - 1}")
        elif len({*self.moe_layers}) < len(self.moe_layers):
            fix = f"moe_layers = {sorted({*self.moe_layers})}"
            complain("moe_layers", "a layer is in the list twice", fix)
        if experts and not self.moe_layers:
            fix = f"moe_layers = {list(range(min(self.num_layers, 3)))} ..., or num_experts = 0"
            complain("num_experts", f"num_experts is {experts}, but no layer holds them", fix)
        if (chosen := self.experts_per_token) > experts:
            message = f"experts_per_token ({chosen}) exceeds num_experts ({experts})"
            complain("experts_per_token", message, f"experts_per_token = {experts}")
        if experts % max(groups := self.router_groups, 1):
            message = f"router_groups ({groups}) must divide num_experts ({experts})"
            complain("router_groups", message)
        if problems:
            raise ConfigError(problems)

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(self.to_json().values()))

    def __hash__(self) -> int:
        # Computed once: shapes are keys of the caches that make a layout cheap to price.
        return self._hash

    @cached_property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kind of every layer, in order."""
        moe, windows = frozenset(self.moe_layers), self.windows or (0,) * self.num_layers
        return tuple(LayerKind(index in moe, window) for index, window in enumerate(windows))

    @cached_property
    def kind_counts(self) -> dict[LayerKind, int]:
        """Number of layers of each kind."""
        return dict(Counter(self.kinds))

    @property
    def mtp_kind(self) -> LayerKind:
        """Kind of the extra prediction layers: that of the last layer."""
        return self.kinds[-1]

    @cached_property
    def sizes(self) -> CutSizes:
        """Sizes that the degrees of a layout divide. Layers of a counted model stay whole."""
        return CutSizes(
            num_layers=self.num_layers,
            num_heads=1 if self.counted else self.num_heads,
            num_kv_heads=0 if self.counted or self.attention == "mla" else self.num_kv_heads,
            intermediate_size=self.intermediate_size,
            shared_width=self.shared_intermediate_size,
            num_moe_layers=self.num_moe_layers,
            num_experts=self.num_experts,
            expert_intermediate_size=self.expert_intermediate_size,
        )

    @property
    def num_moe_layers(self) -> int:
        return len(self.moe_layers)

    @property
    def is_moe(self) -> bool:
        return bool(self.moe_layers)

    @property
    def norm_weights(self) -> int:
        """Learned numbers of one norm over the hidden channels."""
        return _NORM_WEIGHTS[self.norm] * self.hidden_size

    @property
    def gated(self) -> bool:
        """Whether the MLPs have a gate: three matrices instead of two."""
        return self.activation == "swiglu"

    def changed(self, **values: Any) -> ModelShape:
        return ModelShape(**(self.to_json() | values))

    def truncated(self, num_layers: int) -> ModelShape:
        """The model cut to `num_layers` layers: its first ones, but if all its dense layers are in
        front of the MoE layers, one dense layer and MoE layers."""
        dense = self.num_layers - len(self.moe_layers)
        #: Number of layers before the first layer with experts.
        lead = next((index for index, kind in enumerate(self.kinds) if kind.moe), 0)
        if self.is_moe and 0 < lead == dense:
            moe = tuple(range(min(1, num_layers), num_layers))
        else:
            moe = tuple(index for index in self.moe_layers if index < num_layers)
        experts: dict[str, Any] = {}
        if self.is_moe and not moe:
            # A model without MoE layers may have no sizes of experts.
            experts = dict.fromkeys((*_EXPERT_SIZES, "shared_intermediate_size"), 0)
            experts |= {"router_groups": 1, "router_groups_kept": 1}
        return self.changed(
            **experts,
            name=f"{self.name}#L{num_layers}",
            num_layers=num_layers,
            moe_layers=moe,
            windows=self.windows[:num_layers],
        )

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ModelShape.model_fields}


def from_model_config(config: ModelConfig, name: str = "model") -> ModelShape:
    """The shape of one of our own models, exactly as `moemesh train` would build it."""
    moe = tuple(index for index in config.routed_layers if index < config.num_layers)
    shared = set(ModelShape.model_fields) & set(ModelConfig.model_fields)
    values = {key: getattr(config, key) for key in shared}
    if not moe:
        for key in (*_EXPERT_SIZES, "router_groups", "router_groups_kept"):
            del values[key]
    if not config.num_dense_layers:
        del values["intermediate_size"]
    windows = tuple(config.window(layer) for layer in range(config.num_layers))
    norm = "head" if config.qk_norm_over == "head" else "full"
    values |= {
        "name": name,
        "moe_layers": moe,
        "qk_norm": norm if config.qk_norm else "none",
        "windows": windows if any(windows) else (),
        "shared_intermediate_size": config.shared_width if moe else 0,
    }
    return ModelShape(**values)


def from_huggingface(config: Mapping[str, Any], name: str = "model") -> ModelShape:
    """The shape of a parsed ``config.json`` of transformers; the text part of a multimodal model.

    Raises ConfigError naming every key that is missing or selects layers without a formula.
    """
    sizes = read_sizes(config)
    return ModelShape(name=name, notes=sizes.notes, **sizes.fields)


_SIZES = ("num_layers", "hidden_size", "vocab_size", "num_heads", "num_kv_heads", "head_dim")
_EXPERT_SIZES = ("num_experts", "experts_per_token", "expert_intermediate_size")
