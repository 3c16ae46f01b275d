"""`benchmarks.step`: a whole training step beside a plain loop over transformers.

One folder of weights (Qwen3-MoE) and the same tokens for both, in the same ranks. Both take turns,
one whole step each: forward, loss, backward, sums over ranks, norm, clipping, AdamW. A step counts
as long as its slowest rank takes. The peer is the loop that a tutorial shows: transformers with its
fastest experts (`grouped_mm`), torch's DistributedDataParallel on several ranks, autocast for
bfloat16 on a CPU, and on a GPU all of it in bfloat16, without fp32 weights. Losses of both are
compared, so that both do the same work. `evaluate` is the forward with its loss, `generate` the
likeliest tokens behind a prompt; bfloat16 means weights in bfloat16 there, for both.
"""

from __future__ import annotations

import importlib
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.layer_rank import spread
from benchmarks.ranks import on_ranks
from benchmarks.settings import GENERATED, StepSettings
from moemesh.bench.links import synchronize
from moemesh.comm import launch
from moemesh.comm.collectives import barrier, gather_json
from moemesh.comm.mesh import Mesh
from moemesh.config.layout import shard_range
from moemesh.config.lora import LoraConfig
from moemesh.model.batch import Batch
from moemesh.sharding.load_run import load_run
from moemesh.trace.timeline import TimelineRecorder
from moemesh.train.inference.evaluation import load
from moemesh.train.inference.generation import chooser, continuation
from moemesh.train.optimizer import Optimizer
from moemesh.train.step import gradients_of_step, sum_losses, update

#: Steps before the first that counts: allocators and kernels settle.
_STEPS_BEFORE = 3
_RATE, _CLIP, _DECAY = 1e-4, 1.0, 0.1
#: Projections with adapters: those that peft adapts, too, in a model whose experts are stacked.
_ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj")

#: Tokens of a prompt.
_PROMPT = 32

#: One whole step on the tokens [B, S + 1] of all ranks; returns the mean loss of a token, or of
#: tokens that were generated the mean id.
Step = Callable[[Tensor], float]


def run(settings: StepSettings, found: Path | None = None) -> dict[str, Any] | None:
    """Measure every number type; None where another rank has the result."""
    plan = settings.layout

    def on_its_ranks(one: StepSettings) -> dict[str, Any] | None:
        def measured(ranks: launch.Ranks) -> dict[str, Any]:
            return measure(Mesh.create(plan.layout, ranks.device), one)

        ranks = plan.world_size
        return on_ranks("step", one, measured, num_ranks=ranks, found=found, device=one.device)

    if launch.joined() or settings.contender != "both":
        return on_its_ranks(settings)
    results: list[dict[str, Any]] = []
    for dtype in settings.dtypes:
        both = on_its_ranks(replace(settings, dtype=dtype))
        assert both is not None
        for name in _CONTENDERS:
            alone = on_its_ranks(replace(settings, dtype=dtype, contender=name, rounds=2))
            assert alone is not None
            both["results"][0]["peak_bytes"][name] = alone["results"][0]["peak_bytes"][name]
        results += [one | {"goal": settings.goal(dtype)} for one in both["results"]]
    return {**both, "settings": settings.to_json(), "results": results}


def measure(mesh: Mesh, settings: StepSettings) -> dict[str, Any]:
    """On every rank of a mesh of the plan; the same result on all."""
    results = []
    with tempfile.TemporaryDirectory(prefix="moemesh-step-") as own:
        folder = Path(gather_json(own, mesh.control)[0]) / "model"
        if mesh.rank == 0:
            _write(folder, settings)
        barrier(mesh.control)
        for dtype in settings.dtypes:
            results.append(_measured(mesh, settings, folder, dtype))
        barrier(mesh.control)  # rank 0 keeps the folder until all have read it
    return {
        "settings": settings.to_json(),
        "transformers": importlib.import_module("transformers").__version__,
        "threads": torch.get_num_threads(),
        "results": results,
    }


def _write(folder: Path, settings: StepSettings) -> None:
    qwen: Any = importlib.import_module("transformers.models.qwen3_moe")
    importlib.import_module("transformers").utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    config = qwen.Qwen3MoeConfig(
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
    qwen.Qwen3MoeForCausalLM(config).save_pretrained(folder)


def _measured(mesh: Mesh, settings: StepSettings, folder: Path, dtype: str) -> dict[str, Any]:
    named = _CONTENDERS if settings.contender == "both" else {settings.contender}
    steps = {name: _CONTENDERS[name](mesh, settings, folder, dtype) for name in named}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    losses: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(_STEPS_BEFORE + settings.rounds):
        generator = torch.Generator().manual_seed(number)
        shape = (settings.sequences, settings.seq_len + 1)
        tokens_BS = torch.randint(settings.vocabulary, shape, generator=generator)
        # Whoever comes second finds other things in the caches than the first.
        for name in sorted(steps, reverse=bool(number % 2)):
            barrier(mesh["world"])
            synchronize(mesh.device)
            start = time.perf_counter()
            losses[name].append(steps[name](tokens_BS))
            synchronize(mesh.device)
            taken = max(gather_json(time.perf_counter() - start, mesh.control))
            if number >= _STEPS_BEFORE:
                seconds[name].append(taken)
    found: dict[str, Any] = {
        "dtype": dtype,
        "seconds": {name: statistics.median(taken) for name, taken in seconds.items()},
        "peak_bytes": {},
    }
    if len(steps) == 1:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if mesh.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(mesh.device)
        return found | {"peak_bytes": {settings.contender: max(gather_json(peak, mesh.control))}}
    ratios = [ours / theirs for ours, theirs in zip(*seconds.values(), strict=True)]
    return found | {
        "ratio": spread(ratios),
        "loss_difference": max(abs(a - b) for a, b in zip(*losses.values(), strict=True)),
    }


def _ours(mesh: Mesh, settings: StepSettings, folder: Path, dtype: str) -> Step:
    keys = [f"plan.{key}" for key in filter(None, settings.plan.split(","))]
    keys += [f"model.path={folder}", f"train.dtype={dtype}", f"train.weight_decay={_DECAY}"]
    keys += [f"data.seq_len={settings.seq_len}", f"data.global_batch={settings.sequences}"]
    if settings.lora:
        targets = ", ".join(f'"{name}"' for name in _ADAPTED)
        keys += [f"lora.rank={settings.lora}", f"lora.targets=[{targets}]"]
    config = load_run([], keys, {}).config
    parallel = load(config, mesh, folder)
    optimizer = Optimizer.of(parallel, config.train)
    recorder = TimelineRecorder(mesh.rank)

    def own_batch(tokens_BS: Tensor) -> Batch:
        own = shard_range(settings.sequences, mesh["dp"].size, mesh["dp"].index)
        part = tokens_BS[own.start : own.stop].to(mesh.device)
        sequences_B = torch.arange(own.start, own.stop, device=mesh.device)
        return Batch(tokens_BS=part[:, :-1], targets_BS=part[:, 1:], sequences_B=sequences_B)

    def train(tokens_BS: Tensor) -> float:
        result = gradients_of_step(parallel, [own_batch(tokens_BS)], recorder)
        update(parallel, optimizer, result, lr=_RATE, clip=_CLIP)
        return result.loss

    def evaluate(tokens_BS: Tensor) -> float:
        total, count = sum_losses(parallel, [own_batch(tokens_BS)])
        return total / count

    def generate(tokens_BS: Tensor) -> float:
        prompt = tokens_BS[0, :_PROMPT].tolist()
        ids = continuation(parallel.model, prompt, chooser(), mesh.device)
        return statistics.mean(islice(ids, GENERATED))

    return {"train": train, "evaluate": evaluate, "generate": generate}[settings.work]


def _theirs(mesh: Mesh, settings: StepSettings, folder: Path, dtype: str) -> Step:
    transformers: Any = importlib.import_module("transformers")
    transformers.utils.logging.disable_progress_bar()
    # Autocast leaves grouped_mm in float32, which has no kernel on a GPU: all of it in bfloat16.
    is_bfloat16, device = dtype == "bfloat16", mesh.device
    is_cast = is_bfloat16 and device.type == "cpu" and settings.work == "train"
    weights = torch.bfloat16 if is_bfloat16 and not is_cast else torch.float32
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=weights)
    model.to(mesh.device).train()
    model.config.use_cache = settings.work == "generate"
    model.set_experts_implementation("grouped_mm")
    if settings.lora:
        peft: Any = importlib.import_module("peft")
        wanted = peft.LoraConfig(
            r=settings.lora, lora_alpha=LoraConfig().alpha, target_modules=list(_ADAPTED)
        )
        model = peft.get_peft_model(model, wanted)
    trained = [one for one in model.parameters() if one.requires_grad]
    world = mesh["world"]
    whole: nn.Module = model
    if world.size > 1:
        whole = nn.parallel.DistributedDataParallel(model, process_group=world.group)
    decayed = [one for one in trained if one.ndim > 1]
    scales = [one for one in trained if one.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed}, {"params": scales, "weight_decay": 0.0}],
        lr=_RATE, betas=(0.9, 0.95), weight_decay=_DECAY, fused=True,
    )  # fmt: skip
    cast = torch.autocast("cpu", torch.bfloat16) if is_cast else nullcontext()

    def own_loss(tokens_BS: Tensor) -> Tensor:
        own = shard_range(settings.sequences, world.size, world.index)
        part = tokens_BS[own.start : own.stop].to(device)
        with cast:
            logits = whole(input_ids=part[:, :-1]).logits
            return F.cross_entropy(logits.flatten(0, 1).float(), part[:, 1:].flatten())

    def mean_loss(loss: Tensor) -> float:
        return statistics.mean(gather_json(float(loss.detach()), mesh.control))

    def train(tokens_BS: Tensor) -> float:
        loss = own_loss(tokens_BS)
        loss.backward()
        nn.utils.clip_grad_norm_(trained, _CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return mean_loss(loss)

    @torch.no_grad()
    def evaluate(tokens_BS: Tensor) -> float:
        return mean_loss(own_loss(tokens_BS))

    def generate(tokens_BS: Tensor) -> float:
        prompt_1S = tokens_BS[:1, :_PROMPT].to(device)
        found = model.generate(
            prompt_1S, attention_mask=torch.ones_like(prompt_1S), do_sample=False,
            max_new_tokens=GENERATED, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        return statistics.mean(found[0, _PROMPT:].tolist())

    if settings.work != "train":
        model.eval()
    return {"train": train, "evaluate": evaluate, "generate": generate}[settings.work]


_CONTENDERS = {"moemesh": _ours, "transformers": _theirs}


if __name__ == "__main__":
    from benchmarks.application import main

    main("step")
