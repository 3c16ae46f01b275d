"""The ledger adds up, filters, renames, pauses, compares, and survives JSON."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moemesh.trace.ledger import Ledger, LedgerEntry, LedgerTotal
from tests.report.fake_run import entry


def enter(ledger: Ledger, **changes) -> None:
    ledger.record(**entry("tp", "all_gather", "forward", "qkv", 1, 100, 50, 60) | changes)


def test_equal_operations_are_one_entry():
    ledger = Ledger()
    enter(ledger)
    enter(ledger, payload_bytes=1, wire_bytes=2, received_bytes=3)
    enter(ledger, axis="dp")
    assert [(entry.axis, entry.count, entry.payload_bytes) for entry in ledger.entries()] == [
        ("dp", 1, 100),
        ("tp", 2, 101),
    ]
    both = entry("tp", "all_gather", "forward", "qkv", 2, 101, 52, 63)
    assert ledger.entries()[1] == LedgerEntry(**both)


def test_totals_filter():
    ledger = Ledger()
    enter(ledger)
    enter(ledger, axis="dp")
    enter(ledger, op="reduce_scatter", phase="backward")
    assert ledger.total() == LedgerTotal(3, 300, 150, 180)
    assert ledger.total(axis="tp").count == 2
    assert ledger.total(axis="tp", phase="backward") == LedgerTotal(1, 100, 50, 60)
    assert ledger.total(caller="other") == LedgerTotal()
    assert ledger.total(op="reduce_scatter", caller="qkv").count == 1


def test_a_scope_renames_the_forward_only():
    ledger = Ledger()
    with ledger.scope("evaluate"):
        enter(ledger)
        enter(ledger, phase="backward")
        with ledger.scope("inner"):
            enter(ledger)
    enter(ledger)
    phases = [entry.phase for entry in ledger.entries()]
    assert phases == ["backward", "evaluate", "forward", "inner"]


def test_a_scope_ends_with_an_exception():
    ledger = Ledger()
    with pytest.raises(KeyError), ledger.scope("evaluate"), ledger.paused():
        raise KeyError
    enter(ledger)
    assert [entry.phase for entry in ledger.entries()] == ["forward"]


def test_pauses_nest():
    ledger = Ledger()
    with ledger.paused():
        with ledger.paused():
            enter(ledger)
        enter(ledger)
    assert len(ledger) == 0 and ledger == Ledger()
    enter(ledger)
    assert len(ledger) == 1


names, sizes = st.sampled_from(["tp", "ep", "ä \n"]), st.integers(0, 2**60)
entries = st.lists(
    st.builds(entry, names, names, names, names, st.just(1), sizes, sizes, sizes), max_size=8
)


def book(rows) -> Ledger:
    ledger = Ledger()
    for row in rows:
        ledger.record(**row)
    return ledger


@given(entries, entries)
def test_sums_and_json(first, second):
    both = book(first) + book(second)
    assert both == book(first + second) == book(second + first)
    assert both.total().wire_bytes == sum(row["wire_bytes"] for row in first + second)
    assert Ledger.from_rows(both.rows()) == both


def test_what_is_no_ledger_is_refused():
    with pytest.raises(ValueError, match="not a ledger entry"):
        Ledger.from_rows([{"axis": "tp"}])
