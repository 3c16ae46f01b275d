"""Experts over ranks with transformers' Trainer: torchrun --nproc_per_node 2 trainer.py OUT"""

import sys

import torch
import torch.distributed as dist
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, Trainer, TrainingArguments

import moemesh as mm

arguments = TrainingArguments(  # it starts the process group
    sys.argv[1], use_cpu=True, max_steps=8, learning_rate=1e-2, logging_steps=7, report_to=[],
)  # fmt: skip
torch.manual_seed(0)
model = Qwen3MoeForCausalLM(
    Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, moe_intermediate_size=16, num_experts=8, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, output_router_logits=True,
    )
)  # fmt: skip
for layer in model.model.layers:
    layer.mlp = mm.MoELayer.from_transformers(layer.mlp)
model._ddp_params_and_buffers_to_ignore = list(mm.expert_parameters(model))
rows = [{"input_ids": ids, "labels": ids} for ids in torch.arange(64 * 16).view(-1, 16) % 61]
trainer = Trainer(model, arguments, train_dataset=rows)
trainer.train()  # its checkpoints hold the experts of all ranks
trainer.save_model()  # so does this folder; all ranks call
if dist.is_initialized():
    dist.destroy_process_group()
