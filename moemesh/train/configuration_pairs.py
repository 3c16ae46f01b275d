"""Two configurations beside each other: `moemesh config diff`."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from moemesh.config.changes import compare
from moemesh.config.load import load_recorded, load_run, resolved_toml
from moemesh.config.schema import all_keys
from moemesh.train.records.run_folder import CONFIG


class KeyDifference(NamedTuple):
    """One key with its values (None: not set), where each is from, and what the difference means
    for a run that goes on: free, layout, training or model."""

    key: str
    a: object
    b: object
    from_a: str
    from_b: str
    kind: str


def compared(first: Path, second: Path) -> list[KeyDifference]:
    """The keys in which two files, or folders of runs, differ when they are resolved, sorted.

    Raises ConfigError for a configuration with problems.
    """
    (text_a, origins_a), (text_b, origins_b) = _resolved(first), _resolved(second)
    return [
        KeyDifference(
            change.key,
            change.old,
            change.new,
            origins_a.get(change.key, "default"),
            origins_b.get(change.key, "default"),
            change.kind,
        )
        for change in compare(text_a, text_b)
    ]


def _resolved(path: Path) -> tuple[str, dict[str, str]]:
    """The resolved text, and key -> origin; what a run has recorded is taken as it is."""
    if path.is_dir():
        config = load_recorded(path / CONFIG)
        return resolved_toml(config), dict.fromkeys(all_keys(), str(path / CONFIG))
    resolved = load_run([path], (), {})
    return resolved_toml(resolved.config), resolved.origins
