"""`make gpu`: what needs a GPU, on those of this machine, in the order of its worth.

    python -m tests.gpu_session gpu-results

Each part prints its last lines when it ends and leaves two files in the folder: its whole output as
text, and its rows as JSON where it has them. ``parts.jsonl`` gets a line for each part that ended.
A part that fails or is cut off stops no other, and loses none.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

#: Seconds that a command may take.
LIMIT = 1200
RUNS = Path("runs") / "gpu"
#: Lines of a part's output that are printed when it ends.
LAST_LINES = 30
#: One long enough for losses to fall, and for a checkpoint in between.
TRAIN = ("train.device=cuda", "train.dtype=bfloat16", "train.steps=20", "train.checkpoint_every=10")

#: Sizes of a step in which products, not launches, take most of the time on a GPU.
LARGE = (
    "--layers", "8", "--hidden", "1024", "--width", "512", "--experts", "64", "--top-k", "8",
    "--vocabulary", "32000", "--sequences", "8", "--seq-len", "1024", "--dtype", "bfloat16",
)  # fmt: skip
#: Layers of Qwen3-30B-A3B, two of 48, on 32,768 tokens.
SHAPE_Q = (
    "--layers", "2", "--hidden", "2048", "--width", "768", "--experts", "128", "--top-k", "8",
    "--vocabulary", "32000", "--sequences", "8", "--seq-len", "4096", "--dtype", "bfloat16",
)  # fmt: skip


class Command(NamedTuple):
    """Arguments of ``python -m``, of a training run its settings (``--set``), and variables of the
    environment."""

    name: str
    arguments: tuple[str, ...]
    settings: tuple[str, ...] = ()
    environ: tuple[str, ...] = ()

    @property
    def words(self) -> list[str]:
        words = [*self.arguments]
        for setting in self.settings:
            words += ["--set", setting]
        return words

    @property
    def command_line(self) -> list[str]:
        prefix = ["env", *self.environ] if self.environ else []
        return [*prefix, sys.executable, "-m", *self.words]


def plans(num_gpus: int) -> dict[str, tuple[str, ...]]:
    """Name and plan of every run on `num_gpus` GPUs."""
    runs: dict[str, tuple[str, ...]] = {"one": (), "exact": ("plan.combine=exact",)}
    if num_gpus < 2:
        return runs
    ranks = max(n for n in (2, 4, 8) if n <= num_gpus)
    experts = (f"plan.dp={ranks}", f"plan.ep={ranks}")
    for dispatcher in ("all_to_all", "all_gather", "low_latency"):
        runs[dispatcher] = (*experts, f"plan.dispatcher={dispatcher}")
    if ranks >= 4:
        nodes = f"plan.ranks_per_node={ranks // 2}"
        runs["hierarchical"] = (*experts, "plan.dispatcher=hierarchical", nodes)
    runs["chunks"] = (*experts, "plan.dispatch_chunks=2")
    for data in ("replicate", "zero1", "zero2", "zero3"):
        runs[data] = (f"plan.dp={ranks}", f"plan.data={data}")
    runs["tp"] = ("plan.tp=2", "plan.ep=2")
    for context in ("ring", "all_gather", "all_to_all"):
        runs[f"context {context}"] = ("plan.cp=2", f"plan.context={context}")
    pipeline = ("plan.pp=2", "plan.microbatches=4")
    for schedule in ("1f1b", "gpipe", "zb_h1", "dualpipe"):
        runs[schedule] = (*pipeline, f"plan.schedule={schedule}")
    for schedule in ("interleaved_1f1b", "zb_v", "dualpipe_v"):
        chunks = "plan.stages_per_rank=2"
        runs[schedule] = (*pipeline, chunks, f"plan.schedule={schedule}")
    if ranks >= 4:
        runs["pp and ep"] = (*runs["dualpipe_v"], "plan.dp=2", "plan.ep=2")
    return runs


def shared_plans() -> dict[str, tuple[str, ...]]:
    """Name and plan of every run of 2 and 4 ranks that share one GPU."""
    of_two, of_four = ({f"{name} {n}": plan for name, plan in plans(n).items()} for n in (2, 4))
    both = of_two | {name: plan for name, plan in of_four.items() if plan not in of_two.values()}
    return {name: plan for name, plan in both.items() if plan and name[:-2] != "exact"}


def parts(num_gpus: int, folder: Path) -> list[Command]:
    """All commands, in the order of their worth."""
    session = [Command("tests", ("pytest", "-q", "-m", "gpu", "tests", "--ignore=tests/device"))]
    for shape in ("Q", "B"):
        rows = ("--out", str(folder / f"layer-{shape}.jsonl"))
        words = ("benchmarks.device", "--ranks", "1", "--shape", shape, *rows)
        session.append(Command(f"layer {shape}", words))
    for name, sizes in (("step", LARGE), ("step Q", SHAPE_Q)):
        files = ("--out", str(folder / f"{name.replace(' ', '-')}.json"))
        words = ("benchmarks.step", "--device", "cuda", "--kernels", "40", *sizes, *files)
        session.append(Command(name, words))
    shared = ("pytest", "-q", "-m", "gpu", "tests/device/test_shared.py")
    session.append(Command("ranks on one GPU", shared))
    train = ("moemesh", "train", "--out", str(RUNS / "shared"))
    plan = ("plan.dp=2", "plan.ep=2")
    session.append(Command("train on one GPU", train, (*TRAIN, *plan), ("MOEMESH_COMM=gloo",)))
    session.append(Command("doctor", ("moemesh", "doctor")))
    ranks = min(num_gpus, 8)
    if ranks > 1:
        words = ("--device", "cuda", "--ranks", str(ranks), "--out", str(RUNS / "links.toml"))
        session.append(Command("links", ("moemesh", "bench", "links", *words)))
    for name, plan in plans(num_gpus).items():
        out = str(RUNS / name.replace(" ", "_"))
        train = ("moemesh", "train", "--out", out)
        session.append(Command(f"train {name}", train, (*TRAIN, *plan)))
    one, prompt = str(RUNS / "one"), ("--prompt", "def main(", "--max-tokens", "20")
    longer = tuple("train.steps=30" if x == "train.steps=20" else x for x in TRAIN)
    allowed = ("--allow-change", "train.steps")
    resume = ("moemesh", "train", "--out", one, *allowed)
    return [
        *session,
        Command("resume", resume, longer),
        Command("generate", ("moemesh", "generate", one, *prompt), TRAIN[:1]),
        Command("evaluate", ("moemesh", "evaluate", one, "--data", "README.md"), TRAIN[:1]),
        Command(
            "profile", ("moemesh", "train", "--out", f"{one}_profile", "--profile", "3"), TRAIN
        ),
        Command("small step", ("benchmarks.step", "--device", "cuda")),
        Command("simulated device", ("pytest", "-q", "-m", "gpu", "tests/device")),
    ]


def sanitized() -> list[str]:
    """The kernels with sizes of their own under CUDA's checker of memory; nothing without it."""
    program = shutil.which("compute-sanitizer")
    if program is None:
        return []
    # torch's allocator would hide what is read beside a tensor: blocks are larger than tensors.
    options = ["env", "PYTORCH_NO_CUDA_MEMORY_CACHING=1", program, "--error-exitcode", "9"]
    tests = ["-m", "pytest", "-q", "-m", "gpu", "tests/parallel/test_gpu.py"]
    return [*options, sys.executable, *tests, "-k", "products or documents"]


def run(folder: Path, name: str, words: Sequence[str]) -> int:
    """Run one part and return its exit code; 124: it took too long, 127: the program is missing."""
    path = folder / f"{name.replace(' ', '-')}.txt"
    print(f"\n===== {name}\n$ {' '.join(words)}", flush=True)
    start = time.monotonic()
    with path.open("w", encoding="utf-8") as output:
        try:
            code = subprocess.run(
                words, stdout=output, stderr=subprocess.STDOUT, timeout=LIMIT, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            code = 124
        except FileNotFoundError:
            code = 127
    seconds = time.monotonic() - start
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    print("\n".join(lines[-LAST_LINES:]))
    print(f"----- {name}: exit code {code}, {seconds:.0f} s, {path}", flush=True)
    row = {
        "name": name,
        "code": code,
        "seconds": round(seconds, 1),
        "ended": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": list(words),
        "output": path.name,
    }
    with (folder / "parts.jsonl").open("a", encoding="utf-8") as file:
        print(json.dumps(row), file=file)
    return code


def num_gpus() -> int:
    """Those that torch may use here."""
    script = "import torch; print(torch.cuda.device_count())"
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    text = process.stdout.decode().strip()
    return int(text) if text.isdecimal() else 0


def main(folder: Path) -> int:
    """Run all parts; returns 1 if one failed or without a GPU."""
    count = num_gpus()
    if not count:
        print("no GPU: torch.cuda.device_count() is 0; `moemesh doctor` says why", file=sys.stderr)
        return 1
    for path in (RUNS, folder):
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
    facts = {
        "nvidia-smi": ["nvidia-smi"],
        "commit": ["git", "log", "-1", "--oneline"],
        "packages": [sys.executable, "-m", "pip", "freeze"],
    }
    commands = [(one.name, one.command_line) for one in parts(count, folder)]
    if words := sanitized():
        commands.append(("compute-sanitizer", words))
    codes = {name: run(folder, name, words) for name, words in (*facts.items(), *commands)}
    for name, code in codes.items():
        print(f"{'ok' if code == 0 else f'FAILED {code}':12}{name}")
    print(f"results: {folder}")
    return int(any(codes.values()))


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
