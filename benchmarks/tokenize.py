"""`benchmarks.tokenize`: text into tokens, against the package tokenizers by itself.

A byte-level BPE is trained on Python's own library sources and applied to them, cut into documents:
by `encode_batch_fast` and `encode_batch` of the package on a list of texts in memory, by
``moemesh tokenize`` from JSON lines into token files, and as a run reads them. All take turns.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks.settings import TokenizeSettings
from moemesh.bench.settings import BenchError
from moemesh.data.corpus import Corpus
from moemesh.data.input_files import find
from moemesh.data.tokenizing import TokenizeJob, TokenSettings

#: The base of all ratios.
BASE = "encode_batch_fast"
#: Files that the documents are in.
NUM_FILES = 4
#: Seconds on the clock and of all cores.
_Times: TypeAlias = tuple[float, float]


def run(settings: TokenizeSettings) -> dict[str, Any]:
    """Seconds, megabytes a second, and the ratios of speed and of the cores' time to the base,
    medians over rounds."""
    try:
        import tokenizers  # optional
    except ImportError as error:
        raise BenchError(
            "bench tokenize needs the package tokenizers: pip install 'moemesh[tokenizers]'"
        ) from error
    documents = list(_documents(settings))
    num_bytes = sum(len(document.encode()) for document in documents)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text, path = folder / "text", folder / "tokenizer.json"
        text.mkdir()
        for part in range(NUM_FILES):
            lines = (json.dumps({"text": one}) + "\n" for one in documents[part::NUM_FILES])
            (text / f"{part}.jsonl").write_text("".join(lines), encoding="utf-8")
        _train(tokenizers, documents, settings.vocabulary, path)
        counter = iter(range(10**9))

        def alone(method: str) -> int:
            loaded: Any = tokenizers.Tokenizer.from_file(str(path))
            return len(getattr(loaded, method)(documents, add_special_tokens=False))

        def to_files() -> int:
            out = str(folder / f"out{next(counter)}")
            job = TokenizeJob.open(str(text), out, TokenSettings(tokenizer=str(path)))
            return job.run(processes=settings.processes)["num_documents"]

        contenders: dict[str, Callable[[], int]] = {
            BASE: lambda: alone(BASE),
            "encode_batch": lambda: alone("encode_batch"),
            "moemesh tokenize": to_files,
            "read by a run": lambda: len(
                Corpus.open(str(text), "jsonl", str(path), settings.vocabulary).starts
            ),
        }
        seconds = _in_turns(contenders, settings.rounds, len(documents))
    rows = {
        name: {
            "seconds": (median := statistics.median(wall for wall, _ in times)),
            "megabytes_per_second": num_bytes / 1e6 / median,
            "speed_ratio": _ratio(seconds[BASE], times, 0),
            "cpu_ratio": _ratio(times, seconds[BASE], 1),
        }
        for name, times in seconds.items()
    }
    return {
        "settings": settings.to_json(),
        "documents": len(documents),
        "bytes": num_bytes,
        "contenders": rows,
    }


def _ratio(above: list[_Times], below: list[_Times], which: int) -> float:
    """The median over rounds."""
    return statistics.median(
        one[which] / max(other[which], 1e-9) for one, other in zip(above, below, strict=True)
    )


def _in_turns(
    contenders: dict[str, Callable[[], int]], rounds: int, count: int
) -> dict[str, list[_Times]]:
    """Seconds of every round, on the clock and of all cores. Each round begins with another
    contender."""
    names = list(contenders)
    seconds: dict[str, list[_Times]] = {name: [] for name in names}
    for number in range(rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            start, cpu = time.perf_counter(), sum(os.times()[:4])
            found = contenders[name]()
            seconds[name].append((time.perf_counter() - start, sum(os.times()[:4]) - cpu))
            assert found == count
    return seconds


def _documents(settings: TokenizeSettings) -> Iterator[str]:
    """Texts of about `document_bytes`, cut at the ends of lines, of so many megabytes in all."""
    left = settings.megabytes * 10**6
    while left > 0:
        for file in find(None):
            lines: list[str] = []
            size = 0
            for line in file.path.read_text(encoding="utf-8", errors="replace").splitlines(True):
                lines.append(line)
                size += len(line)
                if size >= settings.document_bytes:
                    yield "".join(lines)
                    left -= size
                    lines, size = [], 0
            if left <= 0:
                return


def _train(tokenizers: Any, documents: list[str], vocabulary: int, path: Path) -> None:
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary,
        show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    made.train_from_iterator(documents, trainer)
    made.save(str(path))


if __name__ == "__main__":
    from benchmarks.application import main

    main("tokenize")
