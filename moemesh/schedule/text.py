"""Schedules as text and as CSV, for people to write and for ranks to compare by digest.

The text has a header, a line of ranks for each pipe, a line of entries for each rank; ``#`` starts
a comment.
An operation is ``<stage><kind><microbatch>[p<pipe>][.<slice>]``, a block joins several with ``+``::

    pipeline-schedule v1  name=zb_h1 ranks=2 stages=2 slices=1 microbatches=3
    place 0: 0 1
    rank 0: 0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2
    rank 1: 1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2

``microbatches`` has a number per pipe, ``4,4``. An asynchronous schedule adds ``update=<kind>`` and
``window=<count>``, a generator's arguments follow as ``parameter.<name>=<value>``. The CSV form
holds the same in cells. A CSV table without header, a row of operations for each rank, is read as
well: ranks, stages and placement then follow from the places of the operations.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, cast, get_args, get_type_hints

from moemesh.config.errors import UserError, check_kind
from moemesh.config.limits import parse_json
from moemesh.config.suggest import nearest_path
from moemesh.config.toml import is_number
from moemesh.schedule.action import Entry, Kind, Op, Schedule, UpdateRule

#: Largest size of a file in bytes.
_LARGEST_FILE = 100_000_000


def load(path: str | Path) -> Schedule:
    """The schedule of a text or CSV file. Raises UserError for one that cannot be read."""
    path = Path(path)
    try:
        if path.stat().st_size > _LARGEST_FILE:
            raise UserError(f"{path} has {path.stat().st_size} bytes, more than {_LARGEST_FILE}")
        content = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        near = "" if path.exists() else f" ({nearest_path(path)})"
        raise UserError(f"{path} cannot be read: {error.strerror}{near}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} must be UTF-8 text: byte {error.start} is not") from error
    try:
        reader = from_csv if path.suffix == ".csv" else from_text
        return reader(content)
    except TextError as error:
        raise UserError(f"{path}: {error}") from error


def content_of(schedule: Schedule, path: Path) -> str:
    """The content of a file of `schedule`: a table when `path` ends in .csv, text otherwise; both
    can be edited and given to the command."""
    return to_csv(schedule) if path.suffix == ".csv" else to_text(schedule)


def save(schedule: Schedule, path: str | Path) -> None:
    """Write `schedule` to `path`, see :func:`content_of`. Raises UserError when the file cannot be
    written."""
    path = Path(path)
    try:
        path.write_text(content_of(schedule, path), encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from error


MAGIC = "pipeline-schedule v1"
UPDATE_KINDS = get_args(get_type_hints(UpdateRule)["kind"])

_OP = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})(?:p(\d{1,9}))?(?:\.(\d{1,9}))?", re.ASCII)
_BARE = re.compile(r"[A-Za-z_][\w.-]*", re.ASCII)
_PARAMETER = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_INTEGER = re.compile(r"[+-]?\d{1,4000}", re.ASCII)
_COUNT = re.compile(r"\d{1,9}", re.ASCII)


class TextError(UserError):
    """A schedule that cannot be read: names the line, the token and what was expected."""


class _Line(NamedTuple):
    """One line of the text or row of the table: its number, its label, the tokens after it."""

    number: int
    label: str
    tokens: tuple[str, ...]

    def error(self, message: str, index: int | None = None) -> TextError:
        """An error at token `index` after the label, from 0; None is the label."""
        if index is None:
            return TextError(f"line {self.number}, {self.label!r}: {message}")
        token = self.tokens[index]
        return TextError(f"line {self.number}, token {index + 1}, {token!r}: {message}")


def to_text(schedule: Schedule) -> str:
    """The text form; :func:`from_text` gives an equal schedule back, but with
    ``first_trained_stage`` 0, which the form does not have.

    Raises ValueError unless every parameter's name is a word (letters, digits, underscores).
    """
    lines = [f"{MAGIC}  {' '.join(_header(schedule))}"]
    for label, cells in _rows(schedule):
        lines.append(" ".join([label + ":", *cells]))
    return "\n".join(lines) + "\n"


def to_csv(schedule: Schedule) -> str:
    """The text form in comma-separated cells, a row for every line."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([MAGIC, *_header(schedule)])
    writer.writerows([label, *cells] for label, cells in _rows(schedule))
    return out.getvalue()


def digest(schedule: Schedule) -> str:
    """First 16 hexadecimal digits of the SHA-256 of the text form: ranks compare them."""
    return hashlib.sha256(to_text(schedule).encode()).hexdigest()[:16]


def from_text(text: str) -> Schedule:
    """Read the text form. Raises :class:`TextError` naming line and token. Only the form is checked
    here; whether the schedule can run is for :func:`moemesh.schedule.check.check`."""
    lines: list[_Line] = []
    for number, line in enumerate(text.splitlines(), 1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        if not lines:
            words = content.split()
            lines.append(_Line(number, " ".join(words[:2]), tuple(words[2:])))
            continue
        label, colon, rest = content.partition(":")
        if not colon:
            raise TextError(f"line {number}, {content.split()[0]!r}: expected '<label>: ...'")
        lines.append(_Line(number, " ".join(label.split()), tuple(rest.split())))
    return _schedule(lines)


def from_csv(text: str) -> Schedule:
    """Read the CSV form, or a bare table with a row of operations for each rank. Empty cells are
    skipped. A bare table gets the name "table"; it must hold every stage, each on one rank. Raises
    :class:`TextError` naming line and cell."""
    lines: list[_Line] = []
    reader = csv.reader(io.StringIO(text))
    try:
        for row in reader:
            cells = [cell.strip() for cell in row]
            if lines or any(cells):
                tokens = tuple(filter(None, cells))
                lines.append(_Line(reader.line_num, " ".join(cells[:1]), tokens))
    except csv.Error as error:
        raise TextError(f"line {reader.line_num}: {error}") from error
    while lines and not any(lines[-1].tokens):
        lines.pop()
    if not lines:
        raise TextError("the table is empty")
    # A bare table: numbers and placement follow from the operations.
    if " ".join(lines[0].label.split()) != MAGIC:
        orders = tuple(map(_entries, lines))
        ops = [op for order in orders for entry in order for op in entry]
        stages = 1 + max((op.stage for op in ops), default=0)
        pipes = 1 + max((op.pipe for op in ops), default=0)
        if not ops or max(stages, pipes) > len(ops):
            raise TextError(f"{len(ops)} operations cannot fill {stages} stages in {pipes} pipes")
        owner: dict[tuple[int, int], int] = {}
        for rank, (line, order) in enumerate(zip(lines, orders, strict=True)):
            for index, entry in enumerate(order):
                for op in entry:
                    if owner.setdefault((op.pipe, op.stage), rank) != rank:
                        other = lines[owner[op.pipe, op.stage]].number
                        raise line.error(f"stage {op.stage} is also on line {other}", index)
        for pipe, stage in product(range(pipes), range(stages)):
            if (pipe, stage) not in owner:
                raise TextError(f"no operation of stage {stage} in pipe {pipe}")
        counts = [1 + max(op.microbatch for op in ops if op.pipe == pipe) for pipe in range(pipes)]
        return Schedule(
            name="table",
            num_ranks=len(lines),
            num_stages=stages,
            placement=tuple(tuple(owner[pipe, s] for s in range(stages)) for pipe in range(pipes)),
            orders=orders,
            num_microbatches=tuple(counts),
            num_slices=1 + max(op.slice for op in ops),
        )
    rows = (_Line(n, " ".join(label.split()), cells[1:]) for n, label, cells in lines if cells)
    return _schedule(list(rows))


def parse_op(token: str) -> Op | None:
    """The operation that `token` denotes; None for any other text."""
    match = _OP.fullmatch(token)
    if match is None:
        return None
    stage, kind, microbatch, pipe, part = match.groups()
    return Op(cast(Kind, kind), int(stage), int(microbatch), int(pipe or 0), int(part or 0))


def _header(schedule: Schedule) -> list[str]:
    """``key=value`` tokens of the first line."""
    check_kind("schedule", schedule, Schedule, "schedules.zb_h1(4, 8), or another")
    counts = ",".join(map(str, schedule.num_microbatches))
    header = [
        f"name={_quoted(schedule.name)}",
        f"ranks={schedule.num_ranks}",
        f"stages={schedule.num_stages}",
        f"slices={schedule.num_slices}",
        f"microbatches={counts}",
    ]
    if schedule.update is not None:
        header += [f"update={schedule.update.kind}", f"window={schedule.update.window}"]
    for name, value in sorted(schedule.parameters.items()):
        if not _PARAMETER.fullmatch(name):
            raise ValueError(f"parameter {name!r}: a name has letters, digits and underscores only")
        if isinstance(value, str):
            written = _quoted(value)
        else:
            written = str(int(value)) if isinstance(value, int) else repr(float(value))
        header.append(f"parameter.{name}={written}")
    return header


def _rows(schedule: Schedule) -> Iterable[tuple[str, list[str]]]:
    """Label and cells of every line after the header."""
    for pipe, ranks in enumerate(schedule.placement):
        yield f"place {pipe}", list(map(str, ranks))
    for rank, entries in enumerate(schedule.orders):
        yield f"rank {rank}", ["+".join(map(str, entry)) for entry in entries]


def _quoted(text: str) -> str:
    """`text` as one token: as it is when it is a plain word, else a JSON string."""
    if _BARE.fullmatch(text) and not is_number(text):
        return text
    quoted = json.dumps(text)
    # One token without blanks, and no comment.
    return quoted.replace(" ", "\\u0020").replace("#", "\\u0023")


def _parse_value(text: str) -> int | float | str | None:
    """The value of a parameter; None when `text` is none of its forms."""
    if _INTEGER.fullmatch(text):
        return int(text)
    if is_number(text):
        return float(text)
    if _BARE.fullmatch(text):
        return text
    try:
        value: object = parse_json(text)
    except ValueError:
        return None
    return value if isinstance(value, str) else None


def _schedule(lines: Sequence[_Line]) -> Schedule:
    """The schedule of a header and its labelled lines."""
    if not lines or lines[0].label != MAGIC:
        first_line = f"line {lines[0].number}, {lines[0].label!r}" if lines else "no line at all"
        raise TextError(f"{first_line}: expected {MAGIC!r} and its header")
    # Numbers of the header.
    first, tokens = lines[0], _header_tokens(lines[0])

    def count(key: str) -> int:
        index, value = tokens.get(key, (0, "1"))
        if not _COUNT.fullmatch(value) or int(value) < 1:
            raise first.error("expected a whole number from 1 to 999999999", index)
        return int(value)

    ranks, stages = count("ranks"), count("stages")
    index, value = tokens["microbatches"]
    if not all(map(_COUNT.fullmatch, value.split(","))):
        raise first.error("expected a count for each pipe, such as 8 or 4,4", index)
    counts = tuple(map(int, value.split(",")))
    slices, update = count("slices"), None
    if "update" in tokens:
        index, kind = tokens["update"]
        if kind not in UPDATE_KINDS:
            raise first.error(f"expected one of {', '.join(UPDATE_KINDS)}", index)
        update = UpdateRule(kind=cast(Any, kind), window=count("window"))
    # The labelled lines: one for each pipe, one for each rank.
    parts: dict[str, dict[int, _Line]] = {"place": {}, "rank": {}}
    for line in lines[1:]:
        word, _, number = line.label.partition(" ")
        limit = ranks if word == "rank" else len(counts)
        if word not in parts or not _INTEGER.fullmatch(number):
            raise line.error("expected 'place <pipe>' or 'rank <rank>'")
        if not 0 <= int(number) < limit:
            raise line.error(f"the header leaves room for {word} 0 to {limit - 1} only")
        if int(number) in parts[word]:
            raise line.error(f"is already on line {parts[word][int(number)].number}")
        parts[word][int(number)] = line
    for word, limit in (("place", len(counts)), ("rank", ranks)):
        missing = next((n for n in range(limit) if n not in parts[word]), None)
        if missing is not None:
            raise TextError(f"no line '{word} {missing}:'")
    # The contents of the lines, then the rest of the header.
    placement: list[tuple[int, ...]] = []
    for pipe in range(len(counts)):
        line = parts["place"][pipe]
        for index, token in enumerate(line.tokens):
            if not _COUNT.fullmatch(token):
                raise line.error("expected the rank of a stage", index)
        if len(line.tokens) != stages:
            raise line.error(f"has {len(line.tokens)} ranks for {stages} stages")
        placement.append(tuple(map(int, line.tokens)))
    index, value = tokens["name"]
    name, parameters = _parse_value(value), dict[str, int | float | str]()
    if not isinstance(name, str):
        raise first.error('expected a word, or a JSON string ("two\\u0020words")', index)
    orders = tuple(_entries(parts["rank"][rank]) for rank in range(ranks))
    for key, (index, value) in tokens.items():
        if key.startswith("parameter."):
            parsed = _parse_value(value)
            if parsed is None or not _PARAMETER.fullmatch(word := key.partition(".")[2]):
                raise first.error("expected parameter.<word>=<number, word or string>", index)
            parameters[word] = parsed
    return Schedule(
        name=name,
        num_ranks=ranks,
        num_stages=stages,
        placement=tuple(placement),
        orders=orders,
        num_microbatches=counts,
        num_slices=slices,
        update=update,
        parameters=parameters,
    )


def _header_tokens(line: _Line) -> dict[str, tuple[int, str]]:
    """Key -> (index of its token, value) in the first line. Raises TextError for a missing key."""
    known = ("name", "ranks", "stages", "slices", "microbatches", "update", "window")
    values: dict[str, tuple[int, str]] = {}
    for index, token in enumerate(line.tokens):
        key, equals, value = token.partition("=")
        if not equals or not (key in known or key.startswith("parameter.")):
            message = f"expected <key>=<value> with a key of {', '.join(known)}, parameter.*"
            raise line.error(message, index)
        if key in values:
            raise line.error(f"{key!r} is given twice", index)
        values[key] = (index, value)
    for key in ("name", "ranks", "stages", "microbatches"):
        if key not in values:
            raise line.error(f"the header has no {key}=")
    if "window" in values and "update" not in values:
        raise line.error("window= without update=", values["window"][0])
    return values


def _entries(line: _Line) -> tuple[Entry, ...]:
    """The entries of a line. Equal tokens share one entry."""
    seen: dict[str, Entry] = {}
    for index, token in enumerate(line.tokens):
        if token in seen:
            continue
        ops = tuple(map(parse_op, token.split("+")))
        entry = tuple(op for op in ops if op is not None)
        if len(entry) < len(ops):
            raise line.error(
                f"expected <stage><{'|'.join(get_args(Kind))}><microbatch>[p<pipe>][.<slice>], "
                "joined by '+' in a block",
                index,
            )
        seen[token] = entry
    return tuple(seen[token] for token in line.tokens)
