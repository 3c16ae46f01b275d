"""Records of files: texts and conversations in order, each with its place.

A record is a text (bytes, in UTF-8 for all formats but "text" and "bytes"), a conversation (a dict
with a list under "messages"; records of ShareGPT and Alpaca are converted), a prompt with its
completion (a dict with these two keys), or segments with and without loss (a dict with this key).
One record, or one small batch of rows, is in memory at a time, so a file may be larger than memory,
except a JSON file that is one list.

    format    one record is                                   place
    text      a file; above PIECE bytes in pieces             file, byte
    bytes     the same, of any content and never decompressed file, byte
    jsonl     a line that is not blank                        file, line, byte
              or, in a file that is one list, an element      file, element
    parquet   a row                                           file, row
    dataset   a row of a folder that datasets has saved,      folder, row
              or of a dataset of the Hub
"""

from __future__ import annotations

import json
import re
import shlex
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import chain, cycle
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeAlias, cast

from moemesh.config.data import BadRecords
from moemesh.config.limits import LARGEST_JSON, parse_json
from moemesh.data.conversions import (
    ANSWERS,
    AVOIDED,
    COMPLETION,
    DIALOGS,
    FUNCTIONS,
    IDS,
    MEDIA,
    MESSAGES,
    PROMPT,
    QUESTIONS,
    REJECTED,
    ROLES,
    SEGMENTS,
    SHAPES,
    SYSTEM,
    TEMPLATE_VALUES,
    TOKEN_IDS,
    TOOLS,
    conversion,
    some,
)
from moemesh.data.input_files import (
    HUB,
    SAVED_DATASETS,
    DataFile,
    check_head,
    holds_list,
    open_stream,
)
from moemesh.data.tokenizer import DataError, optional

#: Approximate bytes of a piece of a larger text file; pieces end at the end of a line.
PIECE = 1 << 26
#: Longest line of JSON in bytes: without a bound, an endless line would fill the memory.
LONGEST_LINE = 1 << 30
#: Rows of a table that are decoded at once.
ROWS = 256
#: Places of bad records that a message names.
NAMED = 5
#: Least number of records after which a too large share of bad ones ends the reading.
ENOUGH = 1000
Record: TypeAlias = bytes | dict[str, Any]


class Where(NamedTuple):
    """The place of a record: `unit` ("file", "line", "element" or "row"), its number in the file,
    from 1, and the offset of its first byte in the decompressed file (None for formats without
    offsets)."""

    file: str
    unit: str
    record: int
    byte: int | None

    @property
    def continues(self) -> bool:
        """Whether the record continues the document of the previous one: a piece of a text."""
        return self.unit == "file" and bool(self.byte)

    def __str__(self) -> str:
        if self.unit == "file":
            return f"{self.file}, from byte {self.byte} on" if self.byte else self.file
        place = "" if self.byte is None else f", byte {self.byte}"
        return f"{self.file}, {self.unit} {self.record}{place}"


class BadRecordError(DataError):
    """A record that cannot be used; the rest of the file can."""

    def __init__(self, where: Where, reason: str) -> None:
        super().__init__(f"{where}: {reason}")
        self.where, self.reason = where, reason


class BadRecordLog:
    """Counts of the records and of the bad records of a source; `places` has the messages of the
    first bad ones."""

    def __init__(self, policy: BadRecords = "fail", share: float = 0.0, source: str = "") -> None:
        """With "skip", at most `share` of the records may be bad."""
        self.policy, self._share, self.source = policy, share, source
        self.total = self.bad = 0
        self.places: list[str] = []

    def unreadable(self, error: BadRecordError) -> None:
        """Count a record that cannot be parsed, which `total` does not include yet."""
        self.total += 1
        self.add(error)

    def add(self, error: BadRecordError) -> None:
        """Count a bad record. Raises `error` with the policy "fail", else DataError if too many
        records are bad."""
        if self.policy == "fail":
            raise error
        self.bad += 1
        if len(self.places) < NAMED:
            self.places.append(str(error))
        if self.total >= ENOUGH:
            self.check()

    def check(self) -> None:
        """Raises DataError if the share of bad records is too large."""
        if self.bad > self._share * self.total:
            raise DataError(
                f"{self.source}: {self.bad} of {self.total} records are bad, more than the "
                f"share data.bad_record_share = {self._share:g} that may be left out: "
                f"{'; '.join(self.places)}"
            )

    def note(self) -> str | None:
        """A sentence for the user; None without bad records."""
        if not self.bad:
            return None
        return (
            f"{self.source}: {self.bad} of {self.total} records are bad and left out "
            f'(data.bad_records = "skip"): {"; ".join(self.places)}'
            + (", ..." if self.bad > len(self.places) else "")
        )


def read(
    file: DataFile, text_key: str = "text", log: BadRecordLog | None = None
) -> Iterator[tuple[Where, Record]]:
    """The records of one file, in order. `text_key`: the key of a text; a record with "messages" is
    a conversation.

    `log` raises or collects the errors of bad records, which are left out; None: it raises. Raises
    DataError for a file that cannot be read in its format: damaged, of another content, or without
    the column.
    """
    log = log or BadRecordLog()
    check_head(file)
    match file.format:
        case "text" | "bytes":
            compression = file.compression if file.format == "text" else "none"
            with open_stream(file.path, compression) as stream:
                yield from _texts(stream, file.path)
        case "jsonl":
            with open_stream(file.path, file.compression) as stream:
                is_list = holds_list(stream)
                for where, value in (_elements if is_list else _lines)(stream, file.path):
                    try:
                        value = _parsed(value, where) if isinstance(value, bytes) else value
                        yield where, _record(value, text_key, where)
                    except BadRecordError as error:
                        log.unreadable(error)
        case "parquet":
            yield from _rows(_parquet(file.path, text_key), file.path, text_key, log)
        case "dataset":
            rows = _dataset(file.path, text_key, is_on_hub=file.is_on_hub)
            yield from _rows(rows, file.path, text_key, log)


def _lines(stream: BinaryIO, path: Path) -> Iterator[tuple[Where, bytes]]:
    """The lines that are not blank."""
    number = offset = 0
    while line := stream.readline(LONGEST_LINE):
        number += 1
        where = Where(str(path), "line", number, offset)
        offset += len(line)
        if len(line) == LONGEST_LINE:
            raise DataError(
                f"{where}: the line has more than {LONGEST_LINE:,} bytes, the limit of a record"
            )
        if line.strip():
            yield where, line


def _elements(stream: BinaryIO, path: Path) -> Iterator[tuple[Where, object]]:
    """The elements of a file that is one list, all in memory at once."""
    try:
        values = parse_json(stream.read(LARGEST_JSON + 1).decode("utf-8-sig"))
    except ValueError as error:
        advice = "a file of JSON lines has no brackets around them"
        if getattr(error, "msg", None) == "Extra data":
            advice = "of a list on each line, jq -c '{messages: .}' makes conversations"
        raise DataError(f"{path}: not a valid list in JSON ({error}); {advice}") from error
    for number, value in enumerate(values, start=1):
        yield Where(str(path), "element", number, None), value


def _texts(stream: BinaryIO, path: Path) -> Iterator[tuple[Where, Record]]:
    """A file, or its pieces. A piece ends after a newline that no blank follows; if it has no such
    newline, it ends before the last character."""
    rest, offset = b"", 0  # bytes read after the last cut, and the offset of the first of them
    while piece := stream.read(PIECE):
        piece = rest + piece
        cut = len(piece)
        if len(piece) >= PIECE:
            end = len(piece) - 1
            while (newline := piece.rfind(b"\n", 0, end)) >= 0:
                if piece[newline + 1] not in b" \t\r\n\f\v":
                    cut = newline + 1
                    break
                end = newline
            else:  # no such newline: cut before the last character, which may be incomplete
                cut = len(piece) - 1
                while cut > len(piece) - 4 and piece[cut] & 0xC0 == 0x80:
                    cut -= 1
        text, rest = piece[:cut], piece[cut:]
        if text:
            yield Where(str(path), "file", 1, offset), text
        offset += len(text)
    if rest:
        yield Where(str(path), "file", 1, offset), rest


def _parsed(line: bytes, where: Where) -> object:
    """The JSON of a line; errors have the byte offset of the fault."""
    assert where.byte is not None
    start = where.byte
    if start == 0 and line.startswith(BOM_UTF8):
        line, start = line[len(BOM_UTF8) :], len(BOM_UTF8)
    try:
        return parse_json(line.decode())
    except UnicodeDecodeError as error:
        exact = where._replace(byte=start + error.start)
        raise BadRecordError(exact, f"not valid UTF-8 ({error.reason})") from error
    except json.JSONDecodeError as error:
        exact = where._replace(byte=start + len(error.doc[: error.pos].encode()))
        raise BadRecordError(exact, f"not valid JSON ({error.msg})") from error
    except ValueError as error:
        raise BadRecordError(where, f"not valid JSON ({error})") from error


def _record(value: object, text_key: str, where: Where) -> Record:
    """The record in a value of JSON or of a table: a conversation, texts with and without loss, or
    the UTF-8 bytes of a text."""
    if isinstance(value, dict):
        row = cast("dict[str, Any]", value)
        fields = {key: field for key, field in row.items() if field is not None}
        if MESSAGES in fields:
            messages = _json(fields.pop(MESSAGES), MESSAGES, where)
            return _conversation(_alternating(messages), fields, where)
        if isinstance(text := fields.get(text_key), str | bytes):
            return text if isinstance(text, bytes) else _encoded(text, where)
        shape = next((keys for keys in SHAPES if all(key in fields for key in keys)), None)
        is_shape = text_key not in fields and shape is not None
        if is_shape and not any(fields.get(key) for key in REJECTED):
            return _shaped(without_nulls(fields), shape[0], where)
        content = f"an object with the keys {some(row)}" if row else "an empty object"
        for key in (text_key, MESSAGES):
            if key in row:
                content = f'"{key}" with {_kind(row[key])}'
                if others := [name for name in fields if name != key]:
                    content += f" beside {some(others)}"
    else:
        content = _kind(value)

    def is_record(part: Any) -> bool:
        with suppress(BadRecordError):
            return bool(_record(part, text_key, where))
        return False

    raise BadRecordError(
        where,
        f'expected an object with a text under the key "{text_key}", or a conversation under the '
        f'key "{MESSAGES}"; found {content}{conversion(value, text_key, where.unit, is_record)}',
    )


def _encoded(text: str, where: Where) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        reason = f"the text is not valid Unicode ({error.reason})"
        raise BadRecordError(where, reason) from error


def _conversation(messages: Any, fields: Mapping[str, Any], where: Where) -> Record:
    """The record of `messages` with its optional keys from `fields`."""
    for key in MEDIA:
        if fields.get(key):
            raise BadRecordError(where, f'"{key}" is not empty; only text is trained')
    if fields.get(FUNCTIONS):
        raise BadRecordError(where, f'"{FUNCTIONS}" is not read: "{TOOLS}" is its name today')
    _refuse_avoided(fields, where)
    messages = without_nulls(_json(messages, MESSAGES, where))
    system = fields.get(SYSTEM)
    if system and not isinstance(system, str | list):
        raise BadRecordError(where, f'"{SYSTEM}" must be a text, and is {_kind(system)}')
    if _stripped(system) and isinstance(messages, list):
        first = messages[0] if messages and isinstance(messages[0], dict) else {}
        if first.get("role") not in ("system", "developer"):
            messages = [{"role": "system", "content": system}, *messages]
        elif _stripped(first.get("content")) != _stripped(system):
            reason = f'"{SYSTEM}" and the first message are two different system prompts'
            raise BadRecordError(where, reason)
    record: Record = {MESSAGES: messages}
    for key in (TOOLS, TEMPLATE_VALUES):
        if (value := fields.get(key)) is not None and value != "":
            # Nulls of a list may come from a table, where they mark missing keys. Nulls of a
            # JSON text are values.
            is_text = isinstance(value, str)
            record[key] = _json(value, key, where) if is_text else without_nulls(value)
    return record


def _stripped(content: Any) -> Any:
    """The content of a message without blanks around a text, which most templates drop."""
    return content.strip() if isinstance(content, str) else content


def _refuse_avoided(fields: Mapping[str, Any], where: Where) -> None:
    for key in AVOIDED:
        value = fields.get(key)
        # The label 0 of other records may be a class.
        if value is False or value == "false" or (value == 0 and PROMPT in fields):
            reason = f'"{key}": {json.dumps(value)} marks a completion to avoid'
            raise BadRecordError(where, f"{reason}; preferences are not trained")


# Records of other trainers.


def _shaped(fields: Mapping[str, Any], key: str, where: Where) -> Record:
    """The record with the content of `fields`, whose format is identified by `key`."""
    if key == PROMPT:
        prompt, completion = fields[PROMPT], fields[COMPLETION]
        if isinstance(prompt, str) and isinstance(completion, str):
            _refuse_avoided(fields, where)
            if fields.get(SYSTEM):
                reason = f'"{SYSTEM}" needs "{PROMPT}" and "{COMPLETION}" as lists of messages'
                raise BadRecordError(where, reason)
            _encoded(prompt + completion, where)
            return {PROMPT: prompt, COMPLETION: completion}
        if not (isinstance(prompt, list) and isinstance(completion, list)):
            reason = f'"{PROMPT}" and "{COMPLETION}" must be two texts or two lists of messages'
            raise BadRecordError(where, reason)
        context = [  # answers in the prompt carry no loss
            {**turn, "weight": 0}
            if isinstance(turn, dict) and turn.get("role") == "assistant"
            else turn
            for turn in prompt
        ]
        messages = [*context, *completion]
    elif key == SEGMENTS:  # of axolotl: texts, and whether each carries loss
        parts = fields[key] if isinstance(fields[key], list) else [None]
        pairs = [
            (part.get("text"), part.get("label")) if isinstance(part, dict) else (None, None)
            for part in parts
        ]
        if not all(isinstance(text, str) and isinstance(learned, bool) for text, learned in pairs):
            reason = 'must be a list of objects with a "text" and a "label", true or false'
            raise BadRecordError(where, f'"{SEGMENTS}" {reason}')
        _encoded("".join(text for text, _ in pairs), where)
        return {SEGMENTS: pairs}
    elif key == "conversations":
        messages = _sharegpt(fields[key], where)
    else:  # of Alpaca: "history", and a question, which begins with the text of `key`
        earlier = fields.get("history", [])
        given = [fields[key], fields.get("context", ""), fields.get("input", ""), fields["output"]]
        are_pairs = isinstance(earlier, list) and all(
            isinstance(pair, list) and len(pair) == 2 for pair in earlier
        )
        if not are_pairs or not all(isinstance(text, str) for text in chain(given, *earlier)):
            reason = '"context", "input" and "output" must be texts, "history" a list of pairs'
            raise BadRecordError(where, f'"{key}", {reason}')
        *question, answer = given
        texts = [*chain(*earlier), "\n".join(filter(None, question)), answer]
        messages = _alternating(texts)
    return _conversation(messages, fields, where)


def _alternating(turns: Any) -> Any:
    """The messages of a list of texts, of user and assistant in turns; other values unchanged."""
    if not isinstance(turns, list) or not all(isinstance(turn, str) for turn in turns):
        return turns
    pairs = zip(cycle(("user", "assistant")), turns, strict=False)
    return [{"role": role, "content": text} for role, text in pairs]


def _sharegpt(turns: Any, where: Where) -> list[Any]:
    """The messages of ``conversations``; turns without "from" are returned unchanged."""
    turns = _json(turns, "conversations", where)
    if not isinstance(turns, list):
        raise BadRecordError(where, f'"conversations" must be a list, and is {_kind(turns)}')
    messages = list[Any]()
    for number, turn in enumerate(_alternating(turns), start=1):
        if not isinstance(turn, dict) or "from" not in turn:
            messages.append(turn)
            continue
        role, others = turn["from"], {k: turn[k] for k in turn if k not in ("from", "value")}
        if role == "function_call":
            calls = _json(turn.get("value"), f"turn {number}", where)
            calls = [calls] if isinstance(calls, dict) else calls
            if not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
                reason = f'turn {number} is from "{role}"; its "value" must be an object'
                raise BadRecordError(where, f"{reason} or a list of objects")
            calls = [{"type": "function", "function": call} for call in calls]
            messages.append({"role": "assistant", "tool_calls": calls, **others})
        elif isinstance(role, str) and role in ROLES:
            content = {"content": turn["value"]} if "value" in turn else {}
            messages.append({"role": ROLES[role], **content, **others})
        else:
            known = some([*ROLES, "function_call"], 99)
            raise BadRecordError(where, f'turn {number} is from "{role}"; known are {known}')
    return messages


def _json(value: Any, name: str, where: Where) -> Any:
    """The list or object in a text; other values are returned unchanged."""
    if not isinstance(value, str):
        return value
    try:
        parsed = parse_json(value)
    except ValueError as error:
        raise BadRecordError(where, f"{name}: not valid JSON ({error})") from error
    if not isinstance(parsed, dict | list):
        raise BadRecordError(where, f"{name}: expected a list or an object, found {_kind(parsed)}")
    return parsed


def _rows(
    batches: Iterable[list[Mapping[str, Any]]], path: Path, text_key: str, log: BadRecordLog
) -> Iterator[tuple[Where, Record]]:
    for number, row in enumerate(chain.from_iterable(batches), start=1):
        where = Where(str(path), "row", number, None)
        try:
            yield where, _record(row, text_key, where)
        except BadRecordError as error:
            log.unreadable(error)


def _parquet(path: Path, text_key: str) -> Iterator[list[Mapping[str, Any]]]:
    """Rows in small batches, with the needed columns only."""
    parquet, arrow = optional("pyarrow.parquet", path), optional("pyarrow", path)
    try:
        with parquet.ParquetFile(path, memory_map=True) as file:
            columns = _columns(file.schema_arrow.names, path, text_key)
            for batch in file.iter_batches(batch_size=ROWS, columns=columns):
                yield _python(batch)
    except (arrow.ArrowException, OSError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path}: the parquet data cannot be read ({error})") from error


def _dataset(path: Path, text_key: str, *, is_on_hub: bool) -> Iterator[list[Mapping[str, Any]]]:
    """Rows of a memory-mapped dataset; of the split "train" if there are several."""
    datasets = optional("datasets", path)
    try:
        if is_on_hub:  # the split "train"; without a network, from the package's cache
            name, _, subset = str(path).removeprefix(HUB).partition(":")
            dataset = datasets.load_dataset(name, subset or None, split="train")
        else:
            dataset = datasets.load_from_disk(str(path))
        if not is_on_hub and (path / SAVED_DATASETS).is_file():
            if "train" not in dataset:
                raise DataError(
                    f'{path} holds the splits {some(dataset)}, but no "train": name the folder of '
                    "one of them"
                )
            dataset = dataset["train"]
        table = dataset.select_columns(_columns(dataset.column_names, path, text_key))
        for batch in table.with_format("arrow").iter(ROWS):
            yield _python(batch)
    except DataError:
        raise
    except Exception as error:  # the package raises many kinds for a damaged folder
        raise DataError(f"{path}: the dataset cannot be read ({error})") from error


def _python(batch: Any) -> list[dict[str, Any]]:
    """The rows of a batch or table of Arrow. Maps become objects; texts of the type arrow.json,
    which datasets writes for values of mixed types (its feature Json), become these values. Raises
    ValueError for such a text that is not JSON, and for a key twice in a map."""

    def parsed(value: Any, kind: Any) -> Any:
        if value is None:
            return None
        if getattr(kind, "extension_name", "") == "arrow.json":
            return parse_json(value)
        if hasattr(kind, "item_type"):  # a map: a list of pairs
            table = {key: parsed(item, kind.item_type) for key, item in value}
            if len(table) < len(value):
                raise ValueError("a map has a key twice")
            return table
        if isinstance(value, list):
            return [parsed(item, kind.value_type) for item in value]
        if isinstance(value, dict):
            return {key: parsed(item, kind.field(key).type) for key, item in value.items()}
        return value

    rows = batch.to_pylist()
    for field in batch.schema:
        if re.search(r"arrow\.json|map<", str(field.type)):
            for row in rows:
                row[field.name] = parsed(row[field.name], field.type)
    return rows


def _columns(names: Iterable[str], path: Path, text_key: str) -> list[str]:
    """The columns among `names` that a record is made of. Raises DataError without one."""
    names = list(names)
    of_conversations = (SYSTEM, TOOLS, TEMPLATE_VALUES, *MEDIA, FUNCTIONS, *AVOIDED)
    wanted = [name for name in (MESSAGES, text_key) if name in names]
    if MESSAGES in wanted:
        wanted += of_conversations
    for keys, others in SHAPES.items():  # also with a text column, which may be null in some rows
        if all(key in names for key in keys):
            wanted += [*keys, *others, *of_conversations, *REJECTED]
    if not wanted:
        advice = "data.text_key names the column of the text"
        halves = {name.lower() for name in names} & {*QUESTIONS, *ANSWERS, *REJECTED, *DIALOGS}
        if halves and path.exists():
            # The error for a record in a line of JSON has the command that converts it.
            package, rows = "pyarrow.parquet", f"read_table({json.dumps(str(path))}).to_pylist()"
            if path.is_dir():
                split = path / "train" if (path / SAVED_DATASETS).is_file() else path
                package, rows = "datasets", f"load_from_disk({json.dumps(str(split))})"
            # Dates and numbers of other types become texts.
            line = "json.dumps(x, default=str)"
            code = f"import json, {package}; [print({line}) for x in {package}.{rows}]"
            command = f"python -c {shlex.quote(code)} > {shlex.quote(f'{path.stem}.jsonl')}"
            advice = f"lines of JSON have the command that converts them: {command}"
        raise DataError(
            f'{path} has neither a column "{text_key}" nor "{MESSAGES}", but {some(names)}: '
            + (TOKEN_IDS if any(name in IDS for name in names) else advice)
        )
    wanted = [name for name in dict.fromkeys(wanted) if name in names]
    if twice := [name for name in wanted if names.count(name) > 1]:
        raise DataError(f"{path} has the columns {some(twice)} more than once")
    return wanted


def without_nulls(value: Any) -> Any:
    """`value` without nulls: a table has every key of its type in each row, and so has JSON written
    from one; a null means a missing key."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def _kind(value: object) -> str:
    """The JSON name of a value's type."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "a boolean"
    names = {str: "a string", bytes: "bytes", list: "a list", dict: "an object"}
    return names.get(type(value), "a number")
