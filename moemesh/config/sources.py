"""Sources of values: files, presets, environment and --set, each as leaves with an origin."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from glob import glob
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

from moemesh.config.errors import LONGEST_VALUE, ConfigError, Problem
from moemesh.config.hub import DATA_ENDINGS, is_hub_name
from moemesh.config.limits import parse_json, parse_toml
from moemesh.config.lora import ADAPTER_CONFIG
from moemesh.config.schema import SCHEMA_KEY, SCHEMA_VERSION, SECTIONS, sections_with
from moemesh.config.shown import cut
from moemesh.config.suggest import alias_hint, nearest_choice, nearest_path, nearest_run
from moemesh.config.toml import format_value, key_lines, unreadable

ENVIRONMENT_PREFIX = "MOEMESH__"
#: Separator of several keys in one text.
_KEYS_IN_ONE = re.compile(rf"[,;\s]\s*(?=(?:{'|'.join(SECTIONS)})\.\w+\s*=)")
#: Endings of the names of data files.
_ENDINGS = (".txt", *DATA_ENDINGS)
#: Files in the folder of a run: its configuration, its plan, and the records of its starts.
RUN_CONFIG, RUN_PLAN, RUN_STARTS = "config.toml", "plan.json", "provenance.json"


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """One value as given, and its origin."""

    value: object
    origin: str

    def problem(self, code: str, key: str, message: str, fix: str = "") -> Problem:
        """A problem of this value of `key`."""
        problem = Problem.of(code, key, self.value, message, fix)
        return replace(problem, origin=self.origin)


@dataclass(frozen=True, kw_only=True)
class ConfigSource:
    """Contents of a source: dotted key -> leaf, problems, and notes for the user."""

    leaves: dict[str, Leaf] = field(default_factory=dict[str, Leaf])
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()


def read_file(path: Path) -> ConfigSource:
    """Values of a TOML file, or of the configuration in the folder of a run. Sections become dotted
    keys; the origin of a key is the file and its line. An unreadable file gives one problem."""
    given, path = path, path / RUN_CONFIG if path.is_dir() else path
    name, text = str(path), ""
    try:
        text = read_text(path)
        document = parse_toml(text)
    except (ConfigError, ValueError) as error:
        if (foreign := _foreign(path, text)) is not None:
            return foreign
        if (setting := _setting_of(given)) is not None:
            message = f"{given} is {_NOUNS[setting[0]]}; a configuration is a TOML file"
            fix = f"--set {shlex.quote('='.join(setting))}"
            problem = Problem.of("wrong-type", str(given), None, message, fix)
            return ConfigSource(problems=(problem,))
        if isinstance(error, ConfigError):
            return ConfigSource(problems=error.problems)
        return ConfigSource(problems=(_syntax_problem(name, text, error),))
    lines = key_lines(text)

    def origin(*key: str) -> str:
        while key and key not in lines:
            key = key[:-1]
        return f"{name}:{lines.get(key, 1)}"

    leaves: dict[str, Leaf] = {}
    problems: list[Problem] = []
    for section, content in document.items():
        leaf = Leaf(value=content, origin=origin(section))
        if section == SCHEMA_KEY:
            if not isinstance(content, int) or isinstance(content, bool) or content < 1:
                message = f"{SCHEMA_KEY} must be a whole number of at least 1"
                fix = f"{SCHEMA_KEY} = {SCHEMA_VERSION}"
                problems.append(leaf.problem("wrong-type", SCHEMA_KEY, message, fix))
            elif content > SCHEMA_VERSION:
                message = f"the file has keys of version {content}, known are those up to "
                message += f"{SCHEMA_VERSION}"
                fix = "a newer moemesh"
                problems.append(leaf.problem("too-large", SCHEMA_KEY, message, fix))
        elif section not in SECTIONS:
            # Keys in a section of another trainer may have a hint each; else the section is wrong.
            table = cast("dict[str, object]", content) if isinstance(content, dict) else {}
            foreign_leaves = {
                f"{section}.{key}": Leaf(value=value, origin=origin(section, key))
                for key, value in table.items()
            }
            has_hint = any(map(alias_hint, foreign_leaves))
            leaves |= foreign_leaves if has_hint else {section: leaf}
        elif isinstance(content, dict):
            for key, value in cast("dict[str, object]", content).items():
                leaves[f"{section}.{key}"] = Leaf(value=value, origin=origin(section, key))
        else:
            problems.append(_not_a_section(section, leaf))
    if path.name == RUN_CONFIG:
        for key in INPUTS & leaves.keys():
            value = input_of_run(path.parent, key, leaves[key].value)
            leaves[key] = replace(leaves[key], value=value)
    return ConfigSource(leaves=leaves, problems=tuple(problems))


#: Keys with the path of an input, or with tables that have one (data.sources).
INPUTS = frozenset(
    {
        *("model.path", "lora.path", "train.cluster"),
        *("data.path", "data.sources", "data.validation", "data.tokenizer"),
    }
)


def input_of_run(folder: Path, key: str, value: object) -> object:
    """The `value` of `key` in the configuration of the run in `folder`. A relative path that does
    not exist in the current directory is looked up in the directories where the run was started."""

    def resolved(path: str) -> str:
        is_name = key == "data.tokenizer" and path == "bytes"
        is_name |= key == "train.cluster" and path in preset_names("clusters")
        if is_name or os.path.isabs(path) or _exists(path):
            return path
        with suppress(OSError, ValueError, LookupError, TypeError):
            text = (folder / RUN_STARTS).read_text(encoding="utf-8")
            for start in reversed(parse_json(text)["starts"]):
                if _exists(moved := str(Path(start["directory"], path))):
                    return moved
        return path

    return with_paths(value, resolved)


def with_paths(value: object, change: Callable[[str], str]) -> object:
    """The `value` of a key in INPUTS with each path changed."""
    if isinstance(value, list):
        return [with_paths(item, change) for item in cast("list[object]", value)]
    if isinstance(value, dict):
        table = cast("dict[str, object]", value)
        return table | {key: with_paths(table[key], change) for key in table if key == "path"}
    return change(value) if isinstance(value, str) else value


def _exists(path: str) -> bool:
    """Whether a file, a folder or a match of a pattern exists."""
    return os.path.exists(path) or bool(glob(path, recursive=True))


#: Key of an input that was given in place of a configuration -> its noun.
_NOUNS = {"model.path": "a model", "lora.path": "a folder of adapters", "data.path": "data",
          "model.preset": "a preset of a model"}  # fmt: skip


def _setting_of(path: Path) -> tuple[str, str] | None:
    """Key and value of the setting for a path that was given in place of a configuration: a model,
    adapters, data, a preset, a name of the hub. None for a configuration with a fault, a folder of
    a run, and anything else."""
    if path.is_dir():
        if any((path / name).exists() for name in (RUN_CONFIG, RUN_PLAN)):
            return None
        contents = {"config.json": "model.path", ADAPTER_CONFIG: "lora.path"}
        contents |= {f"*{ending}": "data.path" for ending in _ENDINGS}
        keys = (key for pattern, key in contents.items() if any(path.glob(pattern)))
        key = next(keys, None)
        return None if key is None else (key, str(path))
    if path.name == "config.json":
        return "model.path", str(path.parent)
    if path.suffix == ".safetensors":
        return "model.path", str(path.parent)
    if path.exists():
        return None if path.suffix in (".toml", ".yaml", ".yml") else ("data.path", str(path))
    if str(path) in preset_names():
        return "model.preset", str(path)
    is_model = is_hub_name(str(path)) and not path.name.endswith((*_ENDINGS, ".toml", ".json"))
    return ("model.path", str(path)) if is_model else None


#: Kind of a file of another trainer, by the ending of its name.
_FOREIGN = {
    ".json": "JSON",
    **dict.fromkeys((".yaml", ".yml"), "YAML"),
    **dict.fromkeys((".sh", ".bash", ".slurm", ".sbatch"), "a script"),
}


def _foreign(path: Path, text: str) -> ConfigSource | None:
    """The refusal of a configuration of another trainer, with those of its leaves for which this
    package has a key or a hint; None for other files. Leaves of a script are options, "--lr 1e-3".
    """
    if not path.exists():
        return None
    pairs: list[tuple[str, object, int]] = []  # dotted key, value, line
    kind = "" if path.name in ("config.json", ADAPTER_CONFIG) else _FOREIGN.get(path.suffix, "")
    if kind == "YAML":
        parents: list[tuple[int, str]] = []  # indentation, key; "" for an item of a list
        for number, line in enumerate(text.splitlines(), start=1):
            if (
                match := re.match(
                    r"( *)(- )?([A-Za-z_][\w-]*):(?:\s+(.*))?$", line.partition(" #")[0]
                )
            ) is not None:
                indent, item, key, value = match.groups()
                parents = [parent for parent in parents if parent[0] < len(indent)]
                parents.append((len(indent), "" if item else key))
                if all(names := [name for _, name in parents]):
                    pairs.append((".".join(names), (value or "").strip(" \"'") or None, number))
    elif kind == "JSON":
        with suppress(ValueError, TypeError, AttributeError):
            for key, value in parse_json(text).items():
                table = cast("dict[str, object]", value) if isinstance(value, dict) else {"": value}
                pairs += [(f"{key}.{leaf}".rstrip("."), table[leaf], 1) for leaf in table]
    elif kind:
        for number, line in enumerate(text.splitlines(), start=1):
            for match in re.finditer(r"(?<![\w-])--([A-Za-z][\w-]*)(?:[ =]+([^\s-]\S*))?", line):
                pairs.append((match[1].replace("-", "_"), match[2] or True, number))
    leaves = {
        key: Leaf(value=value, origin=f"{path}:{number}")
        for key, value, number in pairs
        if alias_hint(key) or sections_with(key) or key.endswith(".enabled")
    }
    if not leaves and kind != "YAML":
        return None
    message = f"{path} is {kind}; a configuration is a TOML file"
    fix = "moemesh config show lists all keys"
    problem = Problem.of("wrong-type", str(path), None, message, fix)
    return ConfigSource(leaves=leaves, problems=(problem,))


def _mended(text: str) -> str:
    """The broken TOML value `text`, not empty, as the TOML that was probably meant: a list of
    numbers and texts, a number, or a text."""
    if text[0] != "[":
        bare = text.strip("\"'")
        return format_value(bare if bare[:1] in ("[", "{") else parse_value(bare, "", ""))
    parts = (part.strip(" \"'[]{}") for part in text.split(","))
    return format_value([parse_value(part, "", "") for part in parts if part])


def _syntax_problem(name: str, text: str, error: ValueError) -> Problem:
    """The problem of the file `name` whose `text` is not TOML."""
    reason, rows = str(error), text.splitlines() or [""]
    match = re.search(r"\(at line (\d+)", reason)
    number = int(match.group(1)) if match else len(rows)
    line = rows[min(number, len(rows)) - 1].strip()
    key, _, value = line.partition("=")
    section = line.partition("#")[0].strip("[] ")
    fix = "each key as key = value, with text in quotes, and every quote closed"
    if "Cannot" in reason:
        fix = "give each key, and each section, once"
    elif "=" not in line and section and set(line) & set("[]"):
        fix = f"[{section}]"
    elif "Unclosed" in reason:
        fix = "close every bracket: the open one may be in a line above"
    elif "Invalid value" in reason:
        given = value.strip().strip("= ")
        fix = f"{key.strip()} = {_mended(given)}" if given else "a value after the equals sign"
    wrong = Leaf(value=line[:80] or None, origin=f"{name}:{number}")
    return wrong.problem("syntax", "", unreadable(error), fix)


def _is_configuration(path: Path) -> bool:
    """Whether `path` has the name of a TOML file, or is the folder of a run."""
    return path.suffix == ".toml" or (path / RUN_CONFIG).is_file()


def read_text(path: Path) -> str:
    """The text of a configuration file. Raises ConfigError for one that cannot be read."""
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        message = f"cannot read the file: {error.strerror or error}"
        if path.is_dir():
            fix = str(next(path.glob("*.toml"), "a TOML file, not a folder"))
        else:
            fix = "" if path.exists() else nearest_path(path, _is_configuration)
        if path.name == RUN_CONFIG and path.parent.is_dir():
            fix = nearest_run(path.parent) or (
                "a TOML file, or the folder of a run; a folder of texts is "
                f"--set data.path={shlex.quote(str(path.parent))}"
            )
        if (given := re.match(r"(\w+\.)?(\w+)=", str(path))) is not None:
            sections = ("",) if given[1] else sections_with(given[2])
            if len(sections) == 1:
                name = ".".join(filter(None, (sections[0], str(path))))
                fix = f"--set {shlex.quote(name)}"
        problem = Problem.of("no-file", str(path), None, message, fix)
    except UnicodeDecodeError as error:
        problem = Problem.of("syntax", str(path), None, unreadable(error))
    raise ConfigError([problem])


def read_environment(environ: Mapping[str, str]) -> ConfigSource:
    """Values of variables such as ``MOEMESH__plan__ep=8``, which sets plan.ep; case counts."""
    leaves: dict[str, Leaf] = {}
    problems: list[Problem] = []
    for variable in sorted(environ):
        leaf = Leaf(value=environ[variable], origin=f"environment {variable}")
        if not variable.startswith(ENVIRONMENT_PREFIX):
            # A variable with single underscores, MOEMESH_plan_ep, would be ignored silently.
            prefix, _, rest = variable.lower().partition("_")
            section, _, key = rest.lstrip("_").partition("_")
            if prefix == "moemesh" and section in SECTIONS and key.strip("_"):
                name = f"{section}.{key.strip('_')}"
                message = (
                    "parts of a variable's name are joined by two underscores, and case counts"
                )
                fix = f"{ENVIRONMENT_PREFIX}{name.replace('.', '__')}={leaf.value}"
                problems.append(leaf.problem("syntax", name, message, fix))
            continue
        key, origin = variable.removeprefix(ENVIRONMENT_PREFIX).replace("__", "."), leaf.origin
        if key in SECTIONS:
            problems.append(_not_a_section(key, leaf))
        elif isinstance(value := parse_value(environ[variable], key, origin), Problem):
            problems.append(value)
        else:
            leaves[key] = Leaf(value=value, origin=origin)
    return ConfigSource(leaves=leaves, problems=tuple(problems))


def read_overrides(overrides: Sequence[str]) -> ConfigSource:
    """The values of every ``--set a.b=value``. If a key is set twice, the last value counts, as
    scripts that extend a command line expect, and a note reports it."""
    leaves: dict[str, Leaf] = {}
    problems: list[Problem] = []
    notes: list[str] = []
    for text in overrides:
        key, equals, raw = text.partition("=")
        key = key.strip()
        origin = f"--set {cut(text, LONGEST_VALUE)}"
        if not equals or not key or key[0] in "[{":
            message, name = "an override has the form section.key=value", key.strip("[]{} ")
            fix = f"--set {name if '.' in name else 'plan.ep'}=VALUE"
            leaf = Leaf(value=None, origin=origin)
            problems.append(leaf.problem("syntax", key or "--set", message, fix))
        elif key in SECTIONS:
            problems.append(_not_a_section(key, Leaf(value=raw, origin=origin)))
        elif isinstance(value := parse_value(raw.strip(), key, origin), Problem):
            problems.append(value)
        elif value == raw.strip() and len(several := _KEYS_IN_ONE.split(text.strip())) > 1:
            fix = " ".join(f"--set {shlex.quote(one.strip())}" for one in several)
            leaf = Leaf(value=value, origin=origin)
            problems.append(leaf.problem("syntax", key, "a --set holds one key", fix))
        else:
            if key in leaves and leaves[key].value != value:
                notes.append(f"{key} is set twice: {origin} counts, not {leaves[key].origin}")
            leaves[key] = Leaf(value=value, origin=origin)
    return ConfigSource(leaves=leaves, problems=tuple(problems), notes=tuple(notes))


def parse_value(text: str, key: str, origin: str) -> object:
    """`text` as a TOML value, else as plain text; a Problem when it is broken TOML."""
    leaf = Leaf(value=text, origin=origin)
    try:
        text.encode()
    except UnicodeEncodeError:
        return leaf.problem("syntax", key, "the value is not UTF-8 text")
    if "\n" not in text:
        try:
            return cast("object", parse_toml(f"value = {text}")["value"])
        except ValueError as error:
            if text[:1] in ("[", "{", '"', "'"):
                message = f"not a TOML value: {str(error).partition(' (at line')[0]}"
                fix = f"close every quote and bracket: {shlex.quote(f'{key}={_mended(text)}')}"
                return leaf.problem("syntax", key, message, fix)
    return text


@cache
def preset_names(folder: str = "") -> tuple[str, ...]:
    """Names of the packaged presets: of models, or of another `folder` such as "clusters"."""
    names = [item.name for item in (files("moemesh.config") / "presets" / folder).iterdir()]
    return tuple(sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml")))


def read_preset_table(name: str, folder: str = "") -> dict[str, object]:
    """The table of one packaged preset; `name` must be one of :func:`preset_names`."""
    home = files("moemesh.config") / "presets" / folder
    return parse_toml((home / f"{name}.toml").read_text(encoding="utf-8"))


def read_named_table(
    source: str, folder: str, key: str, missing: str, fix: str = ""
) -> dict[str, Any]:
    """The table of the packaged preset `source` of a folder, or of a TOML or JSON file. Raises
    ConfigError about `key`; for a missing file with the message `missing` and the `fix`, by default
    the nearest preset."""
    if source in preset_names(folder):
        return dict(read_preset_table(source, folder))
    problem, path = partial(Problem.of, key=key, value=source), Path(source)
    is_json = path.suffix == ".json"
    try:
        text = path.read_text(encoding="utf-8-sig")
        table = parse_json(text) if is_json else parse_toml(text)
    except OSError:
        fix = fix or nearest_choice(source, preset_names(folder))
        raise ConfigError([problem("no-file", message=missing, fix=fix)]) from None
    except ValueError as error:
        message = f"not valid JSON: {error}" if is_json else unreadable(error)
        raise ConfigError([problem("syntax", message=message)]) from None
    if isinstance(table, dict):
        return cast("dict[str, Any]", table)
    message = "the file must hold a table of keys"
    raise ConfigError([problem("wrong-type", message=message, fix="a JSON object, or TOML")])


def read_preset(name: str) -> ConfigSource:
    """The fields of [model] that a packaged preset sets."""
    table = read_preset_table(name)
    origin = f"preset {name}"
    return ConfigSource(
        leaves={f"model.{key}": Leaf(value=value, origin=origin) for key, value in table.items()}
    )


def _not_a_section(section: str, leaf: Leaf) -> Problem:
    message = f"{section} is a section and takes keys, not a value"
    fix = f"set a key in it, such as {section}.{next(iter(SECTIONS[section].model_fields))}"
    if section in ("model", "data"):
        fix = f"{section}.path={leaf.value}"
    return leaf.problem("wrong-type", section, message, fix)
