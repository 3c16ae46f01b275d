"""Operator graphs of transformers: embedding, one layer of each kind, head.

This file contains no parallel strategy: operators have dims, sizes and inputs, from which all
strategies follow. Tests check that the solutions contain Megatron's column and row split with
sequence parallelism and GShard's expert parallelism (arXiv:2006.16668).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moemesh.planner.operators.strategies import CostModel, GraphBuilder, OperatorSpec
from moemesh.planner.parameters import attended_tokens, attention_products
from moemesh.planner.shapes.shape import LayerKind, ModelShape

#: Groups of the operator graph besides the kinds of layers (`group_of`).
EMBEDDING, STREAM, HEAD = "embedding", "stream", "head"

_TOKENS = ("batch", "sequence")
_ELEMENT_BYTES = 2
_STREAM = (*_TOKENS, "hidden")
_GATES = (*_TOKENS, "gates")
#: Dims of routed rows: one row per token and chosen expert, cut by batch or by sequence.
_ROWS = ("experts", "batch sequence", "hidden")


def group_of(kind: LayerKind) -> str:
    """The group of operators of a kind of layer."""
    name = "MoE layer" if kind.moe else "dense layer"
    return f"{name}, window {kind.window}" if kind.window else name


class TransformerBlocks:
    """The operator graph of one model for one microbatch.

    All ranks of the mesh together compute `batch` sequences of `sequence` tokens. The graph has the
    embedding, one layer of each kind, and the head, around one residual stream. The layer of a kind
    counts for all layers of that kind, and all boundaries between layers have one layout: equal
    layers take equal strategies.
    """

    def __init__(self, shape: ModelShape, batch: int, sequence: int, costs: CostModel) -> None:
        self.shape, self.sequence, self.graph = shape, sequence, GraphBuilder(costs)
        self.tokens = batch * sequence
        #: Bytes of the residual stream.
        self.stream_bytes = float(self.tokens * shape.hidden_size * _ELEMENT_BYTES)
        is_latent = shape.attention == "mla"
        #: Sizes of dims, of which cuts are divisors; heads are counted in whole key-value heads.
        self.sizes = {
            "batch": batch,
            "sequence": sequence,
            "hidden": shape.hidden_size,
            "heads": shape.num_heads if is_latent else shape.num_kv_heads,
            "width": shape.intermediate_size,
            "experts": shape.num_experts,
            "expert_width": shape.expert_intermediate_size,
            "shared_width": shape.shared_intermediate_size,
            "vocabulary": shape.vocab_size,
        }
        latent = (shape.q_lora_rank or shape.hidden_size) + shape.kv_lora_rank
        #: Channels of the dims that products read and write.
        self.widths = {
            **self.sizes,
            "latent": latent + shape.qk_rotary_head_dim,
            "qkv": shape.query_width + shape.kv_width + shape.value_width,
            "heads": shape.output_width,
        }
        #: Matrices in front of the activation: gate and up, or one.
        self.ups = 2 if shape.gated else 1
        builder, cuts = self.graph, {0: batch, 1: sequence}
        builder.group(STREAM)
        stream = builder.port(STREAM, cuts, self.stream_bytes)
        builder.group(EMBEDDING)
        embedded = self._add(
            "embedding",
            [builder.port("tokens", cuts, 8.0 * self.tokens, constant=True)],
            (_TOKENS,),
            _STREAM,
            2 * self.stream_bytes,
            cut=(*_STREAM, "vocabulary"),
            weight=("vocabulary", "hidden"),
            weight_elements=float(shape.vocab_size * shape.hidden_size),
            recomputable=False,
        )
        builder.link(embedded, stream)
        for kind, count in shape.kind_counts.items():
            builder.group(group_of(kind), count)
            first = self._sum("add attention", stream, self._attention(stream, kind.window))
            normed = self._norm("mlp norm", first)
            if kind.moe:
                parts = [self._experts(normed)]
                if shape.shared_intermediate_size:
                    parts.append(self._mlp("shared ", "shared_width", normed))
            else:
                parts = [self._mlp("", "width", normed)]
            builder.link(self._sum("add mlp", first, *parts, recomputable=False), stream)
        builder.group(HEAD)
        elements = 0 if shape.tied_embeddings else None
        normed = self._norm("final norm", stream)
        logits = self._product("logits", "hidden", "vocabulary", normed, elements=elements)
        size, dims = 4.0 * self.tokens * shape.vocab_size, (*_TOKENS, "vocabulary")
        kept = {"output_bytes": 4.0 * self.tokens, "kept_bytes": size}
        self._add("loss", [logits], (dims,), _TOKENS, size, cut=dims, **kept)

    def _add(
        self,
        name: str,
        sources: Sequence[int],
        inputs: tuple[tuple[str, ...], ...],
        output: tuple[str, ...],
        moved_bytes: float,
        *,
        cut: tuple[str, ...],
        **values: Any,
    ) -> int:
        """Position of a new operator that reads `sources`. By default its output has the size of
        the stream and is kept for the backward; `values` override this."""
        kept: dict[str, Any] = {"output_bytes": self.stream_bytes, "kept_bytes": self.stream_bytes}
        spec = OperatorSpec(
            name=name,
            sizes=self.sizes,
            inputs=inputs,
            output=output,
            cut=cut,
            moved_bytes=moved_bytes,
            **kept | values,
        )
        return self.graph.add(spec, *sources)

    def _norm(self, name: str, source: int) -> int:
        ends = [source], (_STREAM,), _STREAM
        weights = float(self.shape.norm_weights)
        return self._add(name, *ends, 2 * self.stream_bytes, cut=_TOKENS, weight_elements=weights)

    def _sum(self, name: str, *sources: int, recomputable: bool = True) -> int:
        moved, inputs = (len(sources) + 1) * self.stream_bytes, (_STREAM,) * len(sources)
        values: dict[str, Any] = {"cut": _STREAM, "linear": True, "recomputable": recomputable}
        return self._add(name, sources, inputs, _STREAM, moved, **values)

    def _product(
        self,
        name: str,
        inner: str,
        outer: str,
        source: int,
        *,
        outer_width: int | None = None,
        elements: int | None = None,
        kept: bool = False,
        experts: int = 0,
    ) -> int:
        """Product [tokens, inner] x [inner, outer]. `elements` is the size of a weight that is not
        the whole matrix (low ranks), or 0 for one shared with another operator. With `experts`
        every expert has a matrix, and the rows are the routed ones."""
        rows, columns = self.widths[inner], outer_width or self.widths[outer]
        tokens, dims, stack = self.tokens, _TOKENS, ("experts",) * bool(experts)
        if experts:
            tokens, dims = self.tokens * self.shape.experts_per_token, _ROWS[:2]
        whole = rows * columns
        out = float(tokens * columns * _ELEMENT_BYTES)
        return self._add(
            name,
            [source],
            ((*dims, inner),),
            (*dims, outer),
            out if experts else out + float(tokens * rows * _ELEMENT_BYTES),
            cut=(*stack, *_TOKENS, *(dim for dim in (inner, outer) if dim in self.sizes)),
            weight=(*stack, inner, outer),
            weight_elements=float(max(experts, 1) * (whole if elements is None else elements)),
            flops=2.0 * tokens * (elements or whole),
            output_bytes=out,
            kept_bytes=out if kept else 0.0,
        )

    def _activation(self, name: str, source: int, dims: tuple[str, ...], size: float) -> int:
        cut, kept = tuple(" ".join(dims).split()), {"output_bytes": size, "kept_bytes": size}
        return self._add(name, [source], (dims,), dims, (self.ups + 1) * size, cut=cut, **kept)

    def _attention(self, entry: int, window: int) -> int:
        """Norm, projections (over a latent for MLA), core, output projection."""
        shape, width = self.shape, self.widths["qkv"]
        source, inner, elements = self._norm("attention norm", entry), "hidden", None
        if shape.attention == "mla":
            per_head, down = attention_products(shape)
            source = self._product("latent", "hidden", "latent", source, elements=down, kept=True)
            inner, elements = "latent", per_head - shape.output_width * shape.hidden_size
        qkv = self._product(
            "qkv", inner, "heads", source, outer_width=width, elements=elements, kept=True
        )
        heads = (*_TOKENS, "heads")
        out = float(self.tokens * shape.output_width * _ELEMENT_BYTES)
        pairs = self.tokens * attended_tokens(self.sequence, window, "causal")
        core = self._add(
            "attention core",
            [qkv],
            (heads,),
            heads,
            out + float(self.tokens * width * _ELEMENT_BYTES),
            cut=heads,
            flops=2.0 * pairs * shape.num_heads * (shape.query_head_dim + shape.value_head_dim),
            output_bytes=out,
            kept_bytes=out,
            # Context parallelism: every rank reads all keys and values.
            exchange_bytes={
                "sequence": float(self.tokens * (width - shape.query_width) * _ELEMENT_BYTES)
            },
        )
        return self._product("output", "heads", "hidden", core)

    def _mlp(self, prefix: str, dim: str, source: int) -> int:
        """Up (with gate), activation, down, through the inner dim `dim`."""
        width = self.sizes[dim]
        inner_bytes = float(self.tokens * width * _ELEMENT_BYTES)
        up = self._product(
            f"{prefix}up", "hidden", dim, source, outer_width=self.ups * width, kept=True
        )
        act = self._activation(f"{prefix}activation", up, (*_TOKENS, dim), inner_bytes)
        return self._product(f"{prefix}down", dim, "hidden", act)

    def _experts(self, normed: int) -> int:
        """Router, dispatch, experts, combine."""
        shape, width = self.shape, self.shape.expert_intermediate_size
        rows = float(self.tokens * shape.experts_per_token)
        elements = shape.hidden_size * shape.num_experts
        gate_bytes = 4.0 * self.tokens * shape.num_experts
        gates = self._add(
            "router",
            [normed],
            (_STREAM,),
            _GATES,
            self.stream_bytes,
            cut=_TOKENS,
            weight_elements=float(elements),
            flops=2.0 * self.tokens * elements,
            output_bytes=gate_bytes,
            kept_bytes=gate_bytes,
        )
        routed = rows * shape.hidden_size * _ELEMENT_BYTES
        moved, kept = routed + self.stream_bytes, {"output_bytes": routed, "kept_bytes": routed}
        inputs = (_STREAM, _GATES)
        sent = self._add("dispatch", [normed, gates], inputs, _ROWS, moved, cut=_TOKENS, **kept)
        experts, inner_rows = shape.num_experts, (*_ROWS[:2], "expert_width")
        ends = ("hidden", "expert_width", sent)
        up = self._product(
            "expert up", *ends, outer_width=self.ups * width, kept=True, experts=experts
        )
        act = self._activation("expert activation", up, inner_rows, rows * width * _ELEMENT_BYTES)
        down = self._product("expert down", "expert_width", "hidden", act, experts=experts)
        back = (_ROWS, _GATES), _STREAM, moved
        return self._add("combine", [down, gates], *back, cut=_TOKENS, kept_bytes=0.0)
