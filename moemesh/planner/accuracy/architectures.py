"""Models that a table of runs names: entries of architectures, presets, or the sizes of a GPT."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moemesh.config.errors import ConfigError, UserError
from moemesh.config.limits import parse_json
from moemesh.config.sources import preset_names, read_preset_table
from moemesh.config.suggest import nearest_name
from moemesh.planner.accuracy.cells import GPT_SIZES, decimal_in, whole_in
from moemesh.planner.parameters import count_parameters
from moemesh.planner.shapes.load_shape import (
    SHAPES,
    family_name,
    from_arch_table,
    gpt,
    load_model,
    preset_of,
)
from moemesh.planner.shapes.shape import ModelShape

#: A size of a model: "8B", "1.5 b", "8x7B", "30B-A3B".
SIZE = re.compile(r"(\d+x)?\d+(\.\d+)? ?[bm](-a\d+(\.\d+)?b)?", re.IGNORECASE)
#: Relative rounding of a printed number of parameters.
_ROUNDED_SIZE = 0.05


def architectures(table: Path, archs: Path | None) -> dict[str, Any]:
    """The packaged architectures, and those of the file `archs` or beside the table. Raises
    UserError."""
    entries: dict[str, Any] = read_preset_table("architectures", "calibration")
    path = archs or table.with_name("model_archs.json")
    if archs is not None or path.exists():
        try:
            sizes = parse_json(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"cannot read the architectures {path}: {error}") from None
        if not isinstance(sizes, dict):
            raise UserError(f"{path} must hold one JSON object, name -> sizes")
        entries |= sizes
    return entries


def is_model(word: str, archs: Mapping[str, Any]) -> bool:
    """Whether words of a title or an id name a model: they have a letter and a digit, and no file
    has that name."""
    if not re.search(r"[A-Za-z].*\d|\d.*[A-Za-z]", word) or Path(word).exists():
        return False
    try:
        named_shape(word, archs)
    except (ConfigError, ValueError, KeyError, TypeError):
        return False
    return True


def named_shape(arch: str, archs: Mapping[str, Any]) -> ModelShape:
    """The model of an entry of the table (in other spellings, too), of a preset (also by its name
    on the hub), or of a file. Raises ConfigError for a wrong entry, ValueError for an unknown
    name."""
    name, mark, layers = arch.partition("#")
    if not name:
        raise ValueError("the row prints no `arch`")

    def folded(word: str) -> str:
        return re.sub(r"[\W_]", "", word.lower())

    packaged = (*preset_names(), *preset_names(SHAPES))
    spelled = {folded(known): known for known in reversed([*archs, *packaged])}
    release = preset_of(re.sub(r"[\s_]+", "-", name.strip()), has_owner=False)
    same = (spelled.get(folded(word)) for word in (name, family_name(name), release))
    known = name if name in archs else next(filter(None, same), name)
    if known in archs or name.startswith("gpt:"):
        return from_arch_table(f"{known}{mark}{layers}", archs)
    sized = re.fullmatch(r"(.+?)[\s_-]+(\d+(?:\.\d+)?) ?b", name, re.IGNORECASE)
    if sized and folded(sized[1]) in spelled and not Path(name).exists():
        # "DeepSeek V3 671B": the number of parameters confirms the model.
        shape = named_shape(f"{sized[1]}{mark}{layers}", archs)
        if abs(count_parameters(shape).total / 1e9 / float(sized[2]) - 1) < _ROUNDED_SIZE:
            return shape
    name = known
    if preset_of(name) not in packaged and not Path(name).exists():
        near = nearest_name(name, [known.lower() for known in (*archs, *packaged)])
        if SIZE.fullmatch(arch):
            raise ValueError(f"arch is `{arch}`: a size; write its family, here or in the title")
        message = f"arch is `{arch}`: no entry of the table of architectures (--archs), no "
        message += "preset and no file"
        raise ValueError(message + f"; did you mean {near}?" * bool(near))
    shape = load_model(name).shape
    return shape.truncated(int(layers[1:])) if re.fullmatch(r"L\d+", layers) else shape


def sized_gpt(row: Mapping[str, str]) -> ModelShape | None:
    """The GPT of a row that prints its sizes and no other model. Sizes leave open how wide the MLP
    is: the number of parameters, of `params_b` or in the name ("GPT 22B"), must confirm that the
    model is a GPT. Raises ValueError."""
    layers, hidden, heads = (whole_in(row, name, 0) for name in GPT_SIZES)
    arch = row.get("arch", "")
    if not (layers and hidden and heads) or not re.fullmatch(
        r"(gpt[\W_]*)?([\d.]+ ?[bt])?", arch, re.I
    ):
        return None
    shape = gpt(layers, hidden, heads)
    printed = decimal_in(row, "params_b")
    if not printed and (size := re.search(r"([\d.]+) ?([bt])", arch, re.I)):
        printed = float(size[1]) * (1000 if size[2] in "tT" else 1)
    counted = count_parameters(shape).total / 1e9
    if abs(printed / counted - 1) > _ROUNDED_SIZE:
        sizes = f"layers {layers}, hidden {hidden}, heads {heads}"
        raise ValueError(
            f"arch: a GPT of {sizes} has {counted:.3g} billion parameters, the row prints "
            f"{printed or 'none'} (params_b): name the model"
        )
    return shape
