"""Words that a shell completes (``moemesh --install-completion``): presets, names, keys."""

# Nothing heavy here: a shell waits for the answer. Names are imported when they are asked for.
from collections.abc import Callable, Iterable
from functools import partial

Complete = Callable[[str], list[str]]


def words(load: Callable[[], Iterable[str]]) -> Complete:
    """Complete one of these names, or the last of several with commas between."""

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        return [f"{before}{comma}{name}" for name in load() if name.startswith(last)]

    return complete


def _presets(*folders: str) -> list[str]:
    """The packaged presets of the folders ("" has the models)."""
    from moemesh.config.sources import preset_names

    return [name for folder in folders for name in preset_names(folder)]


def _choices(key: str, *more: str) -> list[str]:
    """The choices of a key of [plan], and `more`."""
    from moemesh.config.plan import Plan
    from moemesh.config.suggest import choices_of

    return [*more, *choices_of(Plan.model_fields[key].annotation)]


def _operations() -> tuple[str, ...]:
    from moemesh.bench.settings import OPERATIONS

    return ("all", *OPERATIONS)


clusters = words(partial(_presets, "clusters"))
schedules = words(partial(_choices, "schedule"))
collectives = words(_operations)
#: Fields of requests that are completed in every verb.
BY_FIELD: dict[str, Complete] = {
    "model": words(partial(_presets, "", "shapes")),
    "cluster": clusters,
    "plan": words(partial(_presets, "plans")),
    "routing": words(partial(_presets, "routings")),
    "dispatcher": words(partial(_choices, "dispatcher")),
}


def settings(incomplete: str) -> list[str]:
    """Complete a key of the configuration as ``--set`` takes it, and behind "=" its value where it
    is one of a few names."""
    from moemesh.config.schema import PRESET_KEY, SECTIONS, all_keys
    from moemesh.config.suggest import choices_of

    key, equals, value = incomplete.partition("=")
    if not equals:
        return [f"{name}=" for name in all_keys() if name.startswith(key)]
    if key == PRESET_KEY:
        return [f"{key}={name}" for name in _presets("") if name.startswith(value)]
    section, _, leaf = key.partition(".")
    fields = SECTIONS[section].model_fields if section in SECTIONS else {}
    if leaf not in fields:
        return []
    kind = fields[leaf].annotation
    choices = ("true", "false") if kind is bool else choices_of(kind)
    return [f"{key}={name}" for name in choices if name.startswith(value)]
