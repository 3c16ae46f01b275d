"""Conversations: rendered by the chat template of a tokenizer, with loss on assistant turns only.

Where a template marks its answers (``{% generation %}``), what it marks carries loss, as in
transformers. Of other templates the answers are found by rendering: an answer begins where the
template, asked for one, would have ended, and ends with its end-of-turn token. Where it stands in
the text is told by a second rendering with a mark in its place, so that templates may write a turn
otherwise when others follow. Templates are programs from outside; they run in jinja's sandbox.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from moemesh.config.limits import one_line
from moemesh.data.records import BadRecordError, Where
from moemesh.data.tokenizer import (
    SETTINGS,
    SPECIAL,
    DataError,
    Tokenizer,
    read_whole,
    settings_of,
    special_tokens,
)

TEMPLATE = "chat_template.jinja"
#: Characters of a message of a template that go into an error.
LONGEST_REASON = 300
#: Variables that stand around the answers that a template marks.
BEGIN, END = "generation_begin", "generation_end"
#: Characters that a text is looked through for one that it does not hold: those of private use.
MARKS = [chr(code) for code in range(0xE000, 0xF900)]
#: Names of the reasoning of a message.
REASONING = ("reasoning_content", "thinking", "reasoning")
#: The place of messages that no file holds.
CHAT = Where("the conversation", "file", 1, None)

Messages: TypeAlias = list[dict[str, Any]]


class Rendered(NamedTuple):
    """The text of a conversation, and which of its characters carry loss."""

    text: str
    learned: tuple[range, ...]

    def mask(self, offsets: np.ndarray) -> np.ndarray:
        """The tokens that carry loss, bool [n]: those with a character that does, and those
        between; `offsets` [n, 2] are the characters of each."""
        found = np.zeros(len(offsets), dtype=bool)
        for span in self.learned:
            first = np.searchsorted(offsets[:, 1], span.start, side="right")
            found[first : np.searchsorted(offsets[:, 0], span.stop)] = True
        return found


class ChatTemplate:
    """The chat template of a folder."""

    def __init__(
        self, source: str, tokens: Mapping[str, str], origin: str, added: Sequence[str] = ()
    ) -> None:
        """Use :meth:`open`. `tokens`: the special tokens by key; `added`: all that a tokenizer
        takes whole, the end of a turn among them."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
        )
        environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        self._tokens, self._origin, self._added = tokens, origin, added
        try:
            self._template = environment.from_string(source)
            parsed = environment.parse(source)
        except TemplateError as error:
            raise DataError(f"{origin}: the chat template is broken: {error}") from error
        self._marks_answers = any(one.name == BEGIN for one in parsed.find_all(nodes.Name))

    @classmethod
    def open(
        cls, tokenizer: Tokenizer, needed_by: str = 'the data has conversations ("messages")'
    ) -> ChatTemplate:
        """The template beside a tokenizer. Raises DataError without one."""
        folder, tokens = tokenizer.folder, dict[str, str]()
        settings = {} if folder is None else settings_of(folder / SETTINGS)
        if folder is not None:
            tokens = special_tokens(folder / SPECIAL) | special_tokens(folder / SETTINGS)
        if folder is not None and (folder / TEMPLATE).is_file():
            source = read_whole(folder / TEMPLATE).decode(errors="replace")
            return cls(source, tokens, str(folder / TEMPLATE), tokenizer.added)
        source = settings.get("chat_template")
        if isinstance(source, list):
            named = {one.get("name"): one.get("template") for one in source}
            source = named.get("default")
        if not isinstance(source, str):
            raise DataError(
                f'data.tokenizer is "{folder or "bytes"}", which has no chat template, and '
                f"{needed_by}: name the folder of a tokenizer with {TEMPLATE}"
            )
        return cls(source, tokens, f"{folder}/{SETTINGS}", tokenizer.added)

    def render(self, record: Mapping[str, Any], where: Where) -> Rendered:
        """The text of the conversation under "messages" (and "tools").

        Raises BadRecordError for what is no conversation, has no assistant turn, or makes the
        template fail.
        """
        text_of = partial(self._render, tools=record.get("tools"), where=where)
        one = _Rendering(text_of, _messages(record, where))
        found = one.marked_spans() if self._marks_answers else one.spans(self._end_of_turn)
        if not found:
            reason = f"the chat template ({self._origin}) writes none of the assistant turns"
            raise BadRecordError(where, reason)
        return Rendered(one.text, tuple(found))

    def prompt(self, messages: Messages) -> str:
        """The text of `messages` and the header of an answer to them. Raises DataError."""
        return self._render(messages, add_generation_prompt=True)

    @cached_property
    def stop(self) -> str:
        """The end of an answer: the text of its end-of-turn token, which may be empty."""
        asked = [{"role": "user", "content": "?"}, {"role": "assistant", "content": MARKS[0]}]
        return self._end_of_turn(self._render(asked).rpartition(MARKS[0])[2])

    def _end_of_turn(self, tail: str) -> str:
        """The beginning of `tail`, which stands behind an answer, up to the first added token;
        without one, to the last character that is no blank."""
        ends = [tail.index(token) + len(token) for token in self._added if token in tail]
        return tail[: min(ends)] if ends else tail.rstrip() or tail

    def _render(
        self, messages: Messages, *, tools: Any = None, where: Where = CHAT, **given: Any
    ) -> str:
        values = {BEGIN: "", END: "", "add_generation_prompt": False} | self._tokens | given
        try:
            text = self._template.render(messages=messages, tools=tools, documents=None, **values)
            text.encode()  # of escapes in JSON, a text may hold half of a character
        except Exception as error:  # a template may raise anything
            reason = f"the chat template ({self._origin}) fails: {str(error)[:LONGEST_REASON]}"
            raise BadRecordError(where, reason) from None
        return text


class _Rendering:
    """One conversation, rendered: `text`; :meth:`spans` are the characters of its answers."""

    def __init__(self, render: Callable[..., str], messages: Messages) -> None:
        self._render, self._messages = render, messages
        self.text = render(messages)
        self._mark = next(mark for mark in MARKS if mark not in self.text)
        self._places: dict[int, tuple[int, int]] = {}

    def marked_spans(self) -> list[range]:
        """The characters that the template marks."""
        marked = self._render(self._messages, **{BEGIN: self._mark, END: self._mark})
        ends = np.cumsum([len(piece) for piece in marked.split(self._mark)]).tolist()
        return [range(*pair) for pair in zip(ends[0::2], ends[1::2], strict=False)]

    def spans(self, end_of_turn: Callable[[str], str]) -> list[range]:
        """Each assistant turn that is in the text, without its header, with its end-of-turn token
        as `end_of_turn` finds it in what follows an answer."""
        turns = [n for n, one in enumerate(self._messages) if one["role"] == "assistant"]
        probe = [*self._messages[: turns[0]], {"role": "assistant", "content": self._mark}]
        stop = end_of_turn(self._render(probe).rpartition(self._mark)[2])
        found: list[range] = []
        for turn in turns:
            first, last = self._place(turn)
            if first <= last:
                stop_at = self._stop_at(turn, last, stop, end_of_turn)
                found.append(range(self._start(turn, first), stop_at))
        return found

    def _place(self, turn: int) -> tuple[int, int]:
        """Where the content of a message stands, from and to: what changes with it. From lies
        behind to where the text has no such message."""
        if turn not in self._places:
            own = self._messages[turn]
            for marked in (_marked(own, self._mark), {**own, "content": self._mark}):
                other = self._render([*self._messages[:turn], marked, *self._messages[turn + 1 :]])
                if other != self.text:
                    break
            end = len(self.text) - _shared(self.text[::-1], other[::-1])
            self._places[turn] = _shared(self.text, other), end
        return self._places[turn]

    def _start(self, turn: int, first: int) -> int:
        """The place behind the header of the turn whose content begins at `first`."""
        earlier = self._messages[:turn]
        try:
            prompt = self._render(earlier, add_generation_prompt=True) if earlier else None
        except BadRecordError:  # a template need not know a part of a conversation
            prompt = None
        if prompt is None or self.text.startswith(prompt):
            return first if prompt is None else len(prompt)
        # Earlier turns are written otherwise: the prompt is followed from the last of them on.
        begun, before = self._place(turn - 1)
        if not begun <= before <= first:
            return first
        marked = [*earlier[:-1], _marked(earlier[-1], self._mark)]
        header = self._render(marked, add_generation_prompt=True).rpartition(self._mark)[2]
        return before + _shared(self.text[before:first], header)

    def _stop_at(self, turn: int, last: int, stop: str, end_of_turn: Callable[[str], str]) -> int:
        """The place behind the end-of-turn token of the turn whose content ends at `last`."""
        calls = self._messages[turn].get("tool_calls")
        if not calls and self.text.startswith(stop, last):
            return last + len(stop)
        is_last = turn + 1 == len(self._messages)
        rest = self.text[last : None if is_last else max(last, self._place(turn + 1)[0])]
        if stop:
            ends = rest.find(stop) + len(stop) if stop in rest else len(end_of_turn(rest))
            return last + ends
        # A turn without an end: what the template writes behind the calls when nothing follows.
        alone = _Rendering(self._render, self._messages[: turn + 1])
        return last + _shared(rest, alone.text[alone._place(turn)[1] :])


def _shared(one: str, other: str) -> int:
    """Number of characters that both begin with."""
    known, most = 0, min(len(one), len(other))
    while known < most:
        middle = (known + most + 1) // 2
        if one[known:middle] == other[known:middle]:
            known = middle
        else:
            most = middle - 1
    return known


def _marked(message: Mapping[str, Any], mark: str) -> dict[str, Any]:
    """The message with `mark` in place of its content and of the arguments of its calls."""
    found, content, calls = dict(message), message.get("content"), message.get("tool_calls")
    if isinstance(content, list):
        found["content"] = [
            {**part, "text": mark} if isinstance(part, dict) and "text" in part else part
            for part in content
        ]
    elif content or not calls:
        found["content"] = mark
    if isinstance(calls, list):
        found["tool_calls"] = [_marked_call(call, mark) for call in calls]
    return found


def _marked_call(call: Any, mark: str) -> Any:
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return {**call, "function": _marked_call(call["function"], mark)}
    key = "arguments" if call.get("arguments") else "name"
    return {**call, key: {mark: mark} if isinstance(call.get(key), dict) else mark}


class _Generation(Extension):
    """``{% generation %} ... {% endgeneration %}``: its body, between the variables BEGIN and END,
    which are empty unless the places of the body are asked for."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        first, last = (nodes.Output([nodes.Name(name, "load")]) for name in (BEGIN, END))
        return [first, *body, last]


def _messages(record: Mapping[str, Any], where: Where) -> Messages:
    """The messages without keys that hold nothing, and reasoning under all of its names, as
    transformers gives them to a template."""
    messages = record["messages"]
    if not isinstance(messages, list) or not messages:
        raise BadRecordError(where, '"messages" must be a list of at least one message')
    found: list[dict[str, Any]] = []
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadRecordError(where, f'message {number} has no "role"')
        if "content" not in message and "tool_calls" not in message:
            raise BadRecordError(where, f'message {number} has no "content"')
        held = {key: value for key, value in message.items() if value is not None}
        if (reasoning := next((held[key] for key in REASONING if key in held), None)) is not None:
            held = {"thinking": reasoning, **held, "reasoning_content": reasoning}
        found.append(held)
    if all(message["role"] != "assistant" for message in found):
        raise BadRecordError(where, "the conversation has no assistant turn to learn from")
    return found


def _raise(message: str) -> None:
    raise TemplateError(one_line(str(message)))
