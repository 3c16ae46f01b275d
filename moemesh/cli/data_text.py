"""Samples of training data as text for a terminal or a file."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moemesh.data.preview import Preview
    from moemesh.data.samples import Samples

#: On a terminal, what carries loss is green and all else dim; elsewhere it stands in these marks.
_GREEN, _CYAN, _DIM, _PLAIN = "\x1b[32m", "\x1b[36m", "\x1b[2m", "\x1b[0m"
_OPEN, _CLOSE = "{+", "+}"


def samples_text(samples: "Samples", shown: "Sequence[Preview]", global_batch: int) -> str:
    """Every sample under a header line, with a line before each document."""
    on_terminal = sys.stdout.isatty()
    marked = not all(one.learned.all() for one in shown)
    borders = (
        "attention stays inside a document, where positions begin anew"
        if samples.masks_documents
        else "attention and positions go on across documents"
    )
    look = "in green" if on_terminal else f"in {_OPEN} {_CLOSE}"
    loss = f"targets that carry loss are {look}" if marked else "all targets carry loss"
    lines = [
        f"{samples.num_tokens:,} tokens, {samples.num_training:,} training samples of "
        f"{samples.seq_len:,}\n{borders}; {loss}"
    ]
    for one in shown:
        step, place = one.position // global_batch + 1, one.position % global_batch + 1
        with_loss = f"{int(one.learned.sum()):,} of {samples.seq_len:,} targets carry loss"
        lines += [
            "",
            f"=== step {step}, sequence {place} of {global_batch}: sample {one.sample:,} of "
            f"{one.source}, from token {one.offset:,} on; {with_loss}",
            *_documents(samples, one, marked, on_terminal),
        ]
    return "\n".join(lines)


def samples_json(samples: "Samples", shown: "Sequence[Preview]", global_batch: int) -> Any:
    """The same as one object."""
    return {
        "num_tokens": samples.num_tokens,
        "num_training": samples.num_training,
        "seq_len": samples.seq_len,
        "documents": "mask" if samples.masks_documents else "ignore",
        "samples": [
            {
                "step": one.position // global_batch + 1,
                "position": one.position,
                "sample": one.sample,
                "source": one.source,
                "stream": one.stream,
                "offset": one.offset,
                "tokens": one.tokens.tolist(),
                "targets_with_loss": one.learned.tolist(),
                "documents": one.documents.tolist(),
                "positions": one.positions.tolist(),
                "pieces": [piece._asdict() for piece in one.pieces],
            }
            for one in shown
        ],
    }


def _documents(samples: "Samples", one: "Preview", marked: bool, on_terminal: bool) -> "list[str]":
    lines: list[str] = []
    document = None
    for piece in one.pieces:
        if piece.document != document:
            document = piece.document
            first = int((one.documents == document).argmax())
            place = f"--- document {document:,}, position "
            place += f"{one.positions[first]}" if first < samples.seq_len else "of the last target"
            if first == 0 and one.continued:
                place += f", from its token {one.continued:,} on"
            lines += [f"{_CYAN}{place}{_PLAIN}" if on_terminal else place, ""]
        # What a text holds must not steer the terminal.
        shown = "".join(
            one if one in "\n\t" or one.isprintable() else f"\\u{ord(one):04x}"
            for one in piece.text
        )
        if not marked:
            lines[-1] += shown
        elif on_terminal:
            lines[-1] += f"{_GREEN if piece.learned else _DIM}{shown}{_PLAIN}"
        else:
            lines[-1] += f"{_OPEN}{shown}{_CLOSE}" if piece.learned else shown
    if padding := int((one.documents[:-1] < 0).sum()):
        lines.append(f"--- {padding:,} tokens of padding")
    return lines
