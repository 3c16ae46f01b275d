"""Records of other trainers (ShareGPT, Alpaca, prompts, segments), and those that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from moemesh.data.records import BadRecordError
from tests.data.texts import all_of

SHARED = {
    "system": "Be brief.",
    "conversations": [
        {"from": "human", "value": "a"},
        {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
        {"from": "observation", "value": "r"},
        {"from": "gpt", "value": "b", "weight": 0},
        {"role": "user", "content": "c"},
        {"from": "assistant", "value": "d"},
    ],
    "tools": '[{"name": "f"}]',
}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


SHAPED: dict[str, tuple[dict[str, Any], Any]] = {
    "ShareGPT": (
        SHARED,
        {
            "messages": [
                *({"role": "system", "content": "Be brief."}, user("a")),
                *({"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "r"}),
                *(assistant("b", weight=0), user("c"), assistant("d")),
            ],
            "tools": [{"name": "f"}],
        },
    ),
    "LIMA": (
        {"conversations": ["a", "b", "c", "d"], "system": "Be brief.", "source": "x"},
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                *(user("a"), assistant("b"), user("c"), assistant("d")),
            ]
        },
    ),
    "messages of texts": ({"messages": ["a", "b"]}, {"messages": [user("a"), assistant("b")]}),
    "Alpaca": (
        {"instruction": "Add.", "input": "1 2", "output": "3", "history": [["a", "b"]]},
        {"messages": [user("a"), assistant("b"), user("Add.\n1 2"), assistant("3")]},
    ),
    "Alpaca without input": (
        {"instruction": "Add.", "input": "", "output": "3"},
        {"messages": [user("Add."), assistant("3")]},
    ),
    "prompt of messages": (
        {"prompt": [assistant("a"), user("b")], "completion": [assistant("c")]},
        {"messages": [assistant("a", weight=0), user("b"), assistant("c")]},
    ),
    "prompt of messages with a system": (
        {
            "prompt": [{"role": "user", "content": "b"}],
            "completion": [{"role": "assistant", "content": "c"}],
            "system": "Be brief.",
        },
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "b"},
                {"role": "assistant", "content": "c"},
            ]
        },
    ),
    "a turn without a value": (
        {"conversations": [{"from": "gpt", "value": None, "text": "a"}]},
        {"messages": [{"role": "assistant", "text": "a"}]},
    ),
    "tools and values in a text": (
        {
            "messages": [assistant("a")],
            "tools": '[{"name": "f", "default": null}]',
            "chat_template_kwargs": {"enable_thinking": False, "unset": None},
            "images": [],
            "score": 1.5,
        },
        {
            "messages": [assistant("a")],
            "tools": [{"name": "f", "default": None}],
            "chat_template_kwargs": {"enable_thinking": False},
        },
    ),
    "prompt": ({"prompt": "a", "completion": " b"}, {"prompt": "a", "completion": " b"}),
    "a system prompt beside messages": (
        {"system": "Be brief.", "messages": [user("a"), assistant("b")], "label": True},
        {"messages": [{"role": "system", "content": "Be brief."}, user("a"), assistant("b")]},
    ),
    "a class": ({"messages": [assistant("b")], "label": 0}, {"messages": [assistant("b")]}),
    "a system prompt in both places": (
        {"system": "c", "messages": [{"role": "system", "content": "c"}, assistant("b")]},
        {"messages": [{"role": "system", "content": "c"}, assistant("b")]},
    ),
    "a system prompt in both places, once with a newline": (
        {"system": "c", "messages": [{"role": "system", "content": "c\n"}, assistant("b")]},
        {"messages": [{"role": "system", "content": "c\n"}, assistant("b")]},
    ),
    "a blank system prompt": (
        {"system": "\n", "messages": [assistant("b")]},
        {"messages": [assistant("b")]},
    ),
    "no answer to avoid": (
        {"prompt": "a", "completion": "b", "rejected": False},
        {"prompt": "a", "completion": "b"},
    ),
    "Alpaca with a context": (
        {"instruction": "Sum up.", "context": "1 2", "output": "3"},
        {"messages": [user("Sum up.\n1 2"), assistant("3")]},
    ),
    "messages in a text": (
        {"messages": json.dumps([user("a"), assistant("b")])},
        {"messages": [user("a"), assistant("b")]},
    ),
    "turns in a text": (
        {"conversations": '[{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]'},
        {"messages": [user("a"), assistant("b")]},
    ),
    "segments": (
        {"segments": [{"label": False, "text": "a"}, {"label": True, "text": "b"}]},
        {"segments": [("a", False), ("b", True)]},
    ),
}


@pytest.mark.parametrize("name", SHAPED)
def test_records_of_other_trainers(tmp_path: Path, name: str) -> None:
    given, expected = SHAPED[name]
    (tmp_path / "a.jsonl").write_text(json.dumps(given))
    assert [record for _, record in all_of(tmp_path / "a.jsonl")] == [expected]
    if name != "ShareGPT":  # its turns have other types
        pq.write_table(pa.Table.from_pylist([given | {"id": 1}]), tmp_path / "a.parquet")
        assert [record for _, record in all_of(tmp_path / "a.parquet")] == [expected]


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"messages": None}, '"messages" with null'),
        ({"question": "a", "answer": "b"}, r"jq -c .*content: \.question.*content: \.answer"),
        ({"conversations": [{"from": "narrator", "value": "x"}]}, 'turn 1 is from "narrator"'),
        ({"prompt": "a", "completion": ["b"]}, "two texts or two lists"),
        ({"conversations": "x"}, "conversations: not valid JSON"),
        ({"messages": [], "tools": "f(x)"}, "tools: not valid JSON"),
        ({"messages": [], "images": ["a.png"]}, '"images" is not empty; only text is trained'),
        (
            {"instruction": "a", "output": "b", "audio": {"path": "x.wav"}},
            '"audio" is not empty; only text is trained',
        ),
        ({"conversations": [{"from": "function_call", "value": "{"}]}, "turn 1: not valid JSON"),
        ({"conversations": [{"from": "function_call", "value": 5}]}, "object or a list of objects"),
        ({"conversations": [{"from": "function_call", "value": '["f"]'}]}, "a list of objects"),
        ({"conversations": [{"from": ["human"], "value": "x"}]}, "turn 1 is from"),
        ({"instruction": 3, "output": "b"}, "must be texts"),
        ({"instruction": "a", "output": ["b"]}, "must be texts"),
        ({"instruction": "a", "input": {"b": 1}, "output": "c"}, "must be texts"),
        ({"instruction": "a", "context": {"b": 1}, "output": "c"}, '"context", .* must be texts'),
        ({"instruction": "a", "output": "b", "history": [["c"]]}, "a list of pairs"),
        ({"instruction": "a", "output": "b", "history": ["cd"]}, "a list of pairs"),
        ({"instruction": "a", "output": "b", "history": [{"c": "d", "e": "f"}]}, "list of pairs"),
        ({"instruction": "a", "output": "b", "history": 4}, "a list of pairs"),
        ({"prompt": "a", "completion": "b", "label": 0}, "a completion to avoid"),
        ({"prompt": "a", "completion": "b", "system": "c"}, "as lists of messages"),
        ({"messages": [], "system": {"a": 1}}, '"system" must be a text, and is an object'),
        ({"messages": [{"role": "system", "content": "a"}], "system": "b"}, "different system"),
        ({"segments": [{"label": 1, "text": "a"}]}, 'with a "text" and a "label"'),
        ({"segments": "a"}, 'with a "text" and a "label"'),
    ],
)
def test_records_that_are_no_such(tmp_path: Path, record: dict[str, Any], reason: str) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(record))
    with pytest.raises(BadRecordError, match=f"line 1, byte 0: .*{reason}"):
        all_of(tmp_path / "a.jsonl")


def test_answers_to_avoid_are_refused_in_every_format(tmp_path: Path) -> None:
    record = {"prompt": "a", "completion": "b", "rejected": "c"}
    (tmp_path / "a.jsonl").write_text(json.dumps(record))
    pq.write_table(pa.Table.from_pylist([record]), tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.parquet"):
        with pytest.raises(BadRecordError, match="preferences are not trained"):
            all_of(tmp_path / name)
