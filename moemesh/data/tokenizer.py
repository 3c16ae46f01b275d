"""Tokenizers: text into ids and ids into text.

No special token is added to a text: neither the beginning nor the end that a tokenizer may have
(``bos_token``, ``eos_token``). Those that a chat template writes, or that stand in a text, become
their ids.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from moemesh.config.data import NUM_BYTES
from moemesh.config.errors import UserError
from moemesh.config.limits import parse_json
from moemesh.config.suggest import nearest_path

FILE, SETTINGS, SPECIAL = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
#: Other files that tokenizers come as -> what they lack.
OTHERS = {
    "tokenizer.model": "a SentencePiece model",
    "vocab.json": "a vocabulary without the rules that apply it",
    "vocab.txt": "a vocabulary without the rules that apply it",
    "merges.txt": "merges without the rules that apply them",
    "tiktoken.model": "ranks without the rules that apply them",
    "tekken.json": "Mistral's own format",
    SETTINGS: "settings without a vocabulary",
}
#: Largest file of settings that is read.
MAX_SETTINGS = 64 << 20


class DataError(UserError):
    """The data cannot be used as the configuration asks; the message says what to change."""


class Tokenizer:
    """The bytes of a text as ids 0..255, or a ``tokenizer.json``. `fingerprint` is the same for
    equal tokenizers only; `folder` holds the file (None of bytes)."""

    def __init__(self, fingerprint: str, loaded: Any = None, folder: Path | None = None) -> None:
        """Use :meth:`open`."""
        self.fingerprint, self._loaded, self.folder = fingerprint, loaded, folder

    @classmethod
    def open(cls, tokenizer: str) -> Tokenizer:
        """`tokenizer` is "bytes", a folder, or a tokenizer.json by any name. Raises DataError
        saying what is wrong with it."""
        if tokenizer == "bytes":
            return cls("bytes")
        path = Path(tokenizer).expanduser()
        is_file = path.is_file() and path.suffix == ".json" and path.name not in OTHERS
        file = path if is_file else path / FILE
        if not file.is_file():
            start = f'data.tokenizer is "{tokenizer}"; it must be "bytes", a {FILE}, or a folder'
            found = path
            if not path.is_file():
                found = path / next((name for name in OTHERS if (path / name).exists()), "")
            if found.name in OTHERS and found.is_file():
                raise DataError(
                    f"{start} with one. {found} is {OTHERS[found.name]}: transformers writes the "
                    f"{FILE}, with AutoTokenizer.from_pretrained(FOLDER)"
                    ".save_pretrained(NEW_FOLDER)"
                )
            missing = nearest_path(file if path.exists() else path)
            raise DataError(f"{start} with one ({missing})")
        try:
            from tokenizers import Tokenizer as Loaded  # pyright: ignore  # optional extra
        except ImportError as error:
            raise DataError(
                f"data.tokenizer {tokenizer} needs the package tokenizers: pip install tokenizers"
            ) from error
        content = read_whole(file)
        try:
            loaded = Loaded.from_str(content.decode())
            # Settings of serving, which a file may carry: a document is neither cut nor filled up.
            loaded.no_truncation()
            loaded.no_padding()
        except Exception as error:  # the package raises bare Exception for a malformed file
            raise DataError(f"{file} is not a usable tokenizer: {error}") from error
        digest = hashlib.blake2b(content, digest_size=16).hexdigest()
        return cls(f"blake2b-128:{digest}", loaded, file.parent)

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        if self._loaded is None:
            return NUM_BYTES
        return max(self._loaded.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @cached_property
    def added(self) -> list[str]:
        """The tokens that are taken whole wherever they stand in a text, such as special ones."""
        if self._loaded is None:
            return []
        return [token.content for token in self._loaded.get_added_tokens_decoder().values()]

    def check(self, vocab_size: int) -> None:
        """Raises DataError when a file's ids go beyond a model's `vocab_size`. (Of bytes, a text
        may need fewer than all.)"""
        if self._loaded is not None and self.vocab_size > vocab_size:
            raise DataError(
                f"data.tokenizer {self.folder} has ids up to {self.vocab_size - 1}, and "
                f"model.vocab_size is {vocab_size}: set model.vocab_size to {self.vocab_size} or "
                "more, or name the tokenizer of the model"
            )

    def encode(self, text: bytes, where: object) -> np.ndarray:
        """Ids [n], uint8 of bytes, else int32; `where` names the text in an error."""
        if self._loaded is None:
            return np.frombuffer(text, dtype=np.uint8)
        try:
            decoded = text.decode()
        except UnicodeDecodeError as error:
            raise DataError(f"{where}, byte offset {error.start}: not valid UTF-8") from error
        return self.encode_batch([decoded])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids [n] of each text, by all cores; other threads of Python run meanwhile."""
        if self._loaded is None:
            return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]
        # "fast": without the places in the text, which take a tenth of the time.
        found = self._loaded.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(one.ids, dtype=np.int32) for one in found]

    def encode_with_offsets(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Ids [n] of each text, and the characters that each stands for, from and to, int64
        [n, 2]."""
        if self._loaded is None:
            found: list[tuple[np.ndarray, np.ndarray]] = []
            for text in texts:
                sizes = [len(character.encode()) for character in text]
                places = np.repeat(np.arange(len(text), dtype=np.int64), sizes)
                ids = np.frombuffer(text.encode(), dtype=np.uint8)
                found.append((ids, np.stack([places, places + 1], axis=1)))
            return found
        return [
            (
                np.array(one.ids, dtype=np.int32),
                np.fromiter(chain.from_iterable(one.offsets), dtype=np.int64).reshape(-1, 2),
            )
            for one in self._loaded.encode_batch(texts, add_special_tokens=False)
        ]

    def id_of(self, token: str) -> int:
        """The id of a token by its name. Raises DataError where there is none."""
        found = None if self._loaded is None else self._loaded.token_to_id(token)
        if found is None:
            raise DataError(
                f'data.tokenizer {self.folder or "bytes"} has no token "{token}"'
                + ("" if self.folder else ": bytes have no special tokens")
            )
        return found

    def end_of_text(self) -> int:
        """The id of the ``eos_token`` of the settings. Raises DataError where there is none."""
        if self.folder is None:
            raise DataError('data.tokenizer is "bytes", which has no token for the end of a text')
        for name in (SETTINGS, SPECIAL):
            if (token := special_tokens(self.folder / name).get("eos_token")) is not None:
                return self.id_of(token)
        raise DataError(
            f'{self.folder} names no "eos_token" in {SETTINGS} or {SPECIAL}: name the token'
        )

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """The text of `ids`, with the names of special tokens where `special`; what is no text
        becomes U+FFFD."""
        if self._loaded is not None:
            return self._loaded.decode(list(ids), skip_special_tokens=not special)
        return bytes(one if one < 256 else 0xFF for one in ids).decode(errors="replace")


def settings_of(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty where there is no such file. Raises DataError."""
    if not path.is_file():
        return {}
    if path.stat().st_size > MAX_SETTINGS:
        raise DataError(f"{path} has {path.stat().st_size} bytes; {MAX_SETTINGS} are the most")
    try:
        found = parse_json(read_whole(path))
    except ValueError as error:
        raise DataError(f"{path}: not valid JSON ({error})") from error
    return found if isinstance(found, dict) else {}


def special_tokens(path: Path) -> dict[str, str]:
    """The special tokens that a file of settings names, by key ("eos_token")."""
    found: dict[str, str] = {}
    for key, value in settings_of(path).items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            found[key] = text
    return found


def read_whole(file: Path) -> bytes:
    """The content of a file; DataError when it cannot be read."""
    try:
        return file.read_bytes()
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error.strerror or error})") from error
