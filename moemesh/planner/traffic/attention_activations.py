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
| values padded to the size of keys, and their output | w a (d + d) in place of d_n + d_v | T |
| exit all_to_all | own rows of all heads | T/N |
"""

from __future__ import annotations

from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan


def attention_kept(
    model: ModelConfig, plan: Plan, tokens: tuple[int, int], length: int, element: int
) -> float:
    """Bytes of one forward of a layer, without the norm in front of it; `tokens`: (all of the
    microbatch, rows of the stream here), `length` of a sequence or slice."""
    whole, local = tokens
    block = _Block(model, plan, element)
    found = block.latent(whole, local) if model.attention == "mla" else block.grouped(whole)
    found += whole * block.core()
    if element < 8:
        # The tables are made in float64: every use keeps a copy in the model's dtype.
        found += 4 * length * model.rotary_dim * element * (whole > 0)
    if plan.attention_exit == "all_to_all" and plan.tp > 1:
        found += local * element * model.num_heads * model.value_head_dim
    return found


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

    def core(self) -> float:
        """A token's output and log-sum-exp."""
        model, w = self.model, self.w
        found = self.heads * (w * model.value_head_dim + self.wide)
        if self.is_padded:
            found += self.heads * w * model.query_head_dim
        return found

    def grouped(self, whole: int) -> float:
        model, w, heads, keys, size = (
            self.model, self.w, self.heads, self.keys, self.model.head_dim,
        )  # fmt: skip
        channels = heads + 2 * keys + heads + keys
        per_head = 0.0
        if model.qk_norm and model.qk_norm_over == "head":
            # Keys in front of it are a view of the projections, unless they are made wider.
            inputs = heads + keys * (w < self.wide)
            per_head = self.wide * (size * (inputs + heads + keys) + heads + keys)
            if model.clip_qkv:
                channels += heads + 2 * keys
        elif model.qk_norm:
            channels += 2 * heads + keys
            per_head = 2 * self.wide
            if w < self.wide:
                per_head += self.wide * size * (heads + keys)
            if model.clip_qkv:
                channels += heads + 2 * keys
        elif model.clip_qkv:
            channels += heads + keys
        return whole * (w * (model.hidden_size + size * channels) + per_head)

    def latent(self, whole: int, local: int) -> float:
        model, w, wide, heads = self.model, self.w, self.wide, self.heads
        rank, latent, rotary = model.q_lora_rank, model.kv_lora_rank, model.qk_rotary_head_dim
        found = local * w * model.hidden_size
        for size, beside in ((latent, rotary), (rank, 0)):
            if size:
                # Input, normalised copy and inverse root of a norm.
                found += local * (wide * (2 * size + 1) + w * beside * (w == wide))
        if not rank and self.tp > 1:
            found += whole * w * model.hidden_size
        entered = rank + latent + rotary
        values = (
            model.query_head_dim if self.is_padded else (model.qk_nope_head_dim + model.v_head_dim)
        )
        return found + whole * w * (entered + heads * (2 * model.query_head_dim + values))
