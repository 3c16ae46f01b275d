"""The configuration as a JSON Schema (draft 7), for editors that complete and check TOML."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from moemesh.config.names import Names
from moemesh.config.schema import SCHEMA_KEY, SCHEMA_VERSION, SECTIONS
from moemesh.config.section import Range, Section
from moemesh.config.sources import preset_names
from moemesh.config.suggest import choices_of

_TYPES: dict[type, dict[str, Any]] = {
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
}


@cache
def meanings() -> dict[str, str]:
    """Dotted key -> its meaning in one line, as in docs/configuration.md."""
    return tomllib.loads(Path(__file__).with_name("meanings.toml").read_text(encoding="utf-8"))


def json_schema() -> dict[str, Any]:
    """Every section and key: type, values, default and meaning, without rules between keys."""
    sections = {name: _section(kind, f"{name}.") for name, kind in SECTIONS.items()}
    model = sections["model"]["properties"]
    sections["model"]["properties"] = {
        "preset": _described("model.preset", {"type": "string", "enum": list(preset_names())}),
        "path": _described("model.path", {"type": "string"}),
        **model,
    }
    version = {
        "type": "integer",
        "const": SCHEMA_VERSION,
        "description": "the version of the keys; a file without it is of the newest",
    }
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "moemesh",
        "description": "A training run of moemesh",
        "type": "object",
        "additionalProperties": False,
        "properties": {SCHEMA_KEY: version, **sections},
    }


def _described(key: str, schema: dict[str, Any]) -> dict[str, Any]:
    meaning = meanings().get(key)
    return schema if meaning is None else {**schema, "description": meaning}


def _section(kind: type[Section], prefix: str) -> dict[str, Any]:
    properties: dict[str, Any] = {}
    for name, field in kind.model_fields.items():
        schema, default = _of_type(field.annotation, kind.ranges.get(name)), field.default
        if kind.elements.get(name) is str:
            schema = {"anyOf": [schema, {"type": "string"}]}
        if default is not None and not field.is_required():
            schema["default"] = list(default) if isinstance(default, tuple) else default  # pyright: ignore[reportUnknownArgumentType]
        properties[name] = _described(f"{prefix}{name}", schema)
    return {
        "type": "object",
        "description": (kind.__doc__ or "").partition("\n")[0],
        "additionalProperties": False,
        "properties": properties,
    }


def _of_type(annotation: Any, limits: Range | None) -> dict[str, Any]:
    """The schema of one type; TOML has no null, so None is left out."""
    annotation = getattr(annotation, "__value__", annotation)  # of a type alias
    if get_origin(annotation) is Annotated:
        if isinstance(get_args(annotation)[1], Names):
            return {"type": "string", "enum": list(choices_of(annotation))}
        annotation = get_args(annotation)[0]
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return {"type": "string", "enum": list(arguments)}
    if origin in (Union, UnionType):
        kinds = [_of_type(argument, limits) for argument in arguments if argument is not NoneType]
        return kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
    if origin is tuple:
        schema: dict[str, Any] = {"type": "array", "items": _of_type(arguments[0], limits)}
        if arguments[-1] is not Ellipsis:
            schema |= {"minItems": len(arguments), "maxItems": len(arguments)}
        return schema
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return _section(annotation, f"{annotation.section}.")
    schema = dict(_TYPES[annotation])
    if limits is not None:
        schema["exclusiveMinimum" if limits.open_low else "minimum"] = limits.low
        if limits.high is not None:
            schema["exclusiveMaximum" if limits.open_high else "maximum"] = limits.high
    return schema
