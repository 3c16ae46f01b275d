"""Keys of the attention of a model: heads, latent attention, RoPE, windows, norms, biases."""

from __future__ import annotations

from collections.abc import Iterator
from math import log
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from moemesh.config.errors import Problem
from moemesh.config.section import Count, NotNegative, Positive, Range, Section, Size, UsedWith
from moemesh.config.suggest import divisors, nearest_divisors
from moemesh.config.toml import format_value

Attention = Literal["gqa", "mla"]
RopeType = Literal["default", "linear", "llama3", "yarn"]

MLA_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rotary_head_dim", "v_head_dim")

#: Condition of keys of grouped-query attention, which latent attention does not have.
_GROUPED = UsedWith("attention", ("gqa",))
_YARN = UsedWith("rope_type", ("yarn",))


class HeadSizes(Section):
    """Sizes of heads and projections that follow from the keys of an attention, the same in a model
    that is trained and in a shape that is only planned."""

    if TYPE_CHECKING:
        attention: Attention
        hidden_size: int
        num_heads: int
        num_kv_heads: int
        head_dim: int
        q_lora_rank: int
        kv_lora_rank: int
        qk_nope_head_dim: int
        qk_rotary_head_dim: int
        v_head_dim: int

    @property
    def query_head_dim(self) -> int:
        """Width of a query or key head in the attention product (d_qk)."""
        if self.attention == "mla":
            return self.qk_nope_head_dim + self.qk_rotary_head_dim
        return self.head_dim

    @property
    def value_head_dim(self) -> int:
        """Width of a value head (d_v)."""
        return self.v_head_dim if self.attention == "mla" else self.head_dim

    @property
    def kv_heads(self) -> int:
        """Key/value heads in the attention product; latent attention expands to all heads."""
        return self.num_heads if self.attention == "mla" else self.num_kv_heads

    @property
    def query_width(self) -> int:
        """Channels of all query heads of a layer together."""
        return self.num_heads * self.query_head_dim

    @property
    def kv_width(self) -> int:
        """Channels of all key heads of a layer together (h_kv)."""
        return self.kv_heads * self.query_head_dim

    @property
    def value_width(self) -> int:
        """Channels of all value heads of a layer together."""
        return self.kv_heads * self.value_head_dim

    @property
    def output_width(self) -> int:
        """Channels of the attention output, the input of its last projection."""
        return self.num_heads * self.value_head_dim

    @property
    def entering_widths(self) -> tuple[int, ...]:
        """Channels of a token in each tensor that enters the heads of an attention block."""
        if self.attention == "gqa":
            return (self.hidden_size,)
        latent = self.kv_lora_rank + self.qk_rotary_head_dim
        if self.q_lora_rank:
            return (self.q_lora_rank + latent,)
        return (self.hidden_size, latent)


class AttentionConfig(HeadSizes):
    """The part of :class:`moemesh.config.model.ModelConfig` that describes attention.

    Most names are those of Hugging Face configurations; most keys of a ``rope_scaling`` table get
    the prefix "rope_".
    """

    section: ClassVar[str] = "model"

    #: Grouped-query attention (arXiv:2305.13245) or multi-head latent attention (arXiv:2405.04434).
    attention: Attention = "gqa"
    num_heads: Size = 8
    num_kv_heads: Size = 4
    head_dim: Size = 16
    #: Sizes of latent attention; 0: unused. Without q_lora_rank queries are not compressed.
    q_lora_rank: Count = 0
    kv_lora_rank: Count = 0
    qk_nope_head_dim: Count = 0
    qk_rotary_head_dim: Count = 0
    v_head_dim: Count = 0
    #: Epsilon of the norms of the latents, independent of that of the other norms.
    latent_norm_eps: Positive = 1e-6

    #: RMSNorm of queries and keys before RoPE: over each head with one scale of head_dim, or over
    #: all heads of the projection with a scale for every channel (OLMoE, MiniMax-M2).
    qk_norm: Annotated[bool, _GROUPED] = False
    qk_norm_over: Literal["head", "projection"] = "head"
    #: A bias on the QKV projections; with latent attention, on those down to the latents.
    qkv_bias: bool = False
    #: A bias on the output projection.
    output_bias: bool = False
    #: Queries, keys and values are clipped to +- this value after the norm; 0: without a limit.
    clip_qkv: Annotated[NotNegative, _GROUPED] = 0.0
    #: One learned logit per head that takes part in the softmax and has no value (gpt-oss).
    attention_sinks: bool = False
    #: Factor of the scores; 0: 1/sqrt(query head size).
    attention_multiplier: NotNegative = 0.0
    #: Keys that a query of a sliding layer sees, its own included; 0: no layer slides.
    sliding_window: Count = 0
    #: Layers with a window: one entry a layer, or a pattern that is repeated. Empty: all layers if
    #: there is a sliding_window, else none.
    layer_types: tuple[Literal["full_attention", "sliding_attention"], ...] = ()

    rope_theta: Positive = 10000.0
    #: Share of the channels of a head that are rotated, the first ones.
    partial_rotary_factor: Annotated[float, Range(0.0, 1.0, open_low=True), _GROUPED] = 1.0
    #: Rotated pairs are channels (2i, 2i+1); otherwise (i, i + half).
    rope_interleave: bool = False
    #: Stretching of the frequencies for longer sequences: none, all of them (arXiv:2306.15595), by
    #: wavelength (Llama 3.1), or YaRN (arXiv:2309.00071).
    rope_type: RopeType = "default"
    rope_factor: Annotated[
        float, Range(1.0), UsedWith("rope_type", ("linear", "llama3", "yarn"))
    ] = 1.0
    #: Positions that the frequencies were trained on before they were stretched.
    original_max_position_embeddings: Annotated[
        Count, UsedWith("rope_type", ("llama3", "yarn"))
    ] = 0
    #: YaRN keeps frequencies that turn more than `fast` times over the original positions, divides
    #: those that turn less than `slow` times by the factor, and blends the ones between. With
    #: `truncate` the blend begins and ends at whole channels.
    rope_beta_fast: Positive = 32.0
    rope_beta_slow: Positive = 1.0
    rope_truncate: bool = True
    #: YaRN multiplies the rotated queries and keys by `rope_attention_factor`. If it is 0, the
    #: factor follows from both mscales, or without them from rope_factor (:attr:`rope_scale`). With
    #: latent attention `rope_mscale_all_dim` also scales the scores (:attr:`attention_scale`).
    rope_mscale: Annotated[NotNegative, _YARN] = 0.0
    rope_mscale_all_dim: Annotated[NotNegative, _YARN] = 0.0
    rope_attention_factor: Annotated[NotNegative, _YARN] = 0.0
    #: Llama 3.1 divides frequencies by the factor if their wavelength is above original/low, keeps
    #: them if it is below original/high, and blends between.
    rope_low_freq_factor: Positive = 1.0
    rope_high_freq_factor: Positive = 4.0
    #: The longest sequence that RoPE is made for; 0: without a limit.
    max_position_embeddings: Count = 0

    @property
    def rotary_dim(self) -> int:
        """Channels of a head that RoPE rotates."""
        if self.attention == "mla":
            return self.qk_rotary_head_dim
        return int(self.head_dim * self.partial_rotary_factor)

    def window(self, layer: int) -> int:
        """Keys that a query of `layer` (from 0) sees, its own included; 0: all up to its own."""
        if not self.layer_types:
            return self.sliding_window
        slides = self.layer_types[layer % len(self.layer_types)] == "sliding_attention"
        return self.sliding_window if slides else 0

    @property
    def rope_scale(self) -> float:
        """Factor of the rotated queries and keys: YaRN's attention factor, else 1."""
        if self.rope_type != "yarn":
            return 1.0
        if self.rope_attention_factor:
            return self.rope_attention_factor
        if self.rope_mscale and self.rope_mscale_all_dim:
            return self._mscale(self.rope_mscale) / self._mscale(self.rope_mscale_all_dim)
        return self._mscale(1.0)

    @property
    def attention_scale(self) -> float:
        """Factor of the scores before the softmax."""
        scale = self.attention_multiplier or self.query_head_dim**-0.5
        if self.attention == "mla" and self.rope_type != "default" and self.rope_mscale_all_dim:
            # DeepSeek scales all channels by this mscale. The rotated ones are among them, so
            # `rope_scale` divides by it.
            scale *= self._mscale(self.rope_mscale_all_dim) ** 2
        return scale

    def _mscale(self, weight: float) -> float:
        """0.1 * weight * ln(factor) + 1; with weight 1 equation 22 of arXiv:2309.00071."""
        return 0.1 * weight * log(self.rope_factor) + 1.0

    def attention_rules(self, num_layers: int) -> Iterator[Problem]:
        """Problems of the rules between the keys of this class, for a model of `num_layers`."""
        if self.attention == "mla":
            for name in MLA_SIZES:
                if getattr(self, name) == 0:
                    message = f'attention = "mla" needs {name} of at least 1, not 0'
                    fix = f'{name} = {self.head_dim}, or attention = "gqa"'
                    yield self.problem("missing", name, message, fix, "attention")
            yield from self._even("qk_rotary_head_dim", self.qk_rotary_head_dim)
        else:
            heads, keys, share = self.num_heads, self.num_kv_heads, self.partial_rotary_factor
            if keys > 0 and heads % keys:
                message = f"num_kv_heads ({keys}) must divide num_heads ({heads})"
                fix = f"num_kv_heads = {nearest_divisors(max(heads, 1), keys)}"
                yield self.problem("not-divisible", "num_kv_heads", message, fix, "num_heads")
            if share == 1.0:
                yield from self._even("head_dim", self.head_dim)
            elif not (rotated := self.rotary_dim) or rotated % 2:
                size, even = self.head_dim, rotated - rotated % 2
                legal = [n / size for n in sorted({max(even, 2), even + 2}) if n <= size]
                message = (
                    f"partial_rotary_factor ({share}) of head_dim ({size}) is {rotated} channels: "
                    "RoPE rotates pairs of them"
                )
                name, factors = "partial_rotary_factor", " or ".join(map(format_value, legal))
                fix = f"{name} = {factors or 1.0}"
                yield self.problem("not-divisible", name, message, fix, "head_dim")
        kind = format_value(self.rope_type)
        if self.rope_type in ("llama3", "yarn") and not self.original_max_position_embeddings:
            name, longest = "original_max_position_embeddings", self.max_position_embeddings
            message = f"rope_type = {kind} needs {name}: the positions before they were stretched"
            usual = max(round(longest / max(self.rope_factor, 1.0)), 1) if longest else 4096
            yield self.problem("missing", name, message, f"{name} = {usual}", "rope_type")
        slow, fast = self.rope_beta_slow, self.rope_beta_fast
        if self.rope_type == "yarn" and slow > fast:
            name, other = "rope_beta_slow", "rope_beta_fast"
            message = f"{name} ({slow}) must not exceed {other} ({fast})"
            yield self.problem("too-large", name, message, f"{name} = {fast}", other)
        low, high = self.rope_low_freq_factor, self.rope_high_freq_factor
        if self.rope_type == "llama3" and low >= high:
            name, other = "rope_low_freq_factor", "rope_high_freq_factor"
            message = f"{name} ({low}) must be below {other} ({high})"
            yield self.problem("too-large", name, message, f"{name} = {high / 4}", other)
        types, window = self.layer_types, self.sliding_window
        if types and num_layers > 0 and num_layers % len(types):
            near = [size for size in divisors(num_layers) if size <= len(types)][-1]
            lengths = f"{near} or {num_layers}" if near < num_layers else f"{num_layers}"
            message = (
                f"layer_types has {len(types)} entries: as a repeated pattern their number "
                f"must divide num_layers ({num_layers})"
            )
            fix = f"a list of {lengths} entries"
            yield self.problem("not-divisible", "layer_types", message, fix, "num_layers")
        slides = "sliding_attention" in types
        if slides and not window:
            message = 'layer_types has "sliding_attention", but sliding_window is 0'
            fix = "sliding_window = 128, or no sliding layers"
            yield self.problem("missing", "sliding_window", message, fix, "layer_types")
        if types and window and not slides:
            message = (
                f"sliding_window ({window}) has no use: no entry of layer_types "
                'is "sliding_attention"'
            )
            fix = "sliding_window = 0"
            yield self.problem("conflict", "sliding_window", message, fix, "layer_types")

    def _even(self, name: str, size: int) -> Iterator[Problem]:
        if size % 2:
            message = f"{name} ({size}) must be even: RoPE rotates pairs of channels"
            fix = f"{name} = {size - 1} or {size + 1}" if size > 1 else f"{name} = {size + 1}"
            yield self.problem("not-divisible", name, message, fix)
