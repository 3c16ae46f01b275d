"""Keys of records, and the command that converts a record of another form."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

from moemesh.config.limits import few

#: Keys of the content of a record: a conversation; a prompt and its completion; texts with and
#: without loss.
MESSAGES, PROMPT, COMPLETION, SEGMENTS = "messages", "prompt", "completion", "segments"
#: Optional keys of every conversation: its system prompt, its tools, values for the chat template.
SYSTEM, TOOLS, TEMPLATE_VALUES = "system", "tools", "chat_template_kwargs"
#: Keys of data other than text, which must be empty.
MEDIA = ("images", "videos", "audios", "image", "video", "audio")
#: The older key of tools, which no chat template reads.
FUNCTIONS = "functions"
#: Keys of TRL and of LLaMA-Factory whose value false marks an answer to avoid.
AVOIDED = ("label", "kto_tag")
#: Keys of answers to avoid.
REJECTED = ("rejected", "rejected_response", "non_preferred_output")
#: Keys that identify a record of another format -> its optional keys.
SHAPES = {
    ("conversations",): (),
    ("instruction", "output"): ("input", "context", "history"),
    (PROMPT, COMPLETION): (),
    (SEGMENTS,): (),
}
#: Keys in unsupported records: of a question, of an answer, of a text that belongs to a question,
#: and of a list whose turns alternate between user and assistant.
QUESTIONS = ("question", "query", "problem", "instruction", "prompt", "input")
ANSWERS = ("answer", "response", "solution", "output", "chosen", "preferred_output")
CONTEXTS = ("context", "input")
DIALOGS = ("conversations", "conversation", "dialogue", "dialog", "turns", "data")
#: Keys of the role and of the content of a turn: the pairs that are read, then those of unsupported
#: records.
TURN_KEYS = (("role", "content"), ("from", "value"))
SPEAKERS = ("role", "from", "speaker", "author", "sender")
CONTENTS = ("content", "value", "text", "utterance", "message")
#: Keys of token ids, and the advice for their records.
IDS = ("input_ids", "token_ids", "tokens")
TOKEN_IDS = "token ids are read from .bin and .idx files alone: give the text of the records"
#: Names of ShareGPT's roles.
ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(
        ("gpt", "assistant", "chatgpt", "bard", "bing", "model", "bot", "ai"), "assistant"
    ),
    **dict.fromkeys(("system",), "system"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
}


def conversion(value: Any, text_key: str, unit: str, is_record: Callable[[Any], bool]) -> str:
    """The end of an error message, after a semicolon: the command that converts records like
    `value`, or the key of its only text; "" if unknown. `unit`: that of the record's place, such as
    "line"; `is_record` returns whether a value is read as it is."""
    notes, program = list[str](), None
    if isinstance(value, dict):
        fields = {key: field for key, field in value.items() if field is not None}
        if any(key in IDS and isinstance(held, list) for key, held in fields.items()):
            return f"; {TOKEN_IDS}"
        if any(key in fields for key in REJECTED):
            notes.append("preferences are not trained")
        if {"role", "content"} <= fields.keys():
            program, unit = "{messages: .}", "line"
            notes.append("a list is one conversation on its line")
        else:
            program = _program(fields, text_key, is_record)
        texts = [key for key, field in fields.items() if isinstance(field, str)]
        is_half = any(key.lower() in (*QUESTIONS, *ANSWERS) for key in texts)
        if program is None and not notes and len(texts) == 1 and not is_half:
            notes.append(f"data.text_key = {json.dumps(texts[0])} reads that text")
    elif are_turns(value):
        # A list of turns is one record, on its line or as an element of the file's list.
        program = "{messages: .}"
    elif isinstance(value, str):
        program = f"{{{json.dumps(text_key)}: .}}"
    if program is not None and unit != "row":
        program = f".[] | {program}" if unit == "element" else program
        notes.append(f"jq -c {shlex.quote(program)} converts such a file")
    return f"; {', and '.join(notes)}" if notes else ""


def _program(
    fields: Mapping[str, Any], text_key: str, is_record: Callable[[Any], bool]
) -> str | None:
    """The program of jq that makes a record of `fields`; None if unknown."""
    lists = [key for key, value in fields.items() if are_turns(value) and key not in REJECTED]
    answers = [key for key in lists if key != PROMPT]
    renamed = list(filter(None, (_renamed_turns(*item) for item in fields.items())))
    question, answer = (
        next((key for key in fields if key.lower() in keys and isinstance(fields[key], str)), None)
        for keys in (QUESTIONS, ANSWERS)
    )
    if len(renamed) == 1:  # turns with other names of role and content
        return renamed[0]
    # A conversation whose last turn is under another key.
    if "conversations" in lists and isinstance(fields.get("chosen"), dict):
        return "{conversations: (.conversations + [.chosen])}"
    if len(answers) == 1:  # one list of turns, perhaps with those of a prompt
        turns = _path(answers[0])
        if PROMPT in lists:
            turns = f"(.{PROMPT} + {turns})"
        elif isinstance(request := fields.get("input"), dict) and are_turns(request.get(MESSAGES)):
            turns = f"(.input.{MESSAGES} + {turns})"
        key = "conversations" if "from" in fields[answers[0]][0] else MESSAGES
        return f"{{{key}: {turns}}}"
    if question is not None and answer is not None:
        return f"{{{MESSAGES}: {_turn_pair(fields, question, answer)}}}"
    # Records inside of the object: every value, one value, or the elements of one list.
    held = [key for key, value in fields.items() if isinstance(value, dict) and is_record(value)]
    if len(fields) > 1 and len(held) == len(fields):
        return ".[]"
    lists = [key for key, value in fields.items() if isinstance(value, list) and value]
    firsts = {key: fields[key][0] for key in lists if isinstance(fields[key][0], dict)}
    records = [key for key, first in firsts.items() if is_record(first)]
    if len(held) + len(records) == 1:
        return _path(held[0]) if held else f"{_path(records[0])}[]"
    # Texts of user and assistant in turns, or documents.
    texts = [key for key in lists if all(isinstance(text, str) for text in fields[key])]
    if len(texts) == 1 and texts[0] in DIALOGS and len(fields[texts[0]]) > 1:
        turn = '{role: ["user", "assistant"][.key % 2], content: .value}'
        return f"{{{MESSAGES}: [{_path(texts[0])} | to_entries[] | {turn}]}}"
    if texts == [text_key]:
        return f"{_path(text_key)}[] | {{{json.dumps(text_key)}: .}}"
    return None


def _turn_pair(fields: Mapping[str, Any], question: str, answer: str) -> str:
    """The expression of jq for the messages of a question and its answer, with system prompt,
    history and context in `fields`."""
    turns = list[str]()
    if isinstance(fields.get(SYSTEM), str):
        turns.append(f'{{role: "system", content: .{SYSTEM}}}')
    if isinstance(fields.get("history"), list):
        exchange = '{role: "user", content: .[0]}, {role: "assistant", content: .[1]}'
        turns.append(f"(.history[] | {exchange})")
    keys = [key for key in CONTEXTS if isinstance(fields.get(key), str) and key != question]
    content = _path(question)
    if keys:
        values = ", ".join(map(_path, (question, *keys)))
        content = f'([{values}] | map(values | select(. != "")) | join("\\n"))'
    turns.append(f'{{role: "user", content: {content}}}')
    turns.append(f'{{role: "assistant", content: {_path(answer)}}}')
    return f"[{', '.join(turns)}]"


def are_turns(value: Any) -> bool:
    """Whether the value is a list of messages, or of turns of ShareGPT."""
    return (
        isinstance(value, list)
        and len(value) > 0
        and all(isinstance(x, dict) and x.keys() & {"role", "from"} for x in value)
    )


def _renamed_turns(key: str, value: Any) -> str | None:
    """The program of jq that makes messages of the list under `key`, whose turns have other names
    for role and content; None if it is not such a list."""
    if not isinstance(value, list) or not value or not all(isinstance(x, dict) for x in value):
        return None
    turns = cast("list[dict[str, Any]]", value)
    speaker, content = (
        next((name for name in names if all(isinstance(x.get(name), str) for x in turns)), None)
        for names in (SPEAKERS, CONTENTS)
    )
    if content is None and all(isinstance(x.get("parts"), list) for x in turns):
        content = "parts"  # of Gemini
    if speaker is None or content is None or (speaker, content) in TURN_KEYS:
        return None
    roles = {role: ROLES[role] for role in sorted({x[speaker] for x in turns} & ROLES.keys())}
    roles = {role: known for role, known in roles.items() if role != known}
    role = f"({_path(speaker)} | {json.dumps(roles)}[.] // .)" if roles else _path(speaker)
    text = "(.parts | map(.text) | add)" if content == "parts" else _path(content)
    return f"{{{MESSAGES}: [{_path(key)}[] | {{role: {role}, content: {text}}}]}}"


def _path(key: str) -> str:
    """The path of jq to a key of an object."""
    return f".{key}" if re.fullmatch(r"[A-Za-z_]\w*", key, re.ASCII) else f".[{json.dumps(key)}]"


def some(names: Iterable[str], most: int = 6) -> str:
    """The first `most` names, quoted, for a message."""
    return few((f'"{name}"' for name in names), most)
