"""Operator graphs of transformers: embedding, one layer of each kind, head.

Nothing here knows a parallel strategy. An operator names its dims, sizes and inputs, and the usual
strategies are the result: tests find Megatron's column and row split with sequence parallelism and
GShard's expert parallelism (arXiv:2006.16668) in the solutions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from moemesh.planner.operators.graph import OperatorGraph
from moemesh.planner.operators.strategies import CostModel, GraphBuilder, OperatorSpec
from moemesh.planner.parameters import attended_tokens
from moemesh.planner.shapes.shape import NORM_WEIGHTS, LayerKind, ModelShape

#: Groups of the operator graph besides the kinds of layers (`group_of`).
EMBEDDING, STREAM, HEAD = "embedding", "stream", "head"

_TOKENS = ("batch", "sequence")
_ELEMENT_BYTES = 2
_STREAM = (*_TOKENS, "hidden")
_GATES = (*_TOKENS, "gates")
#: Routed rows: tokens of either dim, once an expert that they chose.
_ROWS = ("experts", "batch sequence", "hidden")


def group_of(kind: LayerKind) -> str:
    """The group of operators of a kind of layer."""
    name = "MoE layer" if kind.moe else "dense layer"
    return f"{name}, window {kind.window}" if kind.window else name


@dataclass(frozen=True, kw_only=True)
class TransformerBlocks:
    """Builder of the operator graph of one model for one microbatch.

    `batch` sequences of `sequence` tokens are those of all ranks of the mesh together.
    """

    shape: ModelShape
    batch: int
    sequence: int
    costs: CostModel

    @property
    def tokens(self) -> int:
        return self.batch * self.sequence

    @property
    def stream_bytes(self) -> float:
        """Bytes of the residual stream."""
        return float(self.tokens * self.shape.hidden_size * _ELEMENT_BYTES)

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes that cuts must divide; heads are cut by whole key-value heads."""
        shape = self.shape
        latent = shape.attention == "mla"
        return {
            "batch": self.batch,
            "sequence": self.sequence,
            "hidden": shape.hidden_size,
            "heads": shape.num_heads if latent else shape.num_kv_heads,
            "width": shape.intermediate_size,
            "experts": shape.num_experts,
            "expert_width": shape.expert_intermediate_size,
            "shared_width": shape.shared_intermediate_size,
            "vocabulary": shape.vocab_size,
        }

    def graph(self) -> OperatorGraph:
        """Embedding, one layer of each kind, and the head, around one residual stream.

        Every kind of layer stands for as many as the model has, and all boundaries between layers
        have one layout: equal layers take equal strategies.
        """
        builder = GraphBuilder(self.costs)
        builder.group(STREAM)
        stream = builder.port(STREAM, 3, self._token_cuts, self.stream_bytes)
        self._embedding(builder, stream)
        for kind, count in self.shape.kind_counts.items():
            builder.group(group_of(kind), count)
            attention = self._attention(builder, stream, kind.window)
            first = builder.add(self._sum("add attention", 2), stream, attention)
            normed = builder.add(self._norm("mlp norm"), first)
            if kind.moe:
                parts = [self._experts(builder, normed)]
                if self.shape.shared_intermediate_size:
                    parts.append(self._mlp(builder, "shared ", "shared_width", normed))
            else:
                parts = [self._mlp(builder, "", "width", normed)]
            last = replace(self._sum("add mlp", 1 + len(parts)), recomputable=False)
            builder.link(builder.add(last, first, *parts), stream)
        self._head(builder, stream)
        return builder.graph()

    def _embedding(self, builder: GraphBuilder, stream: int) -> None:
        builder.group(EMBEDDING)
        tokens = builder.data("tokens", 2, self._token_cuts, 8.0 * self.tokens)
        spec = self._spec(
            "embedding",
            (_TOKENS,),
            _STREAM,
            cut=(*_STREAM, "vocabulary"),
            weight=("vocabulary", "hidden"),
            weight_elements=float(self.shape.vocab_size * self.shape.hidden_size),
            moved_bytes=2 * self.stream_bytes,
            recomputable=False,
        )
        builder.link(builder.add(spec, tokens), stream)

    def _head(self, builder: GraphBuilder, stream: int) -> None:
        builder.group(HEAD)
        normed = builder.add(self._norm("final norm"), stream)
        elements = 0 if self.shape.tied_embeddings else None
        product = self._product("logits", "hidden", "vocabulary", elements=elements)
        size, dims = 4.0 * self.tokens * self.shape.vocab_size, (*_TOKENS, "vocabulary")
        spec = self._spec(
            "loss",
            (dims,),
            _TOKENS,
            size,
            cut=dims,
            output_bytes=4.0 * self.tokens,
            kept_bytes=size,
        )
        builder.add(spec, builder.add(product, normed))

    def _spec(
        self,
        name: str,
        inputs: tuple[tuple[str, ...], ...],
        output: tuple[str, ...],
        moved_bytes: float,
        *,
        cut: tuple[str, ...],
        **values: Any,
    ) -> OperatorSpec:
        """An operator of this model. Unless `values` say otherwise its output is the stream, and is
        kept."""
        kept: dict[str, Any] = {"output_bytes": self.stream_bytes, "kept_bytes": self.stream_bytes}
        return OperatorSpec(
            name=name,
            sizes=self.sizes,
            inputs=inputs,
            output=output,
            cut=cut,
            moved_bytes=moved_bytes,
            **kept | values,
        )

    @property
    def _token_cuts(self) -> dict[int, int]:
        return {0: self.batch, 1: self.sequence}

    @property
    def _widths(self) -> dict[str, int]:
        """Channels of the dims that products read and write."""
        shape = self.shape
        latent = (shape.q_lora_rank or shape.hidden_size) + shape.kv_lora_rank
        return {
            **self.sizes,
            "latent": latent + shape.qk_rotary_head_dim,
            "qkv": shape.query_width + shape.kv_width + shape.value_width,
            "heads": shape.output_width,
        }

    def _norm(self, name: str) -> OperatorSpec:
        scale = float(NORM_WEIGHTS[self.shape.norm] * self.shape.hidden_size)
        moved = 2 * self.stream_bytes
        return self._spec(name, (_STREAM,), _STREAM, moved, cut=_TOKENS, weight_elements=scale)

    def _sum(self, name: str, num_inputs: int) -> OperatorSpec:
        moved, inputs = (num_inputs + 1) * self.stream_bytes, (_STREAM,) * num_inputs
        return self._spec(name, inputs, _STREAM, moved, cut=_STREAM, linear=True)

    def _product(
        self,
        name: str,
        inner: str,
        outer: str,
        *,
        outer_width: int | None = None,
        elements: int | None = None,
        kept: bool = False,
    ) -> OperatorSpec:
        """Tokens x inner times inner x outer; `elements` where the weight is not the whole matrix
        (low ranks) or is shared with another operator (0)."""
        rows, columns = self._widths[inner], outer_width or self._widths[outer]
        whole = rows * columns
        multiplied = elements or whole
        out = float(self.tokens * columns * _ELEMENT_BYTES)
        return self._spec(
            name,
            ((*_TOKENS, inner),),
            (*_TOKENS, outer),
            out + float(self.tokens * rows * _ELEMENT_BYTES),
            cut=(*_TOKENS, *(dim for dim in (inner, outer) if dim in self.sizes)),
            weight=(inner, outer),
            weight_elements=float(whole if elements is None else elements),
            flops=2.0 * self.tokens * multiplied,
            output_bytes=out,
            kept_bytes=out if kept else 0.0,
        )

    def _activation(self, name: str, dims: tuple[str, ...], size: float) -> OperatorSpec:
        cut, moved = tuple(part for dim in dims for part in dim.split()), (self._ups + 1) * size
        return self._spec(name, (dims,), dims, moved, cut=cut, output_bytes=size, kept_bytes=size)

    @property
    def _ups(self) -> int:
        """Matrices in front of the activation: gate and up, or one."""
        return 2 if self.shape.gated else 1

    def _attention(self, builder: GraphBuilder, entry: int, window: int) -> int:
        """Norm, projections (over a latent for MLA), core, output projection."""
        shape, width = self.shape, self._widths["qkv"]
        source, inner, elements = builder.add(self._norm("attention norm"), entry), "hidden", None
        if shape.attention == "mla":
            query = shape.q_lora_rank
            down = shape.hidden_size * (query + shape.kv_lora_rank + shape.qk_rotary_head_dim)
            source = builder.add(
                self._product("latent", "hidden", "latent", elements=down, kept=True), source
            )
            inner = "latent"
            elements = (query or shape.hidden_size) * shape.query_width
            per_head = shape.qk_nope_head_dim + shape.v_head_dim
            elements += shape.kv_lora_rank * shape.num_heads * per_head
        qkv = builder.add(
            self._product("qkv", inner, "heads", outer_width=width, elements=elements, kept=True),
            source,
        )
        heads = (*_TOKENS, "heads")
        out = float(self.tokens * shape.output_width * _ELEMENT_BYTES)
        pairs = self.tokens * attended_tokens(self.sequence, window, "causal")
        core = self._spec(
            "attention core",
            (heads,),
            heads,
            out + float(self.tokens * width * _ELEMENT_BYTES),
            cut=heads,
            flops=2.0 * pairs * shape.num_heads * (shape.query_head_dim + shape.value_head_dim),
            output_bytes=out,
            kept_bytes=out,
            # Queries stay, keys and values visit every rank (context parallelism).
            exchange_bytes={
                "sequence": float(self.tokens * (width - shape.query_width) * _ELEMENT_BYTES)
            },
        )
        return builder.add(self._product("output", "heads", "hidden"), builder.add(core, qkv))

    def _mlp(self, builder: GraphBuilder, prefix: str, dim: str, source: int) -> int:
        width = self.sizes[dim]
        up = self._product(f"{prefix}up", "hidden", dim, outer_width=self._ups * width, kept=True)
        inner_bytes = float(self.tokens * width * _ELEMENT_BYTES)
        act = self._activation(f"{prefix}activation", (*_TOKENS, dim), inner_bytes)
        down = self._product(f"{prefix}down", dim, "hidden")
        return builder.add(down, builder.add(act, builder.add(up, source)))

    def _experts(self, builder: GraphBuilder, normed: int) -> int:
        """Router, dispatch, experts, combine."""
        shape = self.shape
        rows = float(self.tokens * shape.experts_per_token)
        elements = shape.hidden_size * shape.num_experts
        gate_bytes = 4.0 * self.tokens * shape.num_experts
        router = self._spec(
            "router",
            (_STREAM,),
            _GATES,
            self.stream_bytes,
            cut=_TOKENS,
            weight_elements=float(elements),
            flops=2.0 * self.tokens * elements,
            output_bytes=gate_bytes,
            kept_bytes=gate_bytes,
        )
        gates = builder.add(router, normed)
        routed = rows * shape.hidden_size * _ELEMENT_BYTES
        moved, kept = routed + self.stream_bytes, {"output_bytes": routed, "kept_bytes": routed}
        dispatch = self._spec("dispatch", (_STREAM, _GATES), _ROWS, moved, cut=_TOKENS, **kept)
        combine = self._spec(
            "combine", (_ROWS, _GATES), _STREAM, moved, cut=_TOKENS, kept_bytes=0.0
        )
        width = shape.expert_intermediate_size
        wide = (*_ROWS[:2], "expert_width")
        up = self._expert_product(
            "expert up", "hidden", "expert_width", rows, self._ups * width, kept=True
        )
        act = self._activation("expert activation", wide, rows * width * _ELEMENT_BYTES)
        down = self._expert_product("expert down", "expert_width", "hidden", rows, width)
        inside = builder.add(up, builder.add(dispatch, normed, gates))
        return builder.add(combine, builder.add(down, builder.add(act, inside)), gates)

    def _expert_product(
        self, name: str, inner: str, outer: str, rows: float, width: int, *, kept: bool = False
    ) -> OperatorSpec:
        """One matrix an expert: hidden x width, or width x hidden."""
        hidden = self.shape.hidden_size
        out = rows * (hidden if outer == "hidden" else width) * _ELEMENT_BYTES
        return self._spec(
            name,
            ((*_ROWS[:2], inner),),
            (*_ROWS[:2], outer),
            out,
            cut=("experts", *_TOKENS, inner, outer),
            weight=("experts", inner, outer),
            weight_elements=float(self.shape.num_experts * hidden * width),
            flops=2.0 * rows * hidden * width,
            output_bytes=out,
            kept_bytes=out if kept else 0.0,
        )
