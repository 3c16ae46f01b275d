"""Hash functions of checkpoints, with digests of 128 bits.

Chunks and headers use xxh3-128, which detects faults of memory and disks and takes little time (22
GiB/s on a core, BLAKE2b 0.4: docs/log.md). The manifest uses BLAKE2b; its digest proves a
manipulation only to a reader with a separate copy of the digest. Without the package xxhash, all
digests are BLAKE2b.
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
#: Hash function for the chunks and headers of new checkpoints.
WRITTEN = BLAKE2B if xxhash is None else XXH3

Hash = Callable[[bytes | memoryview], str]


class MissingPackageError(UserError):
    """A package is missing for the checkpoint's digests; its bytes may be intact."""


def blake2b(content: bytes | memoryview) -> str:
    """The BLAKE2b digest of bytes, without the name of the function."""
    return blake2b_of([content])


def blake2b_of(parts: Iterable[bytes | memoryview]) -> str:
    """The BLAKE2b digest of the concatenated parts."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def hash_by(name: str) -> Hash:
    """The function named :data:`XXH3` or :data:`BLAKE2B`; it returns a digest without the name.
    Raises MissingPackageError if the package is not installed."""
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
    """A digest with the name of its function, the form of digests outside of chunk lists."""
    return f"{name}:{digest}"
