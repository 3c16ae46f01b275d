"""Experts over ranks beside FSDP2: torchrun --nproc_per_node 2 fsdp2.py"""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import moemesh as mm

dist.init_process_group("gloo")
torch.manual_seed(0)
model = Qwen3MoeForCausalLM(
    Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, moe_intermediate_size=16, num_experts=8, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    )
)  # fmt: skip
for layer in model.model.layers:
    layer.mlp = mm.MoELayer.from_transformers(layer.mlp)
for part in (*model.model.layers, model):
    fully_shard(part)
optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
tokens = (torch.arange(8 * 16).view(8, 16) + 7 * dist.get_rank()) % 61
for _ in range(20):
    loss = model(tokens, labels=tokens).loss
    optimizer.zero_grad()
    loss.backward()  # the mean over ranks: gradients="mean", which is the default
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
held = len(model.model.layers[0].mlp.experts.down)
print(f"rank {dist.get_rank()} holds {held} of 8 experts; loss of the last step {loss:.3f}")
dist.destroy_process_group()
