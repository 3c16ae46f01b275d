"""Tables of experts for expert-specialised fine-tuning (ESFT; Wang et al., 2024, arXiv:2407.01906).

For the data of a task every expert of a layer has a relevance: the mean of its gate scores over the
tokens, or the share of choices of experts that fall on it. The relevances of a layer are divided by
their sum, so that they add up to 1; the smallest set of most relevant experts that reaches a
threshold is trained, and nothing else but what `train.train_only` names. `moemesh esft scores`
writes the table, `train.esft` names it. The keys ``experts``, ``shared_experts`` and
``non_expert_modules`` are those of the files that the paper's authors have published. Those files
can be read as well if their two switches, ``shared_experts`` and ``non_expert_modules``, are off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from moemesh.config.errors import UserError
from moemesh.config.limits import parse_json
from moemesh.config.model import ModelConfig
from moemesh.config.suggest import nearest_path

#: The copy of a run's table in its folder.
KEPT_TABLE = "esft.json"
#: Layer -> the experts of it that train, ascending.
Experts = dict[int, tuple[int, ...]]
#: Tolerance of a sum of shares: its rounding must not add an expert.
_SLACK = 1e-9
#: Switches of published tables -> value of train.train_only that trains the same.
_SWITCHES = {
    "shared_experts": '["*.shared.*"]',
    "non_expert_modules": '["*.attention.*", "*norm*"]',
}


class TableError(UserError):
    """A table of experts cannot be used; the message names the file and what is wrong."""


def relevance(scores: Sequence[float]) -> list[float]:
    """The scores of a layer's experts over their sum."""
    total = sum(scores)
    return [score / total if total else 1 / len(scores) for score in scores]


def most_relevant(
    shares: Sequence[float], *, threshold: float | None = None, count: int | None = None
) -> tuple[int, ...]:
    """The smallest set of the most relevant experts whose shares add up to `threshold`, or `count`
    of them; ascending. Among equally relevant experts the first are taken."""
    order = sorted(range(len(shares)), key=lambda expert: (-shares[expert], expert))
    if threshold is not None:
        reached, count = 0.0, 0
        while count < len(order) and (not count or reached < threshold - _SLACK):
            reached += shares[order[count]]
            count += 1
    return tuple(sorted(order[:count]))


def read_table(path: str | Path) -> Experts:
    """The experts of a table. Raises TableError for any other file."""
    file = Path(path).expanduser()
    try:
        status = file.stat()
    except OSError as error:
        near = "" if file.exists() else f"; {nearest_path(file)}"
        raise TableError(f"{file}: cannot be read ({error.strerror}{near})") from error
    return _read(file, status.st_mtime_ns, status.st_size)  # a key that changes with the file


@lru_cache(maxsize=8)
def _read(file: Path, changed_at: int, size: int) -> Experts:
    try:
        content: Any = parse_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TableError(f"{file}: is not JSON ({error})") from error
    keys = cast("dict[str, Any]", content) if isinstance(content, dict) else {}
    table: Any = keys.get("experts")
    if not isinstance(table, dict) or not table:
        raise TableError(f'{file}: has no object "experts" of layers and their experts')
    for name, patterns in _SWITCHES.items():
        if keys.get(name):
            raise TableError(
                f"{file}: {name} is on; set it to false, and train.train_only = {patterns}"
            )
    trained: Experts = {}
    for layer, experts in cast("dict[str, Any]", table).items():
        if not layer.isdecimal() or not isinstance(experts, list):
            raise TableError(f"{file}: {layer!r} is not the number of a layer with a list")
        ids = cast("list[Any]", experts)
        if not all(type(number) is int for number in ids) or len(set(ids)) < len(ids):
            raise TableError(f"{file}: layer {layer} must list different numbers of experts")
        trained[int(layer)] = tuple(sorted(cast("list[int]", ids)))
    return dict(sorted(trained.items()))


def misfit(experts: Mapping[int, Sequence[int]], model: ModelConfig) -> str:
    """The reason why the experts cannot be those of `model`; "" if they can."""
    layers = [layer for layer in model.routed_layers if layer < model.num_layers]
    if unknown := sorted(experts.keys() - set(model.routed_layers)):
        return f"names layer {unknown[0]}; the model's layers with experts are {_span(layers)}"
    if missing := sorted(set(layers) - experts.keys()):
        return f"has no layer {missing[0]}; the model's layers with experts are {_span(layers)}"
    for layer, chosen in experts.items():
        if not chosen:
            return f"names no expert of layer {layer}: at least one of each layer trains"
        if not 0 <= min(chosen) <= max(chosen) < model.num_experts:
            wrong = next(expert for expert in chosen if not 0 <= expert < model.num_experts)
            return f"names expert {wrong} of layer {layer}; the model has {model.num_experts}"
    return ""


def _span(layers: Sequence[int]) -> str:
    if list(layers) == list(range(layers[0], layers[-1] + 1)):
        return f"{layers[0]} to {layers[-1]}"
    return ", ".join(map(str, layers))
