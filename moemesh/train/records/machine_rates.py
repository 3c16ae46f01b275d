"""Rates of the machine before the first step, on which the predicted seconds of a step are based.

All ranks measure at the same time, as they compute in a step, so that shared cores and links are
part of the rates. Those of the passes are taken from training steps of a small model
(:func:`small_run`), with the clock that measures the run (:mod:`moemesh.train.records.step_clock`):
router, sorting of rows, SwiGLU and the many small products of a step are part of them.

Legend: B sequences, S positions, T tokens of a step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from moemesh.comm.collectives import barrier
from moemesh.comm.mesh import Mesh
from moemesh.comm.transfers import all_reduce_
from moemesh.config.layout import AXES
from moemesh.config.lora import LoraConfig
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.config.run import RunConfig
from moemesh.model.batch import Batch
from moemesh.model.initialization import initialize
from moemesh.model.transformer import Transformer
from moemesh.monitor import progress
from moemesh.planner.shapes.counted import shape_of
from moemesh.planner.step_parts import MEMORY, bandwidth, latency, pass_flops
from moemesh.trace import step_seconds as parts
from moemesh.trace.timeline import TimelineRecorder
from moemesh.train.records.step_clock import StepClock

#: Number of steps of the small model; the first one builds caches and is left out.
_STEPS = 5
#: Seconds after which the small model takes no further step, once it has taken two.
_MOST_SECONDS = 0.5
#: Largest number of parameters of the small model, and of tokens in a step of it, unless one
#: sequence has more.
_MOST_NUMBERS, _MOST_TOKENS = 1 << 26, 2048
#: Elements of the two tensors whose sums over ranks measure an axis: its latency, its bandwidth.
_SMALL, _LARGE = 64, 1 << 17
#: Elements of the tensor that measures the bandwidth of memory.
_STREAMED = 1 << 22
#: Repetitions of a measurement, whose median counts.
_REPEATS = 9


def measure_rates(config: RunConfig, mesh: Mesh) -> dict[str, float]:
    """Rates by the names of :mod:`moemesh.planner.step_parts`; all ranks call. Empty on a GPU."""
    if mesh.device.type != "cpu":
        return {}
    with mesh.ledger.paused():
        barrier(mesh.control)
        rates = _pass_rates(small_run(config))
        streamed = torch.zeros(_STREAMED)
        # Bytes/s: each number of 4 bytes is read and written.
        rates[MEMORY] = 2 * 4 * _STREAMED / _seconds(lambda: streamed.add_(1.0))
        #: Ranks of an axis -> seconds of an operation, bytes/s.
        measured: dict[tuple[int, ...], tuple[float, float]] = {}
        for name in AXES:
            axis = mesh[name]
            if axis.size == 1:
                continue
            ranks = tuple(axis.ranks)
            if ranks not in measured:  # axes of the same ranks have one group
                small, large = (
                    _seconds(partial(all_reduce_, tensor, axis, caller="rates", phase="control"))
                    for tensor in (torch.zeros(_SMALL), torch.zeros(_LARGE))
                )
                sent = 2 * 4 * _LARGE * (axis.size - 1) / axis.size  # bytes of a rank in a ring
                # The large sum without its latency; noise could make the difference 0 or less.
                measured[ranks] = small, sent / max(large - small, large / 10)
            rates[latency(name)], rates[bandwidth(name)] = measured[ranks]
    return rates


def small_run(config: RunConfig) -> RunConfig:
    """A run on one rank with one layer of each kind of MLP.

    Its widths are those of the part of a layer that a rank of `config` holds; a step has at most
    the tokens of a microbatch of that rank, or one sequence.
    """
    model, plan, data = config.model, config.plan, config.data
    if model.architecture is not None:  # a model of our own with the sizes of transformers' code
        shape = shape_of(model)
        sizes = ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
        model = ModelConfig(
            **{name: getattr(shape, name) for name in (*sizes, "num_experts")},
            intermediate_size=shape.intermediate_size or 4 * shape.hidden_size,
            moe_layers=shape.moe_layers or None,
            experts_per_token=max(shape.experts_per_token, 1),
            expert_intermediate_size=max(shape.expert_intermediate_size, 1),
            num_shared_experts=0,
        )
    rank_tokens = plan.tokens_per_rank(data.seq_len, data.global_batch)
    tokens = min(rank_tokens, _MOST_TOKENS)
    # Fewer experts for fewer tokens: the number of rows of an expert is that of the run.
    experts = -(-model.num_experts * tokens // (plan.ep * rank_tokens))
    small = {
        "num_layers": min(model.num_dense_layers, 1) + min(model.num_moe_layers, 1),
        "first_dense_layers": min(model.num_dense_layers, 1) if experts else 1,
        "moe_layers": None,
        "num_mtp_layers": 0,
        "num_heads": model.num_heads // plan.tp,
        "num_kv_heads": max(model.num_kv_heads // plan.tp, 1),
        "intermediate_size": model.intermediate_size // plan.tp,
        "vocab_size": max(model.vocab_size // plan.tp, 2),
        "num_experts": experts,
        "experts_per_token": min(model.experts_per_token, max(experts, 1)),
        "expert_intermediate_size": model.expert_intermediate_size // plan.etp,
        "router_groups": 1,
        "router_groups_kept": 1,
        "layer_types": (),
        "sliding_window": 0,
    }
    seq_len = max(data.seq_len // plan.cp, 1)
    batch = {"seq_len": seq_len, "global_batch": max(tokens // seq_len, 1)}
    return replace(
        config,
        model=model.model_copy(update=small),
        # Adapters of transformers' modules have other names.
        lora=config.lora if config.model.architecture is None else LoraConfig(),
        plan=Plan(),
        data=data.model_copy(update=batch),
    )


def _pass_rates(config: RunConfig) -> dict[str, float]:
    """FLOP/s of the parts of the passes of `config`, a run on one rank."""
    flops, model = pass_flops(config), Transformer(config.model)
    if not flops or sum(weight.numel() for weight in model.parameters()) > _MOST_NUMBERS:
        return {}
    initialize(model, seed=0, dtype=getattr(torch, config.train.dtype))
    for name, weight in model.named_parameters():
        weight.requires_grad_(config.tuning.trains(name))
    clock, data = StepClock(model), config.data
    tokens_BS = torch.arange(data.global_batch * (data.seq_len + 1)) % config.model.vocab_size
    tokens_BS = tokens_BS.view(data.global_batch, -1)
    batch = Batch(
        tokens_BS=tokens_BS[:, :-1],
        targets_BS=tokens_BS[:, 1:],
        sequences_B=torch.arange(data.global_batch),
    )
    deadline = time.monotonic() + _MOST_SECONDS
    for step in range(1, _STEPS + 1):
        recorder, begin = TimelineRecorder(0), time.monotonic()
        if step > 2 and begin > deadline:
            break
        losses_T = model(batch).losses_T
        middle = time.monotonic()
        losses_T.sum().backward()
        end = time.monotonic()
        recorder.add(name="F", start=begin, end=middle, kind="F", step=step)
        recorder.add(name="B", start=middle, end=end, kind="B", step=step)
        clock.finish_step(recorder, step, end - begin)
    progress.on_wait(None)  # else the clock of the small model would collect the waits of the run
    _, seconds = clock.result()
    rates = {part: flops[part] / seconds[part] for part in flops if seconds.get(part)}
    return rates | {parts.TOGETHER: sum(flops.values()) / sum(seconds.values())}


def _seconds(run: Callable[[], object]) -> float:
    """Median seconds of `run`, which every rank repeats the same number of times."""
    run()
    times: list[float] = []
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return max(statistics.median(times), 1e-9)
