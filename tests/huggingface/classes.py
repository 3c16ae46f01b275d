"""The table of the defaults of transformers' configuration classes, from the installed version.

``python -m tests.huggingface.classes`` writes ``moemesh/config/presets/huggingface/classes.toml``;
a test compares the file with the classes. A key counts as read where the source of the family's
class or of its model names it. `test_keys.py` checks that a key that is read changes the logits,
and that any other key does not.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from functools import cache
from pathlib import Path
from textwrap import fill
from typing import Any

from moemesh.config.huggingface.keys import known_families
from moemesh.config.huggingface.model import trained_families
from moemesh.config.toml import format_value
from tests.sandbox import ROOT

FILE = Path("moemesh/config/presets/huggingface/classes.toml")
HEADER = """\
# What the configuration classes of transformers {version} say of the trained families,
# written by `python -m tests.huggingface.classes`.
#
# [X]
#   reads     keys of a config.json that the code of the family reads: no other has an effect
#   aliases   another name of a key -> the key; the other name counts where both are given
#   defaults  keys that may be left out, and what they then mean; of other keys it is null
#   rope      rope_parameters where a config.json says nothing of RoPE
#   turns_a_part  whether RoPE of the default type turns a part of a head (partial_rotary_factor)
"""
#: Families whose code is that of another one, though transformers has no such class.
SAME_CODE = {"kimi_k2": "deepseek_v3"}
#: Keys of every class, which the family's own code does not name.
_GENERAL = {"tie_word_embeddings", "initializer_range"}
#: RoPE has a place of its own here.
_ROPE = {"rope_parameters", "rope_scaling", "rope_theta", "original_max_position_embeddings"}
#: Keys without a number as value, and those of RoPE and of prediction layers: tried separately.
NOT_ALONE = _ROPE | {
    "model_type", "partial_rotary_factor", "quantization_config", "layer_types",
    "mlp_layer_types", "text_config", "language_config", "llm_config", "num_mtp_layers",
    "num_nextn_predict_layers", "mtp_num_layers",
}  # fmt: skip
_READERS = ("moemesh/config/huggingface/sizes.py", "moemesh/config/huggingface/model.py")


@cache
def understood() -> frozenset[str]:
    """Every key of a config.json that some reader here looks for: names in the tables of families,
    and words in the text of the readers."""
    known, trained = known_families(), trained_families()
    keys = {
        name for names in (*known["names"].values(), *trained["keys"].values()) for name in names
    }
    for row in known["family"].values():
        keys |= {*row.get("when", {}), *row.get("defaults", {}), *row.get("positions", ())}
        keys.add(str(row.get("windows", "")).removeprefix("not "))
    keys |= {*known["unknown"], *(key for keys in known["parameters"].values() for key in keys)}
    for file in _READERS:
        keys |= set(re.findall(r"\"([a-z_]\w+)\"", (ROOT / file).read_text(encoding="utf-8")))
    return frozenset(keys)


def refused_keys() -> set[str]:
    """Keys of parts that moemesh lacks: refused by name in every family."""
    known = known_families()
    parts = ("num_experts", "num_shared", "expert_intermediate_size")
    named = [*known["parameters"].values(), *(known["names"][part] for part in parts)]
    return {*known["unknown"], *(key for keys in named for key in keys)} | {
        "attn_type_list",
        "word_embed_proj_dim",
    }


def classes() -> dict[str, dict[str, Any]]:
    """Family -> its row."""
    return {kind: _row(SAME_CODE.get(kind, kind)) for kind in trained_families()["family"]}


def _row(kind: str) -> dict[str, Any]:
    from transformers import CONFIG_MAPPING

    cls = CONFIG_MAPPING[kind]
    model = importlib.import_module(cls.__module__.replace("configuration_", "modeling_"))
    of_class, of_model = inspect.getsource(cls), inspect.getsource(model)
    fields = {field.name: field.default for field in dataclasses.fields(cls)}
    # Either of the two may be the field.
    aliases = {
        **{other: key for other, key in cls.attribute_map.items() if key in fields},
        **{key: other for other, key in cls.attribute_map.items() if key not in fields},
    }
    in_model = set(re.findall(r"config\.(\w+)", of_model))
    # Keys without a field: both read them where they are given.
    given = set(re.findall(r"getattr\(config, \"(\w+)\"", of_model))
    given |= set(re.findall(r"kwargs\.\w+\(\s*\"(\w+)\"", of_class))
    named = {aliases.get(name, name) for name in in_model}
    named |= set(re.findall(r"self\.(\w+)", of_class)) | _GENERAL
    reads = ((named & fields.keys()) | given) & understood() - _ROPE
    return {
        "reads": sorted(reads),
        "aliases": {other: key for other, key in aliases.items() if key in reads},
        "defaults": {key: fields[key] for key in sorted(reads) if fields.get(key) is not None},
        "rope": {key: one for key, one in cls().rope_parameters.items() if one is not None},
        "turns_a_part": "partial_rotary_factor" in of_model,
    }


def text() -> str:
    """The file."""
    import transformers

    lines = [HEADER.format(version=transformers.__version__)]
    for kind, row in classes().items():
        lines.append(f"[{kind}]")
        for name, value in row.items():
            if isinstance(value, dict) and value:
                lines += [f"{name}.{key} = {format_value(one)}" for key, one in value.items()]
            else:
                lines.append(f"{name} = {_listed(value)}")
        lines.append("")
    return "\n".join(lines)


def _listed(value: object) -> str:
    """A long list of words on lines of their own."""
    if value == {}:
        return "{}"
    if not isinstance(value, list):
        return format_value(value)
    words = ", ".join(format_value(word) for word in value)
    return "[\n" + fill(words, 96, initial_indent="    ", subsequent_indent="    ") + ",\n]"


if __name__ == "__main__":
    (ROOT / FILE).write_text(text(), encoding="utf-8")
