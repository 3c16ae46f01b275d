"""The section [data]: the text that a run reads, and how it is cut into sequences."""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable
from contextlib import suppress
from math import isfinite
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator

from moemesh.config.errors import ConfigError, Problem
from moemesh.config.section import Positive, Section, Share, Size

DataFormat = Literal["auto", "bytes", "text", "jsonl", "parquet", "dataset", "indexed"]
Documents = Literal["auto", "ignore", "mask"]
LongConversations = Literal["truncate", "skip", "fail"]
BadRecords = Literal["fail", "skip"]

#: Ids that the tokenizer "bytes" produces.
NUM_BYTES = 256


def loss_unit(tokenizer: object) -> str:
    """The unit of losses with `tokenizer`: its ids are tokens, those of "bytes" are bytes."""
    return "nats a byte" if tokenizer == "bytes" else "nats a token"


#: Suffixes of a number of tokens -> powers of a thousand.
_TOKEN_UNITS = {"k": 1, "m": 2, "b": 3, "t": 4}


def read_tokens(text: str, thousand: int = 1000) -> float:
    """A number of tokens: "14.8T", "300B", "1e12", "2_000_000"; with `thousand` = 1024, for
    sequences and batches, "4k" is 4,096. Raises ConfigError."""
    folded = text.strip().lower().replace("_", "").replace(",", "")
    unit = thousand ** _TOKEN_UNITS.get(folded[-1:], 0)
    try:
        tokens = float(folded[:-1] if folded[-1:] in _TOKEN_UNITS else folded) * unit
    except ValueError:
        tokens = 0.0
    if not (isfinite(tokens) and tokens >= 1):
        message = "a number of tokens is at least 1, optionally with the suffix K, M, B or T"
        fix = "such as --tokens 14.8T, --tokens 300B or --tokens 1e12"
        if thousand == 1024:
            fix = "such as 4096, or 4k, which is the same"
        raise ConfigError([Problem.of("out-of-range", "tokens", text, message, fix)])
    return tokens


def _length(value: object) -> object:
    """The number of tokens of a text such as "4k", from --set; other values are unchanged."""
    if not isinstance(value, str) or re.fullmatch(r"[\d_.,]*\d[kKmM]", value.strip()) is None:
        return value
    with suppress(ConfigError):
        tokens = read_tokens(value, 1024)
        return int(tokens) if tokens == int(tokens) else value
    return value


def _day(value: object) -> object:
    """The text of a date, which needs no quotes in TOML."""
    return str(value) if isinstance(value, datetime.date) else value


class DataSource(Section):
    """One of several sources of a run."""

    section: ClassVar[str] = "data.sources"

    #: A file, folder or glob; None: see ``data.path``.
    path: str | None = None
    #: Share of windows that are drawn from this source, relative to the other weights.
    weight: Positive = 1.0
    format: DataFormat = "auto"
    text_key: str = "text"


class DataConfig(Section):
    """The data of a run."""

    section: ClassVar[str] = "data"

    #: A file, folder or glob; None reads the running Python's own standard library sources.
    path: str | None = None
    #: auto: the format follows from the name of each file.
    format: DataFormat = "auto"
    #: Key or column of the text in jsonl, parquet and datasets.
    text_key: str = "text"
    #: Several sources, mixed by weight, in place of `path`, `format` and `text_key`.
    sources: tuple[DataSource, ...] = ()
    #: Separate files for validation, in place of a share of the training data.
    validation: str | None = None
    validation_format: DataFormat = "auto"
    #: "bytes", or the folder of a tokenizer.
    tokenizer: str = "bytes"
    #: Several documents in one sequence: "ignore" reads across their borders; with "mask" attention
    #: stays inside a document, positions restart, and no token predicts the next document. auto:
    #: "mask" for sources with conversations.
    documents: Documents = "auto"
    #: Treatment of conversations that are longer than a sequence.
    long_conversations: LongConversations = "truncate"
    #: Tokens of one sequence.
    seq_len: Annotated[Size, BeforeValidator(_length)] = 128
    #: Sequences of one step, over all ranks.
    global_batch: Size = 32
    #: Share of the samples kept for validation.
    held_out: Share = 0.05
    #: Reaction to a record that cannot be read: end the run, or leave the record out and count it.
    bad_records: BadRecords = "fail"
    #: With "skip": the largest share of bad records of a source.
    bad_record_share: Share = 0.01
    #: The date (YYYY-MM-DD) that a chat template reads; None: the day of the run's first start.
    date: Annotated[str | None, BeforeValidator(_day)] = None
    #: Folder of tokenized text for later starts; None: ``token_cache`` next to the run folder.
    cache: str | None = None

    @property
    def loss_unit(self) -> str:
        """The unit of losses; see :func:`loss_unit`."""
        return loss_unit(self.tokenizer)

    @property
    def all_sources(self) -> tuple[DataSource, ...]:
        """The sources of the run; without `sources`, `path` as one of weight 1."""
        if self.sources:
            return self.sources
        return (DataSource(path=self.path, format=self.format, text_key=self.text_key),)

    def with_paths(self, change: Callable[[str | None], str | None]) -> DataConfig:
        """The same section with every path of data replaced by what `change` returns for it."""
        sources = tuple(
            source.model_copy(update={"path": change(source.path)}) for source in self.sources
        )
        paths = {"path": change(self.path), "validation": change(self.validation)}
        update = {key: value for key, value in paths.items() if value != getattr(self, key)}
        return self.model_copy(update=update | ({"sources": sources} if sources else {}))

    def check(self) -> list[Problem]:
        """Problems of the section by itself."""
        problems = self.range_problems()
        for name in ("path", "tokenizer", "text_key", "validation", "cache"):
            if getattr(self, name) == "":
                fix = f"leave {name} out to take the default, or name a file or folder"
                problems.append(self.problem("empty", name, f"{name} is empty", fix))
        if self.date is not None:
            try:
                datetime.date.fromisoformat(self.date)
            except ValueError as error:
                fix = f'date = "{datetime.date.today()}", for one'
                problems.append(self.problem("out-of-range", "date", f"date: {error}", fix))
        for number, source in enumerate(self.sources):
            faults = [
                (problem.code, problem.message, problem.fix) for problem in source.range_problems()
            ]
            for name in ("path", "text_key"):
                if getattr(source, name) == "":
                    faults.append(("empty", f"{name} is empty", f"leave {name} out, or name it"))
            for code, message, fix in faults:
                message = f"sources[{number}]: {message}"
                problems.append(Problem.of(code, "data.sources", None, message, fix))
        for name in ("path", "format", "text_key"):
            if self.sources and getattr(self, name) != type(self).model_fields[name].default:
                message = f"data.{name} is for a run of one source, and data.sources names its own"
                fix = "keep one of them"
                problems.append(self.problem("conflict", name, message, fix, "sources"))
        formats = [("sources" if self.sources else "format", s.format) for s in self.all_sources]
        formats.append(("validation_format", self.validation_format))
        raw = [name for name, format in formats if format == "bytes" and self.tokenizer != "bytes"]
        for name in raw[:1]:
            message = f'{name} "bytes" reads files of any content, for the tokenizer "bytes"'
            fix = f'{name} = "text", or data.tokenizer = "bytes"'
            problems.append(self.problem("conflict", name, message, fix, "tokenizer"))
        return problems
