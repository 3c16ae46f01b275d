"""The documentation is true: snippets run, generated blocks are current, links resolve."""

from __future__ import annotations

import functools
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

import pytest

from moemesh.config.errors import ConfigError
from moemesh.config.layout import AXES
from moemesh.planner.traffic.ledger import predict_ledger
from moemesh.sharding.load_run import load_run
from moemesh.trace.loads import LayerLoads
from moemesh.trace.run import MetricsRow
from moemesh.train.preparation import untrainable
from tests.commands import folder as stand_ins
from tests.documents import (
    BLOCK,
    BLOCKS,
    DOCUMENTS,
    PICTURES,
    ROOT,
    SLOW_BLOCKS,
    SMALL_RUN,
    regenerate,
    text_of,
)
from tests.waiting import ended

pytestmark = pytest.mark.documents

#: First words of commands that are not run: they install, build or need a person.
NOT_RUN = ("make", "pip", "git", "source")
#: The pages that a new user reads, whose runs must write every file that is documented.
FIRST = ("README.md", "docs/tutorial.md")


class Fence(NamedTuple):
    """One fenced snippet and the line of the document where it begins."""

    line: int
    language: str
    text: str


def fences(text: str) -> list[Fence]:
    pattern = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    return [
        Fence(text[: match.start()].count("\n") + 1, match[1], match[2])
        for match in pattern.finditer(text)
    ]


# Snippets.


def commands(console: str) -> Iterator[tuple[str, str]]:
    """(command, shown output) of every line that begins with a prompt."""
    for part in re.split(r"^\$ ", console, flags=re.MULTILINE)[1:]:
        command, _, shown = part.partition("\n")
        yield command, shown


def matches(shown: str, printed: str) -> bool:
    """Whether `printed` is the text that a document shows; ``...`` matches anything."""
    pattern = ".*".join(re.escape(part) for part in shown.strip().split("..."))
    return re.fullmatch(pattern, printed.strip(), re.DOTALL) is not None


def run_command(command: str, shown: str, folder: Path) -> None:
    word = command.split()[0]
    if word in NOT_RUN:
        if word == "make":
            target = command.split()[1]
            assert re.search(rf"^{target}:", text_of("Makefile"), re.MULTILINE), command
        return
    # `moemesh` and `python` start with torch loaded; other programs are those of the environment.
    own = Path(sys.executable).parent
    environment = os.environ | {"PATH": f"{stand_ins()}:{own}:{os.environ['PATH']}"}
    if " train" in command or word == "python":
        environment |= SMALL_RUN
    done = ended(["bash", "-c", command], cwd=folder, env=environment)
    # How long a command works depends on the machine, and so do lines of progress.
    printed = done.stdout + re.sub(r"(?m)^moemesh: .*, \d+ s\n", "", done.stderr)
    # A document that shows a message of the command shows a mistake of the user.
    expected = 2 if shown.startswith("moemesh: ") else 0
    assert done.returncode == expected, f"$ {command}\n{printed}"
    assert not shown or matches(shown, printed), f"$ {command}\n--- printed\n{printed}"


def run_snippet(fence: Fence, folder: Path) -> None:
    match fence.language:
        case "console":
            for command, shown in commands(fence.text):
                run_command(command, shown, folder)
        case "python":
            (folder / "snippet.py").write_text(fence.text)
            run_command("python snippet.py", "", folder)
        case "toml":
            (folder / "snippet.toml").write_text(fence.text)
            assert untrainable(load_run([folder / "snippet.toml"], [], {})) == []
        case "json":
            json.loads(fence.text)
        case "text":
            pass
        case other:
            raise AssertionError(f"a fence in {other!r} would not be tested: use text")


@pytest.fixture(scope="module")
def readme_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which every snippet of FIRST has run, in its order."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "examples").symlink_to(ROOT / "examples")
    for document in FIRST:
        for fence in fences(text_of(document)):
            run_snippet(fence, folder)
    return folder


def test_the_snippets_of_the_readme_run(readme_folder: Path) -> None:
    assert (readme_folder / "runs").is_dir()


@pytest.mark.parametrize("document", [name for name in DOCUMENTS if name not in FIRST])
def test_snippets_run(document: str, tmp_path: Path) -> None:
    for fence in fences(text_of(document)):
        run_snippet(fence, tmp_path)


def test_a_wrong_snippet_is_found(tmp_path: Path) -> None:
    """The harness itself: a wrong output, a failing command and an unknown language are red."""
    for fence in (
        Fence(1, "console", "$ moemesh --version\nmoemesh 99.0\n"),
        Fence(1, "console", "$ moemesh config check --set plan.ep=3\n"),
        Fence(1, "console", "$ make nothing\n"),
        Fence(1, "python", "raise SystemExit(1)\n"),
        Fence(1, "sh", "true\n"),
    ):
        with pytest.raises(AssertionError):
            run_snippet(fence, tmp_path)
    with pytest.raises(ConfigError):
        run_snippet(Fence(1, "toml", "[plan]\nepp = 2\n"), tmp_path)


# The documented run folder, compared with the runs of the first pages.


def listed(section: str, document: str = "docs/run-folder.md") -> set[str]:
    """The first cell, in backquotes, of every row of the tables in a section of a document."""
    body = text_of(document).split(f"\n## {section}\n")[1].split("\n## ")[0]
    return set(re.findall(r"^\| `([^`]+)`", body, re.MULTILINE))


def test_the_run_folder_is_as_documented(readme_folder: Path) -> None:
    runs = list((readme_folder / "runs").iterdir())
    names = {path.name for run in runs for path in run.iterdir()}
    said = {name.split("/")[0] for name in listed("Run folder")}
    # Written by a run that failed, or was killed before it saved, by ampnet, in a git repository
    # with changes, for sinks, and in train.checkpoint_folder.
    rare = {
        "failure.json",
        "failures",
        "metrics-N.jsonl",
        "owner-N.json",
        "profile",
        "profile.json",
        "schedule-A-B.txt",
        "diff.patch",
        "metrics.csv",
        "tensorboard",
        "wandb-id",
    }
    assert names - said == set() and said - names == rare


def test_the_metrics_are_as_documented() -> None:
    assert listed("metrics.jsonl") == {"schema", *(field.name for field in fields(MetricsRow))}


def test_the_loads_are_as_documented() -> None:
    one, other = (LayerLoads(step=n, layer=0, tokens_per_expert=(3, 1)) for n in (1, 2))
    assert listed("loads.jsonl") == set(one.plus(other).to_json())


#: Plans whose callers the first pages do not have.
OTHER_CALLERS = [
    "plan.cp=2 plan.data=zero3",
    "plan.cp=2 plan.context=all_to_all plan.data=parameter_server",
    "plan.tp=2 model.qk_norm=true model.qk_norm_over=projection",
    "plan.dp=2 plan.ep=2 plan.dispatcher=low_latency",
    "plan.tp=2 model.router_selection=sinkhorn model.capacity_factor=1.25",
    "plan.dp=2 plan.ep=2 plan.spare_slots=1",
    "plan.pp=2 plan.microbatches=2 plan.optimizer_validation=after",
    "plan.pp=2 plan.microbatches=2 plan.schedule=pipedream",
    "plan.pp=2 plan.microbatches=2 plan.schedule=ampnet",
]


def test_the_ledger_is_as_documented(readme_folder: Path) -> None:
    keys: set[tuple[str, str, str]] = set()
    for given in OTHER_CALLERS:
        config = load_run([], given.split(), {}).config
        ledger = predict_ledger(config.model, config.plan, seq_len=32, global_batch=4)
        keys |= {(e.caller, e.phase, e.axis) for e in ledger.entries()}
    for file in (readme_folder / "runs").glob("*/ledger.json"):
        for rank in json.loads(file.read_text())["ranks"]:
            keys |= {(e["caller"], e["phase"], e["axis"]) for e in rank["entries"]}
    callers, phases, axes = (set(column) for column in zip(*keys, strict=True))
    assert len(callers) > 12, "the first pages train no plan with tp and ep"
    assert callers <= listed("Callers of the ledger")
    assert phases <= listed("Phases of the ledger")
    documented = listed("Axes", "docs/parallelism.md")
    assert axes <= documented and documented == set(AXES)


# Generated blocks.


@pytest.mark.parametrize("document", DOCUMENTS)
def test_generated_blocks_are_current(document: str) -> None:
    text = text_of(document)
    assert text == regenerate(text), "run `python -m tests.documents` and describe new rows"
    assert not [match[2] for match in BLOCK.finditer(text) if "TODO" in match[3]]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_table_of_families_of_transformers_is_current() -> None:
    text = text_of("docs/huggingface.md")
    assert text == regenerate(text, slow=True), "run `python -m tests.documents --slow`"


@pytest.mark.parametrize("picture", PICTURES)
def test_pictures_are_current(picture: str) -> None:
    assert text_of(picture) == PICTURES[picture](), "run: python -m tests.documents"


def test_every_block_is_somewhere() -> None:
    names = [match[2] for document in DOCUMENTS for match in BLOCK.finditer(text_of(document))]
    assert sorted(names) == sorted([*BLOCKS, *SLOW_BLOCKS])


# Claims in words.

NUMBERS = {word: number for number, word in enumerate(("no", "one", "two", "three", "four"))}
_NUMBER = rf"({'|'.join(NUMBERS)}|\d+)"


def gpus_that_ran() -> int:
    """GPUs of the measurements that are kept."""
    return NUMBERS[re.findall(r"(\w+) NVIDIA", text_of("docs/results/gpu.md"))[0]]


def longest_example() -> int:
    examples = (ROOT / "examples").glob("*.py")
    return max(len(path.read_text(encoding="utf-8").splitlines()) for path in examples)


#: Claim of a page with its number, and whether that number is true.
CLAIMS: tuple[tuple[str, Callable[[int], bool]], ...] = (
    (rf"\b{_NUMBER} GPUs? ha(?:s|ve) (?:ever )?run", lambda n: n == gpus_that_ran()),
    (rf"\bhas run on {_NUMBER} GPUs?\b", lambda n: n == gpus_that_ran()),
    (rf"\bexamples?\b[^.|]{{0,60}} at most {_NUMBER} lines", lambda n: n >= longest_example()),
)


def claims(text: str) -> dict[str, bool]:
    """Claims of a page, and whether each is true."""
    flat = " ".join(text.split())

    def number_of(word: str) -> int:
        return int(word) if word.isdecimal() else NUMBERS[word.lower()]

    return {
        match[0]: is_true(number_of(match[1]))
        for pattern, is_true in CLAIMS
        for match in re.finditer(pattern, flat, flags=re.IGNORECASE)
    }


def test_claims_about_gpus_and_examples_are_true() -> None:
    of_pages = {name: claims(text_of(name)) for name in DOCUMENTS if name != "docs/log.md"}
    assert all("has run on one GPU" in of_pages[name] for name in ("README.md", "docs/index.md"))
    false = {name: [*of] for name, of in of_pages.items() if not all(of.values())}
    assert not false


def test_a_false_claim_is_found() -> None:
    text = "No GPU has run it yet. The layer has run on two\nGPUs. Examples show at most 3 lines."
    assert list(claims(text).values()) == [False, False, False]
    assert all(claims(f"examples show each in at most {longest_example()} lines").values())


# Links.


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_resolve(document: str) -> None:
    prose = re.sub(r"^```.*?^```$", "", text_of(document), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / document).parent / path if path else ROOT / document
        assert file.exists(), f"{document}: {target}"
        if anchor:
            heads = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {slug(head) for head in heads}, f"{document}: {target}"


@functools.cache
def python_files() -> list[str]:
    folders = ("moemesh", "tests", "benchmarks", "examples")
    return [str(path) for folder in folders for path in (ROOT / folder).rglob("*.py")]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_named_files_and_targets_exist(document: str) -> None:
    """Paths, modules and make targets that are named in backquotes."""
    for name in re.findall(
        r"`((?:moemesh|tests|docs|examples|recipes)/[\w/.*-]+)`", text_of(document)
    ):
        assert list(ROOT.glob(name.rstrip("/"))), f"{document}: {name}"
    if not document.startswith(("docs/log.md", "docs/results/", "CHANGELOG.md")):  # of their day
        for name in re.findall(r"`([\w/]+\.py)`", text_of(document)):
            assert any(f"/{path}".endswith(f"/{name}") for path in python_files()), name
    for target in re.findall(r"`make ([\w-]+)`", text_of(document)):
        assert re.search(rf"^{target}:", text_of("Makefile"), re.MULTILINE), target


def slug(head: str) -> str:
    """The anchor that a heading gets."""
    return re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-")
