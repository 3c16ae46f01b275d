"""A run folder as a training run would leave it, without training: input of the report's tests."""

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from moemesh.trace.ledger import Ledger
from moemesh.trace.loads import LayerLoads
from moemesh.trace.memory_profile import MemoryProfile, MemoryProfiles
from moemesh.trace.run import MetricsRow, ledgers_to_json
from moemesh.trace.timeline import Timeline, WorkRecord

CONFIG = """\
[model]
preset = "tiny"
hidden_size = 256
num_layers = 4
num_experts = 16
experts_per_token = 2

[plan]
pp = 2
dp = 1
cp = 1
tp = 2
ep = 2
schedule = "1f1b"
microbatches = 4

[data]
seq_len = 256
global_batch = 16

[train]
steps = 400
seed = 1
dtype = "float32"
lr = 0.001
"""


def write_fake_run(
    folder: Path,
    *,
    num_steps: int = 400,
    num_layers: int = 4,
    num_experts: int = 16,
    num_ranks: int = 4,
    loads_every: int = 10,
    records_per_rank: int = 0,
) -> Path:
    """Write every file of a run into `folder`; the same bytes for the same arguments."""
    chance = random.Random(7)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(CONFIG)
    degrees = {"pp": 2, "dp": num_ranks // 4, "cp": 1, "tp": 2, "ep": 2, "etp": 1}
    _dump(folder / "plan.json", degrees | {"schedule": "1f1b", "microbatches": 4})
    _dump(folder / "summary.json", {"unigram_loss": 3.21, "parameters": 12_345_678})
    rows = [metrics_row(step, num_steps, chance) for step in range(1, num_steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(row.to_line() for row in rows))
    ledgers = {rank: ledger(rank) for rank in range(num_ranks)}
    _dump(folder / "ledger.json", ledgers_to_json(ledgers))
    _dump(folder / "ledger_predicted.json", ledgers_to_json(ledgers))
    events = [("start", 0, "a run"), ("alarm", 30, "alarm: layer 1: 1 expert (8) is dead")]
    (folder / "events.jsonl").write_text(
        "".join(
            json.dumps({"time": "2026-11-22T11:36:02+00:00", "step": s, "kind": k, "text": t})
            + "\n"
            for k, s, t in events
        )
    )
    _dump(folder / "memory.json", memory(num_ranks).to_json())
    _dump(folder / "timeline.json", timeline(num_ranks, num_steps, records_per_rank).to_json())
    lines = [
        layer_loads(step, layer, num_experts, num_steps, chance).to_line()
        for step in range(loads_every, num_steps + 1, loads_every)
        for layer in range(num_layers)
    ]
    (folder / "loads.jsonl").write_text("".join(lines))
    return folder


def _dump(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))


def metrics_row(step: int, num_steps: int, chance: random.Random) -> MetricsRow:
    seconds = 0.21 + 0.02 * chance.random() + (0.9 if step == 1 else 0)
    loss = 1.9 + 3.6 * math.exp(-step / 40) + 0.06 * chance.gauss(0, 1)
    check = step == 1 or step % max(num_steps // 20, 1) == 0
    return MetricsRow(
        step=step,
        loss=loss,
        grad_norm=0.6 + 6 * math.exp(-step / 15) + abs(chance.gauss(0, 0.15)),
        aux_loss=1.01 + 0.3 * math.exp(-step / 60),
        tokens=4096,
        tokens_per_second=4096 / seconds,
        lr=1e-3 * min(step / 20, 1),
        seconds=seconds,
        validation_loss=loss + 0.04 if check else None,
    )


def entry(axis: str, op: str, phase: str, caller: str, *amounts: int) -> dict[str, Any]:
    """Arguments of :meth:`Ledger.record`; amounts: operations, bytes of payload, sent, received."""
    names = ("count", "payload_bytes", "wire_bytes", "received_bytes")
    place = {"axis": axis, "op": op, "phase": phase, "caller": caller}
    return place | dict(zip(names, amounts, strict=True))


def ledger(rank: int) -> Ledger:
    book = Ledger()
    shapes = (
        ("tp", "all_gather", "attention", 2**20),
        ("tp", "reduce_scatter", "attention", 2**20),
        ("ep", "all_to_all", "dispatch", 3 * 2**19 + rank * 4096),
        ("ep", "all_to_all", "combine", 3 * 2**19 + rank * 4096),
    )
    for phase in ("forward", "backward"):
        for axis, op, caller, size in shapes:
            book.record(**entry(axis, op, phase, caller, 8, 8 * size, 4 * size, 4 * size))
    size = 21_000_000
    book.record(**entry("dp_cp", "all_reduce", "gradients", "data", 3, size, size, size))
    if rank < 2:
        sent = 2**20
        book.record(**entry("pp", "send_receive", "forward", "pipeline", 4, sent, sent, 0))
    return book


def memory(num_ranks: int) -> MemoryProfiles:
    mebibyte = 2**20
    parts = {"dense_weights": 18, "expert_weights": 40, "gradients": 58, "optimizer": 116}
    parts = {name: size * mebibyte for name, size in (parts | {"buffers": 12}).items()}
    return MemoryProfiles(
        ranks=tuple(
            MemoryProfile(
                rank=rank,
                **parts,
                activations=(90 if rank < num_ranks // 2 else 55) * mebibyte + rank * 777_777,
                peak=(320 if rank < num_ranks // 2 else 280) * mebibyte + rank * 1_234_567,
            )
            for rank in range(num_ranks)
        )
    )


def timeline(num_ranks: int, step: int, records_per_rank: int = 0) -> Timeline:
    """One 1F1B step of two stages and four microbatches, or that many small records a rank."""
    records: list[WorkRecord] = []

    def add(rank: int, start: float, length: float, name: str, **details: Any) -> None:
        end = start + length
        records.append(WorkRecord(rank=rank, start=start, end=end, name=name, step=step, **details))

    for rank in range(num_ranks):
        stage = rank * 2 // num_ranks
        now = 1000.0 + 0.008 * stage + 0.0004 * (rank % 2)
        if records_per_rank:
            kinds = ("forward", "dispatch", "experts", "combine", "backward")
            for index in range(records_per_rank):
                add(rank, 1000.0 + index * 1e-5, 0.9e-5, kinds[index % len(kinds)])
            continue
        order = ("F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3")[stage]
        for kind, microbatch in ((word[0], int(word[1])) for word in order.split()):
            wait = 0.008 if stage == 0 and kind == "B" and microbatch == 0 else 0.0005
            length, start = 0.008 if kind == "F" else 0.016, now + wait
            place = {"kind": kind, "wait": wait, "stage": stage, "microbatch": microbatch}
            add(rank, start, length, "forward" if kind == "F" else "backward", **place)
            if kind == "F":
                add(rank, start + 0.3 * length, 0.12 * length, "dispatch")
                add(rank, start + 0.7 * length, 0.1 * length, "combine")
            now = start + length
        add(rank, now + 0.002, 0.007, "gradients")
        add(rank, now + 0.009, 0.004, "optimizer")
    return Timeline(
        ranks=tuple(range(num_ranks)), records=tuple(records), source="measured", unit="seconds"
    )


def shifted(line: Timeline, offset: float) -> Timeline:
    """The same work, `offset` later."""
    moved = (replace(one, start=one.start + offset, end=one.end + offset) for one in line.records)
    return replace(line, records=tuple(moved))


def layer_loads(
    step: int, layer: int, num_experts: int, num_steps: int, chance: random.Random
) -> LayerLoads:
    """Loads that start skewed and even out; in layer 1 one expert dies half way."""
    skew = 1.6 * math.exp(-3 * step / num_steps) + 0.15 + 0.1 * layer / 4
    weights = [
        math.exp(skew * math.sin(1.7 * expert + layer) + 0.1 * chance.gauss(0, 1))
        for expert in range(num_experts)
    ]
    if layer == 1 and step > num_steps // 2:
        weights[num_experts // 2] = 0
    tokens = [round(8192 * weight / sum(weights)) for weight in weights]
    half = num_experts // 2
    return LayerLoads(
        step=step,
        layer=layer,
        tokens_per_expert=tuple(tokens),
        tokens_per_rank=(sum(tokens[:half]), sum(tokens[half:])),
    )
