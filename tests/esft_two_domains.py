"""``python -m tests.esft_two_domains``: fine-tuning of chosen experts beside that of all weights.

A small model learns two domains, sentences and sums. The task is sums in another notation. Writes
the table between the marks of docs/finetuning.md and the picture of the scores beside it. By hand,
not in the tests: it takes some minutes.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.documents import ROOT

PAGE, PICTURE = ROOT / "docs" / "finetuning.md", ROOT / "docs" / "esft.svg"
MODEL = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_heads": 4,
    "num_kv_heads": 4,
    "head_dim": 16,
    "num_experts": 16,
    "experts_per_token": 2,
    "expert_intermediate_size": 64,
    "num_shared_experts": 0,
    "first_dense_layers": 0,
}
SEQ_LEN = 64
#: Thresholds of ESFT, and what else is compared.
THRESHOLDS = (0.5, 0.8)
_WORDS = (
    ("the", "a", "one", "some"),
    ("cat", "river", "stone", "teacher", "window"),
    ("sees", "finds", "leaves", "remembers"),
    ("the", "a", "every"),
    ("song", "garden", "letter", "mountain"),
)


@dataclass(frozen=True, kw_only=True)
class Result:
    """One way to fine-tune: share of parameters that train, losses on the task and on the other
    domain (nats a byte)."""

    name: str
    trained: float
    task: float
    other: float


def sentences(count: int, draw: random.Random) -> str:
    return "".join(" ".join(map(draw.choice, _WORDS)) + ".\n" for _ in range(count))


def sums(count: int, draw: random.Random, *, task: bool) -> str:
    """``12 + 30 = 42``; of the task ``12 + 30 = 24``: the digits from the right."""
    lines: list[str] = []
    for _ in range(count):
        a, b = draw.randrange(100), draw.randrange(100)
        total = str(a + b)
        lines.append(f"{a} + {b} = {total[::-1] if task else total}\n")
    return "".join(lines)


def moemesh(*words: object) -> str:
    """The output of the command, which must succeed."""
    command = [sys.executable, "-m", "moemesh", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


def options(values: dict[str, object]) -> list[str]:
    return [word for key, value in values.items() for word in ("--set", f"{key}={value}")]


def losses(model: Path, folder: Path) -> tuple[float, float]:
    """Losses on unseen text of the task, and of the other domain."""
    losses = [
        json.loads(moemesh("evaluate", model, "--data", folder / name, "--seq-len", SEQ_LEN,
                           "--set", "data.tokenizer=bytes", "--json"))["loss"]
        for name in ("task-unseen.txt", "other-unseen.txt")
    ]  # fmt: skip
    return losses[0], losses[1]


def compare(folder: Path, *, base_steps: int, steps: int) -> list[Result]:
    """Train the base and fine-tune it in each way; every run has the same data and rates."""
    draw = random.Random(0)
    lines = 12_000
    mixed = (sentences(lines, draw), sums(lines, draw, task=False))
    (folder / "sentences.txt").write_text(mixed[0])
    (folder / "sums.txt").write_text(mixed[1])
    (folder / "task.txt").write_text(sums(lines, draw, task=True))
    (folder / "task-unseen.txt").write_text(sums(500, draw, task=True))
    (folder / "other-unseen.txt").write_text(sentences(300, draw))
    common: dict[str, object] = {
        "data.seq_len": SEQ_LEN,
        "data.global_batch": 32,
        "train.validate_every": 0,
        "train.checkpoint_every": 0,
        "train.validation_batches": 1,
    }
    sources = [
        {"path": str(folder / name), "weight": 1.0} for name in ("sentences.txt", "sums.txt")
    ]
    shown = "[" + ", ".join(f'{{path="{one["path"]}", weight=1.0}}' for one in sources) + "]"
    sizes: dict[str, object] = {f"model.{key}": value for key, value in MODEL.items()}
    moemesh("train", "--out", folder / "pretrained", *options(sizes | common),
            *options({"data.sources": shown, "train.steps": base_steps}))  # fmt: skip
    base = folder / "base"
    moemesh("convert", folder / "pretrained", base)
    ways: list[tuple[str, dict[str, object]]] = [("all weights", {})]
    for threshold in THRESHOLDS:
        table = folder / f"table-{threshold}.json"
        moemesh("esft", "scores", base, folder / "task.txt", "--seq-len", SEQ_LEN, "--samples", 64,
                "--threshold", threshold, "--out", table, "--set", "data.tokenizer=bytes",
                "--svg", folder / f"scores-{threshold}.svg")  # fmt: skip
        ways.append((f"ESFT, p = {threshold}", {"train.esft": str(table)}))
    task, other = losses(base, folder)
    results = [Result(name="before", trained=0.0, task=task, other=other)]
    for number, (name, given) in enumerate(ways):
        out = folder / f"tuned-{number}"
        tuned = {"model.path": str(base), "data.path": str(folder / "task.txt"),
                 "data.tokenizer": "bytes", "train.steps": steps, "train.lr": 1e-3,
                 **given}  # fmt: skip
        moemesh("train", "--out", out, *options(common | tuned))
        summary = json.loads((out / "summary.json").read_text())
        task, other = losses(out, folder)
        share = summary.get("trained_parameters", summary["parameters"]) / summary["parameters"]
        results.append(Result(name=name, trained=share, task=task, other=other))
    return results


def gains(found: Sequence[Result]) -> dict[str, float]:
    """Share of the gain on the task of all weights that each way reaches."""
    before, full = found[0].task, found[1].task
    return {one.name: (before - one.task) / (before - full) for one in found[1:]}


def table(found: Sequence[Result]) -> Iterator[str]:
    share, before = gains(found), found[0]
    yield "| | trains | loss on the task | of the gain | loss on the other domain | forgets |"
    yield "|---|---:|---:|---:|---:|---:|"
    for one in found:
        gain = f"{share[one.name]:.1%}" if one.name in share else ""
        worse = f"{one.other - before.other:+.3f}" if one is not before else ""
        cells = (one.name, f"{one.trained:.1%}", f"{one.task:.3f}", gain, f"{one.other:.3f}", worse)
        yield f"| {' | '.join(cells)} |"


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        results = compare(Path(name), base_steps=1500, steps=600)
        shutil.copy(Path(name) / f"scores-{THRESHOLDS[0]}.svg", PICTURE)
    text = "\n".join(table(results))
    print(text)
    marked = re.compile(r"(<!-- numbers: esft -->\n).*?(<!-- end of numbers -->)", re.DOTALL)
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(marked.sub(rf"\1{text}\n\2", page), encoding="utf-8")


if __name__ == "__main__":
    main()
