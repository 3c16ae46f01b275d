"""Figures of the package's size and shape: ``make house``.

Lines and files of `moemesh`, how long a file and a function are, what is called once, names that
occur more than once, the modules that a rank imports before its first step, and seconds until the
first words of two commands.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator

from tests import words
from tests.sandbox import ROOT

#: A file of fewer lines needs a reason.
SHORT = 60
_RANK = (
    "import sys; import moemesh.cli.train, moemesh.train.command; "
    "print(sum(name.partition('.')[0] == 'moemesh' for name in sys.modules))"
)
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def figures() -> Iterator[tuple[str, str]]:
    """Name and value of every figure that reading the source gives."""
    paths = sorted((ROOT / "moemesh").rglob("*.py"))
    texts = {path: path.read_text(encoding="utf-8") for path in paths}
    trees = [ast.parse(text) for text in texts.values()]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    functions = [node for node in nodes if isinstance(node, _Function)]
    lines = sum(text.count("\n") for text in texts.values())
    inside = [path for path in paths if path.name != "__init__.py"]
    yield "lines", f"{lines:,}"
    yield "files", f"{len(paths)}"
    yield f"files under {SHORT} lines", f"{sum(texts[p].count(chr(10)) < SHORT for p in inside)}"
    yield "lines for each function", f"{lines / len(functions):.1f}"
    yield "private functions called once", f"{sum(len(called_once(tree)) for tree in trees):,}"
    yield (
        "class names that occur twice",
        repeated(Counter(node.name for node in nodes if isinstance(node, ast.ClassDef)), 2),
    )
    yield "file names that occur three times", repeated(Counter(p.name for p in inside), 3)


def called_once(tree: ast.Module) -> list[str]:
    """Private functions and methods that their file names once."""
    nodes = list(ast.walk(tree))
    used = Counter(
        node.id if isinstance(node, ast.Name) else node.attr
        for node in nodes
        if isinstance(node, ast.Name | ast.Attribute)
    )
    private = [node.name for node in nodes if isinstance(node, _Function) and node.name[0] == "_"]
    return [name for name in private if name[:2] != "__" and used[name] == 1]


def repeated(names: Counter[str], least: int) -> str:
    longest = sorted(name for name, count in names.items() if count >= least)
    return f"{len(longest)}{':' if longest else ''} {', '.join(longest)}".strip()


def seconds(*command: str) -> float:
    """Until the command prints its first words."""
    start = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-m", "moemesh", *command], stdout=subprocess.PIPE, cwd=ROOT
    ) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        elapsed = time.perf_counter() - start
        process.kill()
    return elapsed


def main() -> None:
    for name, value in figures():
        print(f"{name:<36} {value}")
    rank = subprocess.run([sys.executable, "-c", _RANK], capture_output=True, text=True, cwd=ROOT)
    print(f"{'modules that a rank imports':<36} {rank.stdout.strip() or rank.stderr}")
    print(f"{'seconds until --help prints':<36} {min(seconds('--help') for _ in range(3)):.2f}")
    print(f"\n{words.report()}")


if __name__ == "__main__":
    main()
