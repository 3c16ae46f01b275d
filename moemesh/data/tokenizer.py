"""Tokenizers: text into ids and ids into text.

A folder means the tokenizer that ``AutoTokenizer`` of transformers reads from it. If other files of
the folder can change the meaning of ``tokenizer.json``, that class reads the folder, and without
transformers the folder is refused. Otherwise ``tokenizer.json`` is read alone, which takes no
import of transformers.

No special token (``bos_token``, ``eos_token``) is added to a text. Special tokens that a chat
template writes, or that occur in a text, become their ids.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import date
from functools import cached_property, lru_cache
from importlib import import_module
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from moemesh.config.data import NUM_BYTES
from moemesh.config.errors import UserError
from moemesh.config.limits import parse_json
from moemesh.config.suggest import nearest_path

FILE, SETTINGS, SPECIAL = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
ADDED, TEMPLATE, TEMPLATES = "added_tokens.json", "chat_template.jinja", "additional_chat_templates"
#: Chat template of a processor, the fallback of the tokenizer's own.
PROCESSOR_TEMPLATE = "chat_template.json"
#: Flags of an added token in the files of transformers.
FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")
#: Files that change the meaning of a tokenizer.json in the same folder.
BESIDE = (SETTINGS, SPECIAL, ADDED, TEMPLATE, PROCESSOR_TEMPLATE)
#: Function of chat templates that returns the date.
CLOCK = "strftime_now"
#: Classes of transformers that use a tokenizer.json unchanged; the first is the default.
GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend")
#: Vocabulary file of another package -> that package; any other ``.model`` is one of sentencepiece.
NEEDS = {"tiktoken.model": "tiktoken", "tekken.json": "mistral_common"}
#: Vocabulary files that transformers converts for any class.
CONVERTED = ("tokenizer.model", "tiktoken.model", "tekken.json")
#: Key of the settings that lists a file in place of tokenizer.json by version of transformers.
VERSIONS = "fast_tokenizer_files"
#: Endings of the files of a tokenizer.
ENDINGS = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".vocab", ".bpe")
#: Most characters of another package's error in a message.
LONGEST_REASON = 300
#: Largest accepted file of settings, in bytes.
MAX_SETTINGS = 64 << 20


class DataError(UserError):
    """The data cannot be used with this configuration; the message has the remedy."""


def optional(module: str, path: object) -> Any:
    """A module of an optional package. Raises DataError if the package, which `path` needs, is
    missing."""
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise DataError(f"{path} needs the package {package}: pip install {package}") from error


class TokenizerSettings(NamedTuple):
    """Chat templates by name; special tokens by key ("eos_token"), which templates may write; the
    `decode` of a class of transformers (None: that of the package tokenizers)."""

    templates: Mapping[str, str]
    special: Mapping[str, Any]
    decode: Callable[..., str] | None = None


class Tokenizer:
    """The tokenizer of a `folder`, or bytes as ids 0..255, for which `folder` and `file` are
    None."""

    def __init__(
        self,
        loaded: Any = None,
        folder: Path | None = None,
        settings: TokenizerSettings | None = None,
        file: Path | None = None,
        day: str | None = None,
    ) -> None:
        """Use :meth:`open`. `day`: the date that chat templates read (None: today)."""
        self._loaded, self.folder, self.file = loaded, folder, file
        self.settings = settings or TokenizerSettings({}, {})
        self.day = None if day is None else date.fromisoformat(day)

    @classmethod
    def open(cls, tokenizer: str, day: str | None = None) -> Tokenizer:
        """`tokenizer` is "bytes", a folder, or a tokenizer.json by any name; `day`: the date
        (YYYY-MM-DD) that its chat template reads. Raises DataError."""
        if tokenizer == "bytes":
            return cls()
        path = Path(tokenizer).expanduser()
        is_file = path.is_file() and path.suffix == ".json" and path.name != SETTINGS
        folder = path.parent if is_file else path
        file = path if is_file else folder / FILE
        parts = [file_ for file_ in _files(folder) if file_.suffix in ENDINGS]
        if not parts or not (is_file or path.is_dir()):
            missing = nearest_path(file if path.exists() else path)
            raise DataError(
                f'data.tokenizer is "{tokenizer}"; it must be "bytes", a {FILE}, or a folder with '
                f"one ({missing})"
            )
        # `reason`: why tokenizer.json alone is not the tokenizer of the folder.
        loaded, padding, reason = None, None, f"{folder} has no {FILE}"
        # Other classes of transformers may change the rules of the file.
        name = settings_of(folder / SETTINGS).get("tokenizer_class", GENERIC[0])
        has_class = name not in GENERIC or (folder / "config.json").is_file()
        if file.is_file() and not has_class:
            loaded, padding = _loaded(file)
            reason = _change(folder, file, loaded, padding)
        may_differ = file.name == FILE and (loaded is None or reason is not None)
        if may_differ and (read := _by_transformers(folder, parts)) is not None:
            return cls(*read, file, day)
        if file.is_file() and loaded is None:
            loaded, padding = _loaded(file)
            reason = _change(folder, file, loaded, padding)
            if reason is None and may_differ and not _is_byte_level(loaded):
                reason = f"{folder} names a class of transformers, which may change {FILE}"
        if reason is not None:
            raise DataError(
                f"{reason}: the package transformers reads it: pip install transformers"
            )
        return cls(loaded, folder, _settings(folder, padding), file, day)

    @cached_property
    def fingerprint(self) -> str:
        """Text that is equal only for tokenizers that make the same ids: the digest of the
        tokenizer.json if it has the same rules as the tokenizer, else of the rules."""
        if self._loaded is None:
            return "bytes"
        rules = _rules(self._loaded)
        file = self.file
        if file is not None and file.is_file() and rules == _rules(_loaded(file)[0]):
            return f"blake2b-128:{_digest(read_whole(file))}"
        return f"blake2b-128:{_digest(rules)}"

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id; 256 for bytes."""
        if self._loaded is None:
            return NUM_BYTES
        return max(self._loaded.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def _shown(self) -> str:
        """The folder, or a tokenizer.json by another name, in messages."""
        is_named = self.file is not None and self.file.name != FILE
        return str((self.file if is_named else self.folder) or "bytes")

    @cached_property
    def added_flags(self) -> dict[int, dict[str, Any]]:
        """Content and flags, by id, of the tokens that are never split in a text, such as special
        ones: the form of ``added_tokens_decoder`` in transformers."""
        if self._loaded is None:
            return {}
        decoder = self._loaded.get_added_tokens_decoder()
        keys = ("content", *FLAGS)
        return {id_: {key: getattr(token, key) for key in keys} for id_, token in decoder.items()}

    @property
    def added(self) -> list[str]:
        """The tokens that are never split in a text."""
        return [flags["content"] for flags in self.added_flags.values()]

    @property
    def template_facts(self) -> list[object]:
        """Templates, special tokens, and the date if a template reads it: together they determine
        the text of a conversation."""
        reads_clock = any(CLOCK in template for template in self.settings.templates.values())
        day = str(self.day or date.today()) if reads_clock else None
        return [dict(self.settings.templates), dict(self.settings.special), day]

    def check(self, vocab_size: int) -> None:
        """Raises DataError if a file's ids exceed `vocab_size`; bytes are not checked."""
        if self._loaded is not None and self.vocab_size > vocab_size:
            raise DataError(
                f"data.tokenizer {self._shown} has ids up to {self.vocab_size - 1}, and "
                f"model.vocab_size is {vocab_size}: set model.vocab_size to {self.vocab_size} or "
                "more, or name the tokenizer of the model"
            )

    def encode(self, text: bytes, where: object) -> np.ndarray:
        """Ids [n], uint8 for bytes, else int32; `where` names the text in an error."""
        if self._loaded is None:
            return np.frombuffer(text, dtype=np.uint8)
        try:
            decoded = text.decode()
        except UnicodeDecodeError as error:
            raise DataError(f"{where}, byte offset {error.start}: not valid UTF-8") from error
        return self.encode_batch([decoded])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids [n] of each text. The package tokenizers works on all cores and releases the GIL."""
        if self._loaded is None:
            return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]
        # "fast": without offsets in the text, which take a tenth of the time.
        encodings = self._encoded(self._loaded.encode_batch_fast, texts)
        return [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]

    def encode_with_offsets(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Ids [n] of each text, and begin and end of each id in its characters, int64 [n, 2]."""
        if self._loaded is None:
            encodings: list[tuple[np.ndarray, np.ndarray]] = []
            for text in texts:
                sizes = [len(character.encode()) for character in text]
                places = np.repeat(np.arange(len(text), dtype=np.int64), sizes)
                ids = np.frombuffer(text.encode(), dtype=np.uint8)
                encodings.append((ids, np.stack([places, places + 1], axis=1)))
            return encodings
        return [
            (
                np.array(encoding.ids, dtype=np.int32),
                np.fromiter(chain.from_iterable(encoding.offsets), dtype=np.int64).reshape(-1, 2),
            )
            for encoding in self._encoded(self._loaded.encode_batch, texts)
        ]

    def _encoded(self, encode: Callable[..., list[Any]], texts: Sequence[str]) -> list[Any]:
        try:
            return encode(texts, add_special_tokens=False)
        except DataError:
            raise
        except Exception as error:  # of the package, such as for an unknown token
            raise DataError(f"{self._shown}: the tokenizer fails on a text: {error}") from error

    def id_of(self, token: str) -> int:
        """The id of a token by its name. Raises DataError without one."""
        id_ = None if self._loaded is None else self._loaded.token_to_id(token)
        if id_ is None:
            raise DataError(
                f'data.tokenizer {self._shown} has no token "{token}"'
                + ("" if self.folder else ": bytes have no special tokens")
            )
        return id_

    @cached_property
    def beginning(self) -> list[int]:
        """The ids that transformers puts before a text, such as that of ``bos_token``."""
        if self._loaded is None:
            return []
        bare, whole = (
            self._loaded.encode("a", add_special_tokens=adds).ids for adds in (False, True)
        )
        count = len(bare)
        first = next((n for n in range(len(whole)) if whole[n : n + count] == bare), 0)
        return whole[:first]

    def end_of_text(self) -> int:
        """The id of the ``eos_token`` of the settings. Raises DataError without one."""
        if self.folder is None:
            raise DataError('data.tokenizer is "bytes", which has no token for the end of a text')
        if (token := self.settings.special.get("eos_token")) is not None:
            return self.id_of(token)
        raise DataError(
            f'{self.folder} names no "eos_token" in {SETTINGS} or {SPECIAL}: name the token'
        )

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """The text of `ids`, `special` tokens by name; invalid UTF-8 becomes U+FFFD."""
        if self._loaded is not None:
            decode = self.settings.decode or self._loaded.decode
            return decode(list(ids), skip_special_tokens=not special)
        return bytes(id_ if id_ < 256 else 0xFF for id_ in ids).decode(errors="replace")


def settings_of(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if the file does not exist or holds another value. Raises
    DataError."""
    if not path.is_file():
        return {}
    if path.stat().st_size > MAX_SETTINGS:
        raise DataError(f"{path} has {path.stat().st_size} bytes; the limit is {MAX_SETTINGS}")
    try:
        settings = parse_json(read_whole(path), last_counts=True)  # as transformers reads it
    except ValueError as error:
        raise DataError(f"{path}: not valid JSON ({error})") from error
    return settings if isinstance(settings, dict) else {}


# Files of a folder into a tokenizer.


def _files(folder: Path) -> list[Path]:
    return sorted(
        path for root in (folder, folder / TEMPLATES) for path in root.glob("*") if path.is_file()
    )


def reads_clock(tokenizer: str) -> bool:
    """Whether a chat template of the folder `tokenizer` reads the date, without opening it."""
    folder = Path(tokenizer).expanduser()
    return tokenizer != "bytes" and any(
        CLOCK.encode() in read_whole(path)
        for path in _files(folder if folder.is_dir() else folder.parent)
        if path.suffix == ".jinja" or path.name in (SETTINGS, PROCESSOR_TEMPLATE)
    )


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _by_transformers(
    folder: Path, parts: Sequence[Path]
) -> tuple[Any, Path, TokenizerSettings] | None:
    """The tokenizer that transformers reads from `folder`; None without that package."""
    try:
        import transformers  # pyright: ignore  # optional
    except ImportError:
        return None
    # The key of the cache: a digest of each file; of a large file, its size and time of change.
    states: list[tuple[Path, object]] = []
    for part in parts:
        status = part.stat()
        is_large = status.st_size > MAX_SETTINGS
        state = (status.st_size, status.st_mtime_ns) if is_large else _digest(read_whole(part))
        states.append((part, state))
    return _read_once(transformers, folder, tuple(states))


@lru_cache(maxsize=4)
def _read_once(
    transformers: Any, folder: Path, states: tuple[tuple[Path, object], ...]
) -> tuple[Any, Path, TokenizerSettings]:
    # Special tokens that tokenizer_config.json gives with flags: transformers accepts this form in
    # special_tokens_map.json only.
    flagged = {
        key: value["content"]
        for key, value in settings_of(folder / SETTINGS).items()
        if key.endswith("_token") and isinstance(value, dict) and value.keys() >= {"content"}
        if "__type" not in value
    }
    logging = transformers.logging
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            str(folder), trust_remote_code=False, local_files_only=True, **flagged
        )
    except Exception as error:  # the package raises anything for a malformed file
        reason = " ".join(str(error).split())[:LONGEST_REASON]
        vocab = next((x for x in _files(folder) if x.name in NEEDS or x.suffix == ".model"), None)
        needs = NEEDS.get(vocab.name, "sentencepiece protobuf") if vocab is not None else ""
        # The error of transformers names other packages.
        if vocab is not None and find_spec(needs.split()[0]) is None:
            number = "two packages" if " " in needs else "a package"
            reason = f"{vocab.name} needs {number}: pip install {needs}"
        elif not any((folder / name).is_file() for name in (FILE, SETTINGS, "config.json")):
            # The folder has the files that ``save_model`` of the package tokenizers writes.
            reason = f'it has no {FILE}: the package tokenizers writes one by save("{FILE}")'
        raise DataError(f"{folder} is not a usable tokenizer: {reason}") from error
    finally:
        logging.set_verbosity(verbosity)
    names = [*dict(tokenizer.vocab_files_names).values(), FILE, *CONVERTED]
    if tokenizer.vocab_files_names and not any((folder / name).is_file() for name in names):
        # Without a file, the class makes a vocabulary of a few tokens.
        missing = f"{', '.join(dict.fromkeys(names))} of a {type(tokenizer).__name__}"
        raise DataError(f"{folder} is not a usable tokenizer: it has no {missing}")
    templates = tokenizer.chat_template or {}
    if isinstance(templates, str):
        templates = {"default": templates}
    loaded = getattr(tokenizer, "backend_tokenizer", None)
    if loaded is None:
        loaded = _SlowTokenizer(tokenizer)
    else:
        loaded.no_truncation()
        loaded.no_padding()
        loaded.encode_special_tokens = bool(getattr(tokenizer, "split_special_tokens", False))
    templates = templates or _processor_templates(folder)
    settings = TokenizerSettings(templates, tokenizer.special_tokens_map, tokenizer.decode)
    return loaded, folder, settings


class _SlowTokenizer:
    """A tokenizer of transformers in Python, with the calls of the package tokenizers."""

    def __init__(self, read: Any) -> None:
        self._read = read
        self.token_to_id = read.get_vocab().get
        self.get_added_tokens_decoder = lambda: read.added_tokens_decoder

    def get_vocab(self, **_: bool) -> dict[str, int]:
        return self._read.get_vocab()

    def to_str(self) -> str:
        added = {
            str(number): str(token) for number, token in self._read.added_tokens_decoder.items()
        }
        model = [type(self._read).__name__, repr(self._read.init_kwargs), self._read.get_vocab()]
        return json.dumps({"model": model, "added_tokens": added})

    def encode(self, text: str, *, add_special_tokens: bool) -> Any:
        return SimpleNamespace(ids=self._read.encode(text, add_special_tokens=add_special_tokens))

    def encode_batch_fast(self, texts: Sequence[str], **_: bool) -> list[Any]:
        return [
            SimpleNamespace(ids=self._read.encode(text, add_special_tokens=False)) for text in texts
        ]

    def encode_batch(self, texts: Sequence[str], **_: bool) -> list[Any]:
        if texts:
            name = type(self._read).__name__
            raise DataError(
                f"a {name} of transformers has no offsets of its tokens, and "
                "the loss mask of a conversation needs them: name a tokenizer with a "
                f"{FILE}, or give texts"
            )
        return []


def _change(folder: Path, file: Path, loaded: Any, padding: str | None) -> str | None:
    """A sentence on a difference between the tokenizer `loaded` from `file` and that of `folder`:
    other files change it, or the token `padding` becomes special. None without a difference."""
    added = {token.content: token for token in loaded.get_added_tokens_decoder().values()}
    special = {"special": True}
    named = (
        (name, token, flags if key.endswith("_decoder") or name == ADDED else flags | special)
        for name in (SETTINGS, SPECIAL, ADDED)
        for key, value in settings_of(folder / name).items()
        if name == ADDED or key.endswith(("_token", "_tokens", "_tokens_decoder"))
        for token, flags in _tokens_in(key if name == ADDED else value)
    )
    for name, token, flags in named:
        known = added.get(token)
        if known is None or any(getattr(known, key) != value for key, value in flags.items()):
            return f'{folder / name} has the token "{token}" otherwise than {file}'
    if padding is not None and (padding not in added or not added[padding].special):
        fault = "is not special in it" if padding in added else "it does not have"
        return f'{file} is filled up with the token "{padding}", which {fault}'
    settings = settings_of(folder / SETTINGS)
    keys = ["split_special_tokens", VERSIONS]
    if type(loaded.model).__name__ != "BPE":
        keys.append("clean_up_tokenization_spaces")
    changing = [key for key in keys if settings.get(key)]
    return f"{folder / SETTINGS} sets {changing[0]}" if changing else None


def _is_byte_level(loaded: Any) -> bool:
    """Whether all classes of transformers leave the rules of a tokenizer.json unchanged. For a
    tokenizer that is not byte-level, most classes replace its rules for blanks."""
    facts = json.loads(loaded.to_str())
    rules = json.dumps([facts["normalizer"], facts["pre_tokenizer"]])
    other = ("Metaspace", "Prepend", "Replace", '"add_prefix_space": true')
    return '"ByteLevel"' in rules and not any(rule in rules for rule in other)


def has_chat_template(tokenizer: str) -> bool:
    """Whether a folder, or that of a tokenizer.json, has a chat template; False for "bytes"."""
    path = Path(tokenizer).expanduser()
    folder = path.parent if path.is_file() else path
    with suppress(DataError, OSError):
        return tokenizer != "bytes" and "default" in _settings(folder).templates
    return False


def _settings(folder: Path, padding: str | None = None) -> TokenizerSettings:
    settings = settings_of(folder / SETTINGS)
    special = {} if padding is None else {"pad_token": padding}
    # Older folders, without "added_tokens_decoder", have special tokens in a separate file, too.
    for name in (SETTINGS,) if "added_tokens_decoder" in settings else (SETTINGS, SPECIAL):
        for key, value in settings_of(folder / name).items():
            for token, _ in _tokens_in(value) if key.endswith("_token") else ():
                special[key] = token
    templates = settings.get("chat_template") or {}
    if isinstance(templates, str):
        templates = {"default": templates}
    elif isinstance(templates, list):
        templates = {entry.get("name"): entry.get("template") for entry in templates}
    written = {path.stem: path for path in sorted((folder / TEMPLATES).glob("*.jinja"))}
    if (folder / TEMPLATE).is_file():
        written["default"] = folder / TEMPLATE
    if written:
        templates = {
            name: read_whole(path).decode(errors="replace") for name, path in written.items()
        }
    return TokenizerSettings(templates or _processor_templates(folder), special)


def _loaded(file: Path) -> tuple[Any, str | None]:
    """The tokenizer of `file`, and the token with which it pads texts; None without padding."""
    package = optional("tokenizers", file)
    try:
        loaded = package.Tokenizer.from_str(read_whole(file).decode())
        padding = (loaded.padding or {}).get("pad_token")
        # A file may have settings for serving: a document is neither truncated nor padded.
        loaded.no_truncation()
        loaded.no_padding()
    except Exception as error:  # the package raises bare Exception for a malformed file
        raise DataError(f"{file} is not a usable tokenizer: {error}") from error
    return loaded, padding


def _rules(loaded: Any) -> bytes:
    """The rules of a tokenizer that determine the ids of a text, as JSON."""
    facts = json.loads(loaded.to_str())
    keys = ("added_tokens", "normalizer", "pre_tokenizer", "model")
    rules = [facts.get(key) for key in keys], getattr(loaded, "encode_special_tokens", False)
    return json.dumps(rules, sort_keys=True).encode()


def _processor_templates(folder: Path) -> dict[str, str]:
    template = settings_of(folder / PROCESSOR_TEMPLATE).get("chat_template")
    return {"default": template} if isinstance(template, str) else {}


def _tokens_in(value: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(value, str):
        yield value, {}
    elif isinstance(value, dict) and isinstance(value.get("content"), str):
        yield value["content"], {key: value[key] for key in FLAGS if key in value}
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tokens_in(item)


def read_whole(file: Path) -> bytes:
    """The content of a file; DataError when it cannot be read."""
    try:
        return file.read_bytes()
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error.strerror or error})") from error
