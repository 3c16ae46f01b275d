"""An MoE of transformers over ranks: torchrun --nproc_per_node 2 trainer_experts.py OUT"""

import sys

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, GptOssConfig, Trainer, TrainingArguments

import moemesh as mm

arguments = TrainingArguments(  # it starts the process group
    sys.argv[1], use_cpu=True, max_steps=8, learning_rate=1e-2, logging_steps=7, report_to=[],
)  # fmt: skip
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(
    GptOssConfig(
        vocab_size=64, hidden_size=32, intermediate_size=16, num_local_experts=8, head_dim=8,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, pad_token_id=0,
    )
)  # fmt: skip
mm.use_experts(model)  # each rank keeps 4 of the 8 experts of a layer
rows = [{"input_ids": ids, "labels": ids} for ids in torch.arange(64 * 16).view(-1, 16) % 61]
trainer = Trainer(model, arguments, train_dataset=rows)
trainer.train()  # its checkpoints hold the experts of all ranks
trainer.save_model()  # so does this folder; all ranks call
if dist.is_initialized():
    dist.destroy_process_group()
