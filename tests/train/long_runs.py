"""The files that long runs of wide models leave behind, without training them."""

from __future__ import annotations

import json
import math
from pathlib import Path

from moemesh.trace.loads import LayerLoads, neighbours
from moemesh.trace.run import MetricsRow

CONFIG = """\
[model]
num_layers = {layers}
num_experts = {experts}
experts_per_token = 8

[plan]
dp = 8
ep = 8

[train]
steps = {steps}
"""


def write_long_run(
    folder: Path, *, steps: int = 100_000, layers: int = 48, experts: int = 128, bins: int = 255
) -> Path:
    """A run of `steps` steps with as many bins of loads as ``train.load_bins = 128`` leaves."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(CONFIG.format(layers=layers, experts=experts, steps=steps))
    with (folder / "metrics.jsonl").open("w") as file:
        file.writelines(_metrics(step, steps).to_line() for step in range(1, steps + 1))
    with (folder / "loads.jsonl").open("w") as file:
        for part in neighbours([1] * steps, bins):
            width = part.stop - part.start
            file.writelines(_loads(part.stop, width, n, experts).to_line() for n in range(layers))
    (folder / "summary.json").write_text(json.dumps({"steps": steps}))
    return folder


def _metrics(step: int, steps: int) -> MetricsRow:
    seconds = 5 + math.sin(step) / 3
    return MetricsRow(
        step=step,
        loss=2 + 9 * math.exp(-9 * step / steps) + math.sin(7 * step) / 30,
        grad_norm=0.3 + math.cos(3 * step) / 30,
        aux_loss=0.01 + math.sin(step) / 1e4,
        tokens=4_194_304,
        tokens_per_second=4_194_304 / seconds,
        lr=3e-4 * (1 - step / steps),
        seconds=seconds,
        validation_loss=2.1 + math.sin(step) / 50 if step % 1000 == 0 else None,
        data_seconds=0.01 + math.cos(step) / 200,
        memory_bytes=7e10 + step,
        tflops_per_rank=400 + math.sin(step),
    )


def _loads(step: int, steps: int, layer: int, experts: int) -> LayerLoads:
    tokens = tuple(
        round(steps * 262_144 * (1 + math.sin(1.7 * expert + layer + step / 9000) / 2))
        for expert in range(experts)
    )
    size = experts // 8
    ranks = tuple(sum(tokens[start : start + size]) for start in range(0, experts, size))
    return LayerLoads(
        step=step,
        layer=layer,
        tokens_per_expert=tokens,
        tokens_per_rank=ranks,
        steps=steps,
        mean_ratios=(1.6, 1.1),
        highest_ratio=1.9,
    )
