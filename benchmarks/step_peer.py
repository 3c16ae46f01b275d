"""The peer of `benchmarks.step`: a plain training loop over transformers, as a tutorial shows it.

It runs in processes of its own, in the environment of its users: plain `python` on one rank,
`torchrun` on several, with the thread settings and the allocator that they find there. It therefore
imports nothing of moemesh.

The loop uses transformers with its fastest experts (`grouped_mm`), torch's DistributedDataParallel
on several ranks, autocast for bfloat16 on a CPU, and on a GPU all of it in bfloat16, without fp32
weights. `evaluate` is the forward with its loss, `generate` the likeliest tokens after a prompt;
bfloat16 means weights in bfloat16 for these two.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.turns import CLIP, DECAY, LEARNING_RATE, PROMPT, Step, take_turns

#: Projections with LoRA adapters: those that peft adapts in a model whose experts are stacked.
LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")


def write_model(folder: Path, settings: Any) -> None:
    """Write a Qwen3-MoE model of the sizes of `settings`, with random weights, to `folder`."""
    import transformers
    from transformers.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM

    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=settings.vocabulary,
        hidden_size=settings.hidden,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.hidden // 32,
        num_key_value_heads=settings.hidden // 64,
        head_dim=32,
        intermediate_size=settings.width,
        moe_intermediate_size=settings.width,
        num_experts=settings.experts,
        num_experts_per_tok=settings.top_k,
        norm_topk_prob=True,
        max_position_embeddings=settings.seq_len,
        tie_word_embeddings=False,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)


def peer_step(settings: Any, folder: Path, dtype: str, device: torch.device) -> Step:
    """The work of `settings` on the default process group, where there is one."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    is_cast = dtype == "bfloat16" and device.type == "cpu" and settings.work == "train"
    # Autocast leaves grouped_mm in float32, which has no kernel on a GPU: all of it in bfloat16.
    weights = torch.bfloat16 if dtype == "bfloat16" and not is_cast else torch.float32
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=weights)
    model.to(device).train(settings.work == "train")
    model.config.use_cache = settings.work == "generate"
    model.set_experts_implementation("grouped_mm")
    if settings.lora:
        import peft

        adapters: Any = peft.LoraConfig(
            r=settings.lora, lora_alpha=settings.lora_alpha, target_modules=list(LORA_TARGETS)
        )
        model = peft.get_peft_model(model, adapters)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    rank, world_size = 0, 1
    wrapped: nn.Module = model
    if dist.is_initialized() and dist.get_world_size() > 1:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(
        [
            {"params": [parameter for parameter in trained if parameter.ndim > 1]},
            {"params": [p for p in trained if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=LEARNING_RATE,
        betas=(0.9, 0.95),
        weight_decay=DECAY,
        fused=True,
    )
    cast = torch.autocast("cpu", torch.bfloat16) if is_cast else nullcontext()
    rows = settings.sequences // world_size

    def local_loss(tokens_BS: Tensor) -> Tensor:
        part_BS = tokens_BS[rank * rows : (rank + 1) * rows].to(device)
        with cast:
            logits = wrapped(input_ids=part_BS[:, :-1]).logits
            return F.cross_entropy(logits.flatten(0, 1).float(), part_BS[:, 1:].flatten())

    def mean_loss(loss: Tensor) -> float:
        total = loss.detach().double()
        if world_size > 1:
            dist.all_reduce(total)
        return float(total) / world_size

    def train(tokens_BS: Tensor) -> float:
        loss = local_loss(tokens_BS)
        loss.backward()
        nn.utils.clip_grad_norm_(trained, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return mean_loss(loss)

    @torch.no_grad()
    def evaluate(tokens_BS: Tensor) -> float:
        return mean_loss(local_loss(tokens_BS))

    def generate(tokens_BS: Tensor) -> float:
        prompt_1S = tokens_BS[:1, :PROMPT].to(device)
        ids = model.generate(
            prompt_1S,
            attention_mask=torch.ones_like(prompt_1S),
            do_sample=False,
            max_new_tokens=settings.generated,
            eos_token_id=None,
            pad_token_id=0,
        )
        return statistics.mean(ids[0, PROMPT:].tolist())

    steps: dict[str, Callable[[Tensor], float]]
    steps = {"train": train, "evaluate": evaluate, "generate": generate}
    return steps[settings.work]


def main(path: str) -> None:
    """Measure with the settings of the JSON file `path`; rank 0 writes the result."""
    settings = SimpleNamespace(**json.loads(Path(path).read_text(encoding="utf-8")))
    device = torch.device(settings.device)
    is_distributed = "RANK" in os.environ
    if is_distributed:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        if device.type == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    step = peer_step(settings, Path(settings.folder), settings.dtype, device)

    def gather(value: float) -> list[float]:
        values: list[Any] = [value]
        if is_distributed:
            values = [None] * dist.get_world_size()
            dist.all_gather_object(values, value)
        return values

    rank = dist.get_rank() if is_distributed else 0
    take_turns(settings, "transformers", step, gather, device, rank=rank)
    if is_distributed:
        dist.barrier()
        # Threads of gloo that DDP's reducer holds sometimes abort a process in the interpreter's
        # teardown; the result is written.
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
