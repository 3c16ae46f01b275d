"""Trained models in use: expert scores and runs that train them, answers by a chat template."""

from __future__ import annotations

import contextlib
import io
import json
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moemesh import cli
from moemesh.comm.mesh import Mesh
from moemesh.config.errors import UserError
from moemesh.data.samples import Samples
from moemesh.data.tokenizer import Tokenizer
from moemesh.sharding.load_run import load_run
from moemesh.trace.run import Run
from moemesh.train.inference import generation
from moemesh.train.inference.esft_request import EsftRequest
from moemesh.train.records import run_folder
from tests.data.test_packing import corpus_of
from tests.huggingface.conversations import add_tokenizer
from tests.huggingface.tiny import save
from tests.train.runs import said

SMALL = ["--set", "model.num_layers=3", "--set", "data.seq_len=16", "--set", "data.global_batch=4"]
SMALL += ["--set", "train.validation_batches=1", "--set", "train.lr=0.01"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run of three steps, and a text."""
    folder = tmp_path_factory.mktemp("esft")
    text = folder / "text.txt"
    text.write_text("one expert knows this, another one does not. " * 40)
    said("train", *SMALL, "--set", "train.steps=3", "--out", str(folder / "run"))
    return folder / "run", text


def scores(run: Path, text: Path, out: Path, *more: str) -> dict[str, Any]:
    given = ["--seq-len", "16", "--samples", "40", "--out", str(out), *more]
    printed = said("esft", "scores", str(run), str(text), *given)
    assert shlex.split(printed.rpartition("train them: ")[2]) == ["--set", f"train.esft={out}"]
    return json.loads(out.read_text())


def test_scores_are_shares_and_plans_agree(trained: tuple[Path, Path], tmp_path: Path) -> None:
    run, text = trained
    drawn = tmp_path / "p.svg"
    one = scores(run, text, tmp_path / "a table.json", "--threshold", "0.5", "--svg", str(drawn))
    for layer, chosen in one["experts"].items():
        row = one["scores"][layer]
        assert sum(row["gate"]) == pytest.approx(1) and sum(row["token"]) == pytest.approx(1)
        reached = sum(row["gate"][expert] for expert in chosen)
        least = min(row["gate"][expert] for expert in chosen)
        assert reached >= 0.5 > reached - least, "the smallest set"
    assert one["experts"].keys() == {"1", "2"}
    frames = drawn.read_text().split('stroke="#b3245e" stroke-width="2">')[1].split("</g>")[0]
    assert frames.count("<rect") == sum(map(len, one["experts"].values()))
    many = scores(
        run, text, tmp_path / "4.json", "--threshold", "0.5", "--score", "gate",
        "--set", "plan.tp=2", "--set", "plan.ep=2",
    )  # fmt: skip
    assert many["experts"] == one["experts"] and many["data"] == one["data"]
    for layer, row in one["scores"].items():
        assert many["scores"][layer]["gate"] == pytest.approx(row["gate"], abs=1e-5)


def test_a_run_trains_the_table_and_resumes(trained: tuple[Path, Path], tmp_path: Path) -> None:
    run, text = trained
    table = tmp_path / "table.json"
    choice = scores(run, text, table, "--experts-per-layer", "2", "--score", "token")
    out = str(tmp_path / "tuned")
    arguments = ["train", *SMALL, "--set", f"train.esft={table}", "--out", out]
    said(*arguments, "--set", "train.steps=2")
    memory = Run.load(Path(out)).memory
    assert memory is not None
    assert memory.ranks[0].gradients == memory.predicted[0].gradients
    assert memory.ranks[0].optimizer == memory.predicted[0].optimizer
    # Two of eight experts in two layers, in fp32: a gradient and two moments.
    assert memory.ranks[0].optimizer == 2 * memory.ranks[0].gradients
    assert memory.ranks[0].gradients * 4 == memory.ranks[0].expert_weights
    said(*arguments, "--set", "train.steps=3")
    table.unlink()
    # The run has a copy of its table.
    said("evaluate", out, "--data", str(text), "--seq-len", "16")
    choice["experts"]["1"] = [7] if choice["experts"]["1"] != [7] else [6]
    table.write_text(json.dumps(choice))
    error = said(*arguments, "--set", "train.steps=4", code=2)
    assert "the run in this folder trains" in error


def test_windows_are_no_longer_than_the_positions_of_the_model() -> None:
    request = EsftRequest(source=Path("model"), data="text.txt", out=Path("out.json"))
    for positions, length in ((0, 4096), (64, 64), (8192, 4096)):
        given = [f"model.max_position_embeddings={positions}", "data.seq_len=8"]
        assert request.checked(load_run([], given, environ={}).config).seq_len == length


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--experts-per-layer", "9"], "a layer has 8 experts"),
        (["--seq-len", "4000"], "one window"),
    ],
)
def test_requests_that_cannot_be_met(
    trained: tuple[Path, Path], tmp_path: Path, given: list[str], message: str
) -> None:
    run, text = trained
    out = tmp_path / "table.json"
    window = [] if "--seq-len" in given else ["--seq-len", "16"]
    arguments = ["esft", "scores", str(run), str(text), "--out", str(out), *window, *given]
    assert message in said(*arguments, code=2)
    assert not out.exists()


pytest.importorskip("transformers")


class Model:
    """Writes one of its `texts`, then "x" for ever; `prompts` are those that it was given."""

    def __init__(self, tokenizer: Tokenizer, texts: list[str]) -> None:
        self.tokenizer, self.texts, self.prompts = tokenizer, texts, list[str]()

    def __call__(self, model: Any, ids: list[int], *others: Any) -> Iterator[int]:
        self.prompts.append(self.tokenizer.decode(ids))
        yield from self.tokenizer.encode(self.texts[len(self.prompts) - 1].encode(), "").tolist()
        yield from (int(self.tokenizer.encode(b"x", "")[0]) for _ in count())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One token a character, turns that end in the four of ``</s>``."""
    return add_tokenizer(save("qwen3_moe", tmp_path / "model"))


def on_one_rank(config: Any, work: Callable[[Mesh], str], *more: str) -> int:
    """Run the work in this process, as a replacement of `generation.on_ranks`."""
    if text := work(Mesh.single("cpu")):
        print(text)
    return 0


@pytest.fixture
def answering(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Model]:
    def answer(*texts: str) -> Model:
        made = Model(Tokenizer.open(str(folder)), list(texts))
        parallel = SimpleNamespace(model=None, close=lambda: None)
        monkeypatch.setattr(generation, "continuation", made)
        monkeypatch.setattr(generation, "load", lambda *_, **__: parallel)
        monkeypatch.setattr(generation, "on_ranks", on_one_rank)
        return made

    return answer


Generated = Callable[..., tuple[str, str]]


@pytest.fixture
def generated(folder: Path, capsys: pytest.CaptureFixture[str]) -> Generated:
    """Output of `moemesh generate` on stdout and stderr; with its chat template by default."""

    def generate(prompt: str | None, *, chat: bool = True, **options: Any) -> tuple[str, str]:
        generation.generate(folder, prompt, chat=chat, **options)
        return tuple(capsys.readouterr())

    return generate


def test_one_answer(answering: Callable[..., Model], generated: Generated) -> None:
    model = answering("It is <7>.</s>\n<user>", "abc", "It is 7.</s>")
    assert generated("3 + 4?", system="Be brief.")[0] == "It is <7>.\n"
    assert model.prompts == ["<system>Be brief.</s>\n<user>3 + 4?</s>\n<assistant>"]
    assert generated("3 + 4?", max_tokens=5)[0] == "abcxx\n"
    assert model.prompts[1] == "<user>3 + 4?</s>\n<assistant>"
    answer = json.loads(generated("3 + 4?", as_json=True)[0])
    assert answer["text"] == "It is 7." and len(answer["tokens"]) == 12


def test_prompts_of_a_file_are_answered_together_as_each_alone(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(generation, "on_ranks", on_one_rank)
    overrides, options = ["train.dtype=float64"], {"max_tokens": 9, "temperature": 0.7}
    most = generation.config_of(folder, overrides).model.max_position_embeddings
    prompts = ["a", "", "one and two", "ab" * most, "<7>", "one more"]
    alone: list[str] = []
    for seed, prompt in enumerate(prompts):
        with contextlib.suppress(UserError):
            generation.generate(folder, prompt, overrides, seed=seed, **options)
        alone.append(capsys.readouterr().out.removesuffix("\n"))
    files = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    files[0].write_text("\n".join(prompts) + "\n", "utf-8-sig")
    files[1].write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in prompts))
    for file in files:
        given = {"prompts": file, "batch": 3, **options}
        assert generation.generate(folder, None, overrides, as_json=True, **given) == 2
        said = capsys.readouterr()
        rows = [json.loads(line) for line in said.out.splitlines()]
        assert [row["line"] for row in rows] == [1, 2, 3, 4, 5, 6]
        errors = {row["line"]: row["error"] for row in rows if "error" in row}
        assert errors == {
            2: "line 2 is empty; it needs at least one token",
            4: f"line 4 has {2 * most} tokens, and the model has {most} positions: at most "
            f"{most - 1}, and a new one",
        }
        assert said.err.splitlines()[-2:] == [f"{file}: {error}" for error in errors.values()]
        texts = [prompts[row["line"] - 1] + row["text"] for row in rows if "text" in row]
        assert texts == [text for text in alone if text] and len(texts) == 4
        generation.generate(folder, None, overrides, **given)
        assert capsys.readouterr().out.split("\n== line ")[1] == f"3\n{alone[2]}"
    files[1].write_text('{"prompt": "a"}\n{"text": "b"}\n')
    with pytest.raises(UserError, match="line 2: no text named prompt"):
        generation.generate(folder, None, overrides, prompts=files[1])


def test_a_terminal_shows_the_text_as_it_comes(
    folder: Path,
    answering: Callable[..., Model],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, seen = answering("ab</s>", "cd", "ef</s>"), list[str]()
    whole = model.__class__.__call__

    def spied(self: Model, *given: Any) -> Iterator[int]:
        for one in whole(self, *given):
            seen.append(capsys.readouterr().out)
            yield one

    monkeypatch.setattr(Model, "__call__", spied)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    generation.generate(folder, "?", chat=True)
    assert seen[:3] == ["", "a", "b"] and capsys.readouterr().out == "\n"
    seen.clear()
    generation.generate(folder, "12", max_tokens=2)
    assert (seen, capsys.readouterr().out) == (["12", "c"], "d\n")
    seen.clear()
    generation.generate(folder, "?", chat=True, as_json=True)
    assert not "".join(seen) and json.loads(capsys.readouterr().out)["text"] == "ef"


def test_an_answer_ends_at_the_models_own_tokens_too(
    folder: Path, answering: Callable[..., Model], generated: Generated
) -> None:
    model = answering("ab~cd</s>")
    end = int(model.tokenizer.encode(b"~", "")[0])
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [end]}))
    assert generated("?")[0] == "ab\n"


def test_a_continuation_keeps_its_first_blank(tmp_path: Path) -> None:
    """Decoders of the kind of Llama's drop a blank before the first of the tokens they get."""
    tokenizers, transformers = map(pytest.importorskip, ("tokenizers", "transformers"))
    words = {word: id_ for id_, word in enumerate(["[UNK]", "▁Hello", "▁world", "s"])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    made.decoder = tokenizers.decoders.Metaspace()
    made.save(str(tmp_path / "tokenizer.json"))
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    whole, pieces = theirs.decode([1, 2, 3, 2]), list[str]()
    given: dict[str, Any] = {"stops": (), "stop": "", "max_tokens": 9, "log": pieces.append}
    growing = generation.GrowingText(Tokenizer.open(str(tmp_path)), prompt=[1], **given)
    assert all(map(growing.add, (2, 3, 2))) and growing.text() == whole.removeprefix("Hello")
    assert "".join(pieces) == " worlds world" and pieces[0] == " world"


@pytest.mark.parametrize("prompt", ["a" * 999, "\u20ac" * 999, "\U0001f600" * 999, "", "\u20ac"])
def test_a_long_prompt_is_not_decoded_with_every_token(
    prompt: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only its end is, from the beginning of a character on: this decoder loses all bytes of a
    row if those of one character are missing."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {f"<0x{byte:02X}>": byte for byte in range(256)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "<0x00>"))
    made.decoder = tokenizers.decoders.Sequence(
        [tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    )
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer, most = Tokenizer.open(str(tmp_path)), 0
    decode = tokenizer.decode

    def counted(ids: Sequence[int], **options: Any) -> str:
        nonlocal most
        most = max(most, len(ids))
        return decode(ids, **options)

    monkeypatch.setattr(tokenizer, "decode", counted)
    ids, pieces = list(prompt.encode()), list[str]()
    given: dict[str, Any] = {"stops": (), "stop": "", "max_tokens": 99, "log": pieces.append}
    growing = generation.GrowingText(tokenizer, prompt=ids, **given)
    assert all(map(growing.add, "\u20ac b".encode()))
    assert growing.text() == "".join(pieces) == "\u20ac b" and most < 99


def test_a_stop_ends_inside_of_a_token(tmp_path: Path) -> None:
    """The text ``</s>`` in two tokens, the second of which has more characters."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: id_ for id_, word in enumerate(["[UNK]", "ab", "</", "s>\n", "x"])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "[UNK]"))
    made.decoder = tokenizers.decoders.Fuse()
    made.save(str(tmp_path / "tokenizer.json"))
    pieces = list[str]()
    given: dict[str, Any] = {"stops": (), "stop": "</s>", "max_tokens": 9, "log": pieces.append}
    growing = generation.GrowingText(Tokenizer.open(str(tmp_path)), **given)
    assert [growing.add(token) for token in (1, 2, 4, 2, 3)] == [True] * 4 + [False]
    assert growing.text() == "ab</x" == "".join(pieces)


def test_an_answer_without_the_blank_before_its_end(
    folder: Path, answering: Callable[..., Model], generated: Generated
) -> None:
    """Templates of Llama 2 write a blank before ``</s>``; a model may end without it."""
    template = (folder / "chat_template.jinja").read_text()
    assert template.count("</s>") == 1
    (folder / "chat_template.jinja").write_text(template.replace("</s>", " ~"))
    rules = json.loads((folder / "tokenizer.json").read_text())
    end = {"id": rules["model"]["vocab"]["~"], "content": "~", "special": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    (folder / "tokenizer.json").write_text(json.dumps(rules | {"added_tokens": [end | flags]}))
    answering("ab~cd", "ab ~cd")
    assert (generated("?")[0], generated("?")[0]) == ("ab\n", "ab \n")


def test_a_prompt_for_a_folder_begins_as_in_transformers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run gets no token, as in its training; a chat template writes its own."""
    rules = json.loads((folder / "tokenizer.json").read_text())
    rules["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<s>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [3], "tokens": ["<s>"]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(rules))
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(str(folder))
    given: list[list[int]] = []

    def continued(model: Any, ids: list[int], *others: Any) -> Iterator[int]:
        given.append(ids)
        return iter(())

    parallel = SimpleNamespace(model=None, close=lambda: None)
    monkeypatch.setattr(generation, "continuation", continued)
    monkeypatch.setattr(generation, "load", lambda *_, **__: parallel)
    monkeypatch.setattr(generation, "on_ranks", on_one_rank)
    generation.generate(folder, "ab")
    generation.generate(folder, "ab", chat=True)
    expected = theirs("ab")["input_ids"]
    assert given[0] == expected and expected[0] == 3
    talk = [{"role": "user", "content": "ab"}]
    chat = theirs.apply_chat_template(talk, add_generation_prompt=True)["input_ids"]
    assert given[1] == chat and chat[0] != 3
    monkeypatch.setattr(generation, "CONFIG", "none.json")  # as for a run
    generation.generate(folder, "ab")
    assert given[2] == expected[1:]


def test_a_prompt_with_its_beginning_gets_no_second(folder: Path) -> None:
    config, tokenizer = load_run([], [], environ={}).config, Tokenizer.open(str(folder))
    first, *others = tokenizer.encode(b"ab", "test").tolist()
    for beginning, expected in (([first], [first, *others]), ([5], [5, first, *others])):
        encoder = generation.PromptEncoder(config, tokenizer, None, [], beginning)
        assert encoder.ids("ab") == expected


def test_settings_of_a_folder_that_are_not_applied(
    folder: Path, answering: Callable[..., Model], generated: Generated
) -> None:
    answering("ab</s>", "cd</s>")
    assert "not applied" not in generated("?")[1]
    (folder / "generation_config.json").write_text('{"temperature": 0.7, "top_k": 20}')
    assert "sets temperature, top_k, which are not applied" in generated("?")[1]


def test_an_empty_answer_is_no_silence(
    answering: Callable[..., Model], generated: Generated
) -> None:
    answering("</s>")
    out, err = generated("?")
    assert not out.strip() and "the answer is empty" in err


@pytest.mark.parametrize("last", ["/exit", None])
def test_a_conversation_at_the_terminal(
    answering: Callable[..., Model],
    generated: Generated,
    monkeypatch: pytest.MonkeyPatch,
    last: str | None,
) -> None:
    model = answering("One <.</s>", "Two.</s>")
    lines = iter(["first?", "", " second? ", last])

    def answer(prompt: str) -> str:
        line = next(lines)
        if line is None:
            raise EOFError
        return line

    monkeypatch.setattr("builtins.input", answer)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    out, err = generated(None)
    first = "<user>first?</s>\n<assistant>"
    assert model.prompts == [first, f"{first}One <.</s>\n<user>second?</s>\n<assistant>"]
    assert out == "One <.\nTwo.\n\n" and "/exit or Ctrl-D" in err


def test_a_conversation_from_a_pipe(
    answering: Callable[..., Model], generated: Generated, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = answering("One.</s>", "Two.</s>")
    monkeypatch.setattr(sys, "stdin", io.StringIO("first?\n\nsecond?\n"))
    assert generated(None) == ("One.\nTwo.\n", "")
    assert len(model.prompts) == 2 and "<assistant>One.</s>" in model.prompts[1]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n"))
    with pytest.raises(UserError, match="stdin holds no question: give one as --prompt"):
        generated(None)


def test_what_chat_refuses(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=r"the plan has 2 ranks, and .* give --prompt TEXT"):
        generation.generate(folder, None, ["plan.dp=2"], chat=True)
    with pytest.raises(
        UserError, match=r"\"bytes\", which has no chat template, and --chat needs one"
    ):
        generation.generate(folder, "?", ["data.tokenizer=bytes"], chat=True)
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no system turns') }}")
    with pytest.raises(UserError, match=r"the conversation: .* fails: no system turns"):
        generation.generate(folder, "?", chat=True)
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match=r"name the folder of a tokenizer with chat_template"):
        generation.generate(folder, "?", chat=True)
    for options, message in (
        (["--chat", "--json"], "answers one --prompt"),
        (["--prompt", "a", "--prompts", "b"], "give one of them"),
        (["--prompt", ""], "moemesh: --prompt is empty; it needs at least one token\n"),
    ):
        monkeypatch.setattr(sys, "argv", ["moemesh", "generate", str(folder), *options])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        err = capsys.readouterr().err
        assert caught.value.code == 2 and message in err and "note" not in err


def test_a_run_that_was_tuned_on_conversations_says_so(
    folder: Path, answering: Callable[..., Model], generated: Generated
) -> None:
    answering("a", "b", "c</s>", "d")
    texts = [corpus_of([10] * 30), corpus_of([10] * 30, texts=tuple(range(30)))]
    texts[1].__dict__["learned"] = None
    for corpus in texts:
        facts = run_folder.record_of_data(Samples(corpus, seq_len=8, seed=0))
        (folder / "data.json").write_text(json.dumps(facts))
        _, err = generated("?", chat=False, max_tokens=2)
        assert ("this run was tuned on conversations: --chat" in err) == (corpus is texts[0])
    (folder / "data.json").write_text(json.dumps({"sources": None}))
    assert "tuned" not in generated("?")[1] + generated("?", chat=False, max_tokens=2)[1]
