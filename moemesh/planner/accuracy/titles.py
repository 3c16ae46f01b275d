"""Facts of a whole table in the lines above it: its model, device, number type, degrees, batch and
sequence length.

A title is prose. A fact counts only if the title has one value of it (two number types count as
"bf16 or fp8"), and only where no column states it. Sizes in a column ("8B", "70B") are those of the
family in the row's column `arch`, else of the one in the title.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from moemesh.config.devices import accelerator_of
from moemesh.config.errors import ConfigError
from moemesh.planner.accuracy.architectures import SIZE, is_model, named_shape
from moemesh.planner.accuracy.cells import GPT_SIZES, spellings

#: Number types of products: "NVFP4", "bf16".
_FORMAT = r"(?:(?:mx|nv)?fp|bf|b?float)(?:4|8|16|32)"
#: The rest of a list or a range of numbers.
_LIST = re.compile(r"\s*(?:to|and|or|vs\.?|[-–/,&])\s*\d")
#: Most words of a model's name.
_NUM_WORDS = 4


def title_facts(
    title: str, names: Sequence[str], rows: Sequence[Mapping[str, str]], archs: Mapping[str, Any]
) -> dict[str, str]:
    """Column -> fact, of the columns that are not among `names`. The fact `title` is the whole
    title, `family` the model whose sizes the rows have."""
    words = [word.strip(",;:.()[]*#") for word in title.split()]
    devices = {device.name: word for word in words if (device := accelerator_of(word))}
    facts = {"title": title, "family": "", "arch": ""}
    if len(devices) == 1:
        facts |= {"hardware": title, "gpus": _number_of(title, *devices.values())}
    facts["precision"] = number_types(title)
    for name, pattern in spellings()["title"].items():
        matches = [*re.finditer(rf"(?i)\b(?:{pattern})", title)]
        values = {next(filter(None, match.groups())) for match in matches}
        if len(values) == 1 and not any(_LIST.match(title, match.end()) for match in matches):
            facts[name] = values.pop()
    sizes = {size for row in rows if (size := size_of(row))}
    if set(GPT_SIZES) <= {*names}:
        facts["arch"] = "gpt"
    elif sizes:
        facts["family"] = _family(title, sizes, archs)
    elif "arch" not in names:
        facts["arch"] = _model(title, archs)
    return {name: fact for name, fact in facts.items() if fact and name not in names}


def number_types(text: str) -> str:
    """The number types in a title or a remark, "bf16 or fp8"; one of 32 bits only if the text names
    no other."""
    words = (word.strip(",;:.()[]*#").lower() for word in text.split())
    formats = {
        word.replace("bfloat", "bf").replace("float", "fp")
        for word in words
        if re.fullmatch(_FORMAT, word)
    }
    return " or ".join(sorted({word for word in formats if "32" not in word} or formats))


def size_of(row: Mapping[str, str]) -> str:
    """The size of a row's model, which its table prints instead of a name or beside a family."""
    cells = (row.get(name, "").strip() for name in ("size", "arch"))
    return next((cell for cell in cells if SIZE.fullmatch(cell)), "")


def with_model(row: Mapping[str, str], archs: Mapping[str, Any]) -> dict[str, str]:
    """The row with the name of its model, where its cells or the title give family and size."""
    size, arch = size_of(row), row.get("arch", "").strip()
    family = arch if arch and arch != size else row.get("family", "")
    if not size or not family or (arch and is_model(arch, archs)):
        return dict(row)
    return {**row, "arch": f"{family} {size}"}


def _phrases(title: str) -> Iterator[list[str]]:
    """The words of each part of a title; marks and words such as "and" or "on" separate parts."""
    for phrase in re.split(r"[,;:()\[\]|*#]|\.(?=\s|$)|\s[-–—]\s|\s(?:and|vs\.?|on|for)\s", title):
        yield phrase.split()


def _windows(title: str) -> Iterator[str]:
    """Neighbouring words of a part of a title, long ones first."""
    for words in _phrases(title):
        for number in range(min(_NUM_WORDS, len(words)), 0, -1):
            for first in range(len(words) - number + 1):
                yield " ".join(words[first : first + number])


def _model(title: str, archs: Mapping[str, Any]) -> str:
    """The model that a title names; "" for none, or several."""
    words_of: dict[str, str] = {}  # model -> its first words
    for words in _windows(title):
        if accelerator_of(words) is None and is_model(words, archs):
            words_of.setdefault(named_shape(words, archs).name, words)
    return next(iter(words_of.values())) if len(words_of) == 1 else ""


def _family(title: str, sizes: set[str], archs: Mapping[str, Any]) -> str:
    """The words of a title that name a model with each of `sizes`; "" for none, or several."""
    words_of: dict[tuple[str, ...], str] = {}  # models -> their first words
    for words in _windows(title):
        try:
            models = tuple(named_shape(f"{words} {size}", archs).name for size in sorted(sizes))
        except (ConfigError, ValueError, KeyError, TypeError):
            continue
        words_of.setdefault(models, words)
    return next(iter(words_of.values())) if len(words_of) == 1 else ""


def _number_of(title: str, device: str) -> str:
    """The number right before the device, or in its word ("8xH100"), of a title that names at most
    one node; "" for none, for several, and for the end of a range."""
    not_single = r"(?<!\bsingle )(?<!\bone )(?<!\ba )(?<!\b1 )"
    nodes = rf"{not_single}\b(?:nodes?|servers?|machines?|hosts?)\b|\bper\b"
    if re.search(nodes, title, re.IGNORECASE):
        return ""
    if prefix := re.match(r"(\d+)[x×]", device):
        return prefix[1]
    number = r"(?<!to )(?<![-–.\w])(\d[\d,]*)\s*[x×]?\s+(?:nvidia\s+|amd\s+)?"
    counts = re.findall(rf"{number}{re.escape(device)}", title, re.IGNORECASE)
    return counts[0] if len(counts) == 1 else ""
