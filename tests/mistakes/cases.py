"""All mistakes: those of ``messages.txt`` with their messages, and those of foreign messages.

A mistake is a line ``$ moemesh ...`` of that file, with the environment before the command and the
text of ``bad.toml`` after it; its message is in the lines below. ``python -m tests.mistakes``
regenerates the messages, so that a new mistake is one more line. Messages of typer and of Python's
parsers change from version to version: such a mistake is a row of ``FOREIGN`` instead.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from moemesh.monitor.devices import signs_of_gpus
from tests.mistakes.files import prepare
from tests.mistakes.runner import Outcome
from tests.sandbox import ROOT
from tests.waiting import ended


class Mistake(NamedTuple):
    """A command line in the words of a shell, the text of ``bad.toml``, and the environment.

    `words`: what a foreign message must hold. `found_late`: while a file is read, when a part of
    the result is written already.
    """

    command: str
    toml: str | None = None
    environ: Mapping[str, str] = {}
    words: tuple[str, ...] = ()
    found_late: bool = False

    @property
    def arguments(self) -> list[str]:
        return shlex.split(self.command)

    @property
    def title(self) -> str:
        """The line of ``messages.txt``."""
        given = "".join(f"{name}={value} " for name, value in self.environ.items())
        file = "" if self.toml is None else f"   (bad.toml: {self.toml!r})"
        return f"$ {given}moemesh {self.command}{file}"


def foreign(command: str, *words: str, **more: bool) -> Mistake:
    return Mistake(command, words=words, **more)


def file(text: str, *words: str) -> Mistake:
    """`config check` of a file with this text."""
    return Mistake("config check bad.toml", toml=text, words=words)


FOREIGN: list[Mistake] = [
    file("[plan", "bad.toml:1", "not valid TOML", "fix: [plan]\n"),
    file("plan]", "fix: [plan]\n"),
    file("tp = [2\ndp = 3", "fix: close every bracket: the open one may be in"),
    file("dtype = float32", 'fix: dtype = "float32"\n'),
    file("lr = = 3", "fix: lr = 3\n"),
    file("lr = =", "fix: a value after the equals sign"),
    file("freeze = [router, 3]", 'fix: freeze = ["router", 3]\n'),
    file("tp =", "fix: a value after the equals sign"),
    file("tp = 1\ntp = 2", "fix: give each key, and each section, once"),
    foreign("config check --set [plan=3", "fix: --set plan.ep=VALUE"),
    file("[plan]\ntp = \n", "bad.toml:2", "not valid TOML"),
    file("[plan]\ntp = 1\ntp = 2\n", "bad.toml:3", "tp = 2"),
    file("[plan]\n[plan]\n", "bad.toml:2"),
    file("[train]\nlr = .5\n", "bad.toml:2"),
    file("[train]\nsteps = 08\n", "bad.toml:2"),
    file('[data]\npath = "a\n', "bad.toml:2"),
    file("x = " + "[" * 5000, "nested too deeply"),
    file("x = " + "9" * 5000, "not valid TOML"),
    foreign("config check --set model.path=broken_model", "config.json"),
    foreign("config check --set model.path=encoder", "t5 has an encoder", "no language model"),
    foreign(
        "plan --model encoder --cluster laptop_cpu --seq-len 128 --global-batch 32",
        "t5 has an encoder",
    ),
    foreign("config check damaged.json", "damaged.json is data"),
    foreign("train --step 5", "--step", "--set train.steps=5"),
    foreign("train --out broken_run", "config.toml", "TOML"),
    foreign("dispatch damaged.json", "damaged.json"),
    foreign("balance damaged.json --gpus 2", "damaged.json"),
    foreign("balance damaged.npz --gpus 2", "damaged.npz"),
    foreign("balance damaged.npy --gpus 2", "damaged.npy"),
    foreign("tokenize none out --tokenizer bytes", "none"),
    foreign("tokenize text.txt out --tokenizer gpt2", "gpt2"),
    foreign("tokenize zipped.txt out --tokenizer bytes", "zipped.txt", "gzip data"),
    foreign("tokenize text.txt out --tokenizer bytes --append-eod", "bytes", "end of a text"),
    foreign(
        "tokenize broken.jsonl out --tokenizer bytes", "broken.jsonl", "line 2", found_late=True
    ),
    foreign("tokenize text.txt text.txt/out --tokenizer bytes", "text.txt"),
]
#: Mistakes only on a machine without a GPU.
if not signs_of_gpus():
    FOREIGN += [
        foreign(f"{verb} --set train.device=cuda", "CUDA", "train.device", "cpu")
        for verb in ("train", "config check")
    ]

MESSAGES = Path(__file__).with_name("messages.txt")
_TITLE = re.compile(r"\$ ((?:\w+=\S* )*)moemesh (.*?)(?:   \(bad\.toml: (.*)\))?")


def kept() -> list[Mistake]:
    """The mistakes of ``messages.txt``."""
    mistakes: list[Mistake] = []
    for line in MESSAGES.read_text(encoding="utf-8").splitlines():
        if line.startswith("$ "):
            title = _TITLE.fullmatch(line)
            assert title is not None, line
            given, command, toml = title.groups()
            environ = dict(one.split("=", 1) for one in given.split())
            mistakes.append(Mistake(command, toml and ast.literal_eval(toml), environ))
    return mistakes


KEPT = kept()
MISTAKES = [*KEPT, *FOREIGN]


def outcomes(python: str = sys.executable) -> list[Outcome]:
    """Outcomes of all mistakes, run in one separate process; `python` runs what the commands start:
    readers of architectures."""
    with tempfile.TemporaryDirectory(prefix="mistakes-") as folder:
        prepare(Path(folder))
        environ = {
            name: value for name, value in os.environ.items() if not name.startswith("MOEMESH_")
        }
        environ |= {"PYTHONPATH": str(ROOT), "COLUMNS": "80", "NO_COLOR": "1"}
        command = [sys.executable, "-m", "tests.mistakes.runner", python]
        done = ended(command, cwd=folder, env=environ)
    assert done.returncode == 0, done.stderr
    return [Outcome(*json.loads(line)) for line in done.stdout.splitlines()]


#: Facts of the machine in a message, and the folder of the call.
_CHANGING = {
    re.compile(r"this machine has [0-9.]+ \w+"): "this machine has N GiB",
    re.compile(r"[0-9.]+ \w+ \([0-9,]+ bytes\) are free"): "N GiB are free",
    re.compile(re.escape(tempfile.gettempdir()) + r"/mistakes-\w+"): "/HERE",
}


def messages(results: Sequence[Outcome]) -> str:
    """The text of ``messages.txt``: commands and their messages, one after the other."""
    text = "\n".join(
        f"{mistake.title}\n{one.err}" for mistake, one in zip(KEPT, results, strict=False)
    )
    for changing, name in _CHANGING.items():
        text = changing.sub(name, text)
    return text
