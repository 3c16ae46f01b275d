"""The section [model]: every size of a model, and the factors and norms of its forward."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import PrivateAttr

from moemesh.config.architecture import Architecture
from moemesh.config.attention_keys import AttentionConfig
from moemesh.config.errors import Problem, independent
from moemesh.config.experts import ExpertConfig
from moemesh.config.lora import LoraConfig, is_adapter
from moemesh.config.rules import CutSizes
from moemesh.config.section import LARGEST_SIZE, Positive, Range, Size
from moemesh.config.tuning import STACKS


class ModelConfig(ExpertConfig, AttentionConfig):
    """A decoder-only transformer, dense or mixture of experts. Defaults are the preset "tiny"."""

    #: Code of the forward: moemesh's, or that of transformers with moemesh's dispatch of rows to
    #: experts. "auto": moemesh's if it can read the family of `model.path`.
    implementation: Literal["auto", "moemesh", "transformers"] = "auto"
    vocab_size: Annotated[int, Range(2, LARGEST_SIZE)] = 256
    hidden_size: Size = 128
    tied_embeddings: bool = False
    norm_eps: Positive = 1e-6
    #: Standard deviation of the initial weights.
    init_std: Positive = 0.02
    #: Factors (Granite) of the embedding and of each block's output; divisor of the logits.
    embedding_multiplier: Positive = 1.0
    residual_multiplier: Positive = 1.0
    logits_scaling: Positive = 1.0

    #: The adapters, whose keys are in [lora] instead of [model].
    _lora: LoraConfig = PrivateAttr(default_factory=LoraConfig)
    _architecture: Architecture | None = PrivateAttr(default=None)

    @property
    def lora(self) -> LoraConfig:
        """The adapters of the model; rank 0: none."""
        return self._lora

    def with_lora(self, lora: LoraConfig) -> ModelConfig:
        """The same model with the adapters `lora` in place of its own."""
        if lora == self._lora:
            return self
        adapted = self.model_copy()
        adapted._lora = lora
        return adapted.with_architecture(self._architecture)

    @property
    def architecture(self) -> Architecture | None:
        """The record of a model whose forward is the code of transformers; None: it is ours."""
        return self._architecture

    def with_architecture(self, architecture: Architecture | None) -> ModelConfig:
        """The same model with the record `architecture`, which gets the model's adapters."""
        built = self.model_copy()
        if architecture is not None:
            architecture = architecture.with_adapters(self._lora)
        built._architecture = architecture
        return built

    def expert_stacks(self, layer: int) -> tuple[str, ...]:
        """Names of the stacked weights of the experts of a layer."""
        if self._architecture is None:
            return tuple(f"layers.{layer}.feed_forward.experts.{leaf}" for leaf in STACKS)
        return tuple(
            record.name
            for record in self._architecture.parameters
            if record.is_expert and record.unit == f"layers.{layer}" and not is_adapter(record.name)
        )

    @property
    def sizes(self) -> CutSizes:
        """Sizes that the degrees of a plan divide."""
        has_experts = self.num_moe_layers > 0
        return CutSizes(
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads if self.attention == "gqa" else 0,
            intermediate_size=self.intermediate_size if self.num_dense_layers > 0 else 0,
            shared_width=self.shared_width if has_experts else 0,
            num_moe_layers=self.num_moe_layers,
            num_experts=self.num_experts,
            expert_intermediate_size=self.expert_intermediate_size,
        )

    def window(self, layer: int) -> int:
        """Keys that a query of `layer` (from 0) sees, its own included; 0: all before it. An extra
        prediction layer has the window of the last layer."""
        return super().window(min(layer, self.num_layers - 1))

    @property
    def ends_share_a_table(self) -> bool:
        """Whether the first and the last stage hold one parameter: an embedding tied to the head,
        or one that extra prediction layers read."""
        return self.tied_embeddings or self.num_mtp_layers > 0

    def check(self) -> list[Problem]:
        """Problems of the section by itself; an empty list is a good model."""
        ranges = self.range_problems()
        if any(problem.key in ("model.num_layers", "model.num_mtp_layers") for problem in ranges):
            return ranges  # the other rules loop over that many layers
        rules = [
            *self.unused_problems(),
            *(self.attention_rules(self.num_layers) if self.architecture is None else ()),
            *self.expert_rules(),
        ]
        return ranges + independent(rules, {problem.key for problem in ranges})
