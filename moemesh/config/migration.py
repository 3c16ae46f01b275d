"""The version of the keys, those that had other names in earlier ones, and files brought to it."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass

from moemesh.config.errors import ConfigError, Problem
from moemesh.config.toml import key_lines, unreadable

#: The top-level key of a file that names the version of its keys; without it the file is read as
#: one of this version.
SCHEMA_KEY = "schema_version"
SCHEMA_VERSION = 1
#: Version -> old dotted key -> new one, for every key that this version has renamed. The one place:
#: messages, `moemesh config migrate` and the tests read it.
RENAMES: dict[int, dict[str, str]] = {}


def renamed() -> dict[str, str]:
    """Every old key -> its name now, also where it was renamed more than once."""
    found: dict[str, str] = {}
    for version in sorted(RENAMES, reverse=True):
        for old, new in RENAMES[version].items():
            found[old] = found.get(new, new)
    return found


def later_version(version: int, origin: str) -> Problem:
    """A file whose keys are of a version that is not known yet."""
    return Problem(
        code="too-large",
        key=SCHEMA_KEY,
        value=version,
        origin=origin,
        message=f"the file has keys of version {version}, known are those up to {SCHEMA_VERSION}",
        fix="a newer moemesh",
    )


@dataclass(frozen=True, kw_only=True)
class Migration:
    """The new text, and a sentence for each change."""

    text: str
    changes: tuple[str, ...]


def migrate(text: str, name: str = "") -> Migration:
    """Rename the keys of `text`, a TOML file called `name`, and write its `schema_version`.

    Raises ConfigError for what is no TOML, for a file of a later version, and for an old key that
    stands where it cannot be renamed by itself (in an inline table, or beside its new name).
    """
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        problem = Problem.of("syntax", name, None, unreadable(error))
        raise ConfigError([problem]) from None
    version = document.get(SCHEMA_KEY)
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise ConfigError([later_version(version, name)])
    lines = text.splitlines()
    places = key_lines(text)
    changes: list[str] = []
    moved: list[tuple[str, list[str]]] = []
    for old, new in renamed().items():
        path = tuple(old.split("."))
        if path not in places:
            section = document.get(path[0])
            if isinstance(section, dict) and path[1] in section:
                number = places.get(path[:1], 1)
                raise ConfigError([_by_hand(old, new, name, number, "it is in an inline table")])
            continue
        number = places[path]
        if tuple(new.split(".")) in places:
            raise ConfigError([_by_hand(old, new, name, number, "both are given")])
        _rename(lines, places, old, new, name, moved)
        changes.append(f"line {number}: {old} is {new} now")
    for section, found in moved:
        _append(lines, section, found)
    if version != SCHEMA_VERSION:
        if (SCHEMA_KEY,) in places:
            number = places[(SCHEMA_KEY,)]
            lines[number - 1] = re.sub(r"=\s*[^#\s]+", f"= {SCHEMA_VERSION}", lines[number - 1])
        else:  # behind the comment that the file begins with
            first = next((i for i, line in enumerate(lines) if line[:1] != "#"), len(lines))
            gap = [] if lines[first : first + 1] in ([""], []) else [""]
            lines[first:first] = [f"{SCHEMA_KEY} = {SCHEMA_VERSION}", *gap]
        changes.append(f"{SCHEMA_KEY} = {SCHEMA_VERSION}")
    ending = "\n" if text.endswith("\n") or not text else ""
    return Migration(text="\n".join(lines) + ending, changes=tuple(changes))


def _rename(
    lines: list[str],
    places: dict[tuple[str, ...], int],
    old: str,
    new: str,
    name: str,
    moved: list[tuple[str, list[str]]],
) -> None:
    """Rename one key on its line, or take its lines out, to `moved`, when it changes section."""
    number = places[tuple(old.split("."))]
    (section, leaf), (home, later) = old.split(".", 1), new.split(".", 1)
    line = lines[number - 1]
    for written, wanted in ((leaf, later), (old, new)):
        match = re.match(rf"(\s*){re.escape(written)}(\s*=)", line)
        if match is None:
            continue
        lines[number - 1] = f"{match[1]}{wanted}{match[2]}{line[match.end() :]}"
        if written == leaf and home != section:
            last = _last_line(lines, number)
            moved.append((home, lines[number - 1 : last]))
            # Empty lines for now: the numbers of the others must stay.
            lines[number - 1 : last] = [_GONE] * (last - number + 1)
        return
    raise ConfigError([_by_hand(old, new, name, number, "its name is written in another way")])


#: Stands for a line that was taken out.
_GONE = "\0"


def _last_line(lines: list[str], number: int) -> int:
    """The last line of the value that begins on line `number`."""
    for last in range(number, len(lines) + 1):
        try:
            tomllib.loads("\n".join(lines[number - 1 : last]))
        except tomllib.TOMLDecodeError:
            continue
        return last
    return number


def _append(lines: list[str], section: str, found: list[str]) -> None:
    """Put lines at the end of a section, which is made where there is none."""
    lines[:] = [line for line in lines if line != _GONE]
    headers = [i for i, line in enumerate(lines) if re.match(r"\s*\[", line)]
    own = [i for i in headers if re.match(rf"\s*\[\s*{section}\s*\]", lines[i])]
    if not own:
        lines += ["", f"[{section}]", *found]
        return
    end = min((i for i in headers if i > own[0]), default=len(lines))
    while end > own[0] + 1 and not lines[end - 1].strip():
        end -= 1
    lines[end:end] = found


def _by_hand(old: str, new: str, name: str, number: int, why: str) -> Problem:
    return Problem(
        code="conflict",
        key=old,
        origin=f"{name}:{number}",
        message=f"{old} is {new} now, and cannot be renamed by itself: {why}",
        fix=f"write {new} by hand",
        related=(new,),
    )
