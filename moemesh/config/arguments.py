"""Arguments of public functions: of the kind that they must have, or one error that says so."""

from __future__ import annotations

from moemesh.config.errors import UserError


def check_kind(name: str, value: object, kind: type, fix: str = "") -> None:
    """Raises TypeError where the argument `name` is no `kind`; `fix` is one way to have one."""
    if not isinstance(value, kind):
        found = f"{name} must be a {kind.__name__}, not {type(value).__name__}"
        raise TypeError(f"{found}: {fix}" if fix else found)


def check_limit(name: str, value: object) -> None:
    """Raises UserError where the argument `name`, a largest norm, is no number of at least 0."""
    # Not "below 0", which NaN is not.
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not value >= 0:
        raise UserError(f"{name} must be a number of at least 0, not {value!r}")
