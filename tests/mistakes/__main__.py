"""Writes the messages of the corpus again: ``python -m tests.mistakes``."""

from __future__ import annotations

from tests.mistakes.corpus import MESSAGES, messages, outcomes

MESSAGES.write_text(messages(outcomes()), encoding="utf-8")
