"""Conversations in sequences: whole, masked, each once, in an order that no layout changes."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from moemesh.comm.mesh import Mesh
from moemesh.data.samples import Samples, Windows, packed
from moemesh.data.tokenizer import DataError
from moemesh.model.batch import document_starts
from moemesh.train.opening import own_batches
from tests.data.texts import stream, training_ids


def corpus_of(lengths: list[int], texts: tuple[int, ...] = (), silent: tuple[int, ...] = ()) -> Any:
    """Documents of these lengths: token i of document d is 1 + (7 d + i) % 250. Of a conversation
    the second half carries loss; of those of `silent` nothing does."""
    tokens = [1 + (7 * d + np.arange(length)) % 250 for d, length in enumerate(lengths)]
    learned = [
        np.full(length, d in texts) | ((np.arange(length) >= length // 2) & (d not in silent))
        for d, length in enumerate(lengths)
    ]
    starts, made = np.cumsum([0, *lengths[:-1]]), np.concatenate(tokens).astype(np.uint8)
    return stream(made, source="chats", learned=np.concatenate(learned), starts=starts)


def drawn(count: int, most: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(2, most + 1, count).tolist()


@pytest.mark.parametrize("documents", ["auto", "ignore"])
@pytest.mark.parametrize(("count", "most", "seq_len"), [(300, 40, 40), (300, 9, 64), (7, 30, 64)])
def test_conversations_are_whole_and_once(
    count: int, most: int, seq_len: int, documents: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = drawn(count, most)
    corpus = corpus_of(lengths)
    sampler = Windows(corpus, seq_len, documents=documents)
    ids = np.arange(sampler.num_samples)
    windows, mask, valid = sampler.windows(ids), sampler.loss_mask(ids), sampler.valid(ids)
    assert mask is not None and valid is not None
    numbers = Windows(corpus, seq_len).documents(ids)
    assert numbers is not None and (sampler.documents(ids) is None) == (documents == "ignore")
    assert np.array_equal(numbers[:, :-1] >= 0, valid) and (numbers[:, -1] == -1).all()
    assert not windows[:, :-1][~valid].any(), "padding"
    seen: list[int] = []
    for row in ids:
        for document in np.unique(numbers[row][numbers[row] >= 0]).tolist():
            seen.append(document)
            (places,) = np.nonzero(numbers[row] == document)
            own = slice(int(corpus.starts[document]), int(corpus.starts[document]) + len(places))
            assert len(places) == lengths[document], "cut"
            assert np.array_equal(windows[row][places], corpus.tokens[own])
            assert np.array_equal(mask[row][places[:-1]], corpus.learned[own][1:])
            assert not mask[row][places[-1]], "the next document is not predicted"
    assert sorted(seen) == list(range(count))
    assert mask.sum() == sum(length - max(length // 2, 1) for length in lengths)
    assert not mask[~valid].any()


def best_fit(lengths: list[int], capacity: int) -> int:
    """Number of sequences of the plain loop."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [room for room in rooms if room >= length]
        if fitting:
            rooms.remove(min(fitting))
        rooms.append(min(fitting, default=capacity) - length)
    return len(rooms)


@pytest.mark.parametrize("most", [3, 17, 60, 100])
def test_sequences_are_as_full_as_by_the_plain_loop(most: int) -> None:
    lengths = drawn(500, most, seed=most)
    packing = packed(corpus_of(lengths), 100, "truncate")
    assert len(packing.bounds) - 1 == best_fit(lengths, 100)
    sizes = np.add.reduceat(packing.sizes, packing.bounds[:-1])
    assert sizes.max() <= 100 and sizes.sum() == sum(lengths)
    # Sequences come in the order of their first documents, documents in theirs.
    firsts = packing.begins[packing.bounds[:-1]]
    assert (np.diff(firsts) > 0).all()
    inner = np.setdiff1d(np.arange(1, len(lengths)), packing.bounds)
    assert (np.diff(packing.begins)[inner - 1] > 0).all()


@pytest.mark.parametrize(
    ("long", "kept", "note"),
    [
        ("truncate", [30, 30, 30], r"and truncated \(data.long_\w+ = \"truncate\"\): 21 tokens"),
        ("skip", [30], r"and left out \(data.long_\w+ = \"skip\"\): 81 tokens"),
        ("fail", [], r"data.seq_len to 50, or data.long_conversations to \"truncate\" or \"skip\""),
    ],
)
def test_long_conversations(long: Any, kept: list[int], note: str) -> None:
    """One that is as long as a sequence is not one of them."""
    corpus = corpus_of([30, 31, 50])
    match = r"chats: 2 of 3 documents are conversations longer than data.seq_len = 30 \(the "
    match += r"longest, document 3, has 50 tokens\).*" + note
    if long == "fail":
        with pytest.raises(DataError, match=match):
            Windows(corpus, 30, long=long)
        return
    sampler = Windows(corpus, 30, long=long)
    valid, windows = sampler.valid(np.arange(len(kept))), sampler.windows(np.arange(len(kept)))
    assert valid is not None and valid.sum(1).tolist() == kept
    assert windows[:, 0].tolist() == corpus.tokens[corpus.starts[: len(kept)]].tolist()
    (said,) = sampler.notes
    assert re.search(match, said)
    assert not Windows(corpus, 50, long=long).notes


def test_a_conversation_that_begins_with_loss() -> None:
    """Only a document of loss alone, as a text is, may be cut."""
    learned = np.array([True, False, *[True] * 23])
    corpus = stream(np.arange(25, dtype=np.uint8), source="chats", learned=learned)
    with pytest.raises(DataError, match="1 of 1 documents are conversations longer than"):
        Windows(corpus, 10, long="fail")
    assert Windows(corpus, 10).num_samples == 1
    assert (
        Windows(replace(corpus, learned=np.ones(25, dtype=bool)), 10, long="fail").num_samples == 3
    )


def test_conversations_without_loss_and_texts() -> None:
    """A conversation that has no loss, or none before it is cut, is left out and counted. A text in
    the same file may be cut: it is not a conversation."""
    corpus = corpus_of([6, 9, 30, 25, 4], texts=(3,), silent=(1,))
    samples = Samples(corpus, seq_len=10, seed=0, held_out=0.1)
    ids = np.arange(samples.num_samples)
    documents, mask = samples.documents(ids), samples.loss_mask(ids)
    assert documents is not None and mask is not None
    assert np.unique(documents).tolist() == [-1, 0, 3, 4]
    assert samples.splits[0].without_loss == 2
    left_out = "2 conversations have no target that carries loss and are left out"
    assert len(samples.notes) == 1 and samples.notes[0].endswith(left_out)
    assert (documents == 3).sum() == 25 and mask[documents[:, :-1] == 3].sum() == 25 - 3
    assert samples.splits[0].num_learned == samples.num_learned == mask.sum() == 22 + 3 + 2
    share = "27 of 74 tokens bear loss (36.5%)"
    assert samples.loss_lines("bytes") == [f"loss     of completions: {share}"]


def test_small_data_is_spread_and_filled_with_padding() -> None:
    """Several sequences: of a single one, half would be held out. A step that is larger than the
    data reads no conversation twice, and its padding does not count as tokens."""
    samples = Samples(corpus_of([10] * 6), seq_len=100, seed=3, global_batch=9)
    assert samples.num_training == 9 and samples.num_validation == 1 and samples.num_empty == 4
    assert samples.notes == [
        "chats: a step reads all training conversations, and 4 of its sequences are padding"
    ]
    for step in range(3):
        ids = samples.ids_at(9 * step, 9)
        assert sorted(ids) == sorted(training_ids(samples))
        (batch,) = own_batches(samples, Mesh.single("cpu"), ids, 1, seed=0)
        assert batch.valid_BS is not None and batch.documents_BS is not None
        assert sorted(batch.valid_BS.sum(1).tolist()) == [0] * 4 + [10] * 5
        assert batch.num_loss_tokens() == 5 * 5 and batch.num_routed_sequences() == 5
        assert document_starts(batch.documents_BS).max() == 10
    assert Samples(corpus_of([10] * 21), seq_len=100, seed=3).num_training == 20
    few = Samples(corpus_of([10] * 21), seq_len=100, seed=3, validation=[corpus_of([9])])
    assert few.num_training == 3 and few.num_validation == 1
    with pytest.raises(DataError, match=r"0 training samples .* a step needs 1 besides the held"):
        Samples(corpus_of([10]), seq_len=100, seed=3)


def test_the_order_is_that_of_position_alone() -> None:
    """The same ids in one call and in many; each sequence once an epoch; another seed, another
    order; the fingerprint follows the rule for long conversations, not that of plain text."""
    corpus = corpus_of(drawn(200, 30))
    made = [Samples(corpus, seq_len=32, seed=seed, global_batch=4) for seed in (1, 1, 2)]
    size = made[0].num_training
    ids = made[0].ids_at(0, 2 * size)
    apart = [made[1].ids_at(place, 1) for place in range(2 * size)]
    assert np.array_equal(ids, np.concatenate(apart))
    assert np.array_equal(np.sort(ids[:size]), np.sort(ids[size:])) and len(set(ids)) == size
    assert not np.array_equal(ids, made[2].ids_at(0, 2 * size))
    assert made[0].fingerprint() == made[1].fingerprint()
    other = Samples(corpus, seq_len=32, seed=1, global_batch=4, long="skip")
    assert other.fingerprint() != made[0].fingerprint()


def test_numbers_of_sequences_do_not_change_unnoticed() -> None:
    """These are what checkpoints of a run count on."""
    packing = packed(corpus_of([8, 3, 5, 9, 2, 2, 7]), 10, "truncate")
    sequences = np.split(packing.begins, packing.bounds[1:-1])
    assert [one.tolist() for one in sequences] == [[0, 25], [8, 29], [11, 27], [16]]
    # The version is in the fingerprint: a run of the earlier packing continues where it has the
    # same order.
    assert packing.version == 1
    learned = np.array([True, False, *[True] * 23])
    corpus = stream(np.arange(25, dtype=np.uint8), source="chats", learned=learned)
    assert [packed(corpus, size, "truncate").version for size in (25, 24)] == [1, 2]
