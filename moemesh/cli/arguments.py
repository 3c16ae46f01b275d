"""Mistakes in a command line: all in one message, with the nearest legal words."""

# Nothing heavy may be imported at the top, or `moemesh --help` becomes slow.
import math
import re
import shlex
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args

import typer
from typer.core import TyperCommand, TyperGroup

from moemesh.cli.verbs import VERBS
from moemesh.config.errors import ConfigError, Problem
from moemesh.config.limits import few
from moemesh.config.suggest import alias_hint, aliases, nearest_choice, spelled_hint

#: Base class of typer's errors on a command line; it has no public name.
_Usage: Any = typer.BadParameter.__mro__[1]
#: Example values for a fix, by option or by metavar, if the examples of a verb have none.
_VALUES = dict(
    pair.split(" ", 1)
    for pair in (
        *("--cluster dgx_h100", "--dispatcher all_to_all", "--dtype bfloat16", "--name mine"),
        *("--svg picture.svg", "--plot picture.svg", "--html page.html", "--save schedule.txt"),
        *("C dgx_h100", "M tiny", "S 4k", "B 256", "MONEY 2.5", "N 4", "X 0.5", "K 5"),
        *("DIR runs/first", "RUN runs/first", "DELTA runs/delta", "TEXT Once upon", "KEY train.lr"),
        "FILE file.json",
        *("SECTION.KEY=VALUE plan.dp=2", "KEY=VALUE lora.rank=8", "SHARE|SIZE 10%", "STEP 100"),
        *("BATCHxTOKENS 32x4096", "RECIPE experts=8,k=2", "--tolerance 0.05"),
    )
)
#: Former verb that is now outside of the package -> its command in a checkout.
IN_A_CHECKOUT = {"drill": "python -m tests.drill", "bench layers": "python -m benchmarks.layer"} | {
    f"bench {name}": f"python -m benchmarks.{name}"
    for name in (
        *("layer", "dispatch", "pipeline", "balance", "replicas"),
        *("memory", "tokenize", "checkpoint", "load", "device"),
    )
}


#: Names in other tools of `--ranks-per-node`.
_RANKS_PER_NODE = (
    *("--nproc-per-node", "--procs-per-node", "--gpus-per-node", "--ntasks-per-node"),
    *("--local-world-size", "--devices-per-node", "--num-gpus-per-node"),
)
#: A verb that does not exist -> the fix, instead of a verb of another group.
_NO_VERB = dict.fromkeys(
    [f"config {word}" for word in ("init", "new", "create", "write", "generate", "template")],
    "write the keys that differ from the defaults into a file of your own: `moemesh config show` "
    "prints all keys, and `moemesh plan --write FILE.toml` writes those of a plan",
)
_RUN = (
    *("run", "run-dir", "run-path", "folder", "dir", "path", "model", "model-path"),
    *("checkpoint", "checkpoint-dir", "ckpt", "i", "input", "from", "load"),
)
#: Name of an argument -> names of the options that other tools have for it.
_ARGUMENTS = {
    "run": _RUN,
    "source": _RUN,
    "place": _RUN,
    "config": ("c", "conf", "cfg", "config-file", "config-path", "file", "yaml", "toml", "recipe"),
    "out": ("o", "output", "output-dir", "out-dir", "save-dir", "target", "dest"),
}


def nearest_verb(word: str, group: str) -> str:
    """The verb most likely meant by `word` after `group` ("" for the command itself): by another
    tool's name, by our name on another level, or by spelling; "" without a match. Verbs of other
    groups are left out: they have another subject."""
    in_group = [verb for verb in VERBS if verb.rpartition(" ")[0] == group]
    others = [verb for verb in VERBS if not group or " " not in verb]
    tables = [
        {word: verb for verb in reversed(verbs) for word in VERBS[verb].words.split()}
        | {verb.rpartition(" ")[2]: verb for verb in reversed(verbs)}
        for verbs in (in_group, others)
    ]
    for cutoff in (1.0, 0.75):
        for table in tables:
            if near := get_close_matches(word, table, 1, cutoff):
                return table[near[0]]
    return ""


class _CommandLine:
    """Parser of the words after a verb or a group of verbs."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, list(args))  # type: ignore[misc]
        except _Usage as error:
            if not args and isinstance(self, Group):
                raise  # a group without words: typer prints its help
            raise _refusal(ctx, *_problems(self, ctx, args)) from error

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)  # type: ignore[misc]
        except typer.BadParameter as error:
            problems = _names(self, ctx.params)  # type: ignore[arg-type]
            raise _refusal(ctx, _problem_of(error, ctx), *problems) from error


class Verb(_CommandLine, TyperCommand):
    """A verb. Raises ConfigError with every problem of its options and arguments."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        rest = super().parse_args(ctx, args)
        order = (
            [] if ctx.resilient_parsing else self.make_parser(ctx).parse_args(args=list(args))[2]
        )
        for param in dict.fromkeys(order):
            if order.count(param) < 2 or param.multiple:
                continue
            # Parsed word by word: a prefix that ends with the name of an option is not legal.
            values: list[Any] = []
            for end in range(1, len(args) + 1):
                with suppress(_Usage):
                    value = self.make_parser(ctx).parse_args(args=args[:end])[0].get(param.name)
                    values += [value] * (value is not None and value not in values[-1:])
            if len(values) > 1:
                text = f"{param.opts[0]} is given twice: {values[-1]} counts, not {values[-2]}"
                typer.echo(f"moemesh: note: {text}", err=True)
        return rest


class Group(_CommandLine, TyperGroup):
    """A group of verbs. Raises ConfigError with the nearest verb for an unknown one."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if self.get_command(ctx, args[0]) is not None or ctx.resilient_parsing:
            return super().resolve_command(ctx, args)
        group, word = ctx.command_path.partition(" ")[2], args[0].lower()
        if elsewhere := IN_A_CHECKOUT.get(f"{group} {word}".strip()):
            fix = f"{elsewhere}, in a checkout"
        elif answer := _NO_VERB.get(f"{group} {word}"):
            fix = answer
        elif word in ("help", "version"):
            # Every verb has a --help, the command alone a --version.
            command, words = self, ["moemesh", *group.split()] if word == "help" else ["moemesh"]
            for verb in args[1:] if word == "help" else ():
                command = command.get_command(ctx, verb) if isinstance(command, Group) else None
                if command is None:
                    break
                words.append(verb)
            fix = f"{' '.join(words)} --{word}"
        elif near := nearest_verb(word, group):
            fix = shlex.join(["moemesh", *near.split(), *args[1:]])
        else:
            fix = f"one of {', '.join(self.list_commands(ctx))}"
        message = f"`{ctx.command_path}` has no verb `{args[0]}`"
        raise _refusal(ctx, Problem.of("unknown-option", args[0], None, message, fix))


def _refusal(ctx: Any, *problems: Problem) -> Exception:
    return ConfigError(problems, where=f"in the command line (`{ctx.command_path} --help`)")


def _problem_of(error: Any, ctx: Any) -> Problem:
    """Problem of an error that a verb raises for conflicting options, with its "; fix: "."""
    key = getattr(error, "param_hint", None) or ctx.command_path
    message, _, fix = error.message.partition("; fix: ")
    return Problem.of("conflict", str(key), None, message.rstrip("."), fix)


def _names(command: Any, given: Any) -> Iterator[Problem]:
    """Problems of the names of models and clusters that are values of options and arguments."""
    from moemesh.config.cluster import load_cluster
    from moemesh.planner.shapes.load_shape import load_model

    for param in command.params:
        is_model, value = param.opts[0] == "--model", given.get(param.name)
        if isinstance(value, str) and (is_model or param.metavar in ("C", "CLUSTER")):
            try:
                load_model(value) if is_model else load_cluster(value)
            except ConfigError as error:
                from moemesh.planner.stages.partition import BRANCHING

                yield from error.problems if value != BRANCHING else ()


def _problems(command: Any, ctx: Any, args: Iterable[str]) -> Iterator[Problem]:
    """Problems of unknown words, and of parameters without a legal value."""
    params = command.get_params(ctx)
    options = {name: param for param in params for name in param.opts if name[0] == "-"}
    # Values of parameters in the examples of the verb's help; those of the first example win.
    examples: dict[str, Any] = {}
    for line in reversed(re.sub(r"\\\n +", "", command.help or "").splitlines()):
        if line.strip().startswith(f"{ctx.command_path} "):
            given = shlex.split(line)[len(ctx.command_path.split()) :]
            examples |= command.make_parser(ctx).parse_args(args=given)[0]
    examples = {name: v[0] if isinstance(v, list) else v for name, v in examples.items() if v}
    # Unknown options, and options without a value.
    words = deque(args)  # not yet read
    valid: list[str] = []  # known options with their values, and arguments
    broken: set[str] = set()  # names of parameters with a problem
    is_sure = True  # whether a missing argument is a mistake
    while words:
        word = words.popleft()
        name, equals, value = word.partition("=")
        param = options.get(name) or (options.get(word[:2]) if word[1:2] != "-" else None)
        if not word.startswith("-") or word in ("-", "--"):
            valid.append(word)
            if word == "--" or isinstance(command, Group):
                break
        elif param is None:
            if not equals and words and not words[0].startswith("-") and isinstance(command, Verb):
                # A value of the option, or an argument of the verb: it is ambiguous.
                value, is_sure = words.popleft(), False
            message = f"`{ctx.command_path}` has no such option"
            arguments = [param for param in params if param.opts[0] not in options]
            fix = _argument(name, value, arguments, ctx.command_path)
            fix = fix or _meant(name, value, options)
            yield Problem.of("unknown-option", name, value or None, message, fix)
        elif param.is_flag or equals or name not in options:
            valid.append(word)
        elif not words or words[0].partition("=")[0] in options:
            broken.add(param.name)
            yield _wrong(param, name, "needs a value", None, examples.get(param.name))
        else:
            valid += [word, words.popleft()]
    # Values of the other words: missing, illegal, and too many.
    try:
        opts, rest, _ = command.make_parser(ctx).parse_args(args=[*valid, *words])
    except _Usage as error:
        yield _problem_of(error, ctx)
        return
    if rest and "--model" in options and opts.get("model") is None:
        from moemesh.planner.shapes.load_shape import load_model

        is_path = Path(rest[0]).exists()  # its mistakes are reported when it is read
        with suppress(ConfigError):
            if not is_path:
                load_model(rest[0])
            opts["model"] = name = rest.pop(0)
            what = "a path" if is_path else "the name of a model"
            message = f"{name} is {what}, which `{ctx.command_path}` takes as an option"
            yield Problem.of("missing", "--model", None, message, f"--model {name}")
    needed = [param for param in command.params if param.required and param.opts[0] not in options]
    for param in command.params:
        is_option, value = param.opts[0] in options, opts.get(param.name)
        try:
            if param.name not in broken and not param.is_eager:
                param.handle_parse_result(ctx, opts, rest)
        except _Usage as error:
            if is_option or is_sure or value is not None:
                name, example = param.opts[0], examples.get(param.name)
                if not is_option:
                    name = param.metavar or param.name.upper()
                    values = (
                        (opts.get(argument.name) or examples[argument.name]) for argument in needed
                    )
                    example = f"{ctx.command_path} {shlex.join(map(str, values))}"
                reason = error.message if value else "is missing"
                yield _wrong(param, name, reason, value, example)
    yield from _names(command, opts)
    if rest and isinstance(command, Verb):
        arguments = [
            opts.get(param.name) for param in command.params if param.opts[0] not in options
        ]
        given = [word for word in (*arguments, *rest) if isinstance(word, str)]
        message = f"`{ctx.command_path}` takes fewer arguments than {' '.join(given)}"
        count = "one" if len(rest) == 1 else str(len(rest))
        fix = f"leave out {count} of them" if len(given) > len(rest) else f"leave out {given[0]}"
        sets = [word for word in given if re.match(r"\w+\.\w+=", word)]
        if "--set" in options and {*rest} <= {*sets}:
            fix = " ".join(f"--set {shlex.quote(word)}" for word in sets)
        yield Problem.of("unknown-option", " ".join(rest), None, message, fix)


def _wrong(param: Any, name: str, reason: str, value: Any, example: str | None) -> Problem:
    """Problem of a parameter without a value, or with an illegal one; `example` is a value of an
    option, or a command with all arguments."""
    # The attributes of a parameter with its type, choices and bounds depend on typer's version.
    kind = getattr(param, "type_descriptor", None) or param.type
    choices = getattr(kind, "choices", None) or ()
    choices = [str(getattr(choice, "value", choice)) for choice in choices]
    named = getattr(kind, "annotation", kind)
    element = named if choices else next(iter(get_args(named)), named)
    type_name = str(getattr(element, "__name__", getattr(element, "name", "")))[:3]
    word = param.metavar or {"int": "N", "flo": "X"}.get(type_name, "VALUE")
    values = (example, param.default, *choices, _VALUES.get(name), _VALUES.get(word), word)
    use = str(next(filter(None, values)))
    use = f"{name} {shlex.quote(use)}" if name.startswith("-") else use
    if value is None:
        help_text = (param.help or name).rstrip(".")
        return Problem.of("missing", name, None, f"{name} {reason}: {help_text}", use)
    if choices:
        fix = nearest_choice(str(value), choices)
        return Problem.of("not-a-choice", name, value, f"{name} cannot be {value}", fix)
    given = value[-1] if param.multiple else value
    if name == "--hours":
        use = f"{name} {_hours(given)}"
    message = f"{name}: {reason.rstrip('.')}"
    parser = getattr(getattr(kind, "parameter_info", None), "parser", getattr(kind, "func", None))
    if parser is None and type_name in ("int", "flo"):
        message = f"{name} must be a {'whole ' * (type_name == 'int')}number, not {given}"
        use = f"{name} {param.default}, the default" if param.default is not None else use
        number = math.nan  # compares false with every bound
        with suppress(ValueError):
            number = float(given)
        bounds = (getattr(param, side, getattr(kind, side, None)) for side in ("min", "max"))
        for bound, words, sign in zip(bounds, ("at least", "at most"), (1, -1), strict=True):
            if bound is not None and sign * number < sign * bound:
                message = f"{name} must be {words} {bound}, not {given}"
                return Problem.of("out-of-range", name, given, message, f"{name} {bound}")
    return Problem.of("wrong-type", name, given, message, use)


def _hours(text: str) -> str:
    """The number of hours in a time (12:30:00, 1-12:00:00 in Slurm) or in a number with a unit
    (90m); for any other text an example."""
    if clock := re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d)(?::(\d\d))?", text):
        days, hours, minutes, seconds = (int(part or 0) for part in clock.groups())
        return f"{days * 24 + hours + minutes / 60 + seconds / 3600:g}"
    if unit := re.fullmatch(r"(\d+(?:\.\d+)?) ?(d|h|m)[a-z]*", text.lower()):
        return f"{float(unit[1]) * {'d': 24, 'h': 1, 'm': 1 / 60}[unit[2]]:g}"
    return "24"


def _argument(name: str, value: str, arguments: Iterable[Any], command: str) -> str:
    """The command with `value` as the argument for which other tools have the option `name`; "" if
    no argument is meant."""
    word, arguments = name.lstrip("-").replace("_", "-"), list(arguments)
    for param in arguments if value else ():
        if word == param.name or word in _ARGUMENTS.get(param.name, ()):
            needed = [other for other in arguments if other is param or other.required]
            words = (value if other is param else other.metavar for other in needed)
            return f"{command} {shlex.join(words)}"
    return ""


def _meant(name: str, value: str, options: Iterable[str]) -> str:
    """The most likely replacement of an unknown option: a similar option, a key for --set, or a
    note on other verbs with this option."""
    if name.lstrip("-") in ("gpus", "num-gpus", "devices", "world-size") and "--nodes" in options:
        return "--nodes N: the devices of a node are in the description of the cluster"
    if name in ("--scheduler", "--launcher", "--platform") and "--slurm" in options:
        return f"--{value}" if f"--{value}" in options else "--torchrun, --slurm, --k8s or --sky"
    if name in ("--time", "--time-limit", "--walltime", "--minutes") and "--hours" in options:
        return f"--hours {_hours(value)}"
    if "--ranks-per-node" in options and name.replace("_", "-") in _RANKS_PER_NODE:
        return f"--ranks-per-node {value or 8}"
    from moemesh.config.schema import SECTIONS, resembling_keys, sections_with

    if near := get_close_matches(name, options, 1, 0.75):
        return near[0]
    if len(name) == 2 and (near := [word for word in options if word[:3] == f"-{name.lower()}"]):
        return min(near, key=len)
    from moemesh.cli import app, import_verbs

    import_verbs()
    every = f"one of {', '.join(options)}"
    if others := [verb for verb, known in _verbs(typer.main.get_command(app)) if name in known]:
        every = f"{name} is an option of {few(others, 8)}; {every}"
    if "--set" not in options:
        return every
    leaf = name.lstrip("-").replace("-", "_")
    keys = [leaf] if "." in leaf else [f"{section}.{leaf}" for section in sections_with(leaf)]
    keys = [key for key in [aliases().get(name) or aliases().get(leaf)] if key] or keys
    hint = "" if keys else alias_hint(leaf) or spelled_hint(leaf)
    if hint:
        if not {*re.findall(r"--\w[\w-]*", re.sub("`[^`]*`", "", hint))} <= {*options}:
            return every  # the hint names options of another verb
        if (renamed := re.fullmatch(r"here it is called ([\w.]+)", hint)) is None:
            return hint
        keys = [renamed[1]]
    if keys := keys or ([] if others else resembling_keys(leaf)):
        from moemesh.config.sources import preset_names

        key = "model.preset" if keys[0] == "model.path" and value in preset_names() else keys[0]
        section, _, field = key.partition(".")
        default = getattr(SECTIONS[section].model_fields.get(field), "default", None)
        value = f'["{value}"]' if value and isinstance(default, tuple) else value
        return f"--set {shlex.quote(f'{key}={value}')}" if value else f"--set {key}=VALUE"
    return every


def _verbs(group: Any, name: str = "") -> Iterator[tuple[str, set[str]]]:
    """All verbs below a group, with their options."""
    for word, command in getattr(group, "commands", {}).items():
        verb = f"{name} {word}".strip()
        yield from _verbs(command, verb)
        yield verb, {option for param in command.params for option in param.opts}
