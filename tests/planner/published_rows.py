"""A small table of runs for tests: published figures with their layouts, and the shapes."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path

COLUMNS = (
    "id", "src", "model", "arch", "hardware", "gpus", "tp", "pp", "vpp", "dp", "ep", "cp", "etp",
    "sp", "zero", "mbs", "gbs", "seq", "precision", "recompute", "step_time_s", "tokens_s_gpu",
    "tflops_gpu", "mfu_pct", "mem_gib", "mem_kind", "status", "metric_reported", "flop_conv",
    "tier", "recalled", "notes",
)  # fmt: skip

ARCHS: dict[str, dict[str, object]] = {
    "llama-13B": {
        "type": "dense", "layers": 40, "hidden": 5120, "heads": 40, "kv_heads": 40,
        "head_dim": 128, "ffn": 13824, "vocab": 128000, "act": "swiglu",
    },
    "moe-30B": {
        "type": "moe", "layers": 48, "hidden": 2048, "heads": 32, "kv_heads": 4, "head_dim": 128,
        "experts": 128, "topk": 8, "moe_ffn": 768, "shared_ffn": 0, "dense_layers": 0,
        "dense_ffn": 0, "vocab": 151936, "act": "swiglu",
    },
    "llama3-70b": {
        "type": "dense", "layers": 80, "hidden": 8192, "heads": 64, "kv_heads": 8, "head_dim": 128,
        "ffn": 28672, "vocab": 128256, "act": "swiglu",
    },
}  # fmt: skip

_FLASH2 = "attention kernel: flash_attention2 + RMS kernel"


def row(number: int, **values: object) -> dict[str, str]:
    """A row whose unnamed columns are empty or 1."""
    plain = {"tp": 1, "pp": 1, "vpp": 1, "ep": 1, "cp": 1, "etp": 1, "sp": 0, "zero": 1}
    cells = dict.fromkeys(COLUMNS, "") | {k: str(v) for k, v in plain.items()}
    cells |= {"id": str(number), "status": "ok", "tier": "A", "precision": "bf16"}
    cells |= {"recompute": "none", "metric_reported": "step_time"}
    return cells | {name: str(value) for name, value in values.items()}


def llama(number: int, tp: int, pp: int, mbs: int, seconds: float | None, **more: object):
    """One of the LLaMA-13B runs on 64 A100 (arXiv:2311.05610); None ran out of memory."""
    values: dict[str, object] = {
        "src": "aleph_alpha", "model": "Llama-13B", "arch": "llama-13B", "gpus": 64, "tp": tp,
        "hardware": "A100-80G NVL8 200G HDR-IB", "pp": pp, "dp": 64 // tp // pp, "mbs": mbs,
        "gbs": 2048, "seq": 2048, "notes": _FLASH2, "step_time_s": seconds or "",
        "status": "ok" if seconds else "OOM",
    }  # fmt: skip
    return row(number, **values | more)


def truncated_llama(number: int, tp: int, pp: int, gbs: int, seconds: float, gib: float):
    """One of the 12-layer Llama3-70B runs on 8 B200 of the SimuMax release notes."""
    return row(
        number, src="simumax_b200", model="llama3-70b[12 layers]", arch="llama3-70b#L12", gpus=8,
        hardware="B200-SXM NVL8 (single node)", tp=tp, pp=pp, dp=8 // tp // pp, sp=int(tp > 1),
        mbs=1, gbs=gbs, seq=4096, step_time_s=seconds, mem_gib=gib,
        mem_kind="max_memory_allocated",
    )  # fmt: skip


ROWS = [
    llama(910, 1, 1, 1, 26.5395),
    llama(911, 2, 1, 2, 29.7045),
    llama(912, 1, 2, 1, 31.0581),
    llama(913, 2, 1, 1, 31.2859),
    llama(918, 2, 2, 1, 34.8416),
    llama(843, 2, 2, 8, None),
    llama(848, 1, 1, 4, None),
    llama(846, 1, 2, 4, None),
    truncated_llama(1837, 1, 2, 16, 0.843, 66.55),
    truncated_llama(1838, 2, 1, 16, 0.7255, 60.68),
    truncated_llama(1839, 4, 1, 8, 0.4098, 39.07),
    truncated_llama(1840, 8, 1, 4, 0.2809, 28.29),
]


def write_table(folder: Path, rows: Sequence[dict[str, str]] = ROWS) -> Path:
    """runs.csv and model_archs.json in `folder`; the path of the table."""
    table = folder / "runs.csv"
    with table.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    (folder / "model_archs.json").write_text(json.dumps(ARCHS), encoding="utf-8")
    return table
