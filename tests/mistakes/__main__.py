"""Regenerates the messages: ``python -m tests.mistakes``."""

from __future__ import annotations

from tests.mistakes.cases import MESSAGES, messages, outcomes

MESSAGES.write_text(messages(outcomes()), encoding="utf-8")
