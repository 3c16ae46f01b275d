"""One benchmark on several ranks, which find this package wherever it was started from."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moemesh.bench import links
from moemesh.bench.settings import Settings
from moemesh.comm import launch

_ROOT = str(Path(__file__).parent.parent)


def on_ranks(
    verb: str,
    settings: Settings,
    measure: Callable[[launch.Ranks], Any],
    *,
    num_ranks: int,
    found: Path | None,
    device: launch.Device = "cpu",
) -> Any | None:
    """:func:`moemesh.bench.links.on_ranks` with ``python -m benchmarks VERB`` as the ranks."""
    # A rank imports nothing from the directory it is started in (python -P).
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if _ROOT not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (*paths, _ROOT)))
    words = ("benchmarks", verb)
    return links.on_ranks(words, settings, measure, num_ranks=num_ranks, found=found, device=device)
