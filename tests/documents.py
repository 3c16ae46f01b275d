"""Blocks of the documentation that are written from the code.

``python -m tests.documents`` rewrites everything between ``<!-- generated: NAME -->`` and
``<!-- end -->``. Blocks that take minutes are written with ``--slow``. Texts of a person in them
(meanings, descriptions) stay; a new row has TODO, which `tests/test_docs.py` refuses.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import get_args

from moemesh.config.data import DataSource
from moemesh.config.errors import CODES
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.config.schema import SECTIONS, keys_of
from moemesh.config.section import LARGEST_SIZE, Range
from moemesh.config.sources import preset_names
from moemesh.config.suggest import choices_of
from moemesh.config.toml import format_value
from moemesh.report.curves import Series, line_chart
from moemesh.sharding.dispatchers import expected_distinct
from moemesh.sharding.load_run import load_run
from moemesh.train.preparation import untrainable
from tests.balance import pictures as balance_pictures
from tests.hub import documents as hub_documents
from tests.huggingface import documents as family_documents
from tests.planner import documents as planner_documents
from tests.sandbox import ROOT
from tests.schedule import documents as schedule_documents

MEANINGS = "moemesh/config/meanings.toml"
DOCUMENTS = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "docs/index.md",
    "docs/features.md",
    "docs/tutorial.md",
    "docs/errors.md",
    "docs/words.md",
    "docs/api.md",
    "docs/architecture.md",
    "docs/modules.md",
    "docs/configuration.md",
    "docs/data.md",
    "docs/checkpoints.md",
    "docs/run-folder.md",
    "docs/parallelism.md",
    "docs/seeds.md",
    "docs/cluster.md",
    "docs/data_parallelism.md",
    "docs/dispatchers.md",
    "docs/schedules.md",
    "docs/planner.md",
    "docs/formulas.md",
    "docs/partition.md",
    "docs/models.md",
    "docs/attention.md",
    "docs/gpu.md",
    "docs/huggingface.md",
    "docs/memory.md",
    "docs/optimizers.md",
    "docs/balancing.md",
    "docs/log.md",
)
#: Every default of a training run that costs time, cut down; --set in a snippet is stronger.
SMALL_RUN = {
    "MOEMESH__model__num_layers": "2",
    "MOEMESH__train__steps": "2",
    "MOEMESH__train__validation_batches": "1",
    "MOEMESH__data__seq_len": "32",
    "MOEMESH__data__global_batch": "4",
}


def text_of(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


def package_floors() -> list[list[str]]:
    """The packages of each floor, from the top."""
    config = tomllib.loads(text_of("pyproject.toml"))
    _, *layers = config["tool"]["importlinter"]["contracts"][0]["layers"]  # benchmarks is none
    return [[name.strip().rpartition(".")[2] for name in row.split("|")] for row in layers]


def floors(old: str) -> str:
    """The floors as a picture in words."""
    return "```text\n" + "".join("   ".join(row) + "\n" for row in package_floors()) + "```\n"


def tree(old: str) -> str:
    """Every module of the library with the first line of its docstring, floors from the top."""
    names = [name for row in package_floors() for name in row]
    written = described(old)
    lines = ["moemesh/"]

    def add(path: Path, depth: int) -> None:
        name = "  " * depth + path.name + ("/" if path.is_dir() else "")
        source = path / "__init__.py" if path.is_dir() else path
        text = written.get(path.relative_to(ROOT).as_posix(), "TODO")
        if source.suffix == ".py" and source.is_file():
            text = (ast.get_docstring(ast.parse(source.read_text())) or text).splitlines()[0]
        lines.append(f"{name:<27} {text}")
        inside = [p for p in path.iterdir() if is_shown(p)] if path.is_dir() else []
        for item in sorted(inside, key=lambda p: (p.is_dir(), p.name)):
            if path.name != "presets":
                add(item, depth + 1)

    def place(path: Path) -> tuple[int, str]:
        return (names.index(path.stem) if path.stem in names else -1), path.name

    for path in sorted(filter(is_shown, (ROOT / "moemesh").iterdir()), key=place):
        add(path, 1)
    add(ROOT / "benchmarks", 0)
    return "```text\n" + "\n".join(lines) + "\n```\n"


def is_shown(path: Path) -> bool:
    if path.is_dir():
        return path.name != "__pycache__"
    return path.suffix in (".py", ".html") and path.name != "__init__.py"


def described(block: str) -> dict[str, str]:
    """Path -> its description in a tree."""
    found, parents = {}, []
    for line in block.splitlines():
        if match := re.fullmatch(r"( *)(\S+?)/?(?: +(.*))?", line):
            depth = len(match[1]) // 2
            parents = [*parents[:depth], match[2]]
            found["/".join(parents)] = match[3] or ""
    return found


def meanings(block: str) -> dict[str, str]:
    """First cell -> last cell of every row."""
    rows = re.findall(r"^\| `([^`]+)` \|.*\| ([^|]*) \|$", block, re.MULTILINE)
    return {key: meaning.strip() for key, meaning in rows}


def keys(old: str) -> str:
    """Every key of the configuration."""
    written = meanings(old)
    lines = []
    for section, kind in SECTIONS.items():
        lines += ["", f"### [{section}]", "", "| key | default | legal | meaning |"]
        lines += ["|---|---|---|---|"]
        for name in keys_of(section):
            key = f"{section}.{name}"
            if name in ("preset", "path") and section == "model":
                default = "`" + (format_value("tiny") if name == "preset" else "not set") + "`"
                legal = "a preset" if name == "preset" else "a folder"
            else:
                field = kind.model_fields[name]
                shown = "not set" if field.default is None else format_value(field.default)
                default = f"`{shown}`"
                legal = legal_values(field.annotation, kind.ranges.get(name))
            lines.append(f"| `{key}` | {default} | {legal} | {written.get(key, 'TODO')} |")
    return "\n".join(lines) + "\n\n"


def legal_values(annotation: object, limits: Range | None) -> str:
    if choices := choices_of(annotation):
        return ", ".join(f"`{choice}`" for choice in choices)
    if get_args(annotation)[:1] == (DataSource,):
        return "tables"
    if limits is None:
        return "true, false" if annotation is bool else "text"
    low = f"{'>' if limits.open_low else '≥'} {limits.low:g}"
    if limits.high is None or limits.high == LARGEST_SIZE:
        return low
    high = limits.high if isinstance(limits.high, int) else f"{limits.high:g}"
    return f"{low}, {'<' if limits.open_high else '≤'} {high}"


def placement_table(old: str) -> str:
    """Every parameter of the preset "tiny" with its placement."""
    from moemesh.parallel.placement import placements

    rows: dict[str, str] = {}
    config = ModelConfig(qk_norm=True)
    for attention_exit in ("reduce_scatter", "all_to_all"):
        table = placements(config, Plan(attention_exit=attention_exit))
        for where in table.values():
            name = re.sub(r"\.\d+\.", ".*.", where.name)
            if name.endswith(".output"):
                name += f" ({'all_to_all' if attention_exit == 'all_to_all' else 'other'} exit)"
            cut = ", ".join(f"dim {dim} over {axis}" for axis, dim in where.shards.items())
            shape = " × ".join(map(str, where.shape))
            rows[name] = f"| `{name}` | {shape} | {cut or '-'} | {where.summed_over} |"
    head = ["| parameter | shape in `tiny` | sharded | gradient summed over |", "|---|---|---|---|"]
    # A stable sort puts the two forms of the output weight side by side.
    layers = [re.sub(r" \(.*", "", name) for name in rows]
    order = sorted(zip(layers, rows, strict=True), key=lambda row: layers.index(row[0]))
    return "\n".join([*head, *(rows[name] for _, name in order)]) + "\n"


def presets(old: str) -> str:
    """The packaged models and clusters."""
    lines = ["| preset | layers | hidden | experts | trained by this version |"]
    lines += ["|---|--:|--:|---|---|"]
    for name in preset_names():
        resolved = load_run([], [f"model.preset={name}"], {})
        model = resolved.config.model
        experts = f"{model.num_experts}, top {model.experts_per_token}"
        lines.append(
            f"| `{name}` | {model.num_layers} | {model.hidden_size} | "
            f"{experts if model.num_experts else 'dense'} | "
            f"{'no' if untrainable(resolved) else 'yes'} |"
        )
    clusters = ", ".join(f"`{name}`" for name in preset_names("clusters"))
    return "\n".join(lines) + f"\n\nClusters (read by `moemesh.config.cluster`): {clusters}.\n"


def codes(old: str) -> str:
    """Every code of a problem and its meaning."""
    rows = "".join(f"| `{code}` | {meaning} |\n" for code, meaning in CODES.items())
    return "\n| code | meaning |\n|---|---|\n" + rows


#: Blocks that are made in minutes.
SLOW_BLOCKS = hub_documents.BLOCKS
BLOCKS = {
    "codes": codes,
    "floors": floors,
    "tree": tree,
    "keys": keys,
    "placements": placement_table,
    "presets": presets,
    "schedules": schedule_documents.schedules,
    **planner_documents.BLOCKS,
    **family_documents.BLOCKS,
}


def dispatcher_rows() -> str:
    """Rows of one token that cross node borders, over the number of nodes, as a picture."""
    experts, chosen, per_node = 256, 8, 8
    points: dict[str, list[tuple[float, float]]] = {}
    for nodes in (1, 2, 4, 8):
        ranks = nodes * per_node
        rows = {
            "all_to_all": chosen * (ranks - per_node) / ranks,
            "all_gather": float(ranks - per_node),
            "hierarchical": expected_distinct(nodes, experts, chosen) * (nodes - 1) / nodes,
            "one copy per rank": expected_distinct(ranks, experts, chosen) * (nodes - 1) / nodes,
        }
        for name, value in rows.items():
            if value <= 10:
                points.setdefault(name, []).append((nodes, value))
    series = [
        Series(name=name, points=tuple(line), colour=colour, dots=True)
        for colour, (name, line) in enumerate(points.items())
    ]
    return line_chart(
        "dispatchers",
        "Rows of a token that cross nodes, over the number of nodes",
        series,
        x_label="nodes",
        y_label="rows across nodes",
        description="256 experts, 8 per token, 8 ranks a node, uniform routing. A copy per expert "
        "tends to 8 rows, node-aware dispatch sends at most one row to each other node, and an "
        "all-gather soon leaves the picture.",
        from_zero=True,
    )


def dispatch_matrices() -> str:
    """Rows between ranks of the command in docs/dispatchers.md, drawn by the command."""
    with TemporaryDirectory() as folder:
        file = Path(folder, "rows.svg")
        command = ["dispatch", "uneven-reduce-scatter", "--svg", str(file)]
        subprocess.run(
            [sys.executable, "-m", "moemesh", *command], check=True, stdout=subprocess.DEVNULL
        )
        return file.read_text(encoding="utf-8")


#: File -> what draws it.
PICTURES = {
    "docs/dispatchers.svg": dispatcher_rows,
    "docs/dispatch-rows.svg": dispatch_matrices,
    **schedule_documents.PICTURES,
    **balance_pictures.PICTURES,
}

BLOCK = re.compile(r"(<!-- generated: (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def regenerate(text: str, *, slow: bool = False) -> str:
    """`text` with every generated block, or every one that is made at once, as it is now."""
    blocks = {**BLOCKS, **(SLOW_BLOCKS if slow else {})}

    def block(match: re.Match[str]) -> str:
        inside = blocks[match[2]](match[3]) if match[2] in blocks else match[3]
        return match[1] + inside + match[4]

    return BLOCK.sub(block, text)


def meanings_file() -> str:
    """The meanings of the keys for the schema of editors, from the tables of docs."""
    lines = [
        "# Written by `python -m tests.documents` from docs/configuration.md: change it there.\n"
    ]
    for name, item in meanings(text_of("docs/configuration.md")).items():
        section, _, leaf = name.partition(".")
        if section in SECTIONS and leaf in keys_of(section):
            lines.append(f"{format_value(name)} = {format_value(item.replace('`', ''))}\n")
    return "".join(lines)


if __name__ == "__main__":
    for name in DOCUMENTS:
        text = regenerate(text_of(name), slow="--slow" in sys.argv)
        (ROOT / name).write_text(text, encoding="utf-8")
    (ROOT / MEANINGS).write_text(meanings_file(), encoding="utf-8")
    for name, draw in PICTURES.items():
        (ROOT / name).write_text(draw(), encoding="utf-8")
