"""Chat templates in the forms of published models, in ``chat_templates``. ``[[`` and ``]]`` enclose
the text of the assistant; `written` replaces them by nothing or the tags of a generation block."""

from __future__ import annotations

from pathlib import Path

#: Name -> (special tokens, other added tokens).
TEMPLATES: dict[str, tuple[list[str], list[str]]] = {
    "qwen3": (
        ["<|im_start|>", "<|im_end|>"],
        ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>"],
    ),
    "llama3": (
        ["<s>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"],
        [],
    ),
    "mistral": (
        ["<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"],
        [],
    ),
    "deepseek": (
        ["<s>", "<｜end▁of▁sentence｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁end｜>"],
        [
            "<｜User｜>",
            "<｜Assistant｜>",
            "<｜tool▁calls▁end｜>",
            "<｜tool▁outputs▁end｜>",
            "<think>",
        ],
    ),
    "plain": ([], []),
    "endless": (
        ["[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"],
        ["<tool_call>", "</tool_call>", "<arg_key>"],
    ),
}


def written(name: str, *, blocks: bool) -> str:
    """A template by its name, with generation blocks or without."""
    tags = ("{%- generation %}", "{%- endgeneration %}") if blocks else ("", "")
    text = Path(__file__).with_name("chat_templates").joinpath(f"{name}.jinja").read_text("utf-8")
    return text.replace("[[", tags[0]).replace("]]", tags[1]).strip()
