"""The container files name files, extras and commands that exist, and pin what they fetch."""

import re
import tomllib
from pathlib import Path

import pytest

pytestmark = pytest.mark.documents

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "containers").glob("*.Containerfile"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def instructions(path: Path) -> list[tuple[str, str]]:
    """(instruction, arguments) in order, continued lines joined and comments left out."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [
        (word, rest.strip())
        for line in joined.splitlines()
        if line.strip()
        for word, _, rest in [line.partition(" ")]
    ]


def is_sent(path: str) -> bool:
    """Whether .containerignore lets a path of the root reach the builder."""
    rules = (ROOT / ".containerignore").read_text().split()
    assert rules[0] == "**"
    return f"!{path}" in rules


def test_there_is_one_for_each_kind_of_machine() -> None:
    assert [path.name for path in FILES] == ["cpu.Containerfile", "cuda.Containerfile"]
    ignored = (ROOT / ".containerignore").read_text()
    assert ignored == (ROOT / ".dockerignore").read_text(), "docker reads a name of its own"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_container_file_is_true(path: Path) -> None:
    pairs = instructions(path)
    text = "\n".join(f"{word} {rest}" for word, rest in pairs)
    copied = [source for word, rest in pairs if word == "COPY" for source in rest.split()[:-1]]
    assert {"pyproject.toml", "moemesh"} <= set(copied)
    for source in copied:
        assert (ROOT / source).exists() and is_sent(source.removeprefix("./")), source
    for readable in (PROJECT["readme"], *PROJECT["license-files"]):
        assert readable in copied, "the build of the package reads it"
    (extras,) = re.findall(r'"\.\[([\w,]+)\]"', text)
    assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])
    # Pinned by arguments: Python with the image, torch with its index.
    given = dict(rest.split("=") for word, rest in pairs if word == "ARG")
    assert set(re.findall(r"\$\{(\w+)\}", text)) <= set(given)
    assert "torch==${TORCH}" in text and "python:${PYTHON}-slim" in text
    lowest = tuple(map(int, PROJECT["requires-python"].removeprefix(">=").split(".")))
    assert tuple(map(int, given["PYTHON"].split("."))) >= lowest
    assert f"TORCH := torch=={given['TORCH']}" in (ROOT / "Makefile").read_text()
    words = [word for word, _ in pairs]
    (user,) = [rest for word, rest in pairs if word == "USER"]
    assert user != "root" and f"useradd --create-home --uid 1000 {user}" in text
    assert words.index("USER") < words.index("ENTRYPOINT")
    (entry,) = [rest for word, rest in pairs if word == "ENTRYPOINT"]
    assert entry == f'["{next(iter(PROJECT["scripts"]))}"]'


def test_the_cuda_index_is_that_of_the_documentation() -> None:
    cuda = (ROOT / "containers" / "cuda.Containerfile").read_text()
    (index,) = re.findall(r"^ARG CUDA=(\w+)$", cuda, re.MULTILINE)
    assert f"https://download.pytorch.org/whl/{index}" in (ROOT / "docs" / "gpu.md").read_text()
