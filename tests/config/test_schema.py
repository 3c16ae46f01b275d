"""Names, ranges and rules of the sections, without files."""

from __future__ import annotations

from itertools import combinations

import pytest
from pydantic import ValidationError

from moemesh.config.plan import DEGREES, Plan
from moemesh.config.run import RunConfig
from moemesh.config.schema import SECTIONS, keys_of
from moemesh.config.section import Range
from moemesh.config.suggest import choices_of, divisors, nearest_divisors
from moemesh.config.train import TrainConfig

# The public contract: first value of each row is the default.
CONTRACT = {
    "attention_exit": ("reduce_scatter", "all_reduce", "all_to_all"),
    "context": ("ring", "all_gather", "all_to_all"),
    "dispatcher": ("all_to_all", "all_gather", "hierarchical", "low_latency", "deepep", "auto"),
    "combine": ("fast", "exact"),
    "payload": ("same", "fp8"),
    "schedule": (
        "1f1b",
        "gpipe",
        "interleaved_1f1b",
        "terapipe",
        "chimera",
        "zb_h1",
        "zb_h2",
        "zb_v",
        "dualpipe",
        "dualpipe_v",
        "pipedream",
        "pipedream_2bw",
        "ampnet",
        "search",
    ),
    "data": ("replicate", "zero1", "zero2", "zero3", "parameter_server"),
    "recompute": ("none", "selective", "full"),
}
NUMBERS = dict.fromkeys((*DEGREES, "dispatch_chunks", "stages_per_rank", "microbatches"), 1)
NUMBERS["spare_slots"] = 0


def edits(a: str, b: str) -> int:
    """Levenshtein distance."""
    row = list(range(len(b) + 1))
    for i, left in enumerate(a, 1):
        previous, row[0] = row[0], i
        for j, right in enumerate(b, 1):
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (left != right))
    return row[-1]


def test_plan_keeps_the_public_contract() -> None:
    assert set(Plan.model_fields) >= {*CONTRACT, *NUMBERS, "ranks_per_node"}
    for name, choices in CONTRACT.items():
        assert choices_of(Plan.model_fields[name].annotation) == choices
        assert getattr(Plan(), name) == choices[0]
    for name, default in NUMBERS.items():
        assert getattr(Plan(), name) == default
    assert Plan().ranks_per_node is None


def test_train_choices_of_the_public_contract() -> None:
    fields = TrainConfig.model_fields
    assert choices_of(fields["dtype"].annotation) == ("float32", "bfloat16", "float64")
    assert choices_of(fields["optimizer"].annotation) == ("adamw", "sgd", "muon")
    assert choices_of(fields["resume"].annotation) == ("auto", "never", "must")


@pytest.mark.parametrize("section", SECTIONS)
def test_sibling_keys_differ_by_two_edits(section: str) -> None:
    close = {
        pair
        for pair in combinations(keys_of(section), 2)
        if edits(*pair) < 2 and not set(pair) <= set(DEGREES)
    }
    assert close == set()


@pytest.mark.parametrize("section", SECTIONS)
def test_every_number_has_a_range_that_holds_its_default(section: str) -> None:
    kind = SECTIONS[section]
    for name, field in kind.model_fields.items():
        default = field.default
        if isinstance(default, bool | str) or (default is None and "int" not in str(field)):
            continue
        is_list = "tuple[str" in str(field) or "Patterns" in str(field) or name == "sources"
        if choices_of(field.annotation) or is_list:  # of names, of tables
            continue
        assert name in kind.ranges, name
        for number in default if isinstance(default, tuple) else [default]:
            assert number is None or kind.ranges[name].holds(number)


def test_sections_are_frozen_strict_and_closed() -> None:
    with pytest.raises(ValidationError):
        Plan(tpp=2)  # type: ignore[call-arg]
    with pytest.raises(ValidationError):
        Plan(tp="2")  # type: ignore[arg-type]
    with pytest.raises(ValidationError):
        Plan(tp=True)
    with pytest.raises(ValidationError):
        Plan(tp=2.0)  # type: ignore[arg-type]
    with pytest.raises(ValidationError):
        TrainConfig(lr=float("nan"))
    with pytest.raises(ValidationError):
        Plan().tp = 2  # type: ignore[misc]
    assert TrainConfig(lr=1).lr == 1.0


def test_defaults_are_legal() -> None:
    assert RunConfig().check() == []


def test_ranges_and_divisors() -> None:
    share = Range(0.0, 1.0, open_high=True)
    assert share.holds(0.0)
    assert not share.holds(1.0)
    assert Range(0.0, open_low=True).holds(1e-300)
    assert divisors(36) == [1, 2, 3, 4, 6, 9, 12, 18, 36]
    assert nearest_divisors(36, 5) == "4 or 6"
    assert nearest_divisors(8, 100) == "8"
    assert TrainConfig(adam_betas=(0.9, 1.0)).check()[0].key == "train.adam_betas"
