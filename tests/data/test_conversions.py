"""Records and files of other forms: each refusal has the command that converts them."""

from __future__ import annotations

import bz2
import codecs
import io
import json
import lzma
import re
import shlex
import shutil
import subprocess
import tarfile
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from moemesh.data.records import BadRecordError
from moemesh.data.tokenizer import DataError
from tests.data.test_records import texts

TURNS = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
SHARED = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]


def packed(name: str) -> bytes:
    """A tar archive with one file."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        archive.addfile(tarfile.TarInfo(name))
    return content.getvalue()


def turn_pair(question: str, answer: str = ".answer") -> str:
    turns = {"user": question, "assistant": answer}
    return ", ".join(f'{{role: "{role}", content: {path}}}' for role, path in turns.items())


@pytest.mark.parametrize(
    ("record", "advice"),
    [
        ({"chosen": TURNS, "rejected": TURNS}, "{messages: .chosen}"),
        (
            {"prompt": TURNS[:1], "chosen": TURNS[1:], "rejected": []},
            "{messages: (.prompt + .chosen)}",
        ),
        (
            {"prompt": "q", "chosen": "a", "rejected": "b"},
            '{messages: [{role: "user", content: .prompt}, {role: "assistant", content: .chosen}]}',
        ),
        ({"id": 1, "dialogue": TURNS}, "{messages: .dialogue}"),
        ({"items": SHARED}, "{conversations: .items}"),
        (
            {"instruction": "q", "response": "a"},
            '{messages: [{role: "user", content: .instruction}, '
            '{role: "assistant", content: .response}]}',
        ),
        ({"data": [{"text": "a"}]}, ".data[]"),
        ({"my turns": TURNS}, '{messages: .["my turns"]}'),
        ({"it's": [{"text": "a"}]}, """.["it's"][]"""),
        ({"text": None, "turns": TURNS}, "{messages: .turns}"),
        (
            {"dialog": [{"speaker": "user", "text": "q"}, {"speaker": "bot", "text": "a"}]},
            '{messages: [.dialog[] | {role: (.speaker | {"bot": "assistant"}[.] // .), '
            "content: .text}]}",
        ),
        (
            {"id": 3, "log": [{"role": "user", "text": "q"}, {"role": "assistant", "text": "a"}]},
            "{messages: [.log[] | {role: .role, content: .text}]}",
        ),
        (TURNS, "{messages: .}"),
        ([TURNS], ".[] | {messages: .}"),
        ([{"question": "q", "answer": "a"}], f".[] | {{messages: [{turn_pair('.question')}]}}"),
        ({"QUESTION": "q", "Answer": "a"}, f"{{messages: [{turn_pair('.QUESTION', '.Answer')}]}}"),
        (
            {"instruction": "q", "context": "", "response": "a"},
            '{messages: [{role: "user", content: ([.instruction, .context] | map(values | '
            'select(. != "")) | join("\\n"))}, {role: "assistant", content: .response}]}',
        ),
        (
            {"query": "q", "response": "a", "history": []},
            '{messages: [(.history[] | {role: "user", content: .[0]}, '
            f'{{role: "assistant", content: .[1]}}), {turn_pair(".query", ".response")}]}}',
        ),
        (
            {"contents": [{"role": "user", "parts": [{"text": "q"}]},
                          {"role": "model", "parts": [{"text": "a"}]}]},
            '{messages: [.contents[] | {role: (.role | {"model": "assistant"}[.] // .), '
            "content: (.parts | map(.text) | add)}]}",
        ),
        (
            {"prompt": "q", "data": ["q", "a"]},
            '{messages: [.data | to_entries[] | {role: ["user", "assistant"][.key % 2], '
            "content: .value}]}",
        ),
        (
            {"input": {"messages": TURNS[:1]}, "preferred_output": TURNS[1:],
             "non_preferred_output": TURNS[1:]},
            "{messages: (.input.messages + .preferred_output)}",
        ),
        (
            {"conversations": SHARED[:1], "chosen": SHARED[1], "rejected": SHARED[1]},
            "{conversations: (.conversations + [.chosen])}",
        ),
        ({"id": "1", "body": {"messages": TURNS}}, ".body"),
        ({"text": ["a"]}, '.text[] | {"text": .}'),
        ({"a": {"text": "a"}, "b": {"text": "a"}}, ".[]"),
        ("a", '{"text": .}'),
        (["a"], '.[] | {"text": .}'),
    ],
)  # fmt: skip
def test_records_of_other_forms_have_the_command_that_converts_them(
    tmp_path: Path, record: Any, advice: str
) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps(record) + "\n")
    with pytest.raises(BadRecordError) as caught:
        texts(file)
    assert f"jq -c {shlex.quote(advice)} converts such a file" in str(caught.value)
    is_preference = "rejected" in str(record) or "non_preferred_output" in str(record)
    assert ("preferences are not trained" in str(caught.value)) == is_preference
    if (jq := shutil.which("jq")) is not None:
        done = subprocess.run([jq, "-c", advice, str(file)], capture_output=True, check=True)
        file.write_bytes(done.stdout)
        converted, *others = texts(file)
        assert all(other == converted for other in others)
        wanted = b"a" if advice.endswith(("[]", '{"text": .}')) else TURNS
        assert converted == (wanted if isinstance(wanted, bytes) else {"messages": wanted})


@pytest.mark.parametrize("name", ["it's $1.parquet", "a folder"])
def test_a_table_of_another_form_has_the_command_that_makes_lines(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rows: list[dict[str, Any]] = [{"question": "q", "answer": "a", "day": date(2026, 1, 2)}] * 2
    file = tmp_path / name
    if name.endswith("parquet"):
        pq.write_table(pa.Table.from_pylist(rows), file)
    else:
        datasets = pytest.importorskip("datasets")
        made = datasets.DatasetDict(train=datasets.Dataset.from_list(rows))
        made.save_to_disk(str(file))
    with pytest.raises(DataError, match=r"has neither a column .* python -c .* > ") as caught:
        texts(file)
    words = shlex.split(str(caught.value).partition("them: ")[2])
    assert words[:2] == ["python", "-c"] and words[3:] == [">", f"{Path(name).stem}.jsonl"]
    exec(words[2], {})
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [
        {**row, "day": "2026-01-02"} for row in rows
    ]


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_a_null_text_is_a_missing_one(tmp_path: Path, name: str) -> None:
    """Rows of a table that joins texts with records of another form."""
    rows: list[dict[str, str | None]] = [
        {"text": None, "instruction": "q", "output": "a"},
        {"text": "plain", "instruction": None, "output": None},
        {"text": "both", "instruction": "q", "output": "a"},
    ]
    if name == "a.parquet":
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / name)
    else:
        (tmp_path / name).write_text("\n".join(map(json.dumps, rows)))
    assert texts(tmp_path / name) == [{"messages": TURNS}, b"plain", b"both"]


def test_the_key_of_the_only_text_is_named(tmp_path: Path) -> None:
    for record, held in (
        ({"text": None, "body": "x"}, r'"text" with null beside "body"'),
        ({"body": "x", "score": 3}, r'an object with the keys "body", "score"'),
    ):
        (tmp_path / "a.jsonl").write_text(json.dumps(record))
        with pytest.raises(BadRecordError, match=rf'{held}; data.text_key = "body" reads'):
            texts(tmp_path / "a.jsonl")


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"input_ids": [1], "labels": [1]}, "token ids are read from .bin and .idx files alone"),
        ({"tokens": [1], "loss_mask": [1]}, "token ids are read from .bin and .idx files alone"),
        ({"prompt": "q", "completion": "a", "label": False}, "a completion to avoid"),
        ({"messages": TURNS, "label": False}, "a completion to avoid"),
        ({"conversations": SHARED, "kto_tag": False}, "a completion to avoid"),
        ({"instruction": "q", "output": "a", "label": False}, "a completion to avoid"),
        ({"messages": TURNS, "functions": [{"name": "now"}]}, '"tools" is its name today'),
    ],
)
@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_what_is_not_trained_is_refused_by_name(
    tmp_path: Path, name: str, record: dict[str, Any], words: str
) -> None:
    file = tmp_path / name
    if name.endswith("jsonl"):
        file.write_text(json.dumps(record) + "\n")
    else:
        pq.write_table(pa.Table.from_pylist([record]), file)
    with pytest.raises(DataError, match=words):
        texts(file)


@pytest.mark.parametrize(
    ("name", "content", "remedy"),
    [
        ("a b.jsonl", '{"text": "ä"}\n'.encode("utf-16"), "iconv -f UTF-16 -t UTF-8"),
        ("a.txt", codecs.BOM_UTF16_BE + "ä\n".encode("utf-16-be"), "iconv -f UTF-16 -t UTF-8"),
        ("a.jsonl", '{"text": "ä"}\n'.encode("utf-32"), "iconv -f UTF-32 -t UTF-8"),
        ("a.tar", packed("a"), "tar -xf"),
        ("it's; touch made.jsonl.bz2", bz2.compress(b"{}"), "bzip2 -dk"),
        ("a.jsonl.xz", lzma.compress(b"{}"), "xz -dk"),
    ],
)
def test_a_file_in_another_form_is_refused_with_the_command_that_converts_it(
    tmp_path: Path, name: str, content: bytes, remedy: str
) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(DataError, match=remedy) as caught:
        texts(file)
    command = re.search(rf"{remedy}.*(?= (?:unpacks|converts) it)", str(caught.value))
    assert command is not None
    if shutil.which(remedy.split()[0]):
        subprocess.run(command[0], shell=True, check=True, cwd=tmp_path)
        made = {one.name for one in tmp_path.iterdir()} - {name}
        assert made in ({f"utf8-{name}"}, {file.stem}) and not file.stem.startswith("utf8")
