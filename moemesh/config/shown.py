"""Short reprs, and tables with a picture for notebooks, of the objects that the library returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sized
from html import escape
from typing import Any, ClassVar, cast

#: Largest number of characters of a repr, and of a value in it.
LONGEST, LONGEST_FACT = 400, 120
#: Name of a class -> the SVG of one of its objects, from `moemesh.api.pictures`.
PICTURES: dict[str, Callable[[Any], str]] = {}


class Shown:
    """Mixin of objects that users print: a repr of at most 400 characters, and in a notebook a
    table with a picture. `shown`: names of the attributes in both; empty: all fields that differ
    from their defaults, and those whose defaults are made by a factory."""

    shown: ClassVar[tuple[str, ...]] = ()

    def facts(self) -> Mapping[str, object]:
        """Name -> value, in the order of the repr."""
        if self.shown:
            return {name: getattr(self, name) for name in self.shown}
        kind: Any = type(self)
        fields: dict[str, Any] = getattr(kind, "__dataclass_fields__", None) or kind.model_fields
        pairs = ((name, getattr(self, name), field.default) for name, field in fields.items())
        return {name: value for name, value, default in pairs if _differs(value, default)}

    def __repr__(self) -> str:
        return short_repr(self, self.facts())

    def _repr_html_(self) -> str:
        name = type(self).__name__
        rows = "".join(
            f"<tr><th>{escape(fact)}</th><td>{escape(brief(value, LONGEST))}</td></tr>"
            for fact, value in self.facts().items()
        )
        picture = PICTURES[name](self) if name in PICTURES else ""
        return f"<div><table><caption>{name}</caption>{rows}</table>{picture}</div>"


def _differs(value: Any, default: Any) -> bool:
    """Whether a value differs from its default; an array with dimensions always does."""
    differs = value != default
    return bool(getattr(differs, "shape", ())) or bool(differs)


def short_repr(thing: object, facts: Mapping[str, object]) -> str:
    """The name of the object's class and its facts, cut at :data:`LONGEST` characters."""
    parts = ", ".join(f"{name}={brief(value)}" for name, value in facts.items())
    return cut(f"{type(thing).__name__}({parts})", LONGEST)


def brief(value: Any, longest: int = LONGEST_FACT) -> str:
    """The value in few characters, a text in at most `longest`: an array by its shape, a long
    collection by its number of items."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        count = value.numel() if hasattr(value, "numel") else value.size
        shape = f"{value.dtype} {list(value.shape)}"
        return brief(value.tolist(), longest) if count == 1 else shape
    if isinstance(value, (tuple, list, dict)):
        size = len(cast("Sized", value))
        text = repr(cast("object", value)) if size <= 16 else ""
        return text if 0 < len(text) <= longest else f"{size} items"
    return cut(repr(value), longest)


def cut(text: str, longest: int) -> str:
    """The text, truncated to at most `longest` characters."""
    return text if len(text) <= longest else f"{text[: longest - 3]}..."
