"""Data sources of a configuration: opened for training, or checked without reading all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from glob import glob, has_magic
from pathlib import Path

from pydantic import ValidationError

from moemesh.config.data import DataConfig, DataSource
from moemesh.config.errors import found_by, refuse_together
from moemesh.config.load import Resolved
from moemesh.data.corpus import Corpus, is_whole_file
from moemesh.data.indexed import BIN, IDX, MASK, SUFFIXES, IndexedTokens, path_with, prefix_of
from moemesh.data.input_files import CHECKED_FILES, DataFile, check_head, find, notes_on
from moemesh.data.records import BadRecordError, BadRecordLog
from moemesh.data.samples import Samples, SampleSource
from moemesh.data.tokenizer import DataError, Tokenizer
from moemesh.data.tokenizing import Log, cached_tokens

#: Largest texts in bytes that every process tokenizes for itself, with the tokenizer "bytes" and
#: with any other. Larger texts are tokenized once, into the token cache, if a run has one.
SMALL_BYTES, SMALL = 64 << 20, 1 << 20
#: Assumed ratio of the uncompressed to the stored size of a compressed file.
EXPANSION = 4


def open_samples(
    data: DataConfig,
    *,
    seed: int,
    vocab_size: int,
    cache: Path | None,
    log: Log,
    log_progress: Log | None = None,
) -> Samples:
    """The training and validation samples of a run. Raises DataError for faults of its data.

    `cache`: the folder of the token cache, unless ``data.cache`` names one; None: no cache. `log`
    receives notes, which are the same in every process, except that one waits for another's tokens.
    `log_progress` (default: `log`) receives the progress of tokenizing, in the one process that
    does it, which may be any.
    """
    sources = [*data.all_sources]
    if data.validation is not None:
        sources.append(validation_source(data))
    opened: list[tuple[Corpus, ...]] = []
    errors: list[Exception] = []
    for source in sources:
        try:
            opened.append(open_source(source, data, vocab_size, cache, log, log_progress))
        except BadRecordError as error:
            fix = 'correct it, or leave such records out with data.bad_records = "skip"'
            errors.append(DataError(f"{error}\nfix: {fix}"))
        except DataError as error:
            errors.append(error)
    refuse_together(errors)
    validation = opened.pop() if data.validation is not None else ()
    samples = Samples(
        [
            SampleSource(name_of(source), corpora, source.weight)
            for source, corpora in zip(data.all_sources, opened, strict=True)
        ],
        seq_len=data.seq_len,
        seed=seed,
        held_out=data.held_out,
        global_batch=data.global_batch,
        documents=data.documents,
        long=data.long_conversations,
        validation=validation,
    )
    for note in samples.notes:
        log(f"note: {note}")
    return samples


def with_vocabulary(resolved: Resolved) -> Resolved:
    """`resolved` with the vocabulary size of ``data.tokenizer``, unless that is "bytes", or another
    one is set by the user or ``model.path``. An unreadable tokenizer is reported later, with the
    data."""
    config, key = resolved.config, "model.vocab_size"
    is_given = not resolved.origins[key].startswith(("preset ", "default"))
    if is_given or config.model_path is not None or config.data.tokenizer == "bytes":
        return resolved
    try:
        size = Tokenizer.open(config.data.tokenizer).vocab_size
        model = type(config.model).model_validate(dict(config.model) | {"vocab_size": size})
    except (DataError, ValidationError):
        return resolved
    origin = f"the ids of data.tokenizer = {config.data.tokenizer}"
    return replace(
        resolved, config=replace(config, model=model), origins=resolved.origins | {key: origin}
    )


def open_source(
    source: DataSource,
    data: DataConfig,
    vocab_size: int,
    cache: Path | None,
    log: Log,
    log_progress: Log | None = None,
) -> tuple[Corpus, ...]:
    """The streams of one source: a single one of text, or one for each pair of token files. Raises
    DataError for files that cannot be read or do not fit the tokenizer."""
    reader = Tokenizer.open(data.tokenizer, data.date)
    reader.check(vocab_size)
    name = name_of(source)
    if (prefixes := token_files(source)) is not None:
        opened = [IndexedTokens.open(prefix) for prefix in prefixes]
        for tokens in opened:
            tokens.check(vocab_size, reader.fingerprint)
        return tuple(
            Corpus.indexed(tokens, vocab_size, str(path_with(tokens.prefix, BIN)))
            for tokens in opened
        )
    files = find(source.path, source.format)
    for note in notes_on(source.path, files):
        log(f"note: {note}")
    bad_records = BadRecordLog(data.bad_records, data.bad_record_share, name)
    folder = cache if data.cache is None else Path(data.cache).expanduser()
    is_small_text = _text_bytes(files) <= _small_bytes(reader)
    if folder is None or is_whole_file(files, reader) or is_small_text:
        corpus = Corpus.open(
            source.path,
            source.format,
            reader,
            vocab_size,
            text_key=source.text_key,
            log=bad_records,
        )
        if note := bad_records.note():
            log(f"note: {note}")
        return (corpus,)
    key, progress = source.text_key, log_progress or log
    tokens = cached_tokens(folder, files, reader, bad_records, key, vocab_size, log, progress)
    tokens.check(vocab_size, reader.fingerprint)
    return (Corpus.indexed(tokens, vocab_size, name),)


def check(data: DataConfig, vocab_size: int) -> list[Exception]:
    """Faults of the tokenizer and of each source, from the first bytes of its texts, or the index,
    sidecar and mask of its token files: each a DataError that :func:`open_samples` would raise."""
    reader, errors = None, list[Exception]()
    try:
        reader = Tokenizer.open(data.tokenizer)
        reader.check(vocab_size)
    except DataError as error:
        errors.append(error)
    for source in data.all_sources:
        errors += found_by(partial(_check_source, source, vocab_size, reader))
    if data.validation is not None:
        problems = found_by(partial(_check_source, validation_source(data), vocab_size, reader))
        # The same checks report data.path; here another key names the files.
        texts = (str(error).replace("data.path ", "data.validation ", 1) for error in problems)
        errors += map(DataError, texts)
    return errors


def _check_source(source: DataSource, vocab_size: int, reader: Tokenizer | None) -> None:
    if (prefixes := token_files(source)) is not None:
        for tokens in map(IndexedTokens.open, prefixes):
            # Token files without a sidecar would have to be read completely.
            if tokens.sidecar is not None and reader is not None:
                tokens.check(vocab_size, reader.fingerprint)
        return
    for file in find(source.path, source.format)[:CHECKED_FILES]:
        check_head(file)


def is_small(data: DataConfig) -> bool:
    """Whether all sources of a run that :func:`check` accepts can be opened in about a second. That
    tokenizes texts, and reads those token files that have no sidecar or have a loss mask."""
    reader = Tokenizer.open(data.tokenizer)
    validation = () if data.validation is None else (validation_source(data),)
    size = 0
    for source in (*data.all_sources, *validation):
        if (prefixes := token_files(source)) is None:
            size += _text_bytes(find(source.path, source.format))
            continue
        for prefix in prefixes:
            tokens = IndexedTokens.open(prefix)
            if tokens.sidecar is None or path_with(prefix, MASK).exists():
                size += path_with(prefix, BIN).stat().st_size
    return size <= _small_bytes(reader)


def _text_bytes(files: Sequence[DataFile]) -> int:
    return sum(file.num_bytes * (1 if file.compression == "none" else EXPANSION) for file in files)


def _small_bytes(reader: Tokenizer) -> int:
    return SMALL_BYTES if reader.folder is None else SMALL


def name_of(source: DataSource) -> str:
    """The name of a source in messages."""
    return "standard library" if source.path is None else source.path


def validation_source(data: DataConfig) -> DataSource:
    """The files of ``data.validation`` as a source."""
    return DataSource(path=data.validation, format=data.validation_format, text_key=data.text_key)


def token_files(source: DataSource) -> list[Path] | None:
    """The prefixes of the token files of a source, in order; None for a source of another format.
    The source names a prefix, one of the two files, a pattern, or a folder of token files."""
    path, format = source.path, source.format
    if path is None or format not in ("auto", "indexed"):
        return None
    root = Path(path).expanduser()
    if root.is_dir():
        matches = sorted(root.rglob(f"*{IDX}"))
        # A folder with token files and others is ambiguous: neither kind is ignored silently.
        others = [
            file
            for file in (sorted(root.rglob("*")) if matches and format == "auto" else [])
            if file.is_file() and not file.name.endswith(SUFFIXES) and file.name[0] != "."
        ]
        if others:
            raise DataError(
                f"data.path {root} holds token files and others, such as {others[0]}: set "
                'data.format to "indexed" for the former, or name the files by a pattern'
            )
    elif has_magic(path) and not root.exists():
        matches = sorted(Path(match) for match in glob(str(root), recursive=True))
        matches = [match for match in matches if match.name.endswith((IDX, BIN))]
    elif root.name.endswith((IDX, BIN)) or path_with(root, IDX).exists() or format == "indexed":
        return [prefix_of(root)]
    else:
        matches = []
    prefixes = list(dict.fromkeys(prefix_of(p) for p in matches if not p.name.endswith(MASK)))
    if format == "auto" and not all(path_with(prefix, BIN).exists() for prefix in prefixes):
        return None
    if not prefixes:
        if format == "auto":
            return None
        raise DataError(f"data.path {path} names no pair of {BIN} and {IDX} files")
    return prefixes
