"""Conversations: the text of the chat template, and loss on the assistant turns only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moemesh.comm.mesh import Mesh
from moemesh.data.chat import ChatTemplate
from moemesh.data.corpus import Corpus, Document
from moemesh.data.records import Where
from moemesh.data.samples import Samples
from moemesh.data.tokenizer import DataError, Tokenizer
from moemesh.train.opening import own_batches

#: ChatML, in the form of many published models.
CHATML = """{% for message in messages %}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
"""
HERE = Where("chat.jsonl", "line", 7, 90)
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Grüße?"},
    {"role": "assistant", "content": "Hallo, schön!"},
    {"role": "user", "content": "And?"},
    {"role": "assistant", "content": "Bye."},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tokenizer of characters and two special tokens, with its template."""
    tokenizers = pytest.importorskip("tokenizers")
    path = tmp_path / "tokenizer"
    path.mkdir()
    written = "".join(one["content"] + one["role"] for one in TALK)
    letters = sorted(set(written) | set("\n <|>_.,?B"))
    vocabulary = {letter: index for index, letter in enumerate(["?unknown", *letters])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="?unknown"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    made.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    made.decoder = tokenizers.decoders.Fuse()
    made.save(str(path / "tokenizer.json"))
    (path / "chat_template.jinja").write_text(CHATML)
    return path


def by_itself(template: ChatTemplate, record: dict[str, Any], tokenizer: Tokenizer) -> Document:
    """Document of a single conversation."""
    rendered = template.render(record, HERE)
    ((ids, offsets),) = tokenizer.encode_with_offsets([rendered.text])
    return Document(HERE, ids, rendered.mask(offsets))


def learned_of(document: Document) -> list[int]:
    assert document.learned is not None
    return document.ids[document.learned].tolist()


def jsonl(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
    return path


def test_the_assistant_turns_carry_loss(folder: Path) -> None:
    tokenizer = Tokenizer.open(str(folder))
    encoded = by_itself(ChatTemplate.open(tokenizer), {"messages": TALK}, tokenizer)
    learned = learned_of(encoded)
    start, end = (tokenizer.encode(text, "") for text in (b"<|im_start|>", b"<|im_end|>"))
    assert len(start) == len(end) == 1
    text = tokenizer.decode([one for one in learned if one != int(end[0])])
    assert text == "Hallo, schön!Bye.", "not the newline that the template writes after a turn"
    assert learned.count(int(end[0])) == 2, "the end of a turn is learned"
    assert int(start[0]) not in learned, "the header is not"


def test_bytes_of_characters_are_learned_whole() -> None:
    template = ChatTemplate(CHATML, {}, "test")
    encoded = by_itself(template, {"messages": TALK}, Tokenizer.open("bytes"))
    text = bytes(learned_of(encoded)).decode()
    assert text == "Hallo, schön!<|im_end|>Bye.<|im_end|>"


def test_the_rendering_is_that_of_transformers(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    expected = theirs.apply_chat_template(TALK, chat_template=CHATML, tokenize=False)
    tokenizer = Tokenizer.open(str(folder))
    encoded = by_itself(ChatTemplate.open(tokenizer), {"messages": TALK}, tokenizer)
    assert np.array_equal(encoded.ids, tokenizer.encode(expected.encode(), HERE))


def test_batches_have_the_mask(folder: Path, tmp_path: Path) -> None:
    data = jsonl(tmp_path / "chat.jsonl", *[{"messages": TALK}] * 50)
    tokenizer = Tokenizer.open(str(folder))
    one = by_itself(ChatTemplate.open(tokenizer), {"messages": TALK}, tokenizer)
    corpus = Corpus.open(str(data), tokenizer=str(folder), vocab_size=300)
    assert np.array_equal(corpus.tokens, np.tile(one.ids, 50)), "no token between them"
    assert corpus.learned is not None and np.array_equal(corpus.learned, np.tile(one.learned, 50))
    size = len(one.ids)
    samples = Samples(corpus, seq_len=2 * size + 9, seed=0, global_batch=2)
    (batch,) = own_batches(samples, Mesh.single("cpu"), np.arange(4), 1, seed=0)
    assert batch.loss_mask_BS is not None and batch.documents_BS is not None
    assert batch.valid_BS is not None and batch.valid_BS.sum(1).tolist() == [2 * size] * 4
    # A token that carries loss is the target of the one before it.
    learned = np.concatenate([one.learned[1:], [False]] * 2 + [np.zeros(9, dtype=bool)])
    assert np.array_equal(batch.loss_mask_BS.numpy(), np.tile(learned, (4, 1)))
    assert batch.num_loss_tokens() == 4 * 2 * one.learned.sum()
    numbers = np.repeat([0, 1, -1], [size, size, 9])
    assert np.array_equal(batch.documents_BS[0].numpy(), numbers)


def test_texts_and_conversations_in_one_file(folder: Path, tmp_path: Path) -> None:
    data = jsonl(tmp_path / "mixed.jsonl", {"text": "brief"}, {"messages": TALK}, {"text": "user"})
    corpus = Corpus.open(str(data), tokenizer=str(folder), vocab_size=300)
    assert corpus.learned is not None
    assert corpus.learned[:5].all() and corpus.learned[-4:].all()
    newline = Tokenizer.open(str(folder)).encode(b"\n", "")
    assert corpus.learned[5] and corpus.tokens[5] == newline[0], "the end of a text"
    assert corpus.starts[1] == 6 and len(corpus.starts) == 3


def test_a_corpus_of_texts_has_no_mask(tmp_path: Path) -> None:
    data = jsonl(tmp_path / "text.jsonl", {"text": "one"}, {"text": "two"})
    assert Corpus.open(str(data)).learned is None


MISTAKES: dict[str, tuple[Any, str]] = {
    "empty": ({"messages": []}, "line 1, byte 0: .* at least one message"),
    "no role": ({"messages": [{"content": "x"}]}, 'line 1, byte 0: message 1 has no "role"'),
    "no content": ({"messages": [{"role": "user"}]}, 'message 1 has no "content"'),
    "other content": (
        {"messages": [{"role": "assistant", "content": None, "refusal": "No."}]},
        'message 1 has no "content", but "refusal"',
    ),
    "a call of an older form": (
        {"messages": [{"role": "assistant", "content": None, "function_call": {"name": "f"}}]},
        'message 1 has "function_call", which is not read',
    ),
    "no answer": ({"messages": TALK[:2]}, 'no assistant turn .*, but turns of "system", "user"'),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "line 1, byte 0: message 1 holds image data; only text is trained",
    ),
    "a sound": (
        {"messages": [*TALK[:1], {"role": "user", "content": [{"audio": "a.wav"}]}]},
        "message 2 holds audio data",
    ),
    "no list": ({"messages": "x"}, "messages: not valid JSON"),
    "tools by name": ({"messages": TALK, "tools": ["f"]}, '"tools" must be a list of objects'),
    "values": (
        {"messages": TALK, "chat_template_kwargs": [1]},
        '"chat_template_kwargs" must be an object',
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_what_is_no_conversation(folder: Path, tmp_path: Path, name: str) -> None:
    record, message = MISTAKES[name]
    data = jsonl(tmp_path / "chat.jsonl", record)
    with pytest.raises(DataError, match=message):
        Corpus.open(str(data), tokenizer=str(folder), vocab_size=300)


def test_templates_that_fail(folder: Path, tmp_path: Path) -> None:
    data = jsonl(tmp_path / "chat.jsonl", {"messages": TALK})
    (folder / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(DataError, match=r"line 1, byte 0: .* fails: roles must alternate"):
        Corpus.open(str(data), tokenizer=str(folder), vocab_size=300)
    (folder / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(DataError, match="is broken"):
        Corpus.open(str(data), tokenizer=str(folder), vocab_size=300)
    (folder / "chat_template.jinja").write_text("{% break %}")
    with pytest.raises(DataError, match="is broken: 'break' outside loop"):
        Corpus.open(str(data), tokenizer=str(folder), vocab_size=300)
    (folder / "chat_template.jinja").write_text(
        "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    )
    with pytest.raises(DataError, match="fails"):
        Corpus.open(str(data), tokenizer=str(folder), vocab_size=300)
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(DataError, match=r"chat_template\.jinja"):
        Corpus.open(str(data), tokenizer=str(folder), vocab_size=300)


def test_a_template_that_leaves_turns_out() -> None:
    """Turns that are missing in the text carry no loss; a record without an answer is bad."""
    source = "{% for m in messages %}{{ m.content if loop.last else '' }};{% endfor %}"
    template = ChatTemplate(source, {}, "test")
    rendered = template.render({"messages": TALK}, HERE)
    assert [rendered.text[span.start : span.stop] for span in rendered.learned] == ["Bye.;"]
    with pytest.raises(DataError, match=r"line 7, byte 90: .* none of the assistant turns"):
        template.render({"messages": [*TALK, {"role": "user", "content": "?"}]}, HERE)


def test_a_list_that_the_template_writes_as_code() -> None:
    """A template for texts writes the list of parts itself; one for parts writes their texts."""
    parts = [{"type": "text", "text": "1 + 2?"}]
    talk = [{"role": "user", "content": parts}, {"role": "assistant", "content": "3"}]
    with pytest.raises(DataError, match=r"message 1 has a list .* as Python code: jq -c"):
        ChatTemplate(CHATML, {}, "test").render({"messages": talk}, HERE)
    both = CHATML.replace(
        "message.content",
        "message.content if message.content is string else message.content[0].text",
    )
    assert both != CHATML
    assert "user\n1 + 2?" in ChatTemplate(both, {}, "test").render({"messages": talk}, HERE).text


#: Contents, and the part that a template for lists of texts leaves out.
PARTS: list[tuple[Any, str | None]] = [
    ([{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache_control": {}}], None),
    ([{"type": "thinking", "thinking": "a"}, {"type": "text", "text": "b"}], None),
    (["a", "b"], "part 1 of message 1"),
    ([{"type": "text", "text": "a"}, {"type": "tool_result", "content": "b"}], "part 2 of message"),
    ({"text": "a"}, "the object in message 1"),
]


#: CHATML, also for contents that are lists of texts.
OF_PARTS = CHATML.replace(
    "{{ message.content }}",
    "{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{{ part.text }}{% endfor %}{% endif %}",
)


def test_the_search_for_lost_parts_renders_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rendering for each part made conversations of many parts ten times as slow."""
    template, calls = ChatTemplate(OF_PARTS, {}, "test"), list[int]()
    render = template._render
    monkeypatch.setattr(template, "_render", lambda *x, **y: calls.append(1) or render(*x, **y))
    numbers = list[int]()
    for count in (1, 1, 9):  # what the template finds out once is not counted
        parts = [{"type": "text", "text": "a"}] * count
        talk = [{**turn, "content": parts} for turn in ASKED]
        template.render({"messages": talk}, HERE)
        numbers.append(len(calls))
        calls.clear()
    assert numbers[1] == numbers[2]


@pytest.mark.parametrize(("content", "lost"), PARTS)
def test_parts_that_the_template_leaves_out(content: Any, lost: str | None) -> None:
    talk = {"messages": [{"role": "user", "content": content}, ASKED[1]]}
    if lost is None:
        assert "b<|im_end|>" in ChatTemplate(OF_PARTS, {}, "test").render(talk, HERE).text
    else:
        with pytest.raises(DataError, match=f"{lost}.* is not written by the chat template"):
            ChatTemplate(OF_PARTS, {}, "test").render(talk, HERE)


@pytest.mark.parametrize(("role", "usual"), [("human", "user"), ("observation", "tool")])
def test_a_role_of_another_format(role: str, usual: str) -> None:
    talk = [{"role": role, "content": "1 + 2?"}, {"role": "assistant", "content": "3"}]
    with pytest.raises(DataError, match=f'message 1 is of "{role}", .*: "{usual}" is its usual'):
        ChatTemplate(CHATML, {}, "test").render({"messages": talk}, HERE)
    names_it = "{% if messages[0].role == '" + role + "' %}{% endif %}" + CHATML
    assert role in ChatTemplate(names_it, {}, "test").render({"messages": talk}, HERE).text


def test_generation_blocks_are_their_body() -> None:
    source = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    talk = [{"role": "assistant", "content": "ab"}]
    encoded = by_itself(
        ChatTemplate(source, {}, "test"), {"messages": talk}, Tokenizer.open("bytes")
    )
    assert bytes(encoded.ids).decode() == "ab"


#: Templates with constructs that few use.
RARE = {
    "values of a block": "{% for m in messages %}{% set c = m.content %}{% generation %}"
    "{% set c = '[' ~ c ~ ']' %}{{ c }}{% endgeneration %}{{ c }}{% endfor %}",
    "options by position": "{% for m in messages %}{{ m | tojson(True) }}{{ m | tojson(False, 2) }}"
    "{{ m | tojson(sort_keys=True, separators=(',', ':')) }}{% endfor %}",
    "two formats": "{% for m in messages %}{{ '{}:{:>4}'.format(m.role, m.content) }}{% endfor %}",
    "values of the record": "{% if think is defined and not think %}-{% endif %}{{ think }}"
    "{{ style.tone }}{{ eos_token }}{% for m in messages %}{{ m.content }}{% endfor %}",
}


@pytest.mark.parametrize("name", RARE)
def test_rare_constructs_are_those_of_transformers(folder: Path, name: str) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    values = {"think": False, "style": {"tone": "ü"}, "eos_token": "<e>"}
    expected = theirs.apply_chat_template(TALK, chat_template=RARE[name], tokenize=False, **values)
    record = {"messages": TALK, "chat_template_kwargs": values}
    assert (
        ChatTemplate(RARE[name], {"eos_token": "</s>"}, "x").render(record, HERE).text == expected
    )


def test_special_tokens_of_the_settings(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    settings = {
        "bos_token": {"content": "B"},
        "chat_template": [
            {"name": "default", "template": "{{ bos_token }}{{ messages[0].content }}"}
        ],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    talk = [{"role": "assistant", "content": "e"}]
    tokenizer = Tokenizer.open(str(folder))
    encoded = by_itself(ChatTemplate.open(tokenizer), {"messages": talk}, tokenizer)
    assert tokenizer.decode([int(one) for one in encoded.ids], special=True) == "Be"


# --- turns that carry no loss, and conversations that templates take only as a whole -----------

#: CHATML with a block around each answer.
BLOCKS = CHATML.replace(
    "{{ message.content }}<|im_end|>\n",
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>"
    "{% endgeneration %}{% else %}{{ message.content }}<|im_end|>{% endif %}\n\n",
)
ASKED = [
    {"role": "user", "content": "1?"},
    {"role": "assistant", "content": "one"},
    {"role": "user", "content": "2?"},
    {"role": "assistant", "content": "two"},
    {"role": "assistant", "content": "three"},
]


def texts_of(source: str, record: dict[str, Any], added: tuple[str, ...] = ("<|im_end|>",)) -> Any:
    rendered = ChatTemplate(source, {}, "test", added).render(record, HERE)
    return [rendered.text[span.start : span.stop] for span in rendered.learned]


@pytest.mark.parametrize("source", [CHATML, BLOCKS])
@pytest.mark.parametrize(
    "off",
    [
        {"weight": 0},
        {"weight": 0.0},
        {"train": False},
        {"loss": False},
        {"masked": True},
        {"trainable": False},
    ],
)
@pytest.mark.parametrize("masked", [(), (1,), (3,), (4,), (1, 3), (1, 3, 4)])
def test_turns_without_loss(source: str, off: dict[str, Any], masked: tuple[int, ...]) -> None:
    on = {key: type(value)(not value) for key, value in off.items()}
    talk = [
        {**turn, **({} if turn["role"] == "user" else off if number in masked else on)}
        for number, turn in enumerate(ASKED)
    ]
    expected = [
        f"{turn['content']}<|im_end|>"
        for number, turn in enumerate(ASKED)
        if turn["role"] == "assistant" and number not in masked
    ]
    assert texts_of(source, {"messages": talk}) == expected


@pytest.mark.parametrize(
    ("turn", "reason"),
    [
        ({"weight": 0.5}, '"weight": 0.5; it must be 1 or 0'),
        ({"weight": "0"}, '"weight": "0"'),
        ({"train": "no"}, '"train": "no"; it must be true or false'),
        ({"train": True, "weight": 0}, "disagree"),
        ({"loss": True, "masked": True}, '"loss" and "masked" disagree'),
        ({"role": "user", "masked": False}, "only turns of the assistant"),
        ({"function_call": {"name": "now"}}, '"function_call", which is not read: "tool_calls"'),
        ({"train_detail": [{"begin_offset": 0}]}, '"train_detail", which is not read: "train"'),
        ({"role": "user", "train": True}, "only turns of the assistant"),
        ({"loss_scale": 0.5}, '"loss_scale", which is not read; "train": false masks a turn'),
        ({"no_loss": 1}, '"no_loss", which is not read'),
        ({"loss_scale": 0}, '"loss_scale", which is not read; "train": false masks a turn'),
        ({"training_detail": [{"train": False}]}, '"training_detail", which is not read'),
    ],
)
def test_other_weights_are_refused(turn: dict[str, Any], reason: str) -> None:
    talk = [*ASKED[:3], {**ASKED[3], **turn}]
    with pytest.raises(DataError, match=f"line 7, byte 90: message 4.*{reason}"):
        texts_of(CHATML, {"messages": talk})


def test_measurements_of_a_turn_are_not_about_its_loss() -> None:
    """Numbers that others record beside a turn."""
    talk = [ASKED[0], {**ASKED[1], "train_loss": 2.5, "loss_mean": 0.25, "train_tokens": 9}]
    assert texts_of(CHATML, {"messages": talk}) == ["one<|im_end|>"]


#: Template like that of gpt-oss: the end of a call differs, and a result repeats its call's name.
CALLS = """{% set ns = namespace(name='') %}{% for m in messages %}
{% if m.tool_calls %}
{% set call = m.tool_calls[0].function %}{% set ns.name = call.name %}
<|start|>assistant to={{ call.name }}<|message|>{{ call.arguments | tojson }}<|call|>
{%- elif m.role == 'tool' %}
<|start|>{{ ns.name }} to=assistant<|message|>{{ m.content }}<|end|>
{%- else %}
<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>
{%- endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"""
MARKED = ("<|start|>", "<|message|>", "<|call|>", "<|end|>")


@pytest.mark.parametrize("arguments", [{}, {"a": {}}, {"a": [1, {"b": None}]}, None])
def test_a_call_ends_at_its_end(arguments: Any) -> None:
    function = {"name": "now"} | ({} if arguments is None else {"arguments": arguments})
    call = {"role": "assistant", "tool_calls": [{"function": function}]}
    source = CALLS.replace("call.arguments", "(call.arguments or {})")
    talk = [ASKED[0], call, {"role": "tool", "content": "12"}, ASKED[1]]
    written = json.dumps(arguments or {})
    expected = [f" to=now<|message|>{written}<|call|>", "<|message|>one<|end|>"]
    assert texts_of(source, {"messages": talk}, MARKED) == expected


#: Template like that of Qwen3.5: it refuses a conversation without a question.
NEEDS_A_QUESTION = (
    "{% if messages | selectattr('role', 'equalto', 'user') | list | length == 0 %}"
    "{{ raise_exception('No user query found in messages.') }}{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.role == 'assistant' %}<think></think>{% endif %}{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.mark.parametrize("system", [[], [{"role": "system", "content": "Be brief."}]])
def test_an_answer_before_the_first_question(system: list[dict[str, str]]) -> None:
    talk = [*system, {"role": "assistant", "content": "Welcome"}, *ASKED[:2]]
    texts = texts_of(NEEDS_A_QUESTION, {"messages": talk}, ("<|im_end|>", "<|assistant|>"))
    assert texts == ["<think></think>Welcome<|im_end|>", "<think></think>one<|im_end|>"]


def test_two_tokens_that_end_a_turn() -> None:
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end><turn>{% endfor %}"
    source += "{{ '<assistant>' if add_generation_prompt else '<eos>' }}"
    talk = {"messages": ASKED[:4]}
    texts = texts_of(source, talk, ("<end>", "<turn>", "<eos>", "<user>", "<assistant>"))
    assert texts == ["one<end><turn>", "two<end><turn>"]


def test_a_template_reads_the_day_of_the_run(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(
        "{{ strftime_now('%d %b %Y') }} {{ messages[0].content }}"
    )
    talk = {"messages": [{"role": "assistant", "content": "x"}]}
    day = Tokenizer.open(str(folder), "2026-02-28")
    assert ChatTemplate.open(day).render(talk, HERE).text == "28 Feb 2026 x"
    other = Tokenizer.open(str(folder), "2026-03-01")
    assert day.template_facts != other.template_facts
    today = ChatTemplate.open(Tokenizer.open(str(folder))).render(talk, HERE).text
    assert today[:11] >= "01 Jan 2026"[:2] and today.endswith(" x")
