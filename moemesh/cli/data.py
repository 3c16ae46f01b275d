"""Verbs `tokenize` and `data show`."""

# No `from __future__ import annotations` in these files: typer reads the annotations.
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from moemesh.cli.application import AsJson, ConfigFile, Overrides, app, data_app, load
from moemesh.config.limits import drawn_on, visible
from moemesh.trace.strict_json import strict_json

if TYPE_CHECKING:
    from moemesh.data.preview import Preview
    from moemesh.data.samples import Samples

#: Colours on a terminal: tokens that carry loss are green, the others dim.
_GREEN, _CYAN, _DIM, _PLAIN = "\x1b[32m", "\x1b[36m", "\x1b[2m", "\x1b[0m"
#: Marks around tokens that carry loss, without a terminal.
_OPEN, _CLOSE = "{+", "+}"
#: Seconds between two lines of progress without a terminal.
LINE_SECONDS = 10


@dataclass(frozen=True, kw_only=True)
class TokenizeRequest:
    """Text, the tokenizer, and the files to write."""

    source: Annotated[str, "A file, folder or glob: text, jsonl, parquet, .gz, .zst.", "<IN>"]
    out: Annotated[str, "A prefix (OUT.bin, OUT.idx, ...), or a folder.", "<OUT>"]
    tokenizer: Annotated[str, 'A folder with tokenizer.json, the file, or "bytes".', "FOLDER"]
    data_format: Annotated[
        Literal["auto", "bytes", "text", "jsonl", "parquet", "dataset"],
        "Format of the files, as data.format; auto: by their names.",
        {"names": ("--format",)},
    ] = "auto"
    text_key: Annotated[str, "Key or column of a text, as data.text_key.", "KEY"] = "text"
    append_eod: Annotated[
        bool, "Append the tokenizer's eos_token to each document, not a newline."
    ] = False
    eod_token: Annotated[str | None, "The same with the token of this name.", "TOKEN"] = None
    bad_records: Annotated[Literal["fail", "skip"], "A record that cannot be read."] = "fail"
    bad_record_share: Annotated[
        float, "Largest share of bad records; with skip.", {"min": 0.0, "max": 1.0}
    ] = 0.01
    processes: Annotated[
        int, "Number of files at once; one file uses all cores, too.", {"min": 1}
    ] = 1


@app.command(short_help="Tokenize text once, for many runs.")
def tokenize(request: TokenizeRequest, as_json: AsJson = False) -> None:
    """Write text as token ids: OUT.bin and OUT.idx (Megatron's format), OUT.meta.json, and for
    conversations OUT.mask.bin, which marks tokens that carry loss.

    The same command resumes after an interruption. Example:

        moemesh tokenize corpus/ tokens/corpus --tokenizer ./Qwen3-30B-A3B
        moemesh train --set data.path=tokens/corpus.idx --set model.path=./Qwen3-30B-A3B
    """
    from moemesh.data.tokenizing import EOS, TokenizeJob, TokenSettings

    note = partial(typer.echo, err=True)
    # Print before anything is read.
    note(f"tokenizing {request.source} with {request.tokenizer}")
    settings = TokenSettings(
        tokenizer=request.tokenizer,
        text_key=request.text_key,
        end_of_document=request.eod_token or (EOS if request.append_eod else None),
        bad_records=request.bad_records,
        bad_record_share=request.bad_record_share,
    )
    job = TokenizeJob.open(request.source, request.out, settings, request.data_format)
    note(f"{len(job.parts):,} file(s), {job.num_bytes / 1e6:,.1f} MB, into {job.prefix}")
    with _progress(job.num_bytes, len(job.parts)) as advance:
        facts = job.run(processes=request.processes, on_note=note, advance=advance)
    if as_json:
        typer.echo(strict_json(facts, indent=2))
        return
    typer.echo(
        f"{facts['prefix']}.bin: {facts['num_tokens']:,} tokens in {facts['num_documents']:,} "
        f"documents, largest id {facts['max_id']:,} of {facts['vocab_size']:,}"
    )


@data_app.command("show", short_help="The first samples, as training reads them.")
def data_show(
    config: ConfigFile = None,
    overrides: Overrides = None,
    samples: Annotated[int, "Number of samples.", {"min": 1}] = 4,
    step: Annotated[int, "Begin with the first sample of this step.", {"min": 1}] = 1,
    out: Annotated[Path | None, "The run's folder, for the cache of long texts.", "DIR"] = None,
    as_json: AsJson = False,
) -> None:
    """Print the samples that a run reads first, decoded: documents, positions, what carries loss.

    Takes what `moemesh train` takes, and starts no rank. Example:

        moemesh data show --set data.path=chat.jsonl --set model.path=./Qwen3-30B-A3B
    """
    from moemesh.data.preview import previews
    from moemesh.data.sources import open_samples
    from moemesh.data.tokenizer import Tokenizer
    from moemesh.data.tokenizing import cache_beside

    resolved = load(config, overrides).config
    data = resolved.data
    opened = open_samples(
        data,
        seed=resolved.train.seed,
        vocab_size=resolved.model.vocab_size,
        cache=cache_beside(out or Path("runs") / "any"),
        log=partial(typer.echo, err=True),
    )
    position = (step - 1) * data.global_batch
    shown = previews(opened, Tokenizer.open(data.tokenizer), position, samples)
    if not as_json:
        text = samples_text(opened, shown, data.global_batch)
        print(text, file=drawn_on(sys.stdout))
        return
    names = ("position", "sample", "source", "stream", "offset")
    answer = {
        "num_tokens": opened.num_tokens,
        "num_training": opened.num_training,
        "seq_len": opened.seq_len,
        "documents": "mask" if opened.masks_documents else "ignore",
        "samples": [
            {
                "step": preview.position // data.global_batch + 1,
                **{name: getattr(preview, name) for name in names},
                "tokens": preview.tokens.tolist(),
                "targets_with_loss": preview.learned.tolist(),
                "documents": preview.documents.tolist(),
                "positions": preview.positions.tolist(),
                "pieces": [piece._asdict() for piece in preview.pieces],
            }
            for preview in shown
        ],
    }
    typer.echo(strict_json(answer))


@contextmanager
def _progress(num_bytes: int, num_files: int) -> Iterator[Callable[[int, int, int], None]]:
    """Yields a function that adds finished (bytes, tokens, files) and prints progress to stderr."""
    start = last = time.monotonic()
    done = [0, 0, 0]

    def add(*more: int) -> str:
        done[:] = [total + count for total, count in zip(done, more, strict=True)]
        rate = done[0] / max(time.monotonic() - start, 1e-9) / 1e6
        return f"{done[2]:,} of {num_files:,} files  {done[1]:,} tokens  {rate:.1f} MB/s"

    if not sys.stderr.isatty():

        def print_line(*more: int) -> None:
            nonlocal last
            state = add(*more)
            if time.monotonic() - last >= LINE_SECONDS:
                last = time.monotonic()
                typer.echo(f"{done[0] / max(num_bytes, 1):4.0%}  {state}", err=True)

        yield print_line
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns: list[Any] = [BarColumn(), TextColumn("{task.percentage:3.0f}%"), TimeRemainingColumn()]
    columns.append(TextColumn("{task.fields[state]}"))
    with Progress(*columns, console=Console(file=drawn_on(sys.stderr))) as shown:
        task = shown.add_task("", total=max(num_bytes, 1), state=add(0, 0, 0))

        def draw(*more: int) -> None:
            state = add(*more)
            shown.update(task, completed=done[0], state=state)

        yield draw


def samples_text(samples: "Samples", shown: "Sequence[Preview]", global_batch: int) -> str:
    """Every sample under a header line, with a line before each document."""
    # A terminal without colours (https://no-color.org) gets the marks of a pipe.
    is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    on_terminal = sys.stdout.isatty() and not is_plain
    marked = not all(preview.learned.all() for preview in shown)
    borders = (
        "attention stays inside a document, where positions restart"
        if samples.masks_documents
        else "attention and positions continue across documents"
    )
    mark = "green" if on_terminal else f"{_OPEN} {_CLOSE}"
    loss = f"targets that carry loss are in {mark}" if marked else "all targets carry loss"
    lines = [
        f"{samples.num_tokens:,} tokens, {samples.num_training:,} training samples of "
        f"{samples.seq_len:,}\n{borders}; {loss}"
    ]
    for preview in shown:
        step, sequence = preview.position // global_batch + 1, preview.position % global_batch + 1
        with_loss = f"{int(preview.learned.sum()):,} of {samples.seq_len:,} targets carry loss"
        lines += [
            "",
            f"=== step {step}, sequence {sequence} of {global_batch}: sample {preview.sample:,} of "
            f"{visible(preview.source)}, from token {preview.offset:,} on; {with_loss}",
        ]
        document = None
        for piece in preview.pieces:
            if piece.document != document:
                document = piece.document
                first = int((preview.documents == document).argmax())
                title = f"--- document {document:,}, position "
                is_inside = first < samples.seq_len
                title += f"{preview.positions[first]}" if is_inside else "of the last target"
                if first == 0 and preview.continued:
                    title += f", from its token {preview.continued:,} on"
                lines += [f"{_CYAN}{title}{_PLAIN}" if on_terminal else title, ""]
            # Control characters of a text must not reach the terminal.
            text = "".join(
                sign if sign in "\n\t" or sign.isprintable() else f"\\u{ord(sign):04x}"
                for sign in piece.text
            )
            if marked and on_terminal:
                text = f"{_GREEN if piece.learned else _DIM}{text}{_PLAIN}"
            elif marked and piece.learned:
                text = f"{_OPEN}{text}{_CLOSE}"
            lines[-1] += text
        if padding := int((preview.documents[:-1] < 0).sum()):
            lines.append(f"--- {padding:,} tokens of padding")
    return "\n".join(lines)
