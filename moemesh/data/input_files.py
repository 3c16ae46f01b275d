"""The files that a path names, and the format of each: by its name, checked by its first bytes.

Formats are never guessed silently. Content that is compressed or binary by its first bytes is never
read as text, and a file whose first line is a JSON object only with ``data.format = "text"``.
"""

from __future__ import annotations

import gzip
import io
import os
import re
import shlex
import stat
import sysconfig
import zlib
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from glob import glob, has_magic
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, cast

from moemesh.config.hub import COMMIT, DATA_ENDINGS, HubError, snapshot
from moemesh.config.limits import few, parse_json
from moemesh.config.suggest import nearest_path
from moemesh.data.tokenizer import DataError, optional

#: Formats of one file. "dataset" is a folder that Hugging Face datasets has saved.
FileFormat = Literal["bytes", "text", "jsonl", "parquet", "dataset"]

Compression = Literal["none", "gzip", "zstd"]

#: Name endings of records in JSON, one on each line or in one list, after the ending of a
#: compression is removed; and of tables in text.
RECORDS, TABLES = (".jsonl", ".ndjson", ".json"), (".csv", ".tsv")
COMPRESSED: dict[str, Compression] = {".gz": "gzip", ".zst": "zstd"}
#: Marks of a folder that `datasets.Dataset.save_to_disk` has written.
SAVED_DATASET, SAVED_DATASETS = "state.json", "dataset_dict.json"
#: Prefix of the path of a dataset of the Hugging Face Hub: hub:OWNER/NAME or hub:OWNER/NAME:SUBSET.
HUB = "hub:"
#: Folder in a downloaded copy of a dataset, with a record for each file.
DOWNLOADS = Path(".cache", "huggingface", "download")
#: Keys of the card of a dataset of the Hub.
CARD_KEYS = r"^(?:configs|dataset_info|size_categories|task_categories):"
#: Splits in the names of files and folders: train, and others.
TRAIN = re.compile(r"(?<![a-z])train")
OTHER_SPLITS = re.compile(r"(?<![a-z])(?:test|validation|valid|val|dev|eval)(?![a-z])")
#: Suffixes of files, which no name of a dataset has.
_FILES = {".bin", ".gz", ".idx", ".json", ".jsonl", ".ndjson", ".parquet", ".txt", ".zst"}
#: First bytes of binary files -> their kind in messages.
MAGIC = (
    (b"\x1f\x8b", "gzip data"),
    (b"\x28\xb5\x2f\xfd", "zstd data"),
    (b"BZh", "bzip2 data"),
    (b"\xfd7zXZ\x00", "xz data"),
    (b"PK\x03\x04", "a zip archive"),
    (b"PAR1", "parquet data"),
    (b"ARROW1", "Arrow data"),
    (b"\xff\xff\xff\xff", "an Arrow stream"),
    (b"\xff\xfe\0\0", "UTF-32 text"),
    (b"\xff\xfe", "UTF-16 text"),
    (b"\xfe\xff", "UTF-16 text"),
    (b"%PDF-", "a PDF document"),
)
#: Kind of a binary file -> the remedy; FILE and NEW become the names of the file and of a new one,
#: quoted for a shell.
REMEDIES = {
    "gzip data": "let its name end in .gz, or leave it out",
    "zstd data": "let its name end in .zst, or leave it out",
    "parquet data": "let its name end in .parquet, or leave it out",
    "bzip2 data": "bzip2 -dk FILE unpacks it",
    "xz data": "xz -dk FILE unpacks it",
    "a zip archive": "unzip FILE unpacks it",
    "an Arrow stream": "name the folder that datasets has saved",
    "UTF-16 text": "iconv -f UTF-16 -t UTF-8 FILE > NEW converts it",
    "UTF-32 text": "iconv -f UTF-32 -t UTF-8 FILE > NEW converts it",
    "a tar archive": "tar -xf FILE unpacks it",
}
#: Limits of the checks before a source is read: bytes at the beginning of a file; number of files.
HEAD, CHECKED_FILES = 1 << 16, 1000
#: Skipped folders: the standard library's own tests are 19 of its 31 MB.
STANDARD_LIBRARY_SKIP = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
)


class DataFile(NamedTuple):
    """One file to read: a regular file; for the format "dataset" a folder, or a dataset of the Hub,
    whose path begins with ``hub:``. `named`: the user set the format, it was not taken from the
    file's name."""

    path: Path
    format: FileFormat
    compression: Compression = "none"
    named: bool = False

    @property
    def is_on_hub(self) -> bool:
        return str(self.path).startswith(HUB)

    @property
    def num_bytes(self) -> int:
        """Bytes on the disk; a dataset of the Hub has an unknown size and counts as large."""
        if self.is_on_hub:
            return 1 << 40
        with reading(self.path):
            if self.format != "dataset":
                return self.path.stat().st_size
            return sum(file.stat().st_size for file in self.path.rglob("*") if file.is_file())


def find(path: str | None, format: str = "auto") -> list[DataFile]:
    """The files of `path` (file, folder or glob; None: the standard library sources of this
    Python), in the order of their relative names, without hidden ones.

    "auto" takes the format of each file from its name: jsonl, parquet, else text. "jsonl" and
    "parquet" select the files with such a name in a folder, and in a glob that has any; a glob
    without one yields all. Raises DataError for a path without files to read.
    """
    if path is None:
        # The ``*.py`` sources of the running Python, without its tests and installed packages.
        root = Path(sysconfig.get_path("stdlib"))
        files = _walk(root, STANDARD_LIBRARY_SKIP.__contains__)
        sources = [DataFile(file, "text") for file in files if file.suffix == ".py"]
        if not sources:
            raise DataError(f"this Python has no library sources under {root}: set data.path")
        return sources
    # A dataset of the Hub: read by the package datasets, or its files from a downloaded copy.
    if path.startswith(HUB):
        if format not in ("auto", "dataset"):
            raise DataError(f'data.path {path} is a dataset of the Hub: data.format = "dataset"')
        return [DataFile(Path(path), "dataset", named=True)]
    if (on_hub := hub_name(path)) is not None:
        root = downloaded(on_hub)
        if not (files := _of_dataset(root, _walk(root, lambda _: False))):
            names = ", ".join(DATA_ENDINGS)
            raise DataError(f"data.path {path}: the dataset has no file named {names}")
        return [_classified(file, format) for file in files]
    if (scheme := re.match(r"(?!file:)\w+(?=://)", path)) is not None:
        raise DataError(
            f"data.path {path}: data is read from files of this machine; copy it first, such as "
            f"by python -c \"import fsspec; fsspec.filesystem('{scheme[0]}').get('{path}', "
            "'data/', recursive=True)\""
        )
    # One file, or the files of a pattern.
    root = Path(path).expanduser()
    try:
        mode = root.stat().st_mode
    except (OSError, ValueError) as error:
        if has_magic(path):
            matches = sorted(Path(match) for match in glob(str(root), recursive=True))
            files = [match for match in matches if match.is_file()]
            if not files:
                raise DataError(f"data.path {path}: the pattern matches no file") from error
            return [_classified(file, format) for file in _named_so(files, format) or files]
        reason = error.strerror if isinstance(error, OSError) else error
        advice, parts = nearest_path(root), path.split(",")
        if len(parts) > 1 and all(Path(part).expanduser().exists() for part in parts):
            sources = ", ".join(f'{{path="{part}"}}' for part in parts)
            advice = f"several are data.sources=[{sources}]"
        raise DataError(f"data.path {path}: {reason} ({advice})") from error
    if stat.S_ISREG(mode):
        return [_classified(root, format)]
    if not stat.S_ISDIR(mode):
        raise DataError(f"data.path {path} is neither a regular file nor a folder")
    # A folder: a saved dataset, or files.
    if any((root / name).is_file() for name in (SAVED_DATASET, SAVED_DATASETS)):
        if format not in ("auto", "dataset"):
            raise DataError(
                f'data.path {path} is a dataset that was saved to disk, and data.format is "'
                f'{format}": data.format = "dataset"'
            )
        return [DataFile(root, "dataset")]
    if format == "dataset":
        raise DataError(
            f"data.path {path} holds neither {SAVED_DATASET} nor {SAVED_DATASETS}: a dataset that "
            "was saved to disk has one of them"
        )
    files = _visible(root)
    if _is_dataset(root):
        files = _of_dataset(root, files) or files
    files = _named_so(files, format)
    if not files:
        kind = f".{format}" if format in ("jsonl", "parquet") else "readable"
        raise DataError(f"data.path {path}: the folder holds no {kind} file")
    return [_classified(file, format) for file in files]


def _visible(root: Path) -> list[Path]:
    return _walk(root, lambda name: name.startswith(".") or name == "__pycache__")


def _is_dataset(root: Path) -> bool:
    """Whether the folder is a copy of a dataset of the Hub: it was downloaded, or has the dataset's
    card."""
    card = root / "README.md"
    if (root / DOWNLOADS).is_dir():
        return True
    with reading(card):
        head = card.read_text("utf-8", "replace")[:HEAD] if card.is_file() else ""
    return head.startswith("---") and re.search(CARD_KEYS, head, re.MULTILINE) is not None


def _of_dataset(root: Path, files: list[Path]) -> list[Path]:
    """The `files` with records (if any name or folder has "train", only those of that split), and
    files that the user has added to a download."""
    added, records = set[Path](), set[Path]()
    is_download = (root / DOWNLOADS).is_dir()
    for file in files:
        if is_download and not (root / DOWNLOADS / f"{file.relative_to(root)}.metadata").exists():
            added.add(file)
        elif file.name.endswith(DATA_ENDINGS):
            records.add(file)
    training = {file for file in records if TRAIN.search(str(file.relative_to(root)).lower())}
    chosen = added | (training or records)
    return [file for file in files if file in chosen]


def notes_on(path: str | None, files: list[DataFile]) -> list[str]:
    """Sentences on `path`, of which :func:`find` returned `files`: on several formats, and on other
    splits than train."""
    counts, splits = Counter(file.format for file in files), _note_on_splits(path, files)
    formats = ", ".join(f"{count} {format}" for format, count in counts.most_common())
    mixed = f"{path} holds files of several formats ({formats}); all of them are read"
    return [mixed] * (len(counts) > 1) + ([] if splits is None else [splits])


def _note_on_splits(path: str | None, files: list[DataFile]) -> str | None:
    if path is None or not (root := Path(path).expanduser()).is_dir():
        return None
    if any(file.format == "dataset" for file in files):  # the package datasets reads the folder
        return None
    names = [file.path.relative_to(root).as_posix() for file in files]
    if _is_dataset(root):
        records = [file for file in _visible(root) if file.suffix in _FILES]
        unread = {file.relative_to(root).as_posix() for file in records}.difference(names)
        without = f"only its split train is read, without {few(sorted(unread), 3)}"
        return f"{path} is a dataset of the Hub: {without}" if unread else None
    others = [name for name in names if OTHER_SPLITS.search(name.lower())]
    if not others or not any(TRAIN.search(name.lower()) for name in names):
        return None
    given = few(others, 3)
    return f"{path} holds files that are named as another split ({given}); all of them are read"


class HubName(NamedTuple):
    """A dataset of the Hub; `revision`: a branch, a tag or a commit."""

    name: str
    revision: str | None


def hub_name(path: str | None) -> HubName | None:
    """The dataset that OWNER/NAME, OWNER/NAME@REVISION or hf://datasets/OWNER/NAME names; None for
    an existing path, or another form."""
    form = r"(hf://datasets/)?([\w.-]+/[\w.-]+?)(?:@([\w.-]+))?"
    match = re.fullmatch(form, path or "")
    if match is None or path is None or path.startswith((".", "/")):
        return None
    if match[1] is None and Path(match[2]).suffix in _FILES:  # a missing file
        return None
    if match[1] is None and (Path(path).exists() or Path(path).parent.exists()):
        return None
    return HubName(match[2], match[3])


def pinned(path: str | None) -> str | None:
    """`path` with the commit of a dataset of the Hub; any other path is returned unchanged."""
    if (on_hub := hub_name(path)) is None or re.fullmatch(COMMIT, on_hub.revision or ""):
        return path
    return f"{on_hub.name}@{downloaded(on_hub).name}"


def downloaded(dataset: HubName) -> Path:
    """The folder of a dataset in the cache of huggingface_hub; the folder's name is the commit.
    Missing files are downloaded, unless HF_HUB_OFFLINE is set."""
    name = dataset.name
    try:
        return snapshot(name, dataset.revision, "dataset")
    except HubError as error:
        if error.package:
            raise DataError(
                f"data.path {name} does not exist; as a dataset of the Hub it needs the package "
                f"huggingface_hub: pip install huggingface_hub, or {error.command} --local-dir "
                "FOLDER, and data.path = FOLDER"
            ) from error
        raise DataError(
            f"data.path {name} does not exist, and as a dataset of the Hub it cannot be "
            f"downloaded ({error}): where there is a network, {error.command}"
        ) from error


def check_head(file: DataFile) -> None:
    """Raises DataError for a file whose first bytes are not of its format, such as compressed or
    binary data under the name of a text, or JSON, unless the user set the format "text"."""
    path, format, compression, named = file
    if format in ("bytes", "dataset"):
        return
    with reading(path), path.open("rb") as plain:
        start = plain.read(8)
    if not start:
        return
    if format == "parquet":
        if not start.startswith(b"PAR1"):
            raise DataError(f"{path} is named as parquet, but does not begin as such a file")
        return
    # Binary content.
    with open_stream(path, compression) as stream:
        head = stream.read(HEAD)
    content = next((name for magic, name in MAGIC if head.startswith(magic)), None)
    if head[257:262] == b"ustar":
        content = "a tar archive"
    if content is None and b"\x00" in head:
        content = f"binary data (a zero byte at {head.index(0)})"
    if content is not None:
        advice = REMEDIES.get(
            content,
            "leave it out (a pattern such as FOLDER/**/*.md chooses files of a folder and its "
            'folders), or train on bytes as they are with data.format = "bytes"',
        )
        names = {"FILE": shlex.quote(str(path)), "NEW": shlex.quote(f"utf8-{path.name}")}
        advice = re.sub(r"\b(FILE|NEW)\b", lambda word: names[word[0]], advice)
        kind = "text in UTF-8" if format == "text" else "JSON"
        raise DataError(f"{path} holds {content}, not {kind}: {advice}")
    if named:
        return
    # JSON and tables, whose format was taken from the file's name.
    line, newline, _ = head.partition(b"\n")
    is_object = line.lstrip().startswith(b"{") and (newline or len(head) < HEAD)
    is_record = False
    with suppress(ValueError):
        is_record = is_object and isinstance(parse_json(line, last_counts=True), dict)
    suffix = _suffixes(path)[0]
    if format == "text" and is_record:
        raise DataError(
            f'{path} holds JSON. Set data.format to "jsonl" to read the records of its lines, or '
            'to "text" to train on the JSON text itself'
        )
    if format == "text" and suffix in TABLES:
        tabs = ", sep='\\t'" * (suffix == ".tsv")
        raise DataError(
            f'{path} is named as a table. Set data.format to "text" to train on its text as it is, '
            "or convert it: python -c \"import datasets; datasets.load_dataset('csv', "
            f"data_files='{path}'{tabs})['train'].to_parquet('{path.stem}.parquet')\""
        )
    if format == "jsonl" and suffix == ".json" and is_object and not is_record:
        raise DataError(
            f"{path} holds one JSON object on several lines, and records are JSON lines or the "
            f"elements of a list: jq -c . {shlex.quote(path.name)} > "
            f"{shlex.quote(f'{path.stem}.jsonl')} writes each object on a line, "
            "jq -c '.KEY[]' those of a list under KEY; data.format = \"text\" trains on the "
            "JSON text itself"
        )


def holds_list(stream: BinaryIO) -> bool:
    """Whether the JSON in a stream is a list and not an object on each line."""
    start: bytes = stream.peek(HEAD)  # pyright: ignore  # all streams of open_stream are buffered
    return start.removeprefix(BOM_UTF8).lstrip().startswith(b"[")


def _suffixes(path: Path) -> tuple[str, str]:
    """(suffix of a name without the suffix of a compression, suffix of the compression or "")."""
    name = path.name.lower()
    ending = next((suffix for suffix in COMPRESSED if name.endswith(suffix)), "")
    return Path(name.removesuffix(ending)).suffix, ending


def _named_so(files: list[Path], format: str) -> list[Path]:
    """The files with a name of `format`, if it is "jsonl" or "parquet"; else all."""
    if format not in ("jsonl", "parquet"):
        return files
    return [file for file in files if _classified(file, "auto").format == format]


def _classified(path: Path, format: str) -> DataFile:
    """The file with the format that the user set, or ("auto") that of its name."""
    if format == "bytes":
        return DataFile(path, "bytes", named=True)
    if format == "parquet":
        return DataFile(path, "parquet", named=True)
    if format == "dataset":
        raise DataError(f"{path} is a file: a dataset that was saved to disk is a folder")
    suffix, ending = _suffixes(path)
    compression = COMPRESSED.get(ending, "none")
    if format != "auto":
        kind: FileFormat = "jsonl" if format == "jsonl" else "text"
        return DataFile(path, kind, compression, named=True)
    if suffix == ".parquet" and not ending:
        return DataFile(path, "parquet")
    return DataFile(path, "jsonl" if suffix in RECORDS else "text", compression)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns an OSError into a DataError that names `path`."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error


def _walk(root: Path, skip: Callable[[str], bool]) -> list[Path]:
    """Regular files under `root`, sorted by relative name with ``/``."""

    def fail(error: OSError) -> None:
        raise DataError(f"{error.filename}: cannot be read ({error.strerror})") from error

    files: list[Path] = []
    for folder, subfolders, names in os.walk(root, onerror=fail):
        subfolders[:] = [name for name in subfolders if not skip(name)]
        files += [Path(folder, name) for name in names if not skip(name)]
    return sorted((f for f in files if f.is_file()), key=lambda f: f.relative_to(root).as_posix())


# Bytes of a file, decompressed as they are read.

#: Compressed bytes that are decompressed at once: few, since a hostile file expands 30,000-fold.
CHUNK = 1 << 13


@contextmanager
def open_stream(path: Path, compression: Compression = "none") -> Iterator[BinaryIO]:
    """The bytes of `path`, decompressed. Raises DataError for a missing file, content that
    contradicts the name, and a truncated or damaged stream."""
    stream: BinaryIO | None = None
    try:
        with path.open("rb") as plain:
            if compression == "none":
                stream = plain
            else:
                start = plain.read(4)
                plain.seek(0)
                magic = {name: first for first, name in MAGIC}[f"{compression} data"]
                if not start.startswith(magic):
                    raise DataError(
                        f"{path} is named as {compression} data, but does not begin as such: "
                        "rename it"
                    )
                if compression == "gzip":
                    stream = cast("BinaryIO", gzip.GzipFile(fileobj=plain))
                else:
                    stream = io.BufferedReader(_Zstd(path, plain), 1 << 17)  # pyright: ignore
            yield stream
    except (OSError, EOFError, zlib.error, _BrokenZstd) as error:
        if isinstance(error, OSError) and error.strerror:
            raise DataError(f"{path}: cannot be read ({error.strerror})") from error
        place = "" if stream is None else f" after {stream.tell():,} decompressed bytes"
        raise DataError(f"{path}: the {compression} data are damaged{place} ({error})") from error


class _BrokenZstd(Exception):
    """The frames of a file end too early or cannot be read."""


class _Zstd(io.RawIOBase):
    """The frames of a zstd file; `zstandard`'s reader accepts a truncated file as complete."""

    def __init__(self, path: Path, plain: BinaryIO) -> None:
        self._package = optional("zstandard", path)
        self._plain, self._frame = plain, self._package.ZstdDecompressor().decompressobj()
        #: Whether a frame has begun, and compressed bytes that were read but not decompressed.
        self._inside, self._input = False, b""
        #: Decompressed bytes that were not returned yet, and the number of returned ones.
        self._ready, self._position = b"", 0

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            self._input = self._input or self._plain.read(CHUNK)
            if not self._input:
                if self._inside:
                    raise _BrokenZstd("the file ends inside a frame")
                return 0
            try:
                self._ready = self._frame.decompress(self._input)
            except self._package.ZstdError as error:
                raise _BrokenZstd(str(error)) from error
            self._inside, self._input = True, b""
            if self._frame.eof:
                self._input = self._frame.unused_data
                self._frame = self._package.ZstdDecompressor().decompressobj()
                self._inside = False
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        self._position += count
        return count
