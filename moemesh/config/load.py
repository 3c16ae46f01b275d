"""Reading a configuration: every source merged, every problem found at once, every origin kept."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from string import ascii_letters
from typing import Any, TypeVar, cast

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from moemesh.config.data import DataSource
from moemesh.config.errors import ConfigError, Problem, independent
from moemesh.config.esft_table import KEPT_TABLE
from moemesh.config.hub import local_folder, repository_of
from moemesh.config.huggingface.adapters import with_adapters
from moemesh.config.huggingface.architecture import read_architecture
from moemesh.config.huggingface.folder import read_config, read_folder
from moemesh.config.model import ModelConfig
from moemesh.config.run import DEFAULT_PRESET, RunCheck, RunConfig
from moemesh.config.schema import (
    PATH_KEY,
    PRESET_KEY,
    SCHEMA_KEY,
    SCHEMA_VERSION,
    SECTIONS,
    all_keys,
    explain_unknown_key,
)
from moemesh.config.section import Section
from moemesh.config.shown import cut
from moemesh.config.sources import (
    RUN_CONFIG,
    ConfigSource,
    Leaf,
    preset_names,
    read_environment,
    read_file,
    read_overrides,
    read_preset,
)
from moemesh.config.suggest import choices_of, nearest_choice
from moemesh.config.toml import format_value, is_number
from moemesh.config.train import TrainConfig

#: Kind of an error of pydantic -> the value that it expects, in messages.
_EXPECTED = {
    "int_type": "an integer",
    "float_type": "a number",
    "string_type": "text in quotes",
    "bool_type": "true or false",
    "finite_number": "a finite number",
    "tuple_type": "a list of numbers",
    "missing": "a list of 2 numbers",
    "too_long": "a list of 2 numbers",
    "dict_type": "a table",
}
#: Keys whose default follows from other keys, with the description of the default.
FOLLOWING = {
    "train.lr": "default by model.path and lora.rank",
    "train.warmup_steps": "default by train.steps: a tenth, at most 20",
}
#: Comment of a key of FOLLOWING in a recorded configuration.
_FOLLOWS = "  # follows from other keys"
#: End of a fix that names the default, for lack of a nearer value.
_DEFAULT = ", the default"
#: Unit after a number ("128 tokens") -> its factor in the number without a unit.
_PLAIN_UNITS: dict[str, int] = dict.fromkeys(
    ("tokens", "sequences", "steps", "layers", "GPUs", "ranks"), 1
)
#: The one key that holds a list of tables.
SOURCES_KEY = "data.sources"
IMPLEMENTATION_KEY = "model.implementation"
#: (the folder of ``model.path``, given keys, broken keys) -> problems of keys that contradict it.
FolderCheck = Callable[[ConfigSource, Mapping[str, Leaf], Collection[str]], Iterable[Problem]]
S = TypeVar("S", bound=Section)


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A configuration that passed every check, origins by leaf ("plan.ep"), and notes."""

    config: RunConfig
    origins: dict[str, str]
    notes: tuple[str, ...] = ()


class UnresolvedError(ConfigError):
    """The problems, and a configuration in which keys of a wrong type have their defaults; `broken`
    keys of other problems have the given values."""

    def __init__(
        self, problems: Iterable[Problem], valid: Resolved, broken: Collection[str]
    ) -> None:
        super().__init__(problems)
        self.valid, self.broken = valid, frozenset(broken)


def resolve(
    files: Sequence[Path],
    overrides: Sequence[str],
    environ: Mapping[str, str] | None,
    folder_checks: Sequence[FolderCheck],
    run_checks: Sequence[RunCheck],
) -> Resolved:
    """Same as :func:`moemesh.sharding.load_run.load_run`, which adds the checks: `folder_checks` of
    ``model.path``, `run_checks` of valid sections."""
    sources = [
        *(read_file(path) for path in files),
        # The one place that reads values of the configuration from the environment.
        read_environment(os.environ if environ is None else environ),
        read_overrides(overrides),
    ]
    problems = [problem for source in sources for problem in source.problems]
    problems += _unknown_keys(sources)
    # All leaves; later sources win.
    chosen = {key: leaf for source in sources for key, leaf in source.leaves.items()}
    adapters = with_adapters(chosen)
    chosen = adapters.leaves
    preset, path, broken, choice_problems = _choose_model(chosen)
    problems += [*choice_problems, *adapters.problems]
    broken |= {problem.key for problem in adapters.problems}
    if path is None or PRESET_KEY in broken:
        base = read_preset(preset)
    else:
        wanted = chosen.get(IMPLEMENTATION_KEY)
        implementation = "auto" if wanted is None else wanted.value
        has_tokenizer = "data.tokenizer" in chosen
        base, path = _read_model(path, implementation, has_tokenizer=has_tokenizer)
        if wanted is not None and wanted.value == "auto":
            del chosen[IMPLEMENTATION_KEY]  # the folder's reader has chosen
    where = chosen[PATH_KEY].origin if PATH_KEY in chosen else ""
    problems += (
        replace(problem, origin=problem.origin or where) if problem.key == PATH_KEY else problem
        for problem in base.problems
    )
    # Leaves of the model's preset or folder come below all others.
    leaves = {**base.leaves, **chosen}
    # If different sources set train.steps and train.epochs, the later source wins, so that --set
    # can end a run whose file has the other key.
    last_source = {
        key: max((n for n, source in enumerate(sources) if key in source.leaves), default=-1)
        for key in ("train.steps", "train.epochs")
    }
    if min(last_source.values()) >= 0 and len(set(last_source.values())) > 1:
        del leaves[min(last_source, key=lambda key: last_source[key])]
    if PRESET_KEY in broken or base.problems:
        # The model's size is unknown: rules over fields that are not given are skipped.
        broken |= {f"model.{name}" for name in ModelConfig.model_fields} - chosen.keys()

    sections, section_problems = _sections(leaves)
    problems += section_problems
    broken |= {problem.key for problem in section_problems}
    if path is not None and not base.problems:
        folder_problems = [
            problem for check in folder_checks for problem in check(base, chosen, broken)
        ]
        problems += folder_problems
        broken |= {problem.key for problem in folder_problems}
    if not base.problems:
        sections["model"] = _with_architecture(sections["model"], path)
    config = RunConfig(**sections, model_preset=preset, model_path=path)
    config = config.with_following()
    origins = {key: leaves[key].origin if key in leaves else "default" for key in all_keys()}
    origins |= {key: why for key, why in FOLLOWING.items() if key not in leaves}
    if "plan.stages_per_rank" not in leaves and config.plan.stages_per_rank > 1:
        origins["plan.stages_per_rank"] = "default by plan.schedule"
    for problem in independent(config.check(run_checks), broken):
        # The origin of the key itself, then those of the other keys of the rule that were given.
        others = [
            f"{key}: {origins[key]}"
            for key in problem.related
            if key != problem.key and not origins.get(key, "default").startswith("default")
        ]
        origin = "; ".join([origins.get(problem.key, "default"), *others])
        problems.append(replace(problem, origin=origin))
    if problems:
        broken |= {problem.key for problem in problems}
        valid = Resolved(config=config, origins=origins)
        raise UnresolvedError((_as_the_model(problem, base) for problem in problems), valid, broken)
    notes = tuple(note for source in [adapters, base, *sources] for note in source.notes)
    return Resolved(config=config, origins=origins, notes=notes)


def _read_model(
    name: str, implementation: object, *, has_tokenizer: bool
) -> tuple[ConfigSource, str]:
    """The values of the model `name`, and its folder: for a name of the hub that of a snapshot."""
    try:
        path = str(local_folder(name, "model", PATH_KEY))
    except ConfigError as error:
        return ConfigSource(problems=tuple(error.problems)), name
    base = read_folder(Path(path), implementation, has_tokenizer=has_tokenizer)
    if path == name:
        return base, name
    note = f"model.path: {name} is the snapshot {path}, which the run records"
    return replace(base, notes=(note, *base.notes)), path


def read_recorded(
    path: Path, overrides: Sequence[str], sections: Sequence[str], run_checks: Sequence[RunCheck]
) -> RunConfig:
    """Same as :func:`moemesh.sharding.load_run.load_recorded`, without its checks."""
    source, given = read_file(path), read_overrides(overrides)
    problems = [*source.problems, *given.problems, *_unknown_keys([source, given])]
    recorded = {
        key: leaf for key, leaf in source.leaves.items() if key.partition(".")[0] in sections
    }
    leaves = recorded | given.leaves
    table = path.parent / KEPT_TABLE
    if "train.esft" in recorded and "train.esft" not in given.leaves and table.is_file():
        # The file that it was copied from may have changed, or be gone.
        leaves["train.esft"] = replace(recorded["train.esft"], value=str(table))
    names = {key: leaves.pop(key, None) for key in (PRESET_KEY, PATH_KEY)}
    preset, folder = (None if leaf is None else str(leaf.value) for leaf in names.values())
    built, section_problems = _sections(leaves)
    built["model"] = _with_architecture(built["model"], folder)
    config = RunConfig(**built, model_preset=preset or DEFAULT_PRESET, model_path=folder)
    if problems := [*problems, *section_problems] or config.check(run_checks):
        raise ConfigError(problems)
    return config


def _with_architecture(model: ModelConfig, path: str | None) -> ModelConfig:
    """`model` with the record of the ``config.json`` in `path` if transformers computes it."""
    if model.implementation != "transformers" or path is None:
        return model
    return model.with_architecture(read_architecture(read_config(Path(path))))


def with_recorded(config: RunConfig, folder: Path) -> RunConfig:
    """`config` with values of the run in `folder`, so that a resumed run keeps them: keys that
    follow from others unless they are given, the date of a chat template, and revisions of the
    Hub."""
    if not (folder / RUN_CONFIG).is_file():
        return config
    recorded = read_file(folder / RUN_CONFIG).leaves
    values: dict[str, object] = {}
    for name in (key.partition(".")[2] for key in FOLLOWING):
        leaf = recorded.get(f"train.{name}")
        value = TrainConfig.model_fields[name].default if leaf is None else leaf.value
        if name not in config.train.model_fields_set and isinstance(value, int | float):
            values[name] = value
    config = config.with_following(**values)
    day = recorded.get("data.date")
    data = config.data
    if data.date is None and day is not None:
        data = data.model_copy(update={"date": day.value})
    # A name of the hub means its newest revision; a run stays at the revision that it recorded.
    path, given = recorded.get(PATH_KEY), config.model_path
    if path is not None and given is not None and given != path.value:
        pinned = str(path.value)
        if repository_of(given) is not None and repository_of(pinned) == repository_of(given):
            update = {"tokenizer": pinned} if data.tokenizer == given else {}
            data = data.model_copy(update=update)
            config = replace(config, model_path=pinned)
    text = (folder / RUN_CONFIG).read_text(encoding="utf-8", errors="replace")
    commits = re.findall(r"([\w.-]+/[\w.-]+)@([0-9a-f]{40})\b", text)
    revisions = {name: f"{name}@{commit}" for name, commit in commits}
    return replace(config, data=data.with_paths(lambda path: revisions.get(path or "", path)))


def resolved_toml(config: RunConfig) -> str:
    """`config` as TOML, which loads back to an equal configuration: every key that has a value. A
    comment marks values that follow from other keys (:func:`following`)."""
    given = {f"train.{name}" for name in config.train.model_fields_set}
    follows = FOLLOWING.keys() - given
    lines = [f"{SCHEMA_KEY} = {SCHEMA_VERSION}"]
    for section, fields in config_values(config).items():
        lines += ["", f"[{section}]"]
        lines += [
            f"{key} = {format_value(value)}" + _FOLLOWS * (f"{section}.{key}" in follows)
            for key, value in fields.items()
            if value is not None
        ]
    return "\n".join(lines) + "\n"


def following(text: str) -> set[str]:
    """The keys whose values in `text`, of :func:`resolved_toml`, follow from others."""
    names = {key: key.removeprefix("train.") for key in FOLLOWING}
    return {key for key in names if re.search(f"(?m)^{names[key]} = .*{_FOLLOWS}$", text)}


def config_values(config: RunConfig) -> dict[str, dict[str, object]]:
    """section -> key -> value, with `model.preset` or `model.path` first."""
    source: dict[str, object] = {"preset": config.model_preset, "path": config.model_path}
    if config.model_path is not None:
        source["preset"] = None
    sections: dict[str, dict[str, object]] = {}
    for name in SECTIONS:
        section = cast("Section", getattr(config, name))
        fields: dict[str, object] = dict(source) if name == "model" else {}
        for key in SECTIONS[name].model_fields:
            value: object = getattr(section, key)
            if isinstance(value, tuple):
                # A table in a list is written without the keys that have their defaults.
                value = tuple(
                    item.model_dump(exclude_defaults=True) if isinstance(item, Section) else item
                    for item in cast("tuple[object, ...]", value)
                )
            fields[key] = value
        sections[name] = fields
    if config.train.epochs is not None:  # the number of steps follows from the data
        given = config.train.model_fields_set
        follows = ("steps", "warmup_steps")
        sections["train"] |= {key: None for key in follows if key == "steps" or key not in given}
    return sections


def _unknown_keys(sources: Sequence[ConfigSource]) -> list[Problem]:
    """One problem for every leaf of any source whose key does not exist."""
    known, problems = set(all_keys()), list[Problem]()
    for source in sources:
        for key, leaf in source.leaves.items():
            if key not in known:
                shown = replace(leaf, value=None) if isinstance(leaf.value, dict) else leaf
                problems.append(shown.problem("unknown-key", key, *explain_unknown_key(key)))
    return problems


def _choose_model(chosen: Mapping[str, Leaf]) -> tuple[str, str | None, set[str], list[Problem]]:
    """(preset, path, broken keys, problems) from `model.preset` and `model.path`."""
    problems: list[Problem] = []
    names: dict[str, str] = {}
    for key in (PRESET_KEY, PATH_KEY):
        leaf = chosen.get(key)
        if leaf is None:
            continue
        if isinstance(leaf.value, str) and leaf.value:
            names[key] = leaf.value
        else:
            given = "is empty" if leaf.value == "" else "must be text in quotes"
            message = f"{key} {given}"
            problems.append(leaf.problem("wrong-type", key, message, "the name, in quotes"))
    preset, path = names.get(PRESET_KEY, DEFAULT_PRESET), names.get(PATH_KEY)
    if PRESET_KEY in names and path is not None:
        message = f"model.preset and model.path both choose the model ({chosen[PATH_KEY].origin})"
        problems.append(chosen[PRESET_KEY].problem("conflict", PRESET_KEY, message, "keep one"))
    if preset not in preset_names():
        message = f"no preset is named {format_value(preset)}"
        fix = nearest_choice(preset.replace("_", "-"), preset_names())
        problems.append(chosen[PRESET_KEY].problem("not-a-choice", PRESET_KEY, message, fix))
        preset = DEFAULT_PRESET
    return preset, path, {problem.key for problem in problems}, problems


def _sections(leaves: Mapping[str, Leaf]) -> tuple[dict[str, Any], list[Problem]]:
    """Name -> section, and the problems of all sections."""
    built = {name: build_section(kind, leaves) for name, kind in SECTIONS.items()}
    problems = [problem for _, wrong in built.values() for problem in wrong]
    return {name: section for name, (section, _) in built.items()}, problems


def build_section(kind: type[S], leaves: Mapping[str, Leaf]) -> tuple[S, list[Problem]]:
    """The section, with the default in place of each value of a wrong type, and a problem for
    each of those values."""
    name = kind.section
    values: dict[str, Any] = {
        field: leaves[f"{name}.{field}"].value
        for field in kind.model_fields
        if f"{name}.{field}" in leaves
    }
    try:
        return kind.model_validate(values), []
    except ValidationError as error:
        problems = type_problems(kind, leaves, error)
        rest = {field: value for field, value in values.items() if field not in problems}
        return kind.model_validate(rest), list(problems.values())


def type_problems(
    kind: type[Section], leaves: Mapping[str, Leaf], error: ValidationError
) -> dict[str, Problem]:
    """Field -> what is wrong with its value, or that it is missing."""
    problems: dict[str, Problem] = {}
    for detail in error.errors(include_url=False):
        field = str(detail["loc"][0])
        if field in problems:
            continue
        key, inner = f"{kind.section}.{field}", detail["loc"][1:]
        if (leaf := leaves.get(key)) is None:
            message = f"the {kind.section} has no {field}"
            problem = Problem.of("missing", key, None, message)
        elif key != SOURCES_KEY or not inner:
            problem = _type_problem(kind, field, leaf, detail)
        else:
            place = f"{field}[{inner[0]}]"
            if len(inner) == 1:
                message, fix = f"{place} must be a table", '{ path = "FOLDER", weight = 2.0 }'
                problem = leaf.problem("wrong-type", key, message, fix)
            elif detail["type"] == "extra_forbidden":
                message = f"{place} has no key `{inner[1]}`"
                fix = nearest_choice(str(inner[1]), tuple(DataSource.model_fields))
                problem = leaf.problem("unknown-key", key, message, fix)
            else:
                entry = replace(leaf, value=detail["input"])
                problem = _type_problem(DataSource, str(inner[1]), entry, detail)
                message = f"{place}: {problem.message}"
                problem = replace(problem, key=key, value=leaf.value, message=message)
        problems[field] = problem
    return problems


def _type_problem(kind: type[Section], field: str, leaf: Leaf, detail: ErrorDetails) -> Problem:
    """The problem of a value of a wrong type, or outside a list of names."""
    key, reason = f"{kind.section}.{field}", detail["type"]
    choices = choices_of(kind.model_fields[field].annotation)
    shown = cut(format_value(leaf.value), 60)
    if reason == "literal_error":
        fix = nearest_choice(str(detail["input"]), choices, key)
        return leaf.problem("not-a-choice", key, f"{field} cannot be {shown}", fix)
    is_text = reason == "tuple_type" and kind.elements.get(field) is str
    expected = "a list of names" if is_text else _EXPECTED.get(reason)
    if key == SOURCES_KEY:
        expected = "a list of tables"
    message = f"{field}: {detail['msg']}"
    if expected:
        message = f"{field} must be {expected}, not {shown}"
    value, default, fix = leaf.value, kind.model_fields[field].default, ""
    if reason == "string_type":
        fix = f"{field} = {format_value(format_value(value))}"
    elif reason == "bool_type":
        is_off = str(value).lower() in ("0", "no", "off", "false", "0.0")
        fix = f"{field} = {'false' if is_off else 'true'}"
    elif field == "sources" and isinstance(value, str | dict):
        table = {"path": value} if isinstance(value, str) else cast("object", value)
        fix = f"sources = [{format_value(table)}]"
    elif reason == "tuple_type" and isinstance(value, int) and not is_text:
        fix = f"{field} = [{value}]"
    elif reason == "finite_number":
        fix = f"leave {field} out to take the default"
    elif isinstance(value, (str, float)) and is_number(text := _without_unit(str(value), field)):
        number = float(text)
        if reason == "float_type":
            fix = f"{field} = {number}"
        elif reason == "int_type" and number.is_integer():
            fix = f"{field} = {int(number)}"
    if not fix and not kind.model_fields[field].is_required():
        shown = format_value(default)
        fix = f"leave {field} out" if default is None else f"{field} = {shown}{_DEFAULT}"
    return leaf.problem("wrong-type", key, message, fix)


def _without_unit(text: str, field: str) -> str:
    """`text` without a unit of the key `field`: "5min" of seconds is "300.0"."""
    units = {"s": 1, "sec": 1, "min": 60, "h": 3600} if field.endswith("_seconds") else _PLAIN_UNITS
    number = text.rstrip(f" {ascii_letters}")
    unit = text.removeprefix(number).strip()
    return str(float(number) * units[unit]) if is_number(number) and unit in units else text


def _as_the_model(problem: Problem, base: ConfigSource) -> Problem:
    """`problem` with the value of the preset or folder as its fix, if a size is below 1 or the fix
    is only the default: the end of the range, such as one channel, would be legal and useless."""
    leaf = base.leaves.get(problem.key)
    given, is_outside = problem.value, problem.code == "out-of-range"
    is_low = is_outside and isinstance(given, (int, float)) and given < 1
    is_vague = is_low or problem.fix.endswith(_DEFAULT)
    if leaf is None or not is_vague or problem.origin == leaf.origin:
        return problem
    name = problem.key.partition(".")[2]
    return replace(problem, fix=f"{name} = {format_value(leaf.value)}, as {leaf.origin}")
