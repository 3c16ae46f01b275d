"""Conversations: rendered by the chat template of a tokenizer, with loss on assistant turns only.

An assistant turn is what the template adds to a conversation when the turn is appended, beyond the
header that it writes for an answer to come: the reply and its end-of-turn tokens, never the header.
Templates are programs from outside; they run in jinja's sandbox.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from moemesh.data.records import BadRecordError, Where
from moemesh.data.tokenizer import (
    SETTINGS,
    DataError,
    Tokenizer,
    read_whole,
    settings_of,
    special_tokens,
)

TEMPLATE = "chat_template.jinja"
#: Characters of a message of a template that go into an error.
LONGEST_REASON = 300


class Rendered(NamedTuple):
    """The text of a conversation, and which of its characters carry loss."""

    text: str
    learned: tuple[range, ...]

    def mask(self, offsets: np.ndarray) -> np.ndarray:
        """Which tokens carry loss, bool [n]; `offsets` [n, 2] are the characters of each."""
        found = np.zeros(len(offsets), dtype=bool)
        for span in self.learned:
            found |= (offsets[:, 0] >= span.start) & (offsets[:, 1] <= span.stop)
        return found


class Encoded(NamedTuple):
    """Ids [n] of a document, and which of them carry loss as targets, bool [n]."""

    ids: np.ndarray
    learned: np.ndarray


class ChatTemplate:
    """The chat template of a folder."""

    def __init__(self, source: str, tokens: Mapping[str, str], origin: str) -> None:
        """Use :meth:`open`."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        self._tokens, self._origin = tokens, origin
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise DataError(f"{origin}: the chat template is broken: {error}") from error

    @classmethod
    def open(cls, tokenizer: Tokenizer) -> ChatTemplate:
        """The template beside a tokenizer. Raises DataError without one."""
        folder = tokenizer.folder
        settings = {} if folder is None else settings_of(folder / SETTINGS)
        tokens = {} if folder is None else special_tokens(folder / SETTINGS)
        if folder is not None and (folder / TEMPLATE).is_file():
            source = read_whole(folder / TEMPLATE).decode(errors="replace")
            return cls(source, tokens, str(folder / TEMPLATE))
        source = settings.get("chat_template")
        if isinstance(source, list):
            named = {one.get("name"): one.get("template") for one in source}
            source = named.get("default")
        if not isinstance(source, str):
            raise DataError(
                f'data.tokenizer is "{folder or "bytes"}", which has no chat template, and the '
                'data has conversations ("messages"): name the folder of a tokenizer with '
                f"{TEMPLATE}"
            )
        return cls(source, tokens, f"{folder}/{SETTINGS}")

    def encode(self, record: Mapping[str, Any], tokenizer: Tokenizer, where: Where) -> Encoded:
        """:meth:`render`, and the ids of the text."""
        rendered = self.render(record, where)
        ((ids, offsets),) = tokenizer.encode_with_offsets([rendered.text])
        return Encoded(ids, rendered.mask(offsets))

    def render(self, record: Mapping[str, Any], where: Where) -> Rendered:
        """The text of the conversation under "messages" (and "tools").

        Raises BadRecordError for what is no conversation, has no assistant turn, or makes the
        template fail.
        """
        messages = _messages(record, where)
        text = self._render(messages, record, where)
        spans: list[range] = []
        for turn, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            # Templates need not know a conversation without messages.
            earlier = messages[:turn]
            before = self._render(earlier, record, where, answers=True) if earlier else ""
            after = self._render(messages[: turn + 1], record, where)
            if not after.startswith(before) or not text.startswith(after):
                raise BadRecordError(
                    where,
                    f"the chat template ({self._origin}) writes turn {turn + 1} otherwise when "
                    "others follow, so that its part of the text cannot be told: give each answer "
                    "a record of its own",
                )
            spans.append(range(len(before), len(after)))
        return Rendered(text, tuple(spans))

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        record: Mapping[str, Any],
        where: Where,
        *,
        answers: bool = False,
    ) -> str:
        try:
            text = self._template.render(
                messages=messages,
                tools=record.get("tools"),
                add_generation_prompt=answers,
                **self._tokens,
            )
            text.encode()  # of escapes in JSON, a text may hold half of a character
        except Exception as error:  # a template may raise anything
            reason = f"the chat template ({self._origin}) fails: {str(error)[:LONGEST_REASON]}"
            raise BadRecordError(where, reason) from None
        return text


class _Generation(Extension):
    """``{% generation %} ... {% endgeneration %}`` of newer templates: its body, as it stands."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _messages(record: Mapping[str, Any], where: Where) -> list[dict[str, Any]]:
    messages = record["messages"]
    if not isinstance(messages, list) or not messages:
        raise BadRecordError(where, '"messages" must be a list of at least one message')
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadRecordError(where, f'message {number} has no "role"')
        if "content" not in message and "tool_calls" not in message:
            raise BadRecordError(where, f'message {number} has no "content"')
    if all(message["role"] != "assistant" for message in messages):
        raise BadRecordError(where, "the conversation has no assistant turn to learn from")
    return messages


def _to_json(value: object, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> None:
    raise TemplateError(message)
