"""Codes of problems and failures of runs: the error index has those of the package."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from moemesh.config.errors import CODES
from tests.documents import ROOT, text_of


def literals(node: ast.expr | None) -> Iterator[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.IfExp):
        yield from literals(node.body)
        yield from literals(node.orelse)


def codes_used() -> dict[str, str]:
    """Every code that a source file gives to a problem, and one of the places."""
    codes: dict[str, str] = {}
    for path in (ROOT / "moemesh").rglob("*.py"):
        text = path.read_text()
        if not re.search(r"\bcode\b|roblem\(", text):
            continue
        nodes = list(ast.walk(ast.parse(text)))
        helpers = {
            node.name
            for node in nodes
            if isinstance(node, ast.FunctionDef) and [a.arg for a in node.args.args][:1] == ["code"]
        }
        for node in nodes:
            given: list[ast.expr | None] = []
            if isinstance(node, ast.Call):
                name = getattr(node.func, "attr", getattr(node.func, "id", "")).lower()
                given += [word.value for word in node.keywords if word.arg == "code"]
                if name in {"problem", "wrong", *helpers} and node.args:
                    given.append(node.args[0])
                if name == "plan_problem" and len(node.args) > 1:
                    given.append(node.args[1])
            elif isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "code":
                given.append(node.value)
            for code in (code for value in given for code in literals(value)):
                codes[code] = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
    return codes


def test_every_code_is_explained_and_used() -> None:
    used = codes_used()
    assert len(used) > 15, "the scan finds nothing any more"
    assert not (unknown := {c: where for c, where in used.items() if c not in CODES}), unknown
    source = "".join(path.read_text() for path in (ROOT / "moemesh").rglob("*.py"))
    assert not [code for code in CODES if source.count(f'"{code}"') < 2], "explained, never used"


def test_the_failures_of_the_error_index_are_messages_of_the_code() -> None:
    table = text_of("docs/errors.md").split("## Failures of a run")[1].split("\n## ")[0]
    quoted = re.findall(r"`([^`]+)`", "".join(re.findall(r"^\| ([^|]+) \|", table, re.MULTILINE)))
    code = "\n".join(path.read_text() for path in sorted((ROOT / "moemesh").rglob("*.py")))
    code = re.sub(r'"\s*\n\s*f?"', "", code)  # literals of several lines are one
    messages = [one for one in quoted if " " in one]
    assert len(messages) >= 6
    for message in messages:
        # N, names in capitals and dots are placeholders, which a run fills in.
        parts = re.split(r"\b[A-Z]+\b|…", message)
        assert all(part.strip() in code for part in parts), message
