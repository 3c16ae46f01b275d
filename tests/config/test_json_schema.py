"""The JSON Schema of a configuration: every key, and the same verdict as the loader on one key."""

from __future__ import annotations

import json
import tomllib
from typing import Any

import pytest

from moemesh.config.errors import ConfigError
from moemesh.config.json_schema import json_schema, meanings
from moemesh.config.load import resolved_toml
from moemesh.config.schema import SECTIONS, all_keys, keys_of
from moemesh.config.sources import preset_names
from moemesh.sharding.load_run import load_run
from tests.documents import MEANINGS, ROOT, meanings_file

SCHEMA = json_schema()
_KINDS: dict[str, Any] = {
    "object": dict, "array": list, "string": str, "boolean": bool, "integer": int,
    "number": (int, float),
}  # fmt: skip


def valid(value: Any, schema: dict[str, Any]) -> bool:
    """True if `value` is valid by a schema that has only the keywords of ours."""
    known = {"$schema", "title", "description", "default", "type", "enum", "const", "anyOf"}
    known |= {"properties", "additionalProperties", "items", "minItems", "maxItems"}
    known |= {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
    assert not set(schema) - known
    if "anyOf" in schema:
        return any(valid(value, one) for one in schema["anyOf"])
    kind = schema["type"]
    if not isinstance(value, _KINDS[kind]) or (kind != "boolean" and isinstance(value, bool)):
        return False
    if kind == "object":
        inside = schema["properties"]
        return all(key in inside and valid(item, inside[key]) for key, item in value.items())
    if kind == "array":
        is_of_length = schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", 10**9)
        return is_of_length and all(valid(item, schema["items"]) for item in value)
    if value not in schema.get("enum", [value]) or value != schema.get("const", value):
        return False
    return not isinstance(value, (int, float)) or (
        schema.get("minimum", value) <= value <= schema.get("maximum", value)
        and schema.get("exclusiveMinimum", value - 1) < value
        and value < schema.get("exclusiveMaximum", value + 1)
    )


def test_every_key_is_there_with_its_meaning() -> None:
    assert json.loads(json.dumps(SCHEMA)) == SCHEMA
    for section in SECTIONS:
        inside = SCHEMA["properties"][section]["properties"]
        assert tuple(inside) == keys_of(section)
        assert all("TODO" not in item["description"] for item in inside.values())
    assert set(meanings()) == set(all_keys())
    assert (ROOT / MEANINGS).read_text() == meanings_file(), "python -m tests.documents"


@pytest.mark.parametrize("preset", preset_names())
def test_resolved_configurations_are_valid(preset: str) -> None:
    text = resolved_toml(load_run([], [f"model.preset={preset}"], {}).config)
    assert valid(tomllib.loads(text), SCHEMA)


def test_recipes_are_valid() -> None:
    files = list((ROOT / "recipes").glob("*.toml"))
    assert files
    for file in files:
        assert valid(tomllib.loads(file.read_text()), SCHEMA), file


VALUES = ("0", "-1", "2.5", "true", '"x"', "[1]")
CODES = {"wrong-type", "not-a-choice", "out-of-range"}


def refusal(setting: str, key: str) -> str | None:
    """Code of the first problem of `key`; None without a problem."""
    try:
        load_run([], [setting], {})
    except ConfigError as error:
        return next((one.code for one in error.problems if one.key == key), None)
    return None


def test_what_the_loader_accepts_is_valid_and_most_mistakes_are_not() -> None:
    marked = missed = 0
    for key in all_keys():
        if key in ("model.preset", "model.path"):
            continue  # they name a model, whose sizes then have problems of their own
        section, leaf = key.split(".")
        for text in VALUES:
            code = refusal(f"{key}={text}", key)
            is_valid = valid({section: {leaf: tomllib.loads(f"x = {text}")["x"]}}, SCHEMA)
            if code is None:
                assert is_valid, (key, text)
            elif code in CODES:
                marked += not is_valid
                missed += is_valid
    # Missed: ranges that depend on other keys.
    assert marked > 250 and missed < marked / 20, (marked, missed)
