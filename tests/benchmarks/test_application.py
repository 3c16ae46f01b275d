"""The command of the benchmarks: its verbs, their arguments, and mistakes in one message."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from benchmarks import application, layer
from benchmarks.settings import LayerSettings
from tests.sandbox import ROOT

VERBS = [str(one.name) for one in application.app.registered_commands if not one.hidden]


def said(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    """Message of a command with a mistake: on stderr, with exit code 2."""
    monkeypatch.setattr(sys, "argv", ["benchmarks", *words])
    with pytest.raises(SystemExit) as caught:
        application.main()
    out, err = capsys.readouterr()
    assert (caught.value.code, out) == (2, ""), (words, out, err)
    assert err.startswith("moemesh: ") and "Traceback" not in err
    return err


def test_every_verb_is_a_module_of_its_name() -> None:
    assert len(VERBS) == 11
    for verb in VERBS:
        assert callable(importlib.import_module(f"benchmarks.{verb}").run)
        text = (ROOT / "benchmarks" / f"{verb}.py").read_text()
        assert text.endswith(f'    main("{verb}")\n'), "python -m benchmarks.VERB"


def test_a_verb_passes_on_what_it_was_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[object, ...]] = []
    monkeypatch.setattr(layer, "run", lambda *given: calls.append(given))
    arguments = ["--shape", "A", "--ranks", "4", "--dtype", "bfloat16", "--rounds", "7", "--json"]
    monkeypatch.setattr(sys, "argv", ["benchmarks", *arguments])
    with pytest.raises(SystemExit) as caught:
        application.main("layer")
    assert caught.value.code == 0
    ((settings, path),) = calls
    expected = LayerSettings(shape="A", ranks="4", dtype="bfloat16", rounds=7)
    assert settings == expected and path is None
    assert expected.words()[:4] == ["--shape", "A", "--ranks", "4"]


@pytest.mark.parametrize("verb", VERBS)
def test_an_unknown_option_is_one_message(
    verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    message = said([verb, "--no-such-option=3"], monkeypatch, capsys)
    where = f"in the command line (`python -m benchmarks {verb} --help`)"
    assert message.startswith(f"moemesh: 1 problem {where}\n")
    assert "has no such option [unknown-option]" in message and message.count("    fix: ") == 1


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("nothing", ["nothing", "one of layer"]),
        ("layer --shape C", ["--shape cannot be C", "A, B, tiny, all"]),
        ("layer --ranks 0", ["--ranks", "0", "numbers of at least 1"]),
        ("layer --rounds many", ["--rounds must be a whole number, not many"]),
        ("dispatch --workload W9", ["no workload 'W9'", "W0     all experts evenly"]),
        ("dispatch --tokens 0.1k", ["0.1k is 102.4 tokens: a whole number is needed"]),
        ("memory --seq-len 0.1k", ["0.1k is 102.4 tokens: a whole number is needed"]),
    ],
)
def test_a_mistake_names_key_value_and_nearest_choice(
    words: str,
    named: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    message = said(words.split(), monkeypatch, capsys)
    assert all(word in message for word in named), message
