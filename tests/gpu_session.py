"""`make gpu`: everything that needs a GPU, on those of this machine, into one report to send back.

    python -m tests.gpu_session gpu-report.txt

Commands run one after the other, each with a limit of time and an exit code; the report ends with a
table of them. A failure stops nothing. With one GPU ranks and NCCL are left out.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple, TextIO

#: Seconds that a command may take.
LIMIT = 1200
RUNS = Path("runs") / "gpu"
#: One long enough for losses to fall, and for a checkpoint in between.
TRAIN = ("train.device=cuda", "train.dtype=bfloat16", "train.steps=20", "train.checkpoint_every=10")

#: Sizes of a step in which products, not launches, take most of the time on a GPU.
LARGE = (
    "--layers", "8", "--hidden", "1024", "--width", "512", "--experts", "64", "--top-k", "8",
    "--vocabulary", "32000", "--sequences", "8", "--seq-len", "1024", "--dtype", "bfloat16",
)  # fmt: skip


class Command(NamedTuple):
    """Arguments of ``python -m``, and of a training run its settings (``--set``)."""

    name: str
    arguments: tuple[str, ...]
    settings: tuple[str, ...] = ()

    @property
    def words(self) -> list[str]:
        words = [*self.arguments]
        for setting in self.settings:
            words += ["--set", setting]
        return words


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


def commands(num_gpus: int) -> list[Command]:
    """All of them, in order."""
    session = [
        Command("doctor", ("moemesh", "doctor")),
        Command("tests", ("pytest", "-q", "-m", "gpu", "tests")),
    ]
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
    session += [
        Command("resume", resume, longer),
        Command("generate", ("moemesh", "generate", one, *prompt), TRAIN[:1]),
        Command("evaluate", ("moemesh", "evaluate", one, "--data", "README.md"), TRAIN[:1]),
        Command(
            "profile", ("moemesh", "train", "--out", f"{one}_profile", "--profile", "3"), TRAIN
        ),
        # A layer counted on the simulated device beside its time on this one, then whole steps.
        Command("bench device", ("benchmarks.device", "--ranks", "1")),
        Command("bench step", ("benchmarks.step", "--device", "cuda")),
        Command("bench large step", ("benchmarks.step", "--device", "cuda", *LARGE)),
    ]
    return session


def sanitized() -> list[str]:
    """The kernels with sizes of their own under CUDA's checker of memory; nothing without it."""
    program = shutil.which("compute-sanitizer")
    if program is None:
        return []
    # torch's allocator would hide what is read beside a tensor: blocks are larger than tensors.
    options = ["env", "PYTORCH_NO_CUDA_MEMORY_CACHING=1", program, "--error-exitcode", "9"]
    tests = ["-m", "pytest", "-q", "-m", "gpu", "tests/parallel/test_gpu.py"]
    return [*options, sys.executable, *tests, "-k", "products or documents"]


def run(report: TextIO, name: str, words: list[str]) -> tuple[str, int, float]:
    """Run one command, its output in the report; 124: it took too long, 127: it is not there."""
    print(f"\n===== {name}\n$ {' '.join(words)}", file=report, flush=True)
    start = time.monotonic()
    try:
        code = subprocess.run(
            words, stdout=report, stderr=subprocess.STDOUT, timeout=LIMIT, check=False
        ).returncode
    except subprocess.TimeoutExpired:
        code = 124
    except FileNotFoundError:
        code = 127
    seconds = time.monotonic() - start
    print(f"----- {name}: exit code {code}, {seconds:.0f} s", file=report, flush=True)
    print(f"{name}: exit code {code}, {seconds:.0f} s", flush=True)
    return name, code, seconds


def num_gpus() -> int:
    """Those that torch may use here."""
    script = "import torch; print(torch.cuda.device_count())"
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    text = process.stdout.decode().strip()
    return int(text) if text.isdecimal() else 0


def main(path: Path) -> int:
    """Write the report; returns 1 if a command failed or without a GPU."""
    count = num_gpus()
    if not count:
        print("no GPU: torch.cuda.device_count() is 0; `moemesh doctor` says why", file=sys.stderr)
        return 1
    shutil.rmtree(RUNS, ignore_errors=True)
    RUNS.mkdir(parents=True)
    with path.open("w", encoding="utf-8") as report:
        print(f"{count} GPUs", file=report)
        done = [
            run(report, "nvidia-smi", ["nvidia-smi"]),
            run(report, "links of the machine", ["nvidia-smi", "topo", "-m"]),
            run(report, "commit", ["git", "log", "-1", "--oneline"]),
            run(report, "packages", [sys.executable, "-m", "pip", "freeze"]),
        ]
        for one in commands(count):
            done.append(run(report, one.name, [sys.executable, "-m", *one.words]))
        if words := sanitized():
            done.append(run(report, "compute-sanitizer", words))
        print("\n===== all", file=report)
        for name, code, seconds in done:
            print(
                f"{'ok' if code == 0 else f'FAILED {code}':12}{name} ({seconds:.0f} s)", file=report
            )
    print(f"report: {path}")
    return int(any(code for _, code, _ in done))


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
