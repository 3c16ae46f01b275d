"""The predicted activations of one attention block of our own library on a CPU, each storage once.

Per token with w bytes an element and W = max(w, 4), N = tp; heads of a rank: a queries, k keys and
values of d channels (of latent attention a of each, values of d_v):

| kept | bytes | tokens |
|---|---|---|
| entry: stream behind its norm | w h | T, latent attention T/N |
| grouped: projections; rotated queries and keys; output | w d (a + 2k); w d (a + k); w d a | T |
| latent: down and their norms | w (r + r_kv + d_r), 2 W r, 2 W r_kv | T/N |
| latent: what enters | w (r + r_kv + d_r) | T |
| latent: queries, keys, values, output | w a (2 d + d_n + d_v + d_v) | T |
| log-sum-exp | W a | T |
| a norm of each head | queries before it, both behind it: W d (2 a + k); W (a + k) | T |
| a norm over all heads | the same: w d (2 a + k); 2 W | T |
| either, where w < W | keys before it; over all heads, both as they are summed: W d (a + k) | T |
| clipping | its copies of queries, and values behind it: w d (a + k) | T |
| computed again: the output once more | w d_v a | T |
| values padded to the size of keys, and their output | w a (d + d) in place of d_n + d_v | T |
| exit all_to_all | own rows of all heads | T/N |

Where cp ranks swap heads for positions, each keeps queries, keys, values and output of its heads in
whole sequences in place of its own projections.
"""

from __future__ import annotations

from collections.abc import Iterator

from moemesh.config.context import head_share
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.planner.traffic.saved import Saved


def attention_saved(
    model: ModelConfig,
    plan: Plan,
    tokens: tuple[int, int],
    length: int,
    element: int,
    *,
    cp_index: int = 0,
    attended: int = 0,
) -> Iterator[Saved]:
    """One forward of a layer, without the norm in front of it; `tokens`: (all of the microbatch,
    rows of the stream here), `length` of a sequence or slice. Where ranks of cp swap heads for
    positions, `attended` are the tokens of whole sequences."""
    whole, local = tokens
    block = _Block(model, plan, element)
    again = block.is_again
    if model.attention == "mla":
        yield from block.latent(whole, local)
    else:
        yield from block.grouped(whole)
    if whole:
        tables = length * model.rotary_dim * element
        # They are made in float64: every use keeps a copy in a narrower dtype.
        if element < 8:
            yield Saved("attention", 4 * tables, is_again=again)
        else:
            yield Saved("attention", 2 * tables, is_again=again, is_shared=True)
    core = attended * block.by_heads(cp_index) if block.swaps else whole * block.core()
    yield Saved("attention", core, is_again=again)
    result, hidden = whole * element * block.heads * model.value_head_dim, model.hidden_size
    if plan.attention_exit == "all_to_all" and plan.tp > 1:
        own = local * element * model.num_heads * model.value_head_dim
        if not again and not block.is_padded:
            yield Saved("attention", result)
        yield Saved("attention", own, held=own, gradient=local * element * hidden)
    else:
        yield Saved("attention", result, held=result, gradient=whole * element * hidden)


class _Block:
    def __init__(self, model: ModelConfig, plan: Plan, element: int) -> None:
        self.model, self.w, self.wide = model, element, max(element, 4)
        self.tp = plan.tp
        self.heads = model.num_heads / plan.tp
        self.keys = model.num_kv_heads / plan.tp
        #: The fused kernels of a CPU want one head size; those that merge blocks do not pad.
        self.is_padded = model.value_head_dim < model.query_head_dim and (
            plan.cp == 1 or plan.context == "all_to_all"
        )
        #: Whether what lies between the projections is computed again.
        self.is_again = plan.recompute == "selective" and plan.recompute_attention

        #: Heads for positions: the projections are sent, and what arrives is kept in their place.
        self.swaps = plan.cp > 1 and plan.context == "all_to_all"
        self.cp = plan.cp

    def by_heads(self, cp_index: int) -> float:
        """A token's queries, keys, values and output of the heads that a rank of cp attends with,
        and their log-sum-exp."""
        model, w, heads = self.model, self.w, round(self.heads)
        kv_heads = heads if model.attention == "mla" else round(self.keys)
        share = head_share(heads, kv_heads, self.cp, cp_index)
        queries, keys = len(share.queries), len(share.keys)
        if not share.is_even(heads // kv_heads):
            keys = queries
        size = model.query_head_dim
        values = size if self.is_padded else model.value_head_dim
        return (queries + keys) * w * (size + values) + queries * self.wide

    def core(self) -> float:
        """A token's log-sum-exp, and outputs that are not the input of the last product."""
        model, w = self.model, self.w
        found = self.heads * self.wide
        if self.is_padded:
            found += self.heads * w * model.query_head_dim
        elif self.is_again:
            # Computed again, the output lies beside the one that was kept.
            found += self.heads * w * model.value_head_dim
        return found

    def grouped(self, whole: int) -> Iterator[Saved]:
        model, w, heads, keys, size = (
            self.model, self.w, self.heads, self.keys, self.model.head_dim,
        )  # fmt: skip
        entered = whole * w * model.hidden_size
        projected = whole * w * size * (heads + 2 * keys)
        yield Saved("attention", entered, held=entered, gradient=projected)
        channels = 0.0 if self.swaps else heads + keys
        per_head = summed = 0.0
        # Query heads of several groups are copied side by side; those of one are a view.
        copied = heads if keys > 1 else 0.0
        if model.qk_norm and model.qk_norm_over == "head":
            # Keys in front of it are a view of the projections, unless they are made wider.
            inputs = heads + keys if w < self.wide else copied
            per_head = self.wide * (size * (inputs + heads + keys) + heads + keys)
            if model.clip_qkv:
                channels += heads + 2 * keys
        elif model.qk_norm:
            channels += copied + heads + keys
            per_head = 2 * self.wide
            # The sums, an input of the part that is computed again.
            summed = 2 * self.wide * self.is_again
            if w < self.wide:
                summed += self.wide * size * (heads + keys)
            if model.clip_qkv:
                channels += heads + 2 * keys
        elif model.clip_qkv:
            channels += copied + keys
        # A view of them keeps the projections: values, or keys in front of their norm.
        is_read = model.clip_qkv > 0 or (model.qk_norm and w == self.wide)
        if self.swaps and not (is_read or self.is_again):
            projected = 0.0
        yield Saved("attention", projected + whole * summed)
        core = whole * (w * size * channels + per_head)
        yield Saved("attention", core, is_again=self.is_again)

    def latent(self, whole: int, local: int) -> Iterator[Saved]:
        model, w, wide, heads = self.model, self.w, self.wide, self.heads
        rank, latent, rotary = model.q_lora_rank, model.kv_lora_rank, model.qk_rotary_head_dim
        queries = whole * w * heads * model.query_head_dim
        expanded = whole * w * heads * (model.qk_nope_head_dim + model.v_head_dim)
        stream = local * w * model.hidden_size
        yield Saved("attention", stream, held=stream, gradient=local * w * (rank + latent + rotary))
        for size, beside in ((latent, rotary), (rank, 0)):
            if size:
                # Input, normalised copy and inverse root of a norm.
                kept = local * (wide * (2 * size + 1) + w * beside * (w == wide))
                yield Saved("attention", kept)
        if not rank and self.tp > 1:
            gathered = whole * w * model.hidden_size
            yield Saved("attention", gathered, held=gathered)
        entered = whole * w * (rank + latent + rotary)
        yield Saved("attention", entered, held=entered, gradient=queries + expanded)
        values = whole * w * heads * model.query_head_dim if self.is_padded else expanded
        if self.is_again:
            yield Saved("attention", queries + expanded)
            values = values if self.is_padded else 0.0
        if self.swaps:
            return
        yield Saved("attention", 2 * queries + values, is_again=self.is_again)
