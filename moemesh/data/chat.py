"""Conversations: rendered by the chat template of a tokenizer, with loss on assistant turns only.

If a template marks its answers (``{% generation %}``), the marked text carries loss, as in
transformers. For other templates the answers are located by rendering: an answer begins at the end
of the generation prompt, and ends with its end-of-turn token. A second rendering with a mark in
place of the answer gives its position, so templates may write a turn differently when others
follow. Templates are foreign programs; they run in jinja's sandbox. Completions and segments need
no template (:func:`completed`).
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from moemesh.config.limits import one_line
from moemesh.data.conversions import (
    COMPLETION,
    PROMPT,
    ROLES,
    SEGMENTS,
    TEMPLATE_VALUES,
    TOOLS,
    some,
)
from moemesh.data.records import BadRecordError, Where
from moemesh.data.template_limits import LimitedEnvironment, sizes_of
from moemesh.data.tokenizer import TEMPLATE, DataError, Tokenizer

#: Most characters of an error message of a template in ours.
LONGEST_REASON = 300
#: Variables that the extension writes before and after an answer that a template marks.
BEGIN, END = "generation_begin", "generation_end"
#: Candidates for a character that a text does not contain: the private use area.
MARKS = [chr(code) for code in range(0xE000, 0xF900)]
#: Names of the reasoning of a message.
REASONING = ("reasoning_content", "thinking", "reasoning")
#: Key of a turn -> the values with which it carries loss, and those with which it does not.
LOSS_KEYS = {
    "weight": (1, 0),  # OpenAI, Mistral, Together
    "train": (True, False),  # axolotl
    "loss": (True, False),  # ms-swift
    "masked": (False, True),  # torchtune
    "trainable": (True, False),  # Tinker
}
#: Key of a turn that templates do not read -> what to write instead.
OLDER_KEYS = {
    "function_call": '"tool_calls": [{"type": "function", "function": {...}}]',
    "train_detail": '"train" for a whole turn',
}
#: Other keys that set the loss of a turn, if their value is a switch or a list. Other values, such
#: as the number of `train_loss`, are measurements.
_LOSS = re.compile(
    r"(?:^|_)(?:train|training|trainable|loss|mask|masks|weight|weights|learn)(?:_|$)"
)
#: Those among them that set the loss by any number.
_FACTOR = re.compile(r"(?:^|_)(?:weight|weights|scale)(?:_|$)")
#: Names of roles that other formats than messages have.
FOREIGN_ROLES = {role for role, usual in ROLES.items() if role != usual}
#: The command that turns contents that are lists of parts into texts.
JOIN_PARTS = (
    "jq -c '.messages[].content |= if type == \"array\" then map(.text) | add else . end' joins "
    "the texts of its parts"
)
#: Types and keys of parts of a message that are not text, such as ``image_url``.
_MEDIA = re.compile("image|video|audio")
#: A first turn that every template accepts.
QUESTION = {"role": "user", "content": "?"}
#: Place, in errors, of messages that are not from a file.
CHAT = Where("the conversation", "file", 1, None)

Messages: TypeAlias = list[dict[str, Any]]


class Rendered(NamedTuple):
    """The text of a conversation, and the ranges of characters that carry loss."""

    text: str
    learned: tuple[range, ...]

    def mask(self, offsets: np.ndarray) -> np.ndarray:
        """Tokens that carry loss, bool [n]: those with a character in a range of `learned`, and
        tokens without characters between them. `offsets` [n, 2]: first character of each token and
        the end after its last one."""
        mask = np.zeros(len(offsets), dtype=bool)
        for span in self.learned:
            first = np.searchsorted(offsets[:, 1], span.start, side="right")
            mask[first : np.searchsorted(offsets[:, 0], span.stop)] = True
        return mask


class ChatTemplate:
    """The chat template of a folder, or several by name."""

    def __init__(
        self,
        sources: str | Mapping[str, str],
        tokens: Mapping[str, Any],
        origin: str,
        added: Sequence[str] = (),
        day: datetime.date | None = None,
    ) -> None:
        """Use :meth:`open`. `tokens`: the special tokens by key; `added`: all tokens that are never
        split, usually the end of a turn among them; `day`: the date for templates (None: today)."""
        environment = LimitedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
        )
        environment.add_filter("tojson", _json)
        environment.globals["raise_exception"] = _raise

        def strftime_now(form: str) -> str:
            now = datetime.datetime.now()
            return (now if day is None else now.combine(day, datetime.time())).strftime(form)

        environment.globals["strftime_now"] = strftime_now
        self._environment, self._tokens = environment, tokens
        self._origin, self._added = origin, added
        self._templates: dict[str, Template] = {}
        self._marking: set[str] = set()
        self._texts: set[object] = set()  # the constants of all templates, such as roles
        for name, source in ({"default": sources} if isinstance(sources, str) else sources).items():
            try:
                self._templates[name] = environment.from_string(source)
                parsed = environment.parse(source)
            except (TemplateError, SyntaxError, RecursionError, MemoryError) as error:
                raise DataError(f"{origin}: the chat template is broken: {error}") from error
            self._texts.update(node.value for node in parsed.find_all(nodes.Const))
            if any(node.name == BEGIN for node in parsed.find_all(nodes.Name)):
                self._marking.add(name)

    @classmethod
    def open(
        cls, tokenizer: Tokenizer, needed_by: str = 'the data has conversations ("messages")'
    ) -> ChatTemplate:
        """The chat template of a tokenizer. Raises DataError without one."""
        folder, settings = tokenizer.folder, tokenizer.settings
        if "default" not in settings.templates:
            names = ", ".join(sorted(settings.templates))
            held = f"only chat templates of other names ({names})" if names else "no chat template"
            raise DataError(
                f'data.tokenizer is "{folder or "bytes"}", which has {held}, and '
                f"{needed_by}: name the folder of a tokenizer with {TEMPLATE}"
            )
        return cls(
            settings.templates, settings.special, str(folder), tokenizer.added, tokenizer.day
        )

    def render(self, record: Mapping[str, Any], where: Where) -> Rendered:
        """The text of the conversation under "messages", with "tools" and the values for the
        template under "chat_template_kwargs".

        Raises BadRecordError for an invalid conversation, one without an assistant turn, and one
        for which the template fails.
        """
        messages, learned = _messages(record, where)
        tools = record.get(TOOLS)
        given = record.get(TEMPLATE_VALUES) or {}
        if not isinstance(given, dict):
            raise BadRecordError(where, f'"{TEMPLATE_VALUES}" must be an object')
        for number, message in enumerate(messages, start=1):
            if (role := message["role"]) in FOREIGN_ROLES and role not in self._texts:
                reason = f'message {number} is of "{role}", a role that the chat template does not'
                raise BadRecordError(where, f'{reason} know: "{ROLES[role]}" is its usual name')
        # The text, and where the answers are in it.
        sizes = sizes_of([messages, tools, given])
        rendering = _Rendering(
            partial(self._render, tools=tools, where=where, sizes=sizes, values=given), messages
        )
        if self._name(tools) in self._marking:
            spans = rendering.marked_spans(learned)
        else:
            spans = rendering.spans(learned, self)
        if spans is None:
            reason = f"the chat template ({self._origin}) writes none of the assistant turns"
            raise BadRecordError(where, reason)
        # Contents that are lists or objects, which a template may print as code or leave out.
        for number, message in enumerate(messages, start=1):
            parts = message.get("content")
            if isinstance(parts, list) and parts and str(parts) in rendering.text:
                reason = f"message {number} has a list as its content, which the chat template"
                raise BadRecordError(where, f"{reason} writes as Python code: {JOIN_PARTS}")
        if (lost := rendering.lost_part()) is not None:
            turn, number = lost
            is_list = isinstance(messages[turn]["content"], list)
            held = f"part {number + 1} of " if is_list else "the object in "
            reason = f"{held}message {turn + 1} is not written by the chat template"
            raise BadRecordError(where, f"{reason}: give a text")
        return Rendered(rendering.text, tuple(spans))

    def prompt(self, messages: Messages) -> str:
        """The text of `messages` and the header of the next answer. Raises DataError."""
        return self._render(messages, add_generation_prompt=True)

    @cached_property
    def stop(self) -> str:
        """The end of an answer: the text of its end-of-turn token, which may be empty."""
        return self.end_of_turn(self._tail())

    @cached_property
    def stop_token(self) -> str | None:
        """The added token that ends an answer; None if other text ends it."""
        end = self._first_end(self._tail())
        return max(filter(end.endswith, self._added), key=len, default=None)

    @cached_property
    def _closing(self) -> str:
        """The added tokens that directly follow the first one after an answer, both at the end of
        a conversation and before another turn."""
        try:
            last, other = self._tail(), self._tail(QUESTION)
        except BadRecordError:
            return ""
        closing, common = "", last[: _shared(last, other)]
        common = common[len(self._first_end(common)) :]
        while token := next(filter(common[len(closing) :].startswith, self._added), ""):
            closing += token
        return closing

    @cached_property
    def header(self) -> str:
        """The text that a template writes before an answer; empty if unknown."""
        try:
            prompt, question = self.prompt([QUESTION]), self._render([QUESTION])
        except BadRecordError:
            return ""
        return prompt[_shared(prompt, question) :]

    def _tail(self, *following: dict[str, Any]) -> str:
        """The text after an answer, up to the end of a rendering with the `following` messages."""
        answer = {"role": "assistant", "content": MARKS[0]}
        return self._render([QUESTION, answer, *following]).rpartition(MARKS[0])[2]

    def end_of_turn(self, tail: str) -> str:
        """The prefix of `tail`, the text after an answer, that ends the turn."""
        end = self._first_end(tail)
        if self._closing and tail.startswith(self._closing, len(end)):
            end += self._closing
        return end

    def _first_end(self, tail: str) -> str:
        """The prefix of `tail` up to the first added token; without one, up to the last non-blank
        character."""
        ends = [tail.index(token) + len(token) for token in self._added if token in tail]
        return tail[: min(ends)] if ends else tail.rstrip() or tail

    def _name(self, tools: Any) -> str:
        """Name of the template that renders a conversation with these `tools`."""
        return "tool_use" if tools is not None and "tool_use" in self._templates else "default"

    def _render(
        self,
        messages: Messages,
        *,
        tools: Any = None,
        where: Where = CHAT,
        sizes: Mapping[int, int] | None = None,
        values: Mapping[str, Any] | None = None,
        **given: Any,
    ) -> str:
        known = {BEGIN: "", END: "", "add_generation_prompt": False, "documents": None}
        known |= {**self._tokens, **(values or {}), **given, "messages": messages, TOOLS: tools}
        self._environment.begin(sizes or {})
        try:
            text = self._templates[self._name(tools)].render(known)
            text.encode()  # escapes in JSON can produce lone surrogates
        except Exception as error:  # a template may raise anything
            reason = f"the chat template ({self._origin}) fails: {str(error)[:LONGEST_REASON]}"
            raise BadRecordError(where, reason) from None
        return text


def completed(record: Mapping[str, Any], tokenizer: Tokenizer) -> Rendered:
    """The text of a record with segments, some of which carry loss, or with a prompt and its
    completion, which carries loss and ends with the tokenizer's ``eos_token``."""
    if SEGMENTS in record:
        segments = record[SEGMENTS]
    else:
        completion, end = record[COMPLETION], tokenizer.settings.special.get("eos_token", "")
        completion += "" if completion.endswith(end) else end
        segments = [(record[PROMPT], False), (completion, True)]
    text, learned = "", list[range]()
    for part, carries_loss in segments:
        if carries_loss:
            learned.append(range(len(text), len(text) + len(part)))
        text += part
    return Rendered(text, tuple(learned))


class _Rendering:
    """One conversation, rendered to `text`; :meth:`spans` are the characters of its answers."""

    def __init__(self, render: Callable[..., str], messages: Messages) -> None:
        self._render, self._messages = render, messages
        self.text = render(messages)
        self._mark = next(mark for mark in MARKS if mark not in self.text)
        self._places: dict[int, tuple[int, int]] = {}

    def marked_spans(self, learned: Sequence[bool]) -> list[range] | None:
        """The ranges of characters that the template marks, without those of turns that are not
        `learned`; None if the template marks nothing."""
        marked = self._render(self._messages, **{BEGIN: self._mark, END: self._mark})
        # Pieces are alternately outside and inside of a span; joined, they are the text.
        ends = np.cumsum([len(piece) for piece in marked.split(self._mark)]).tolist()
        spans = [range(*pair) for pair in zip(ends[0::2], ends[1::2], strict=False)]
        if not spans:
            return None
        for turn, message in enumerate(self._messages):
            if message["role"] == "assistant" and not learned[turn]:
                begin = self._place(turn - 1)[1] if turn else 0
                is_last = turn + 1 == len(self._messages)
                end = len(self.text) if is_last else self._place(turn + 1)[0]
                spans = [span for span in spans if span.start < begin or span.stop > end]
        return spans

    def spans(self, learned: Sequence[bool], template: ChatTemplate) -> list[range] | None:
        """The range of characters of each assistant turn that is `learned` and written, without its
        header, with its end-of-turn token; None if the text has no assistant turn."""
        turns = [n for n, message in enumerate(self._messages) if message["role"] == "assistant"]
        places = {turn: self._place(turn) for turn in turns}
        places = {turn: place for turn, place in places.items() if place[0] <= place[1]}
        if not places:
            return None
        # A rendering that ends with an answer shows its end-of-turn token.
        answer = {"role": "assistant", "content": self._mark}
        try:
            probe = self._render([*self._messages[: turns[0]], answer])
        except BadRecordError:  # a template may refuse an answer without a question
            probe = self._render([QUESTION, answer])
        end_of_turn = template.end_of_turn
        stop = end_of_turn(probe.rpartition(self._mark)[2])
        spans: list[range] = []
        for turn, (first, last) in places.items():
            if not learned[turn]:
                continue
            start, length = self._start(turn, first, template.header), len(stop)
            # The content may be followed by calls, or end otherwise than that of the probe.
            if self._messages[turn].get("tool_calls") or not self.text.startswith(stop, last):
                is_last = turn + 1 == len(self._messages)
                rest = self.text[last : None if is_last else max(last, self._place(turn + 1)[0])]
                if not stop:  # a turn without an end: the text after its calls, if it is the last
                    alone = _Rendering(self._render, self._messages[: turn + 1])
                    length = _shared(rest, alone.text[alone._place(turn)[1] :])
                elif stop in rest:
                    length += rest.find(stop)
                else:
                    length = len(end_of_turn(rest))
            spans.append(range(start, last + length))
        return spans

    def lost_part(self) -> tuple[int, int] | None:
        """(message, part), numbers from 0, of the first part that the template leaves out though it
        writes texts of this message; None if there is none. A part is an element of the content, or
        the content itself if it is an object. Parts of reasoning may be left out."""
        marks = dict[tuple[int, int], str]()  # message and part -> the text in place of its texts

        def marked(value: Any, mark: str) -> Any:
            if isinstance(value, list):
                return [marked(part, mark) for part in value]
            if isinstance(value, dict):
                return {key: x if key == "type" else marked(x, mark) for key, x in value.items()}
            return mark if isinstance(value, str) else value

        def marked_part(turn: int, number: int, part: Any) -> Any:
            if isinstance(part, dict) and part.get("type") in REASONING:
                return part
            mark = f"{self._mark}{len(marks)}{self._mark}"
            if (other := marked(part, mark)) != part:
                marks[turn, number] = mark
            return other

        def rendered(contents: Mapping[int, Any]) -> str:
            messages = list(self._messages)
            for turn, content in contents.items():
                messages[turn] = {**messages[turn], "content": content}
            with suppress(BadRecordError):
                return self._render(messages)
            return ""

        contents = dict[int, Any]()
        for turn, message in enumerate(self._messages):
            content = message.get("content")
            if isinstance(content, list):
                contents[turn] = [marked_part(turn, *item) for item in enumerate(content)]
            elif isinstance(content, dict):
                contents[turn] = marked_part(turn, 0, content)
        # One rendering with the marks of all parts, and two for each part that it lacks.
        text = rendered(contents) if marks else ""
        for (turn, number), mark in marks.items():
            if mark not in text:
                content, other = self._messages[turn]["content"], contents[turn]
                if isinstance(content, list):
                    other = [*content[:number], other[number], *content[number + 1 :]]
                alone = rendered({turn: other})
                if alone and mark not in alone and self._mark in rendered({turn: self._mark}):
                    return turn, number
        return None

    def _place(self, turn: int) -> tuple[int, int]:
        """Begin and end of a message's content in the text: the range that changes with it. Begin
        exceeds end if the text has no such message."""
        if turn not in self._places:
            message = self._messages[turn]
            # Three ways to mark the message, of which the first that changes the text counts: its
            # content and the arguments of its calls; any content; the names of its calls.
            marks = (_marked(message, self._mark), {**message, "content": self._mark})
            for marked in (*marks, _marked(message, self._mark, "name")):
                other = self._render([*self._messages[:turn], marked, *self._messages[turn + 1 :]])
                if other != self.text:
                    break
            end = len(self.text) - _shared(self.text[::-1], other[::-1])
            first = _shared(self.text, other)
            if other != self.text:  # inserted text may begin like the text after it
                first = min(first, end)
            self._places[turn] = first, end
        return self._places[turn]

    def _start(self, turn: int, first: int, header: str) -> int:
        """Position after the header of the turn whose content begins at `first`; `header` is that
        of an answer to a question."""
        # `before`: the end of the content of the turn before this one.
        earlier, before = self._messages[:turn], 0
        try:
            prompt = self._render(earlier, add_generation_prompt=True) if earlier else None
        except BadRecordError:  # a template may refuse a part of a conversation
            prompt = None
        if prompt is not None and self.text.startswith(prompt):
            start = len(prompt)
            # After the result of a tool, a prompt may lack the header that the text has.
            is_written = start + len(header) <= first and self.text.startswith(header, start)
            return start + len(header) * is_written
        if earlier:
            begun, before = self._place(turn - 1)
            if not begun <= before <= first:
                return first
        if prompt is not None:
            # Earlier turns are rendered differently: compare from the last of them on.
            marked = [*earlier[:-1], _marked(earlier[-1], self._mark)]
            written = self._render(marked, add_generation_prompt=True).rpartition(self._mark)[2]
            return before + _shared(self.text[before:first], written)
        # No prompt of the template fits: look for most of the header of an answer to a question.
        for length in range(len(header), len(header) // 2, -1):
            if (place := self.text.rfind(header[:length], before, first)) >= 0:
                return place + length
        return first


def _shared(text: str, other: str) -> int:
    """Length of the common prefix, by bisection."""
    low, high = 0, min(len(text), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if text[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _marked(message: Mapping[str, Any], mark: str, key: str = "arguments") -> dict[str, Any]:
    """The message with `mark` as its content and as the `key` of its calls."""
    marked, content, calls = dict(message), message.get("content"), message.get("tool_calls")
    if isinstance(content, list):
        marked["content"] = [
            {**part, "text": mark} if isinstance(part, dict) and "text" in part else part
            for part in content
        ]
    elif content or not calls:
        marked["content"] = mark
    if isinstance(calls, list):
        marked["tool_calls"] = [_marked_call(call, mark, key) for call in calls]
    return marked


def _marked_call(call: Any, mark: str, key: str) -> Any:
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return {**call, "function": _marked_call(call["function"], mark, key)}
    return {**call, key: mark if isinstance(call.get(key), str) else {mark: mark}}


class _Generation(Extension):
    """``{% generation %} ... {% endgeneration %}``: writes its body between the variables BEGIN and
    END, which are empty except when spans are located."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        first, last = (nodes.Output([nodes.Name(name, "load")]) for name in (BEGIN, END))
        return [first, nodes.Scope(body), last]  # variables set in the body are local to it


def _messages(record: Mapping[str, Any], where: Where) -> tuple[Messages, list[bool]]:
    """The messages in the form that transformers gives to templates, reasoning also under the names
    "thinking" and "reasoning_content", and whether each carries loss if the template writes it."""
    messages = record["messages"]
    if not isinstance(messages, list) or not messages:
        raise BadRecordError(where, '"messages" must be a list of at least one message')
    normalized: Messages = []
    learned: list[bool] = []
    for number, message in enumerate(messages, start=1):
        # Role and content: text only.
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadRecordError(where, f'message {number} has no "role"')
        content = message.get("content")
        names = [
            str(name)
            for part in (content if isinstance(content, list) else ())
            if isinstance(part, dict)
            for name in (part.get("type"), *(key for key in part if part[key] is not None))
        ]
        if (media := next(filter(None, map(_MEDIA.search, names)), None)) is not None:
            reason = f"message {number} holds {media[0]} data; only text is trained"
            raise BadRecordError(where, reason)
        message = {key: value for key, value in message.items() if value is not None}
        # Keys that are not read.
        is_answer = message["role"] == "assistant"
        if (older := next((key for key in OLDER_KEYS if message.get(key)), None)) is not None:
            reason = f'message {number} has "{older}", which is not read: {OLDER_KEYS[older]}'
            raise BadRecordError(where, reason)
        for key, value in message.items():
            is_switch = isinstance(value, list) or value in (0, 1)
            is_factor = isinstance(value, int | float) and _FACTOR.search(key)
            if key not in LOSS_KEYS and _LOSS.search(key) and (is_switch or is_factor):
                reason = f'message {number} has "{key}", which is not read; '
                raise BadRecordError(where, f'{reason}"train": false masks a turn')
        if "content" not in message and "tool_calls" not in message:
            others = [key for key in message if key != "role" and message[key]]
            held = f", but {some(others)}" if others else ""
            raise BadRecordError(where, f'message {number} has no "content"{held}')
        # Whether the turn carries loss, by its keys or its role.
        given = {key: message[key] for key in LOSS_KEYS if key in message}
        for key, value in given.items():
            if not isinstance(value, int | float) or value not in LOSS_KEYS[key]:
                on, off = map(json.dumps, LOSS_KEYS[key])
                shown = json.dumps(value)[:LONGEST_REASON]
                reason = f'message {number} has "{key}": {shown}; it must be {on} or {off}'
                raise BadRecordError(where, reason)
        carries_loss = {value == LOSS_KEYS[key][0] for key, value in given.items()}
        if len(carries_loss) > 1:
            names = " and ".join(f'"{key}"' for key in given)
            raise BadRecordError(where, f"message {number}: {names} disagree")
        if True in carries_loss and not is_answer:
            reason = f'message {number} is of "{message["role"]}" and marked to carry loss'
            raise BadRecordError(where, f"{reason}: only turns of the assistant can")
        learned.append(is_answer and False not in carries_loss)
        rest = {key: value for key, value in message.items() if key not in LOSS_KEYS}
        if (reasoning := next((rest[key] for key in REASONING if key in rest), None)) is not None:
            rest = {"thinking": reasoning, **rest, "reasoning_content": reasoning}
        normalized.append(rest)
    tools = record.get(TOOLS)
    if tools is not None and not (
        isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)
    ):
        raise BadRecordError(where, f'"{TOOLS}" must be a list of objects')
    roles = dict.fromkeys(message["role"] for message in normalized)
    if "assistant" not in roles:
        reason = f"the conversation has no assistant turn to learn from, but turns of {some(roles)}"
        raise BadRecordError(where, reason)
    return normalized, learned


def _json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """The filter ``tojson`` as in transformers: templates may give its options by position."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise(message: str) -> None:
    raise TemplateError(one_line(str(message)))
