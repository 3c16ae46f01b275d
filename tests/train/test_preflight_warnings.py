"""What is said before a run starts, and what is refused because it cannot fit."""

import pytest

from moemesh.config.load import load_run
from moemesh.train.preflight_warnings import (
    TooLargeError,
    preflight_warnings,
    refuse_too_large,
)


def said(*overrides: str) -> list[str]:
    return list(preflight_warnings(load_run([], overrides, {}).config))


def test_a_sensible_plan_needs_no_remark() -> None:
    assert said() == []
    assert said("plan.pp=4", "plan.microbatches=8", "plan.schedule=zb_h1") == []
    assert said("plan.dp=2", "plan.ep=2", "plan.spare_slots=1") == []


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["plan.schedule=gpipe"], "plan.schedule = gpipe does nothing"),
        (["plan.spare_slots=1"], "plan.spare_slots = 1 does nothing"),
        (["plan.dispatcher=hierarchical"], "plan.dispatcher = hierarchical does nothing"),
        (["plan.pp=4"], "plan.microbatches = 1 keeps 4 pipeline ranks waiting for 75% of a step"),
    ],
)
def test_what_was_probably_not_meant_gets_one_remark(overrides: list[str], words: str) -> None:
    (remark,) = said(*overrides)
    assert words in remark


def test_many_ranks_on_few_cores() -> None:
    config = load_run([], ["plan.dp=2"], {}).config
    assert list(preflight_warnings(config, 2)) == []
    (remark,) = preflight_warnings(config, 100_000)
    assert "100000 ranks share" in remark


def test_streams_that_never_drain_have_no_bubble_of_a_step() -> None:
    assert said("plan.pp=4", "plan.schedule=pipedream") == []


def test_states_that_exceed_the_memory_are_refused() -> None:
    """AdamW in float32: 16 bytes a parameter, on all ranks that hold it."""
    config = load_run([], [], {}).config
    needed = 16 * 3_712_128
    refuse_too_large(config, needed)
    with pytest.raises(TooLargeError, match=r"56\.6 MiB for weights.* has 56\.6 MiB"):
        refuse_too_large(config, needed - 1)
    replicas = load_run([], ["plan.dp=2"], {}).config
    with pytest.raises(TooLargeError, match="2 rank"):
        refuse_too_large(replicas, 2 * needed - 1)
    large = load_run([], ["model.preset=mixtral-8x7b", "plan.dp=8", "plan.ep=8"], {}).config
    with pytest.raises(TooLargeError, match=r"optimizer of the first \d of 8 rank"):
        refuse_too_large(large, 2**39)
