"""Words that slow a reader down, counted: ``make house`` prints them, ``make check`` holds them.

A line of a comment, a docstring or a message counts once for each match of a kind below, a line of
code for each name. `tests/words.toml` has a ceiling for each part of the repository and kind; a
count may be below its ceiling, never above, and ``python -m tests.words --lower`` writes the counts
of today as ceilings where they are lower. ``python -m tests.words PART KIND`` lists the places.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.sandbox import ROOT

#: Pattern of each kind, and what to write instead.
KINDS = {
    "headless": (
        r"^#: ?(?:Of|In|On|To|By|From|So|As|What|How|Where|Behind|Beside|Up to|At)\b"
        r"|^\"\"\"(?:Of|What|How|As|From|Where|In|On)\b",
        "a noun first: what the attribute or the function is, with its unit or shape",
    ),
    "speech": (
        r"\b(?:told|tells?|telling|says?|said|saying|asks?|asked|speaks?|spoken)\b",
        "returns, prints, logs, reports, raises, checks",
    ),
    "behind": (r"\bbehind\b", "after, next, later"),
    "count": (
        r"\b(?:so|as) (?:many|few|long|often)\b(?! as\b)|\bas of\b|^\W*As :",
        "the first n, at most n, n times",
    ),
    "person": (r"\b(?:whoever|nobody|somebody)\b", "the caller, the user, a rank"),
    "repeat": (r"\b(?:again|once more|anew)\b", "recompute, repeat, resume, retry"),
    "standing": (
        r"\bstands?\b|\b(?:is|are) there\b|\bat work\b|\bunder way\b|\bon (?:its|their) way\b"
        r"|\bgo(?:es)? on\b",
        "exists, is running, pending, in flight, continues",
    ),
    "denial": (r"\b(?:is|are) no\b", "what is required"),
    "name": (
        r"\b(?:told|say|tell|asked|found|misfits|beside|here|its)\b *(?:\+?=(?!=)|:=|\()",
        "the noun of the content",
    ),
}
#: Folder and file pattern of each part of the repository.
PARTS = {
    "package": ("moemesh", "*.py"),
    "tests": ("tests", "*.py"),
    "docs": ("docs", "*.md"),
    "readme": (".", "README.md"),
}
CEILINGS = Path(__file__).with_suffix(".toml")


class Place(NamedTuple):
    path: Path
    line: int
    kind: str
    text: str


def places(part: str) -> Iterator[Place]:
    """Every match in the files of a part."""
    folder, pattern = PARTS[part]
    for path in sorted((ROOT / folder).rglob(pattern) if folder != "." else [ROOT / pattern]):
        source = path.read_text(encoding="utf-8")
        lines = list(enumerate(source.splitlines(), 1))
        prose = lines if path.suffix == ".md" else list(prose_of(source))
        for kind, (expression, _) in KINDS.items():
            if kind == "name" and path.suffix == ".md":
                continue
            for number, text in lines if kind == "name" else prose:
                for _match in re.finditer(expression, text, re.M):
                    yield Place(path, number, kind, text.strip())


def prose_of(source: str) -> Iterator[tuple[int, str]]:
    """Line number and text of comments, of lines of docstrings, and of strings with a blank."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    tree, docstrings = ast.parse(source), set[int]()
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
            continue
        if ast.get_docstring(node) is None:
            continue
        (statement, *_) = node.body
        assert isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        docstrings.add(id(statement.value))
        for offset, line in enumerate(str(statement.value.value).splitlines()):
            yield statement.lineno + offset, ("" if offset else '"""') + line.strip()
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if is_text and " " in node.value and id(node) not in docstrings:
            yield node.lineno, node.value


def counts() -> dict[str, dict[str, int]]:
    """Matches of each part and kind."""
    table = {part: dict.fromkeys(KINDS, 0) for part in PARTS}
    for part, row in table.items():
        for place in places(part):
            row[place.kind] += 1
    return table


def ceilings() -> dict[str, dict[str, int]]:
    return tomllib.loads(CEILINGS.read_text(encoding="utf-8"))


def write_ceilings(table: dict[str, dict[str, int]]) -> None:
    head = "# Most places of each kind of word (tests/words.py): a ceiling may only fall.\n"
    parts = (
        f"\n[{part}]\n" + "".join(f"{kind} = {count}\n" for kind, count in row.items())
        for part, row in table.items()
    )
    CEILINGS.write_text(head + "".join(parts), encoding="utf-8")


def main(words: list[str]) -> None:
    if words == ["--lower"]:
        highest = ceilings()
        write_ceilings(
            {
                part: {kind: min(count, highest[part][kind]) for kind, count in row.items()}
                for part, row in counts().items()
            }
        )
        return
    if len(words) == 2:
        part, kind = words
        print(f"{kind}: write {KINDS[kind][1]}")
        for place in places(part):
            if place.kind == kind:
                print(f"{place.path.relative_to(ROOT)}:{place.line}: {place.text[:150]}")
        return
    print(report())


def report() -> str:
    """A row for each kind, a column for each part, with the ceiling where it is higher."""
    table, highest = counts(), ceilings()
    lines = ["words that slow a reader" + "".join(f"{part:>14}" for part in PARTS)]
    for kind in KINDS:
        cells = []
        for part in PARTS:
            count, most = table[part][kind], highest[part][kind]
            cells.append(f"{count}" if count == most else f"{count} (of {most})")
        lines.append(f"{kind:24}" + "".join(f"{cell:>14}" for cell in cells))
    sums = (str(sum(table[part].values())) for part in PARTS)
    lines.append(f"{'all':24}" + "".join(f"{cell:>14}" for cell in sums))
    return "\n".join(lines)


if __name__ == "__main__":
    main(sys.argv[1:])
