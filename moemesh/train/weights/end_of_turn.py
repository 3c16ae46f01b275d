"""Tokenizer and end of a turn in an export: those of the run, in the files of transformers.

``generate`` of transformers stops at the ``eos_token_id`` of ``generation_config.json``; servers
and evaluation harnesses also stop at that of ``config.json`` and at the tokenizer's ``eos_token``.
In the files of a base model these are the end of a text, which a run on conversations never emits.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from moemesh.checkpoint.huggingface.convert import carry_along, write_json
from moemesh.config.errors import UserError
from moemesh.config.huggingface.folder import CONFIG, byte_tokenizer
from moemesh.config.limits import parse_json
from moemesh.config.lora import ADAPTER_CONFIG
from moemesh.config.run import RunConfig
from moemesh.data.chat import ChatTemplate
from moemesh.data.tokenizer import (
    BESIDE,
    ENDINGS,
    FILE,
    GENERIC,
    SETTINGS,
    SPECIAL,
    DataError,
    Tokenizer,
    settings_of,
)
from moemesh.train.records.run_folder import was_tuned_on_conversations

GENERATION, EOS = "generation_config.json", "eos_token_id"
#: Key of the settings of a tokenizer for the token that ends a text.
_TOKEN = "eos_token"
#: Keys that ``generate`` takes from config.json in a folder without generation_config.json.
_IDS = ("bos_token_id", "pad_token_id", "decoder_start_token_id")

#: Keys of generation_config.json that change which tokens ``generate`` chooses.
_UNAPPLIED = (
    "bad_words_ids", "begin_suppress_tokens", "constraints", "do_sample", "dola_layers",
    "encoder_no_repeat_ngram_size", "encoder_repetition_penalty", "epsilon_cutoff", "eta_cutoff",
    "exponential_decay_length_penalty", "force_words_ids", "forced_bos_token_id",
    "forced_eos_token_id", "guidance_scale", "max_time", "min_length", "min_new_tokens", "min_p",
    "no_repeat_ngram_size", "num_beams", "penalty_alpha", "repetition_penalty", "sequence_bias",
    "stop_strings", "suppress_tokens", "temperature", "token_healing", "top_h", "top_k", "top_p",
    "typical_p", "watermarking_config",
)  # fmt: skip


class EndOfTurn(NamedTuple):
    """The text that ends a turn, and its token and id (None if the text has several tokens)."""

    text: str
    token: str | None
    id: int | None


def text_ends(folder: Path) -> list[int]:
    """The ids that end a text in ``generate`` of transformers: those of generation_config.json, or
    without that file those of config.json. Raises UserError for a file without a JSON object, and
    for values that are not ids."""
    file = next((file for name in (GENERATION, CONFIG) if (file := folder / name).is_file()), None)
    if file is None:
        return []
    try:
        values = parse_json(file.read_text(encoding="utf-8"))
        given = (values if file.name == GENERATION else _of_config(values)).get(EOS)
    except (ValueError, AttributeError) as error:
        raise UserError(f"{file}: not a JSON object ({error})") from error
    if given is None:
        return []
    ids = given if isinstance(given, list) else [given]
    if not all(type(number) is int for number in ids):
        raise UserError(f"{file}: {EOS} = {json.dumps(given)} must be an id, or a list of ids")
    return ids


def _of_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that ``generate`` takes from the `values` of a config.json: those of the whole
    model, then those of its text part."""
    written = {key: value for key, value in values.items() if value is not None}
    text = values.get("text_config")
    return {**text, **written} if isinstance(text, dict) else written


def unapplied_settings(folder: Path) -> list[str]:
    """Keys of generation_config.json, or without that file of config.json, that change the texts of
    ``generate`` of transformers, and that ``moemesh generate`` does not apply."""
    if (folder / GENERATION).is_file():
        settings = settings_of(folder / GENERATION)
    else:
        settings = _of_config(settings_of(folder / CONFIG))
    given = {key: settings.get(key) for key in _UNAPPLIED}
    # The numbers 0 and 1 are taken to change nothing. True, which equals 1 in
    # Python, does change something.
    return [k for k, v in given.items() if v is True or v not in (None, False, 0, 1, [], {})]


def end_of_turn(run: Path, config: RunConfig) -> EndOfTurn | None:
    """The end of a turn in the training of `run`: the stop of ``moemesh generate --chat``, or
    without a chat template the end of a completion. None for a run on texts, for a tokenizer that
    cannot be read, and if no text ends a turn."""
    if not was_tuned_on_conversations(run):
        return None
    with suppress(DataError):
        tokenizer = Tokenizer.open(config.data.tokenizer)
        if "default" in tokenizer.settings.templates:
            template = ChatTemplate.open(tokenizer)
            text, token = template.stop, template.stop_token
        else:
            text = token = tokenizer.settings.special.get(_TOKEN)
        if text:
            return EndOfTurn(text, token, None if token is None else tokenizer.id_of(token))
    return None


def put_tokenizer(out: Path, tokenizer: Tokenizer) -> None:
    """Write this tokenizer into the folder `out`, such that ``AutoTokenizer`` reads the same
    one."""
    folder, file = tokenizer.folder, tokenizer.file
    if folder is None or file is None:
        return
    for name in BESIDE:
        (out / name).unlink(missing_ok=True)
    if file.name == FILE:
        others = (GENERATION, ADAPTER_CONFIG)
        carry_along(folder, out, lambda name: name.endswith(ENDINGS) and name not in others)
    else:
        carry_along(folder, out, lambda name: name in BESIDE)
        shutil.copyfile(file, out / FILE)
    settings = settings_of(out / SETTINGS)
    if "tokenizer_class" not in settings and not (folder / CONFIG).is_file():
        # Without a class, AutoTokenizer takes that of the model's family.
        write_json(out / SETTINGS, {**settings, "tokenizer_class": GENERIC[0]})


def put_bytes(out: Path) -> str:
    """Write the tokenizer "bytes" into the folder `out`; returns a sentence for the user."""
    (out / FILE).write_text(byte_tokenizer(), encoding="utf-8")
    write_json(out / SETTINGS, {"tokenizer_class": GENERIC[0]})
    return f"text is read by bytes: {FILE} has one token for each"


def put_end_of_turn(out: Path, end: EndOfTurn) -> str:
    """Add the end of a turn to the tokens that end generation in the folder `out`; returns a
    sentence for the user."""
    if end.id is None:
        text = json.dumps(end.text)
        return (
            f"a turn ends with {text}, which takes several tokens: in transformers, "
            f"generate(..., stop_strings=[{text}], tokenizer=tokenizer)"
        )
    config = settings_of(out / CONFIG)
    given = _of_config(config)
    generation = settings_of(out / GENERATION) or {
        key: given[key] for key in (EOS, *_IDS) if given.get(key) is not None
    }
    for name, values in ((GENERATION, generation), (CONFIG, config | {EOS: given.get(EOS)})):
        before = values.get(EOS)
        ids = [before] if isinstance(before, int) else list(before or [])
        if end.id not in ids:
            ids.append(end.id)
        write_json(out / name, {**values, EOS: ids if len(ids) > 1 else ids[0]})
    places = [GENERATION, CONFIG]
    if _name_end_of_text(out, str(end.token), end.id):
        places.append(SETTINGS)
    return f"a turn ends with {end.token} (id {end.id}): written to {', '.join(places)}"


def _name_end_of_text(folder: Path, token: str, number: int) -> bool:
    """Make `token` the ``eos_token`` of the tokenizer in `folder`. False, with unchanged files, if
    the tokenizer cannot be read, if its id of `token` is not `number`, if other added tokens would
    change, or if a chat template uses ``eos_token``."""
    files = {
        name: settings_of(folder / name)
        for name in (SETTINGS, SPECIAL)
        if name == SETTINGS or (folder / name).exists()
    }
    try:
        tokenizer = Tokenizer.open(str(folder))
        if tokenizer.id_of(token) != number:
            return False
    except DataError:
        return False
    if tokenizer.settings.special.get(_TOKEN) == token:
        return True
    if any(_TOKEN in template for template in tokenizer.settings.templates.values()):
        return False
    # Without ids in the files, transformers numbers added tokens in the order of the files, and
    # `eos_token` comes first. If that changes an id, the second attempt writes all ids.
    ids = {str(id_): flags for id_, flags in tokenizer.added_flags.items()}
    for more in ({}, {"added_tokens_decoder": ids}):
        for name, values in files.items():
            write_json(folder / name, values | {_TOKEN: token} | (more if name == SETTINGS else {}))
        with suppress(DataError):
            if Tokenizer.open(str(folder)).added_flags == tokenizer.added_flags:
                return True
    for name, values in files.items():
        write_json(folder / name, values)
    return False
