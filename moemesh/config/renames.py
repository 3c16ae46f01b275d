"""The version of the keys, and the keys that had other names in earlier versions."""

from __future__ import annotations

from moemesh.config.errors import Problem

#: The top-level key of a file that names the version of its keys; without it the file is read as
#: one of this version.
SCHEMA_KEY = "schema_version"
SCHEMA_VERSION = 1
#: Version -> old dotted key -> new one, for every key that this version has renamed. The one place:
#: messages, `moemesh config migrate` and the tests read it.
RENAMES: dict[int, dict[str, str]] = {}


def renamed() -> dict[str, str]:
    """Every old key -> its name now, also where it was renamed more than once."""
    found: dict[str, str] = {}
    for version in sorted(RENAMES, reverse=True):
        for old, new in RENAMES[version].items():
            found[old] = found.get(new, new)
    return found


def later_version(version: int, origin: str) -> Problem:
    """A file whose keys are of a version that is not known yet."""
    return Problem(
        code="too-large",
        key=SCHEMA_KEY,
        value=version,
        origin=origin,
        message=f"the file has keys of version {version}, known are those up to {SCHEMA_VERSION}",
        fix="a newer moemesh",
    )
