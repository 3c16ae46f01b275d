"""Tokenizers: text into ids and ids into text."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moemesh.config.errors import UserError


class DataError(UserError):
    """The data cannot be used as the configuration asks; the message says what to change."""


class Tokenizer:
    """The bytes of a text as ids 0..255, or the ``tokenizer.json`` of a folder. `fingerprint` is
    the same for equal tokenizers only."""

    def __init__(self, fingerprint: str, loaded: Any = None) -> None:
        """Use :meth:`open`."""
        self.fingerprint, self._loaded = fingerprint, loaded

    @classmethod
    def open(cls, tokenizer: str) -> Tokenizer:
        """`tokenizer` is "bytes" or a folder. Raises DataError saying what is wrong with it."""
        if tokenizer == "bytes":
            return cls("bytes")
        file = Path(tokenizer).expanduser() / "tokenizer.json"
        if not file.is_file():
            raise DataError(
                f'data.tokenizer is "{tokenizer}"; it must be "bytes" or a folder that holds a '
                f"tokenizer.json ({nearest(file)})"
            )
        try:
            from tokenizers import Tokenizer as Loaded  # pyright: ignore  # optional extra
        except ImportError as error:
            raise DataError(
                f"data.tokenizer {tokenizer} needs the package tokenizers: "
                "pip install 'moemesh[tokenizers]'"
            ) from error
        content = read_whole(file)
        try:
            loaded = Loaded.from_str(content.decode())
        except Exception as error:  # the package raises bare Exception for a malformed file
            raise DataError(f"{file} is not a usable tokenizer: {error}") from error
        digest = hashlib.blake2b(content, digest_size=16).hexdigest()
        return cls(f"blake2b-128:{digest}", loaded)

    def encode(self, text: bytes, where: str) -> np.ndarray:
        """Ids [n], uint8 of bytes, else int32; `where` names the text in an error."""
        if self._loaded is None:
            return np.frombuffer(text, dtype=np.uint8)
        try:
            decoded = text.decode()
        except UnicodeDecodeError as error:
            raise DataError(f"{where}, byte offset {error.start}: not valid UTF-8") from error
        ids = self._loaded.encode(decoded, add_special_tokens=False).ids
        return np.array(ids, dtype=np.int32)

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Ids [n], and the characters of `text` that each stands for, from and to, int64 [n, 2]."""
        if self._loaded is not None:
            found = self._loaded.encode(text, add_special_tokens=False)
            offsets = np.array(found.offsets, dtype=np.int64).reshape(-1, 2)
            return np.array(found.ids, dtype=np.int32), offsets
        sizes = [len(character.encode()) for character in text]
        places = np.repeat(np.arange(len(text), dtype=np.int64), sizes)
        return np.frombuffer(text.encode(), dtype=np.uint8), np.stack([places, places + 1], axis=1)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; what is no text becomes U+FFFD."""
        if self._loaded is not None:
            return self._loaded.decode(list(ids))
        return bytes(one if one < 256 else 0xFF for one in ids).decode(errors="replace")


def read_whole(file: Path) -> bytes:
    """The content of a file; DataError when it cannot be read."""
    try:
        return file.read_bytes()
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error.strerror or error})") from error


def nearest(path: Path) -> str:
    """Words that name the nearest part of `path` that exists."""
    parent = next((p for p in path.absolute().parents if p.exists()), Path(path.anchor))
    return f"the nearest existing folder is {parent}"
