"""The hash functions of checkpoints, and their digests of 128 bits.

Chunks and headers have xxh3-128, which finds every fault of memory and disks and costs a hundredth
of what they do; the manifest has BLAKE2b, which only proves a manipulation to somebody who keeps
the digest elsewhere. Where the package xxhash is missing, BLAKE2b is written throughout.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable

from moemesh.config.errors import UserError

try:
    import xxhash
except ImportError:  # pragma: no cover
    xxhash = None

XXH3, BLAKE2B = "xxh3-128", "blake2b-128"
#: The function of chunks and headers that are written.
WRITTEN = BLAKE2B if xxhash is None else XXH3

Hash = Callable[[bytes | memoryview], str]


class MissingPackageError(UserError):
    """A checkpoint cannot be read without a package, which says nothing about its bytes."""


def blake2b(content: bytes | memoryview) -> str:
    """The BLAKE2b digest of bytes, without the name of the function."""
    return blake2b_of([content])


def blake2b_of(parts: Iterable[bytes | memoryview]) -> str:
    """The BLAKE2b digest of bytes that come in parts."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def hash_by(name: str) -> Hash:
    """The function of that name, :data:`XXH3` or :data:`BLAKE2B`, which gives a digest without the
    name. Raises MissingPackageError where the package is not installed."""
    if name == BLAKE2B:
        return blake2b
    if xxhash is None:
        raise MissingPackageError(
            f"the checkpoint's digests are {name}, which needs the package xxhash: "
            "pip install xxhash"
        )
    return xxhash.xxh3_128_hexdigest


def hash_bytes(content: bytes | memoryview) -> str:
    """The digest of bytes by :data:`WRITTEN`, without the name of the function."""
    return hash_by(WRITTEN)(content)


def digest_text(digest: str, name: str) -> str:
    """A digest as the manifest spells it where it stands alone."""
    return f"{name}:{digest}"
