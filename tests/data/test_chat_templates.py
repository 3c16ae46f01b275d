"""Token ids and loss mask of conversations are those of transformers, for templates with and
without generation blocks."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moemesh.data.chat import ChatTemplate
from moemesh.data.corpus import Corpus
from moemesh.data.records import BadRecordError, BadRecordLog, Where
from moemesh.data.tokenizer import Tokenizer
from tests.data.templates import TEMPLATES, written
from tests.data.test_chat import by_itself

HERE = Where("chat.jsonl", "line", 7, 90)
WORDS = ["Grüße", "héllo", "日本語", "🙂👍🏽", "what", "is", "3", "+", "4", "?", "'so'", '"json"']
WORDS += ["{x}", "</s>", "tab\there", "new\nline", "ok"]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The <weather> of a city & its time",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]


def tokenizer_of(folder: Path, name: str, *, blocks: bool) -> tuple[Tokenizer, ChatTemplate, Any]:
    """Ours, our template without blocks or with, and transformers' tokenizer with blocks."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    special, added = TEMPLATES[name]
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.post_processor = tokenizers.processors.ByteLevel(trim_offsets=name == "llama3")
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=500,
        show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    texts = [written(name, blocks=False), " ".join(WORDS)]
    made.train_from_iterator(texts * 3, trainer)
    made.add_special_tokens(special)
    made.add_tokens(added)
    made.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(written(name, blocks=blocks))
    ends = {"bos_token": "<s>", "eos_token": "</s>"}
    ends = {key: token for key, token in ends.items() if token in special}
    (folder / "tokenizer_config.json").write_text(json.dumps(ends))
    ours = Tokenizer.open(str(folder))
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), **ends
    )
    theirs.chat_template = written(name, blocks=True)
    return ours, ChatTemplate.open(ours), theirs


def text(draw: random.Random, most: int = 6) -> str:
    return " ".join(draw.choices(WORDS, k=draw.randrange(1, most)))


def answer(draw: random.Random, name: str) -> dict[str, Any]:
    content = draw.choice(["", " padded \n", text(draw), text(draw, 20), "🙂", "assistant: <|im_"])
    if name in ("qwen3", "deepseek") and draw.random() < 0.4:
        content = f"<think>\n{text(draw)}\n</think>\n\n{content}"
    if name == "endless" and content:
        # Of a character of several tokens at the end of a block, transformers marks the first.
        content += "."
    turn: dict[str, Any] = {"role": "assistant", "content": content}
    if name == "qwen3" and draw.random() < 0.2:
        turn[draw.choice(["reasoning_content", "thinking"])] = text(draw)
    return turn


def conversation(draw: random.Random, name: str) -> dict[str, Any]:
    """System turns, several questions, calls of tools, empty answers."""
    talk: list[dict[str, Any]] = []
    if draw.random() < 0.5:
        talk.append({"role": "system", "content": text(draw)})
    has_tools = draw.random() < 0.5
    for turn in range(draw.randrange(1, 5)):
        question = f"{turn} {text(draw)}"
        talk.append({"role": "user", "content": question})
        while has_tools and draw.random() < 0.5:
            calls = [
                {
                    "type": "function",
                    "id": f"call{number:05}",
                    "function": {
                        "name": "weather",
                        "arguments": draw.choice([{"city": "Zürich"}, {}, {"city": text(draw)}]),
                    },
                }
                for number in range(1 if name == "llama3" else draw.randrange(1, 3))
            ]
            content = draw.choice(["", None, text(draw)])
            talk.append({"role": "assistant", "content": content, "tool_calls": calls})
            for _ in calls:
                talk.append({"role": "tool", "content": text(draw)})
        talk.append(answer(draw, name))
        if name in ("qwen3", "deepseek", "plain") and draw.random() < 0.1:
            talk.append({"role": "system", "content": text(draw)})
    return {"messages": talk} | ({"tools": TOOLS} if has_tools else {})


@pytest.mark.representative(
    "qwen3-False", "llama3-True", "mistral-False", "deepseek-True", "plain-False", "endless-True"
)
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("name", TEMPLATES)
def test_ids_and_mask_are_those_of_transformers(tmp_path: Path, name: str, blocks: bool) -> None:
    ours, template, theirs = tokenizer_of(tmp_path, name, blocks=blocks)
    draw = random.Random(f"{name}")
    for _ in range(40):
        record = conversation(draw, name)
        expected = theirs.apply_chat_template(
            record["messages"],
            tools=record.get("tools"),
            tokenize=True,
            return_assistant_tokens_mask=True,
            return_dict=True,
        )
        encoded = by_itself(template, record, ours)
        assert encoded.ids.tolist() == expected["input_ids"]
        learned = np.array(encoded.learned, dtype=int).tolist()
        if learned != expected["assistant_masks"]:
            shown = [
                "".join(
                    f"[{token}]" if one else token
                    for token, one in zip(
                        theirs.convert_ids_to_tokens(encoded.ids.tolist()), mask, strict=True
                    )
                )
                for mask in (learned, expected["assistant_masks"])
            ]
            assert shown[0] == shown[1]


#: Qwen3's thinking models, Phi and gpt-oss: a longer prompt, an end of the text, another last end.
SPANS: dict[str, tuple[str, list[str]]] = {
    "prompt with more than a header": (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant><think>{% endif %}",
        ["one <end>", "two<end>"],
    ),
    "an end of the text": (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>\n{% endfor %}"
        "{{ '<assistant>' if add_generation_prompt else '<eot>' }}",
        ["one <end>", "two<end>"],
    ),
    "another end of the last turn": (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
        "{{ '<eot>' if loop.last and m.role == 'assistant' else '<end>' }}{% endfor %}"
        "{{ '<assistant>' if add_generation_prompt }}",
        ["one <end>", "two<eot>"],
    ),
    "what belongs to nobody": (
        "{% for m in messages %}{{ m.content }}|{% endfor %}",
        ["one |", "two|"],
    ),
}


@pytest.mark.parametrize("name", SPANS)
def test_answers_are_found_without_blocks(name: str) -> None:
    source, expected = SPANS[name]
    template = ChatTemplate(source, {}, "test", ["<end>", "<eot>", "<user>", "<assistant>"])
    turns = ["one?", "one ", "<assistant>one|two?", "two"]
    roles = ["user", "assistant"] * 2
    talk = [{"role": role, "content": text} for role, text in zip(roles, turns, strict=True)]
    rendered = template.render({"messages": talk}, HERE)
    assert [rendered.text[span.start : span.stop] for span in rendered.learned] == expected


def test_a_conversation_that_the_template_refuses_is_a_bad_record(tmp_path: Path) -> None:
    tokenizer_of(tmp_path, "mistral", blocks=False)
    orders = [["user", "assistant"]] * 3 + [["user", "user", "assistant"], ["user", "assistant"]]
    lines = [
        {"messages": [{"role": role, "content": f"{number}"} for role in order]}
        for number, order in enumerate(orders)
    ]
    data = tmp_path / "chat.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(BadRecordError, match=r"line 4, byte \d+: .* roles must alternate"):
        Corpus.open(str(data), tokenizer=str(tmp_path), vocab_size=600)
    log = BadRecordLog("skip", 0.5, "chat")
    corpus = Corpus.open(str(data), tokenizer=str(tmp_path), vocab_size=600, log=log)
    assert len(corpus.starts) == 4
    assert (log.total, log.bad) == (5, 1) and "line 4" in log.places[0]
