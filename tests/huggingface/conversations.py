"""A tokenizer with a chat template, and conversations for it."""

from __future__ import annotations

import json
from pathlib import Path

TEMPLATE = """{% for message in messages %}
<{{ message.role }}>{{ message.content }}</s>
{% endfor %}
{% if add_generation_prompt %}
<assistant>{% endif %}
"""


def add_tokenizer(folder: Path) -> Path:
    """One token a printable character, and the template, into a folder with a model."""
    import tokenizers

    letters = [chr(code) for code in range(32, 127)] + ["\n"]
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({c: i for i, c in enumerate(letters)}))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    made.decoder = tokenizers.decoders.Fuse()
    made.save(str(folder / "tokenizer.json"))
    # Else the class of the model's family would read the file, with a decoder of its own.
    settings = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
    (folder / "tokenizer_config.json").write_text(settings)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def write_sums(path: Path, count: int) -> Path:
    """Conversations of two turns, no two alike, as jsonl."""
    lines = [
        json.dumps(
            {
                "messages": [
                    {"role": "user", "content": f"{number} + {7 * number % 31}?"},
                    {"role": "assistant", "content": str(number + 7 * number % 31)},
                ]
            }
        )
        for number in range(count)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path
