"""Every mistake in the words of a command line, in one message, for every verb."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import typer

from moemesh import cli
from moemesh.cli.application import app
from moemesh.cli.arguments import IN_A_CHECKOUT, nearest_verb
from moemesh.cli.verbs import VERBS as ROWS
from tests.test_cli import Invoke


def verbs() -> Iterator[tuple[str, Any]]:
    """(words, command) of every verb, those of groups included."""
    cli.import_verbs()

    def below(words: str, command: Any) -> Iterator[tuple[str, Any]]:
        if not hasattr(command, "commands"):
            yield words, command
        for name, one in getattr(command, "commands", {}).items():
            yield from below(f"{words} {name}".strip(), one)

    yield from below("", typer.main.get_command(app))


VERBS = dict(verbs())


Said = Callable[[list[str]], str]


@pytest.fixture
def said(invoke: Invoke) -> Said:
    """The message of the command about a mistake, on stderr, with exit code 2."""

    def call(words: list[str]) -> str:
        code, out, err = invoke(*words)
        assert (code, out) == (2, ""), (words, out, err)
        assert "Traceback" not in err
        return err

    return call


def test_the_table_of_words_has_every_verb_once() -> None:
    known = {name for name in VERBS if not name.startswith("bench")}
    assert {name for name in ROWS if name != "bench"} == known
    for group in {name.rpartition(" ")[0] for name in ROWS}:
        inside = [name for name in ROWS if name.rpartition(" ")[0] == group]
        words = [word for name in inside for word in ROWS[name].words.split()]
        names = [name.rpartition(" ")[2] for name in inside]
        assert len(set(words + names)) == len(words + names), (group, sorted(words))


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("eval", "evaluate"),
        ("finetune", "train"),
        ("chat", "generate"),
        ("export", "convert"),
        ("simulate", "schedule"),
        ("trian", "train"),
        ("prune", "checkpoint prune"),
        ("delete", "checkpoint prune"),
        ("verify", "checkpoint verify"),
        ("cluster explain", "cluster show"),
        ("cluster ls", "cluster list"),
        ("cluster create", "cluster init"),
        ("checkpoint delete", "checkpoint prune"),
        ("checkpoint list", "checkpoint ls"),
        ("checkpoint remove", "checkpoint prune"),
        ("checkpoint compare", "checkpoint diff"),
        ("checkpoint verfy", "checkpoint verify"),
        ("checkpoint export", "convert"),
        ("config validate", "config check"),
        ("data preview", "data show"),
        ("help checkpoint ls", "checkpoint ls --help"),
        ("checkpoint help ls", "checkpoint ls --help"),
        ("checkpoint version", "--version"),
        ("help plan --json", "plan --help"),
        ("help nonsense", "--help"),
        ("config ls", "config show"),
    ],
)
def test_a_word_of_another_tool_leads_to_the_verb(typed: str, meant: str, said: Said) -> None:
    assert f"    fix: moemesh {meant}\n" in said(typed.split())


@pytest.mark.parametrize("word", ["init", "new", "qqqq", "delete"])
def test_a_verb_of_another_group_is_no_answer(word: str, said: Said) -> None:
    fix = said(["config", word]).partition("fix: ")[2]
    assert fix and not re.search("cluster|checkpoint", fix)


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        ("--hours 24:00:00", "--hours 24"),
        ("--hours 1-12:30:00", "--hours 36.5"),
        ("--hours 90m", "--hours 1.5"),
        ("--hours long", "--hours 24"),
        ("--time 12:00:00", "--hours 12"),
        ("--nproc_per_node 4", "--ranks-per-node 4"),
        ("--gpus-per-node=4", "--ranks-per-node 4"),
    ],
)
def test_limits_and_sizes_of_jobs_in_the_words_of_schedulers(
    words: str, fix: str, said: Said
) -> None:
    assert f"    fix: {fix}\n" in said(["launch", "--slurm", *words.split()])


def test_every_word_of_the_table_leads_to_its_verb(said: Said) -> None:
    for verb, row in ROWS.items():
        group = verb.split()[:-1]
        for number, word in enumerate(row.words.split()):
            assert nearest_verb(word, " ".join(group)) == verb
            if number == 0:
                assert f"fix: moemesh {verb}\n" in said([*group, word])


def test_a_word_like_none_lists_the_verbs(said: Said) -> None:
    message = said(["checkpoint", "qqqq"])
    assert all(name in message for name in ("ls", "verify", "diff", "prune"))


@pytest.mark.parametrize("verb", VERBS)
def test_all_mistakes_of_a_command_line_come_in_one_message(verb: str, said: Said) -> None:
    """Nothing that is needed is given, an unknown option, and of each number a text."""
    params = VERBS[verb].params
    numbers = [one for one in params if str(one.type_descriptor.annotation) in ("<class 'int'>",)]
    broken = {one.opts[0] for one in numbers}
    missing = {
        one.opts[0] if one.param_type_name == "option" else one.metavar or one.name.upper()
        for one in params
        if one.required and one not in numbers
    }
    words = [word for name in sorted(broken) for word in (name, "many")]
    message = said([*verb.split(), *words, "--no-such-option=3"])
    count = len(broken) + len(missing) + 1
    title = f"{count} problem{'s' * (count > 1)} in the command line"
    assert message.startswith(f"moemesh: {title} (`moemesh {verb} --help`)\n"), message
    wrong = (
        "{} must be a whole number, not many",
        "{}: a number of tokens is at least 1, optionally with",
    )
    assert all(any(one.format(name) in message for one in wrong) for name in broken)
    assert all(f"{name} is missing: " in message for name in missing)
    assert "`moemesh " + verb + "` has no such option [unknown-option]" in message
    assert message.count("    fix: ") == count, message


@pytest.mark.parametrize("option", ["--output-dir", "--force", "--resume-from-checkpoint"])
def test_a_hint_names_options_of_the_verb_alone(option: str, said: Said) -> None:
    assert "a new --out" in said(["train", "--force"])
    message = said(["config", "check", option])
    assert "--out" not in message.partition("fix: ")[2].replace(option, "")


@pytest.mark.parametrize("verb", VERBS)
def test_the_fix_of_what_is_missing_can_be_typed(verb: str, said: Said) -> None:
    """No fix repeats the word of the help, except names that the user chooses."""
    private = {"--partition", "--account", "--image", "--accelerator", "--eod-token", "--payload"}
    private |= {"--block", "--memory-cap", "--found"}
    for param in VERBS[verb].params:
        is_option = param.opts[0].startswith("-")
        if getattr(param, "is_flag", False) or param.opts[0] in private:
            continue
        if is_option or param.required:
            message = said([*verb.split(), *param.opts[:1] * is_option])
            fixes = re.findall(r"    fix: (.*)\n", message)
            assert not re.search(r"\b[A-Z]{2,}\b|\b[A-Z]$", " ".join(fixes)), message
            assert all(re.match(rf"moemesh {verb} .|--\S+ .", one) for one in fixes), message


def test_help_speaks_in_the_words_of_the_field_and_with_a_head() -> None:
    """No help text begins with a question word or a preposition, none has a private word."""
    headless = r"(What|Of|How|Where|As|Which|Whether|Who|Why|When|Such|So|By|Behind|From|On|In) "
    private = r"\b(clothes|onward|told|tells|asks|asked|hottest|hot|votes|crossed|most of a rank)\b"
    texts = [
        (name, text)
        for name, command in VERBS.items()
        for text in (
            command.help or "",
            command.short_help or "",
            *(param.help or "" for param in command.params),
        )
    ]
    assert not [one for one in texts if re.match(headless, one[1])]
    assert not [one for one in texts if re.search(private, one[1])]


def test_the_help_of_groups_names_their_verbs() -> None:
    command: Any = typer.main.get_command(app)
    for group in ("checkpoint", "cluster", "config"):
        listed = command.commands[group].help.split(": ")[1].rstrip(".")
        assert set(listed.split(", ")) == set(command.commands[group].commands)


def test_a_verb_that_left_the_package_is_told_where_it_is(said: Said) -> None:
    for verb, command in IN_A_CHECKOUT.items():
        message = said([*verb.split(), "--help"])
        assert f"    fix: {command}, in a checkout\n" in message
        assert importlib.util.find_spec(command.removeprefix("python -m ")) is not None
    assert not IN_A_CHECKOUT.keys() & VERBS.keys()


@pytest.mark.parametrize(
    ("words", "note"),
    [
        ("layout --plan dp=2 --plan=dp=4", "--plan is given twice: dp=4 counts, not dp=2"),
        ("layout --set plan.dp=2 --set plan.dp=4", "set twice: --set plan.dp=4 counts"),
        ("layout --plan dp=2 --plan dp=2 --model tiny --rank 0 --rank 1", ""),
    ],
)
def test_the_last_of_two_values_counts_with_a_note(words: str, note: str, invoke: Invoke) -> None:
    """Options that may be repeated, and equal values, have no note."""
    code, _, err = invoke(*words.split())
    assert code == 0 and (note in err if note else not err)
