"""Long runs of wide models: their files are small, and the report reads them in bounded memory."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from moemesh.trace.loads import LayerLoads, neighbours
from moemesh.trace.run import MetricsRow
from tests.waiting import PATIENCE

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
    """A run of `steps` steps, whose loads are in the bins that ``train.load_bins = 128`` leaves."""
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


MEASURE = """
import json, sys
from pathlib import Path
from moemesh.balance.load_files import load_table
from moemesh.report import page
folder = Path(sys.argv[1])
written = page.write(folder)
# Not ru_maxrss, which begins with the size of the process that was forked.
status = Path("/proc/self/status").read_text()
peak = int(status.split("VmHWM:")[1].split()[0]) * 1024
table = load_table(folder)
print(json.dumps([peak, written.stat().st_size, list(table.shape), int(table.sum())]))
"""


def measure(folder: Path) -> tuple[int, int, list[int], int]:
    """Peak bytes of the process that writes the report, bytes of the page, and the sums of the
    loads."""
    command = [sys.executable, "-c", MEASURE, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE)
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_report_of_100_000_steps_of_a_wide_model_takes_200_mb(tmp_path: Path) -> None:
    folder = write_long_run(tmp_path / "run")
    assert (folder / "loads.jsonl").stat().st_size < 40e6
    peak, page, shape, _ = measure(folder)
    assert shape == [48, 128]
    assert peak <= 200e6, f"{peak / 1e6:.0f} MB"
    assert page <= 1.5e6, f"{page / 1e6:.2f} MB"


@pytest.mark.slow
def test_memory_does_not_grow_with_the_rows_of_loads(tmp_path: Path) -> None:
    """Also of a run that wrote a row for every step: those of an older version, load_bins = 0."""
    shape = {"layers": 6, "experts": 64}
    few = measure(write_long_run(tmp_path / "few", steps=200, bins=200, **shape))
    many = measure(write_long_run(tmp_path / "many", steps=2000, bins=2000, **shape))
    assert few[2] == many[2] == [6, 64]
    assert np.isclose(many[3] / few[3], 10, rtol=0.01)
    # 2,000 x 6 x 64 whole numbers in lists take 28 MB.
    assert many[0] - few[0] < 12e6
