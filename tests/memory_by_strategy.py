"""``python -m tests.memory_by_strategy``: one short run per strategy, and the memory it cuts.

Writes the table between the marks of docs/memory.md and its picture, from the memory.json of runs
that it starts. By hand, not in the tests: activations follow the routing, and peaks the allocator.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from moemesh.report.bars import memory_bars
from moemesh.trace.memory_profile import MemoryProfile, MemoryProfiles, format_bytes
from moemesh.trace.run import Run
from tests.documents import ROOT

PAGE, PICTURE = ROOT / "docs" / "memory.md", ROOT / "docs" / "memory.svg"
#: States dominate, and activations are not small: four ranks in every row.
COMMON = {
    "model.hidden_size": 192,
    "model.num_layers": 8,
    "model.num_experts": 8,
    "model.expert_intermediate_size": 192,
    "data.seq_len": 256,
    "data.global_batch": 8,
    "train.steps": 2,
    "train.validate_every": 0,
    "train.checkpoint_every": 0,
    "train.validation_batches": 1,
}
_REPLICAS = "plan.dp=4 plan.ep=2"
STRATEGIES = {
    "replicate": f"{_REPLICAS}",
    "zero1": f"{_REPLICAS} plan.data=zero1",
    "zero2": f"{_REPLICAS} plan.data=zero2",
    "zero3": f"{_REPLICAS} plan.data=zero3",
    "server": f"{_REPLICAS} plan.data=parameter_server",
    "ep = 4": "plan.dp=4 plan.ep=4",
    "tp = 4": "plan.tp=4 plan.ep=2 plan.dp=1",
    "cp = 4": "plan.cp=4 plan.ep=2",
    "pp = 2": "plan.pp=2 plan.dp=2 plan.ep=2 plan.microbatches=4",
    "selective": f"{_REPLICAS} plan.recompute=selective",
    "full": f"{_REPLICAS} plan.recompute=full",
    "2 batches": f"{_REPLICAS} plan.microbatches=2",
    "zero3 full": f"{_REPLICAS} plan.data=zero3 plan.recompute=full",
}
_PARTS = ("weights", "gathered_weights", "gradients", "optimizer", "activations", "buffers")


def fullest(plan: str) -> tuple[MemoryProfile, MemoryProfile]:
    """Profile of the rank with the most memory in a run under `plan`: measured, and predicted."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = [sys.executable, "-m", "moemesh", "train", "--out", str(out)]
        for given in [*(f"{key}={value}" for key, value in COMMON.items()), *plan.split()]:
            command += ["--set", given]
        subprocess.run(command, check=True, capture_output=True)
        run = Run.load(out)
    assert run.memory is not None
    measured = max(run.memory.ranks, key=lambda profile: profile.total)
    predicted = next(one for one in run.memory.predicted if one.rank == measured.rank)
    return measured, predicted


def row(name: str, plan: str, measured: MemoryProfile, predicted: MemoryProfile) -> str:
    """One line of the table: MiB measured, and the prediction of the sum beside it."""
    cells = [f"{getattr(measured, part) / 2**20:.2f}" for part in _PARTS]
    sums = f"{measured.total / 2**20:.2f} | {predicted.total / 2**20:.2f}"
    return f"| {name} | `{plan}` | {' | '.join(cells)} | {sums} |"


def main() -> None:
    """Run every strategy and write the page's table and picture."""
    rows: list[str] = []
    profiles: list[MemoryProfile] = []
    for number, (name, plan) in enumerate(STRATEGIES.items()):
        measured, predicted = fullest(plan)
        rows.append(row(name, plan, measured, predicted))
        values = {part: getattr(measured, part) for part in measured.parts()}
        profiles.append(MemoryProfile(rank=number, **values, peak=0))
        print(name, format_bytes(measured.total), format_bytes(predicted.total), flush=True)
    picture = memory_bars(MemoryProfiles(ranks=tuple(profiles)))
    for number, name in reversed(list(enumerate(STRATEGIES))):
        picture = picture.replace(f">rank {number}<", f">{name}<").replace(
            f">rank {number}, ", f">{name}, "
        )
    PICTURE.write_text(picture + "\n", encoding="utf-8")
    head = (
        "| strategy | plan | weights | gathered | gradients | optimizer | activations | buffers "
        "| sum | predicted |\n|---|---|--:|--:|--:|--:|--:|--:|--:|--:|\n"
    )
    text = re.sub(
        r"(<!-- measured: memory -->\n).*?(<!-- end of numbers -->)",
        lambda match: f"{match[1]}{head}" + "\n".join(rows) + f"\n{match[2]}",
        PAGE.read_text(encoding="utf-8"),
        flags=re.DOTALL,
    )
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
