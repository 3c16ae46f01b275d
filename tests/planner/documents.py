"""The tables of docs/data_parallelism.md, from the formulas of the library."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from moemesh.config.cluster import load_cluster
from moemesh.config.plan import Plan
from moemesh.planner.kept_tensors import layer_kept
from moemesh.planner.layout_sources import from_plan, read_plan
from moemesh.planner.memory import rank_memory
from moemesh.planner.parameters import count_flops, count_parameters
from moemesh.planner.planned_layout import PlannedLayout
from moemesh.planner.shapes.load_shape import load_model
from moemesh.planner.speed import kv_cache_bytes
from moemesh.planner.timing.price import pricing
from moemesh.planner.traffic.volumes import step_volumes, volumes_ledger

#: A dense model, whose weights all have the same number of replicas.
_DENSE = load_model("llama3-8b").shape
_PSI = count_parameters(_DENSE).total

#: Name of a row of a table, and the plan keys of that row.
STRATEGIES: dict[str, dict[str, Any]] = {
    "`replicate`": {"data": "replicate"},
    "`zero1`": {"data": "zero1"},
    "`zero2`": {"data": "zero2"},
    "`zero3`": {"data": "zero3"},
    "`zero3`, `reshard = step`": {"data": "zero3", "reshard": "step"},
    "`parameter_server`, 1 server": {"data": "parameter_server"},
    "`parameter_server`, 2 servers": {"data": "parameter_server", "servers": 2},
}


def _layout(ranks: int, microbatches: int = 1, **keys: Any) -> PlannedLayout:
    plan = Plan(dp=ranks, microbatches=microbatches, **keys)
    return from_plan(plan, seq_len=8, global_batch=ranks * microbatches)


def rows(header: Sequence[str], body: Iterable[Sequence[str]], *, left: int = 1) -> str:
    """A table of Markdown; the first `left` columns are names."""
    rule = ["---"] * left + ["--:"] * (len(header) - left)
    return "".join(f"| {' | '.join(line)} |\n" for line in [header, rule, *body])


#: First words of a row of the table of overlaps -> the planner's constant of its exposed share.
_EXPOSED = {
    "all_to_all": "overlapped_exchange_exposed",
    "the same in": "overlapped_exchange_exposed",
    "gradients": "gradient_exposed",
    "messages": "pipeline_exposed",
}


def overlap(old: str) -> str:
    """The table of docs/gpu.md: measured shares as they are, and the planner's constants."""
    constants = pricing(load_cluster("dgx_h100")).constants
    lines = old.splitlines()
    for number, line in enumerate(lines):
        name = next((words for words in _EXPOSED if line.startswith(f"| {words}")), None)
        if name is not None:
            *cells, _, end = line.split("|")
            share = 100 * float(getattr(constants, _EXPOSED[name]))
            lines[number] = "|".join([*cells, f" {share:.0f} % ", end])
    return "\n".join([*lines, ""])


def _each(value: float) -> str:
    return f"{value / _PSI:.2f}".removesuffix("0").removesuffix(".0")


def states(old: str) -> str:
    """Bytes of model states per parameter of a rank, bf16 weights and AdamW."""
    body: list[list[str]] = []
    for name, keys in STRATEGIES.items():
        four, many = (rank_memory(_DENSE, _layout(ranks, **keys), 0) for ranks in (4, 64))
        parts = (four.dense_weights, four.gradients, four.optimizer, four.states, many.states)
        body.append([name, *map(_each, parts)])
        if keys["data"] == "parameter_server":
            layout = _layout(4, **keys).changed(optimizer_bytes=0)
            worker = rank_memory(_DENSE, layout, 0)
            parts = (worker.dense_weights, worker.gradients, worker.optimizer, worker.states)
            body.append(["the same, a worker", *map(_each, parts), _each(worker.states)])
    header = ("strategy", "weights", "gradients", "optimizer", "N = 4", "N = 64")
    return rows(header, body)


def links(old: str) -> str:
    """Bytes per parameter on the busiest link of a step: gradients and weights."""
    body: list[list[str]] = []
    for name, keys in STRATEGIES.items():
        cells = [name]
        for ranks, microbatches in ((4, 1), (4, 8), (64, 1)):
            ledger = volumes_ledger(_DENSE, _layout(ranks, microbatches, **keys))
            totals = [ledger.total(caller=caller) for caller in ("gradients", "weights")]
            sent, received = (
                sum(getattr(total, way) for total in totals)
                for way in ("wire_bytes", "received_bytes")
            )
            cells += [_each(sent), _each(received)]
        body.append(cells)
    ends = ("N = 4 sent", "received", "m = 8 sent", "received", "N = 64 sent", "received")
    return rows(("strategy", *ends), body)


def _optimizer_line(gradients: int) -> str:
    """Bytes per parameter with AdamW and gradients of `gradients` bytes per parameter."""
    layout = _layout(1).changed(gradient_bytes=gradients)
    return f"{rank_memory(_DENSE, layout, 0).states / _PSI:.0f}"


def seed_memory(old: str) -> str:
    """Figures of seed 002 for size, work and memory, next to results of the library's formulas."""
    gpt3 = load_model("gpt3-175b").shape
    total, hidden, layers = count_parameters(gpt3).total, gpt3.hidden_size, gpt3.num_layers
    per_layer = 12 * hidden**2 + 13 * hidden
    sequence = 2048
    forward = count_flops(gpt3, sequence, "full")
    tokens = 300 * 10**9
    bytes_each = [_optimizer_line(gradients) for gradients in (2, 4, 6)]
    eager = replace(
        _layout(1), seq_len=sequence, attention_kernel="eager", fused_norm=True, dropout=True
    )
    kept = layer_kept(gpt3, gpt3.kinds[0], eager).on_rank(eager)
    scores = 5 * gpt3.num_heads * sequence**2
    linear = (kept - scores) / (sequence * hidden)
    body = [
        [
            "parameters a layer",
            '≈ 12lh², "per layer"',
            f"12h² + 13h a layer: {per_layer:,} × {layers} layers of GPT-3, of {total:,} in all",
        ],
        [
            "FLOPs of an iteration",
            "l(24hsh² + 4bs²h) + 2bshV",
            f"24bsh², and this is one forward: {forward.forward / 1e9:.0f} GFLOP a token, "
            f"{forward.training / 1e9:.0f} to train",
        ],
        [
            "FLOPs of GPT-3",
            "6 · 1750 · 10⁹",
            f"6 · {total / 1e9:.0f} · 10⁹ a token; × {tokens:.0e} tokens = "
            f"{6 * total * tokens:.2e}",
        ],
        [
            "bytes a parameter",
            "20",
            f"{bytes_each[0]} (16-bit gradients), {bytes_each[1]} (fp32 gradients: ours), "
            f"{bytes_each[2]} only while both live",
        ],
        [
            "states of GPT-3",
            "20 · 1750 · 10⁹",
            f"{bytes_each[1]} · {total / 1e9:.0f} · 10⁹ = "
            f"{int(bytes_each[1]) * total / 2**40:.2f} TiB",
        ],
        [
            "activations of a layer",
            "34bsh + 5hs²a",
            f"{linear:.0f}bsh + 5bs²a: {kept / 2**30:.2f} GiB a sequence of GPT-3, and only with "
            "GELU, dropout and without flash attention",
        ],
        [
            "KV cache",
            "4blh(s + n)",
            f"4lh = {4 * layers * hidden:,} bytes a token of GPT-3 (ours: "
            f"{kv_cache_bytes(gpt3, 1, 1):,}); Llama3-405B, which groups heads, "
            f"{kv_cache_bytes(load_model('llama3-405b').shape, 1, 1):,}",
        ],
    ]
    return rows(("figure", "printed", "right"), body, left=3)


#: Rows of seed 002's table of traffic, with its printed totals and shares as text.
_PRINTED = {
    ("DP", "all_reduce"): ("44.48 GB", "1.34 %"),
    ("PP", "send_receive"): ("4.875 GB", "0.14 %"),
    ("TP", "all_reduce"): ("1775 GB", "52.9 %"),
    ("SP", "all_gather"): ("1462.5 GB", "44.08 %"),
    ("EP", "all_to_all"): ("51.19 GB", "1.54 %"),
}


def seed_traffic(old: str) -> str:
    """Seed 002's traffic of one step, printed and by the formulas."""
    # Events of an inner stage by MiB. The sums of norms and routers over tp are not listed.
    layout = read_plan("traffic-table").layout
    table: dict[tuple[str, str], Counter[float]] = {key: Counter() for key in _PRINTED}
    for volume in step_volumes(load_model("traffic-table").shape, layout, 1):
        if (volume.axis, volume.caller) != ("tp", "gradients"):
            tensor = "TP" if volume.op == "all_reduce" else "SP"
            axis = {"edp": "DP", "pp": "PP", "ep": "EP"}.get(volume.axis, tensor)
            table[axis, volume.op][volume.wire_bytes / 2**20] += int(volume.events)
    volumes = {
        key: sum(size * 2**20 * count for size, count in sizes.items())
        for key, sizes in table.items()
    }
    total = sum(volumes.values())
    body: list[list[str]] = []
    for (axis, op), printed in _PRINTED.items():
        volume = volumes[axis, op]
        events = sorted(table[axis, op].items())
        transfers = ", ".join(f"{size:g} MiB × {count}" for size, count in events)
        ours = f"{volume / 2**30:.2f} GiB", f"{100 * volume / total:.2f} %"
        body.append([axis, f"`{op}`", transfers, *printed, *ours])
    header = ("axis", "operation", "transfers", "printed", "share", "formulas", "share")
    return rows(header, body, left=2)


BLOCKS = {
    "overlap": overlap,
    "states_by_strategy": states,
    "links_by_strategy": links,
    "seed_memory": seed_memory,
    "seed_traffic": seed_traffic,
}
