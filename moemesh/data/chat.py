"""Conversations: rendered by the chat template of a tokenizer, with loss on assistant turns only.

An assistant turn is what the template adds to a conversation when the turn is appended, beyond the
header that it writes for an answer to come: the reply and its end-of-turn tokens, never the header.
Templates are programs from outside; they run in jinja's sandbox.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from moemesh.data.tokenizer import DataError, Tokenizer, read_whole

TEMPLATE, SETTINGS = "chat_template.jinja", "tokenizer_config.json"


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
    def open(cls, tokenizer: str) -> ChatTemplate:
        """The template of the tokenizer in a folder. Raises DataError without one."""
        folder = Path(tokenizer).expanduser()
        settings = _settings(folder / SETTINGS) if tokenizer != "bytes" else {}
        tokens = {
            key: value["content"] if isinstance(value, dict) else str(value)
            for key, value in settings.items()
            if key.endswith("_token") and value is not None
        }
        if tokenizer != "bytes" and (folder / TEMPLATE).is_file():
            source = read_whole(folder / TEMPLATE).decode(errors="replace")
            return cls(source, tokens, str(folder / TEMPLATE))
        source = settings.get("chat_template")
        if isinstance(source, list):
            named = {one.get("name"): one.get("template") for one in source}
            source = named.get("default")
        if not isinstance(source, str):
            raise DataError(
                f'data.tokenizer is "{tokenizer}", which has no chat template, and the data has '
                f'conversations ("messages"): name the folder of a tokenizer with {TEMPLATE}'
            )
        return cls(source, tokens, str(folder / SETTINGS))

    def encode(self, record: Mapping[str, Any], tokenizer: Tokenizer, where: str) -> Encoded:
        """The conversation under "messages" (and "tools"), rendered and tokenized.

        Raises DataError naming the record for what is no conversation, has no assistant turn, or
        makes the template fail.
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
                raise DataError(
                    f"{where}: the chat template ({self._origin}) writes turn {turn + 1} otherwise "
                    "when others follow, so that its part of the text cannot be told: give each "
                    "answer a record of its own"
                )
            spans.append(range(len(before), len(after)))
        ids, offsets = tokenizer.encode_with_offsets(text)
        learned = np.zeros(len(ids), dtype=bool)
        for span in spans:
            learned |= (offsets[:, 0] >= span.start) & (offsets[:, 1] <= span.stop)
        return Encoded(ids, learned)

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        record: Mapping[str, Any],
        where: str,
        *,
        answers: bool = False,
    ) -> str:
        try:
            return self._template.render(
                messages=messages,
                tools=record.get("tools"),
                add_generation_prompt=answers,
                **self._tokens,
            )
        except Exception as error:  # a template may raise anything
            raise DataError(f"{where}: the chat template ({self._origin}) fails: {error}") from None


class _Generation(Extension):
    """``{% generation %} ... {% endgeneration %}`` of newer templates: its body, as it stands."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _messages(record: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    messages = record["messages"]
    if not isinstance(messages, list) or not messages:
        raise DataError(f'{where}: "messages" must be a list of at least one message')
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DataError(f'{where}: message {number} has no "role"')
        if "content" not in message and "tool_calls" not in message:
            raise DataError(f'{where}: message {number} has no "content"')
    if all(message["role"] != "assistant" for message in messages):
        raise DataError(f"{where}: the conversation has no assistant turn to learn from")
    return messages


def _settings(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(read_whole(path))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not valid JSON ({error})") from error
    return found if isinstance(found, dict) else {}


def _to_json(value: object, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> None:
    raise TemplateError(message)
