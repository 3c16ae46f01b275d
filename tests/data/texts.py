"""Files of text and a tokenizer for a test, and sources opened as a run opens them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moemesh.config.data import DataConfig
from moemesh.data.corpus import Corpus
from moemesh.data.input_files import find
from moemesh.data.records import Record, Where, read
from moemesh.data.samples import Samples
from moemesh.data.sources import open_samples


def all_of(path: Path, format: str = "auto", text_key: str = "text") -> list[tuple[Where, Record]]:
    """The records of a file, or of all files of a folder, with their places."""
    return [one for file in find(str(path), format) for one in read(file, text_key)]


def byte_level_tokenizer(folder: Path, text: str, template: str, *special: str) -> Path:
    """A byte-level BPE of 300 tokens, the special ones first, with a chat template, in `folder`."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        show_progress=False,
        special_tokens=list(special),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    made.train_from_iterator([text], trainer)
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(template)
    return folder


def stream(tokens: np.ndarray, vocab_size: int = 256, source: str = "made", **more: Any) -> Corpus:
    """Corpus of given tokens."""
    return Corpus(tokens=tokens, vocab_size=vocab_size, source=source, **more)


def opened(data: DataConfig, cache: Path | None = None, vocab_size: int = 256) -> Samples:
    return open_samples(data, seed=1, vocab_size=vocab_size, cache=cache, log=lambda text: None)


def training_ids(samples: Samples) -> np.ndarray:
    """Training samples of all sources, ascending."""
    parts = [split.training.ids for split in samples.splits]
    return np.concatenate([part.spread(len(part)) for part in parts])


def held_out_ids(samples: Samples) -> np.ndarray:
    """All validation samples of one source, or of files of their own, ascending."""
    return samples.validation_ids(samples.num_validation)


def lines(path: Path, word: str, count: int) -> Path:
    content = "".join(json.dumps({"text": f"{word} {i:05}"}) + "\n" for i in range(count)).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path
