"""Regenerates the snapshots: ``python -m tests.snapshots [NAME ...]``."""

from __future__ import annotations

import sys

from tests.snapshots.cases import NAMES, path_of, text_of

for name in sys.argv[1:] or NAMES:
    path_of(name).write_text(text_of(name), encoding="utf-8")
