"""The tables of docs/models.md, from the tests and from what the library knows of families."""

from __future__ import annotations

import re
from textwrap import fill

from moemesh.config.huggingface.keys import known_families
from moemesh.config.huggingface.model import trained_families
from tests.huggingface.tiny import FAMILIES
from tests.huggingface.training_cases import CASES, Case


def families(old: str) -> str:
    """Every verified family: the names of its models, which runs of it are compared, and what a
    person wrote in the last two cells."""
    rows = re.findall(r"^\| `(\w+)` \|.*\| ([^|]*) \| ([^|]*) \|$", old, re.MULTILINE)
    written = {kind: (attention.strip(), experts.strip()) for kind, attention, experts in rows}
    lines = ["| `model_type` | also | trained as transformers trains it | attention | MLPs |"]
    lines += ["|---|---|---|---|---|"]
    for kind in FAMILIES:
        attention, experts = written.get(kind, ("TODO", "TODO"))
        also = ", ".join(f"`{name}`" for name in other_names(kind)) or "-"
        lines.append(f"| `{kind}` | {also} | {compared(kind)} | {attention} | {experts} |")
    return "\n".join(lines) + "\n"


def other_names(kind: str) -> list[str]:
    """Types of models that are read and trained by the same rows."""
    trained, known = trained_families()["family"], known_families()
    same = known["same"].get(kind, [])
    return same + [
        name
        for name in trained
        if name not in FAMILIES
        and trained[name] == trained[kind]
        and known["family"][name] == known["family"][kind]
    ]


def compared(kind: str) -> str:
    """The runs of a family that `test_training.py` compares."""
    cases = [case for case in CASES if case.kind == kind]

    def some(words: dict[str, str], of: str) -> list[str]:
        return [word for value, word in words.items() if value in {_value(c, of) for c in cases}]

    parts = [
        *some({"adamw": "AdamW", "sgd": "SGD"}, "optimizer"),
        *some({"float64": "float64", "float32": "fp32"}, "dtype"),
        *some({"True": "conversations"}, "sft"),
        *some({"True": "auxiliary loss"}, "auxiliary"),
    ]
    plans = len({case.plan for case in cases})
    return ", ".join(parts) + (f", {plans} plans" if plans > 1 else "")


def _value(case: Case, name: str) -> str:
    return str(getattr(case, name))


def planned(old: str) -> str:
    """Families with formulas, but without a model of ours."""
    trained = trained_families()["family"]
    names = sorted(kind for kind in known_families()["family"] if kind not in trained)
    return fill(", ".join(f"`{name}`" for name in names), 120, break_on_hyphens=False) + "\n"


def refused(old: str) -> str:
    """Parts without a formula in moemesh, and the families that have them."""
    lines = ["| not known | `model_type` |", "|---|---|"]
    for what, kinds in known_families()["refused"].items():
        lines.append(f"| {what} | {', '.join(f'`{kind}`' for kind in kinds)} |")
    return "\n".join(lines) + "\n"


BLOCKS = {"families": families, "planned_families": planned, "refused_families": refused}
