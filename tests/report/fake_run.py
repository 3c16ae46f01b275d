"""A run folder as a training run would leave it, without training: input of the report's tests."""

import json
import math
import random
from pathlib import Path

from moemesh.trace.ledger import Ledger
from moemesh.trace.loads import LayerLoads
from moemesh.trace.memory_profile import MemoryProfile, MemoryProfiles
from moemesh.trace.run import MetricsRow, ledgers_to_json
from moemesh.trace.timeline import Timeline, WorkRecord

_TIME = "2026-11-22T11:36:02+00:00"
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


def ledger(rank: int) -> Ledger:
    book = Ledger()
    shapes = (
        ("tp", "all_gather", "attention", 8, 2**20),
        ("tp", "reduce_scatter", "attention", 8, 2**20),
        ("ep", "all_to_all", "dispatch", 8, 3 * 2**19 + rank * 4096),
        ("ep", "all_to_all", "combine", 8, 3 * 2**19 + rank * 4096),
    )
    for phase in ("forward", "backward"):
        for axis, op, caller, count, size in shapes:
            book.record(
                axis=axis,
                op=op,
                phase=phase,
                caller=caller,
                count=count,
                payload_bytes=count * size,
                wire_bytes=count * size // 2,
                received_bytes=count * size // 2,
            )
    book.record(
        axis="dp_cp",
        op="all_reduce",
        phase="gradients",
        caller="data",
        count=3,
        payload_bytes=21_000_000,
        wire_bytes=21_000_000,
        received_bytes=21_000_000,
    )
    if rank < 2:
        book.record(
            axis="pp",
            op="send_receive",
            phase="forward",
            caller="pipeline",
            count=4,
            payload_bytes=2**20,
            wire_bytes=2**20,
            received_bytes=0,
        )
    return book


def memory(num_ranks: int) -> MemoryProfiles:
    mebibyte = 2**20
    return MemoryProfiles(
        ranks=tuple(
            MemoryProfile(
                rank=rank,
                dense_weights=18 * mebibyte,
                expert_weights=40 * mebibyte,
                gradients=58 * mebibyte,
                optimizer=116 * mebibyte,
                activations=(90 if rank < num_ranks // 2 else 55) * mebibyte + rank * 777_777,
                buffers=12 * mebibyte,
                peak=(320 if rank < num_ranks // 2 else 280) * mebibyte + rank * 1_234_567,
            )
            for rank in range(num_ranks)
        )
    )


def timeline(num_ranks: int, step: int, records_per_rank: int = 0) -> Timeline:
    """One 1F1B step of two stages and four microbatches, or that many small records a rank."""
    records: list[WorkRecord] = []
    for rank in range(num_ranks):
        stage = rank * 2 // num_ranks
        now = 1000.0 + 0.008 * stage + 0.0004 * (rank % 2)
        if records_per_rank:
            kinds = ("forward", "dispatch", "experts", "combine", "backward")
            for index in range(records_per_rank):
                start = 1000.0 + index * 1e-5
                name = kinds[index % len(kinds)]
                records.append(
                    WorkRecord(rank=rank, start=start, end=start + 0.9e-5, name=name, step=step)
                )
            continue
        order = ("F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3")[stage]
        for entry in order.split():
            kind, microbatch = entry[0], int(entry[1])
            wait = 0.008 if stage == 0 and kind == "B" and microbatch == 0 else 0.0005
            length = 0.008 if kind == "F" else 0.016
            records.append(
                WorkRecord(
                    rank=rank,
                    start=now + wait,
                    end=now + wait + length,
                    name="forward" if kind == "F" else "backward",
                    kind=kind,
                    wait=wait,
                    stage=stage,
                    microbatch=microbatch,
                    step=step,
                )
            )
            if kind == "F":
                for name, begin, end in (("dispatch", 0.3, 0.42), ("combine", 0.7, 0.8)):
                    records.append(
                        WorkRecord(
                            rank=rank,
                            start=now + wait + begin * length,
                            end=now + wait + end * length,
                            name=name,
                            step=step,
                        )
                    )
            now += wait + length
        records.append(
            WorkRecord(rank=rank, start=now + 0.002, end=now + 0.009, name="gradients", step=step)
        )
        records.append(
            WorkRecord(rank=rank, start=now + 0.009, end=now + 0.013, name="optimizer", step=step)
        )
    return Timeline(
        ranks=tuple(range(num_ranks)), records=tuple(records), source="measured", unit="seconds"
    )


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
