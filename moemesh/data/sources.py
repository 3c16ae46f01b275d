"""The sources that a configuration names, opened, or only looked at."""

from __future__ import annotations

from collections import Counter
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
from moemesh.data.indexed import BIN, IDX, MASK, SUFFIXES, IndexedTokens, beside, prefix_of
from moemesh.data.input_files import CHECKED_FILES, DataFile, check_head, find
from moemesh.data.records import BadRecordError, BadRecordLog
from moemesh.data.samples import Samples, SampleSource
from moemesh.data.tokenizer import DataError, Tokenizer
from moemesh.data.tokenizing import Say, cached_tokens

#: Bytes of files that every process turns into tokens for itself, with the tokenizer "bytes" and
#: with another; more than this is tokenized once, into the token cache.
SMALL_BYTES, SMALL = 64 << 20, 1 << 20
#: A file of a compressed format counts as so many times its size.
EXPANSION = 4


def open_samples(
    data: DataConfig,
    *,
    seed: int,
    vocab_size: int,
    cache: Path | None,
    say: Say,
    say_progress: Say | None = None,
) -> Samples:
    """The training and validation samples of a run. Raises DataError for whatever is wrong with its
    data.

    `cache`: the folder of the token cache, unless ``data.cache`` names one; None: no cache. `say`
    gets what every process would say, `say_progress` (None: the same) what the one says that
    tokenizes, which may be any.
    """
    named = [*data.all_sources]
    if data.validation is not None:
        named.append(validation_source(data))
    opened: list[tuple[Corpus, ...]] = []
    errors: list[Exception] = []
    for one in named:
        try:
            opened.append(open_source(one, data, vocab_size, cache, say, say_progress))
        except BadRecordError as error:
            fix = 'correct it, or leave such records out with data.bad_records = "skip"'
            errors.append(DataError(f"{error}\nfix: {fix}"))
        except DataError as error:
            errors.append(error)
    refuse_together(errors)
    validation = opened.pop() if data.validation is not None else ()
    samples = Samples(
        [
            SampleSource(name_of(one), corpora, one.weight)
            for one, corpora in zip(data.all_sources, opened, strict=True)
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
        say(f"note: {note}")
    return samples


def with_vocabulary(resolved: Resolved) -> Resolved:
    """The same with the vocabulary of ``data.tokenizer`` where model.vocab_size is that of a preset
    or the default. A tokenizer that cannot be read is reported where the data is looked at."""
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
    say: Say,
    say_progress: Say | None = None,
) -> tuple[Corpus, ...]:
    """The streams of one source: one of text, one for each pair of token files."""
    reader = Tokenizer.open(data.tokenizer, data.date)
    reader.check(vocab_size)
    name = name_of(source)
    if (prefixes := token_files(source)) is not None:
        opened = [IndexedTokens.open(prefix) for prefix in prefixes]
        for one in opened:
            one.check(vocab_size, reader.fingerprint)
        return tuple(
            Corpus.indexed(one, vocab_size, str(beside(one.prefix, BIN))) for one in opened
        )
    files = find(source.path, source.format)
    counts = Counter(file.format for file in files)
    if len(counts) > 1:
        held = ", ".join(f"{count} {format}" for format, count in counts.most_common())
        say(f"note: {name} holds files of several formats ({held}); all of them are read")
    log = BadRecordLog(data.bad_records, data.bad_record_share, name)
    folder = cache if data.cache is None else Path(data.cache).expanduser()
    small = _text_bytes(files) <= _small_bytes(reader)
    if folder is None or is_whole_file(files, reader) or small:
        corpus = Corpus.open(
            source.path,
            source.format,
            reader,
            vocab_size,
            text_key=source.text_key,
            log=log,
        )
        if note := log.note():
            say(f"note: {note}")
        return (corpus,)
    key, tell = source.text_key, say_progress or say
    found = cached_tokens(folder, files, reader, log, key, vocab_size, say, tell)
    found.check(vocab_size, reader.fingerprint)
    return (Corpus.indexed(found, vocab_size, name),)


def check(data: DataConfig, vocab_size: int) -> list[Exception]:
    """Faults of the tokenizer and of each source, whose files are looked for, and read
    at their first bytes only: each a DataError that :func:`open_samples` would raise."""
    reader, found = None, list[Exception]()
    try:
        reader = Tokenizer.open(data.tokenizer)
        reader.check(vocab_size)
    except DataError as error:
        found.append(error)
    for source in data.all_sources:
        found += found_by(partial(_check_source, source, vocab_size, reader))
    if data.validation is not None:
        own = found_by(partial(_check_source, validation_source(data), vocab_size, reader))
        # Files are looked for in the same way whichever key names them.
        found += [DataError(str(one).replace("data.path ", "data.validation ", 1)) for one in own]
    return found


def _check_source(source: DataSource, vocab_size: int, reader: Tokenizer | None) -> None:
    if (prefixes := token_files(source)) is not None:
        for one in map(IndexedTokens.open, prefixes):
            # Of token files without a description all tokens would have to be read.
            if one.sidecar is not None and reader is not None:
                one.check(vocab_size, reader.fingerprint)
        return
    for file in find(source.path, source.format)[:CHECKED_FILES]:
        check_head(file)


def is_small(data: DataConfig) -> bool:
    """Whether all sources of a run that :func:`check` accepts are read in about a second:
    token files, and texts that every process turns into tokens for itself."""
    reader = Tokenizer.open(data.tokenizer)
    validation = () if data.validation is None else (validation_source(data),)
    size = 0
    for source in (*data.all_sources, *validation):
        if (prefixes := token_files(source)) is None:
            size += _text_bytes(find(source.path, source.format))
            continue
        for prefix in prefixes:
            tokens = IndexedTokens.open(prefix)
            if tokens.sidecar is None or beside(prefix, MASK).exists():
                size += beside(prefix, BIN).stat().st_size
    return size <= _small_bytes(reader)


def _text_bytes(files: Sequence[DataFile]) -> int:
    return sum(file.num_bytes * (1 if file.compression == "none" else EXPANSION) for file in files)


def _small_bytes(reader: Tokenizer) -> int:
    return SMALL_BYTES if reader.folder is None else SMALL


def name_of(source: DataSource) -> str:
    """The source in messages."""
    return "standard library" if source.path is None else source.path


def validation_source(data: DataConfig) -> DataSource:
    """The files of ``data.validation`` as a source."""
    return DataSource(path=data.validation, format=data.validation_format, text_key=data.text_key)


def token_files(source: DataSource) -> list[Path] | None:
    """The prefixes of the token files that a source names, in order: a prefix, one of the two
    files, a pattern or a folder of them; None for a source of another format."""
    path, format = source.path, source.format
    if path is None or format not in ("auto", "indexed"):
        return None
    root = Path(path).expanduser()
    if root.is_dir():
        found = sorted(root.rglob(f"*{IDX}"))
        # A folder of token files and others: neither would be read in silence.
        others = [
            file
            for file in (sorted(root.rglob("*")) if found and format == "auto" else [])
            if file.is_file() and not file.name.endswith(SUFFIXES) and file.name[0] != "."
        ]
        if others:
            raise DataError(
                f"data.path {root} holds token files and others, such as {others[0]}: set "
                'data.format to "indexed" for the former, or name the files by a pattern'
            )
    elif has_magic(path) and not root.exists():
        found = sorted(Path(match) for match in glob(str(root), recursive=True))
        found = [one for one in found if one.name.endswith((IDX, BIN))]
    elif root.name.endswith((IDX, BIN)) or beside(root, IDX).exists() or format == "indexed":
        return [prefix_of(root)]
    else:
        found = []
    prefixes = list(dict.fromkeys(prefix_of(p) for p in found if not p.name.endswith(MASK)))
    if format == "auto" and not all(beside(prefix, BIN).exists() for prefix in prefixes):
        return None
    if not prefixes:
        if format == "auto":
            return None
        raise DataError(f"data.path {path} names no pair of {BIN} and {IDX} files")
    return prefixes
