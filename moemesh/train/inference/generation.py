"""`moemesh generate`: text from a run or a folder of transformers, token by token.

The keys and values of earlier tokens are cached, so that a token costs one forward of its own. This
is the model of training with its dispatchers and seams, for trying a model out: no request joins
a running batch, memory is not paged. For serving, convert the run and use a server.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import compress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moemesh.comm import launch
from moemesh.comm.mesh import Mesh
from moemesh.comm.slurm import rank_of
from moemesh.config.errors import ConfigError, Problem, UserError
from moemesh.config.huggingface.adapters import is_adapter_folder
from moemesh.config.huggingface.folder import CONFIG
from moemesh.config.limits import parse_json
from moemesh.config.run import RunConfig
from moemesh.data.chat import ChatTemplate
from moemesh.data.tokenizer import Tokenizer
from moemesh.model.batch import Batch
from moemesh.model.seams import ScopeSums, SliceState
from moemesh.model.transformer import Transformer
from moemesh.trace.strict_json import strict_json
from moemesh.train.inference.evaluation import load, on_ranks
from moemesh.train.records.run_folder import answers_chats
from moemesh.train.weights.conversion import to_stderr
from moemesh.train.weights.end_of_turn import text_ends, unapplied_settings
from moemesh.train.weights.weight_sources import config_of

#: Function of logits [V] that returns the id of the next token.
Choose = Callable[[Tensor], int]


class KeyValueCache(SliceState):
    """The cache of growing sequences, without autograd. Suffixes of tensors: B sequences, M heads
    of keys and values, S positions, D numbers of a head.

    When a layer's buffer is full, it is replaced by one of twice the length, so that most tokens
    are appended without a copy of the others.
    """

    #: More slices may follow, so auxiliary losses, which training needs, are not computed.
    is_last = False

    def __init__(self) -> None:
        #: Layer -> number of positions that its buffers hold.
        self._length: dict[int, int] = {}
        #: Layer -> buffers of keys and of values.
        self._room: dict[int, tuple[Tensor, Tensor]] = {}

    def extend(self, layer: int, key_BMSD: Tensor, value_BMSD: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all positions, with the new ones appended: views of the buffer."""
        start = self._length.get(layer, 0)
        stop = self._length[layer] = start + key_BMSD.shape[2]
        new, buffers = (key_BMSD, value_BMSD), self._room.get(layer)
        if buffers is None or buffers[0].shape[2] < stop:
            sizes = [(*x.shape[:2], max(stop, 2 * start), x.shape[3]) for x in new]
            key, value = (x.new_empty(size) for x, size in zip(new, sizes, strict=True))
            for larger, full in zip((key, value), buffers or (), strict=False):
                larger[:, :, :start] = full[:, :, :start]
            buffers = self._room[layer] = key, value
        for buffer, x in zip(buffers, new, strict=True):
            buffer[:, :, start:stop] = x
        key, value = (buffer[:, :, :stop] for buffer in buffers)
        return key, value

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only the sequences in these rows."""
        for layer, (key, value) in self._room.items():
            index = torch.tensor(rows, dtype=torch.int64, device=key.device)
            self._room[layer] = key[index], value[index]

    def total(self, layer: int, sums: ScopeSums) -> ScopeSums | None:
        return None


class Continuations:
    """Sequences that grow together, one token each at every step; all ranks of the plan do the
    same. The model is in one part, without a pipeline. Shorter prompts are padded at their
    beginning: for attention the padding is another document, and it is not routed."""

    def __init__(
        self,
        model: Transformer,
        prompts: Sequence[Sequence[int]],
        choosers: Sequence[Choose],
        device: torch.device | str = "cpu",
    ) -> None:
        """Each of `prompts` has at least one token and one of `choosers`."""
        self.model, self.choosers, self.device = model, list(choosers), device
        length = max(map(len, prompts))
        self._starts = [length - len(prompt) for prompt in prompts]
        self._ids = [[0] * (length - len(prompt)) + list(prompt) for prompt in prompts]
        self._cache = KeyValueCache()
        #: Number of positions in the cache.
        self._done = 0

    @torch.no_grad()
    def step(self) -> list[int]:
        """The next token of each sequence."""
        tokens_BS = torch.tensor(self._ids, device=self.device)
        num_sequences, length = tokens_BS.shape
        valid_BS = documents_BS = None
        if any(self._starts):
            starts_B1 = torch.tensor(self._starts, device=self.device)[:, None]
            valid_BS = torch.arange(length, device=self.device) >= starts_B1
            documents_BS = valid_BS.long()
        whole = Batch(
            tokens_BS=tokens_BS,
            targets_BS=tokens_BS,
            sequences_B=torch.arange(num_sequences, device=self.device),
            valid_BS=valid_BS,
            documents_BS=documents_BS,
            training=False,
        )
        if self._done < length - 1:  # only the last position of a prompt needs logits
            self.model.stream(whole.slice(self._done, length - 1, self._cache))
        logits_BV = self.model.logits(whole.slice(length - 1, length, self._cache))
        self._done = length
        chosen = [choose(row) for choose, row in zip(self.choosers, logits_BV, strict=True)]
        for ids, token in zip(self._ids, chosen, strict=True):
            ids.append(token)
        return chosen

    def keep(self, rows: Sequence[int]) -> None:
        """Continue with these sequences only."""
        self._ids = [self._ids[row] for row in rows]
        self._starts = [self._starts[row] for row in rows]
        self.choosers = [self.choosers[row] for row in rows]
        self._cache.keep(rows)


def continuation(
    model: Transformer, prompt: Sequence[int], choose: Choose, device: torch.device | str = "cpu"
) -> Iterator[int]:
    """Ids that follow one `prompt`, without end: see :class:`Continuations`."""
    growing = Continuations(model, [prompt], [choose], device)
    while True:
        yield growing.step()[0]


def chooser(temperature: float = 0.0, top_p: float = 1.0, seed: int = 0) -> Choose:
    """The likeliest token (temperature 0), or a draw from the softmax of logits / temperature among
    the likeliest tokens that together have the probability `top_p` (Holtzman et al., 2019)."""
    generator = torch.Generator().manual_seed(seed)

    def choose(logits_V: Tensor) -> int:
        logits_V = logits_V.double().cpu()
        if logits_V.isnan().any():
            raise UserError("the logits of the model are NaN: its weights are not numbers")
        if not temperature:
            return int(logits_V.argmax())
        # Subtracting the maximum first is safe for every temperature.
        scaled_V = (logits_V - logits_V.max()) / temperature
        shares_V, ids_V = scaled_V.softmax(0).sort(descending=True, stable=True)
        # The token that crosses the bound is included, so there is always one.
        before_V = shares_V.cumsum(0) - shares_V
        shares_V = shares_V.masked_fill((before_V > 0) & (before_V >= top_p), 0.0)
        return int(ids_V[torch.multinomial(shares_V, 1, generator=generator)])

    return choose


class GrowingText:
    """The text of the tokens of one sequence, until it ends; `log` gets it piece by piece.

    It ends at an id of `stops`, before the text `stop`, or with `max_tokens` tokens. `prompt`: the
    tokens that the text continues; without them many decoders drop the blank before its first word.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stops: Collection[int],
        stop: str,
        max_tokens: int,
        prompt: Sequence[int] = (),
        log: Callable[[str], object] = lambda text: None,
    ) -> None:
        self.tokenizer, self.stops, self.stop = tokenizer, stops, stop
        self.max_tokens, self.log = max_tokens, log
        #: The last tokens of the prompt: enough that the first of the answer keeps its blank and
        #: bytes of one character stay together.
        self._prompt = _end_with_text(prompt, tokenizer)
        #: Number of characters of these tokens, which the text leaves out.
        self._before = len(tokenizer.decode(self._prompt))
        self.tokens: list[int] = []
        #: Text that `log` has received.
        self._logged = ""

    def add(self, token: int) -> bool:
        """Append a token; returns whether the text continues after it."""
        if token in self.stops:
            return False
        self.tokens.append(token)
        stop, decode = self.stop, self.tokenizer.decode
        # The last n tokens contain a new stop of n characters, perhaps with more after it.
        if stop and stop in decode(self.tokens[-len(stop) :], special=True):
            return False
        # Wait for the rest of a character, and of a possible stop text.
        text = self._decoded()
        if not text.endswith(("\ufffd", *(stop[:n] for n in range(1, len(stop))))):
            self.log(text[len(self._logged) :])
            self._logged = text
        return len(self.tokens) < self.max_tokens

    def text(self) -> str:
        """The whole text; passes its pending end to `log`."""
        text = self._decoded()
        text = text.partition(self.stop)[0] if self.stop else text
        self.log(text[len(self._logged) :])
        self._logged = text
        return text

    def _decoded(self) -> str:
        """The text that the tokens add to that of the prompt."""
        return self.tokenizer.decode([*self._prompt, *self.tokens])[self._before :]


def _end_with_text(ids: Sequence[int], tokenizer: Tokenizer) -> list[int]:
    """The last tokens of `ids`, 16 to 19 of them, such that their text begins with a whole
    character; all of `ids` if no number does. Each new token is decoded with them."""
    for length in range(16, 20):  # a character has at most four tokens
        if tokenizer.decode(ids[-length:])[:1] not in ("", "\ufffd"):
            return list(ids[-length:])
    return list(ids)


def answer_together(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[GrowingText],
    choosers: Sequence[Choose],
    device: torch.device | str = "cpu",
) -> None:
    """Continue the prompts together, each until its answer ends."""
    if not prompts:
        return
    growing, open_answers = Continuations(model, prompts, choosers, device), list(answers)
    while open_answers:
        tokens = growing.step()
        continues = [answer.add(token) for answer, token in zip(open_answers, tokens, strict=True)]
        if not all(continues):
            growing.keep([row for row, is_open in enumerate(continues) if is_open])
            open_answers = list(compress(open_answers, continues))


def prompts_of(file: Path) -> list[str]:
    """The prompts of a file: its lines, or the strings "prompt" of a ``.jsonl`` file. Raises
    UserError with the line that has none."""
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: not UTF-8 text: byte {error.start + 1} is invalid") from error
    lines = lines[:-1] if not lines[-1] else lines
    if file.suffix == ".jsonl":
        for number, line in enumerate(lines):
            try:
                lines[number] = parse_json(line)["prompt"]
                assert isinstance(lines[number], str)
            except (ValueError, TypeError, KeyError, AssertionError) as error:
                need = 'no text named prompt; a line is an object such as {"prompt": "2 + 2 is"}'
                raise UserError(f"{file}, line {number + 1}: {need}") from error
    if not lines:
        raise UserError(f"{file}: holds no prompt")
    return lines


@dataclass(frozen=True)
class PromptEncoder:
    """Token ids of prompts for the model of `config`. With `template` a prompt is a question of a
    conversation, after its earlier `turns`."""

    config: RunConfig
    tokenizer: Tokenizer
    template: ChatTemplate | None
    turns: list[dict[str, str]]
    #: Ids before each prompt that does not begin with them.
    beginning: list[int]

    def ids(self, text: str, name: str = "--prompt") -> list[int]:
        """The ids of a prompt. Raises UserError, which calls it `name`, for one that the model
        cannot continue."""
        if self.template is not None:
            text = self.template.prompt([*self.turns, {"role": "user", "content": text}])
        try:
            ids = self.tokenizer.encode(text.encode(), name).tolist()
        except UnicodeEncodeError as error:
            raise UserError(
                f"{name} is not UTF-8 text: character {error.start + 1} is invalid"
            ) from error
        if ids[: len(self.beginning)] != self.beginning:
            ids = [*self.beginning, *ids]
        if not ids:
            raise UserError(f"{name} is empty; it needs at least one token")
        model = self.config.model
        if max(ids) >= model.vocab_size:
            raise UserError(
                f"{name} has the id {max(ids)}, not below model.vocab_size "
                f"{model.vocab_size}: another tokenizer than the model's?"
            )
        if len(ids) >= (most := model.max_position_embeddings or len(ids) + 1):
            raise UserError(
                f"{name} has {len(ids)} tokens, and the model has {most} positions: at most "
                f"{most - 1}, and a new one"
            )
        return ids

    def note_positions(self, length: int, name: str = "--prompt") -> None:
        """Print a note on a prompt and its answer that are longer than the model has positions."""
        if length > (most := self.config.model.max_position_embeddings or length):
            to_stderr(
                f"note: {name}: {length} tokens with the answer, and the model has {most} "
                "positions: the text after them is unreliable"
            )


@dataclass(frozen=True, kw_only=True)
class AnswerWriter:
    """Writes answers of a loaded `model`: all ranks of `mesh` compute them, the first one prints.

    `new_text` makes the text of an answer; `chooser` returns the choice of tokens for a seed;
    `seed` is that of the first prompt."""

    model: Transformer
    mesh: Mesh
    encoder: PromptEncoder
    new_text: Callable[..., GrowingText]
    chooser: Callable[[int], Choose]
    seed: int
    as_json: bool

    @cached_property
    def choose(self) -> Choose:
        """One random generator for all answers of a conversation."""
        return self.chooser(self.seed)

    def text_after(
        self, ids: list[int], log: Callable[[str], object] = lambda text: None
    ) -> GrowingText:
        """A new text for an answer; it continues that of the prompt `ids`, unless a chat template
        separates the two."""
        return self.new_text(prompt=() if self.encoder.template else ids, log=log)

    def answer(
        self, ids: list[int], log: Callable[[str], object] = lambda text: None
    ) -> tuple[str, list[int]]:
        """The text that follows the prompt `ids`, and its tokens; `log` gets it piece by piece."""
        growing = self.text_after(ids, log)
        for token in continuation(self.model, ids, self.choose, self.mesh.device):
            if not growing.add(token):
                break
        text = growing.text()
        if self.mesh.rank == 0:
            self.encoder.note_positions(len(ids) + len(growing.tokens))
            if not text:
                why = "its tokens have no text" if growing.tokens else "the model ends it at once"
                to_stderr(f"note: the answer is empty: {why}")
        return text, growing.tokens

    def one_answer(self, ids: list[int], head: str) -> str:
        """`head` and the answer to a prompt; on a terminal they are printed as they grow, and ""
        is returned."""
        if self.mesh.rank == 0 and sys.stdout.isatty() and not self.as_json:
            _print_more(head)
            self.answer(ids, _print_more)
            print(flush=True)
            return ""
        text, tokens = self.answer(ids)
        return strict_json({"text": text, "tokens": tokens}) if self.as_json else head + text

    def write_file(
        self,
        heads: Sequence[str],
        rows: Mapping[int, list[int]],
        errors: Mapping[int, str],
        batch: int,
    ) -> None:
        """Print the answers to the lines of a file, `batch` lines at a time. Lines are numbered
        from 1: `heads` are printed before their answers, `rows` has the ids of valid prompts,
        `errors` the reason of each other line."""
        for first in range(1, len(heads) + 1, batch):
            numbers = range(first, min(first + batch, len(heads) + 1))
            texts = {n: self.text_after(rows[n]) for n in numbers if n in rows}
            choosers = [self.chooser(self.seed + number - 1) for number in texts]
            prompts = [rows[number] for number in texts]
            device = self.mesh.device
            answer_together(self.model, prompts, list(texts.values()), choosers, device)
            for number in numbers if self.mesh.rank == 0 else ():
                if (growing := texts.get(number)) is None:
                    row: dict[str, Any] = {"line": number, "error": errors.get(number)}
                else:
                    length = len(rows[number]) + len(growing.tokens)
                    self.encoder.note_positions(length, f"line {number}")
                    row = {"line": number, "text": growing.text(), "tokens": growing.tokens}
                if self.as_json:
                    print(strict_json(row), flush=True)
                elif growing is not None:
                    print(f"== line {number}\n{heads[number - 1]}{growing.text()}", flush=True)

    def converse(self) -> None:
        """Read questions from stdin, a line each, and print answers, until /exit or end of
        input."""
        turns, is_terminal = self.encoder.turns, sys.stdin.isatty()
        num_before = len(turns)
        if is_terminal:
            print("/exit or Ctrl-D ends the conversation", file=sys.stderr)
        with suppress(EOFError, KeyboardInterrupt):
            while (question := input("> " if is_terminal else "").strip()) != "/exit":
                if question:
                    text, _ = self.answer(self.encoder.ids(question), _print_more)
                    turns.append({"role": "user", "content": question})
                    turns.append({"role": "assistant", "content": text})
                    print(flush=True)
        if is_terminal:
            print(flush=True)
        elif len(turns) == num_before:
            raise UserError("stdin holds no question: give one as --prompt, or a line each")


_print_more = partial(print, end="", flush=True)


def generate(
    source: Path,
    prompt: str | None,
    overrides: Sequence[str] = (),
    *,
    prompts: Path | None = None,
    batch: int = 16,
    chat: bool = False,
    system: str | None = None,
    max_tokens: int = 100,
    temperature: float | None = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    best: bool = False,
    as_json: bool = False,
) -> int:
    """Continue `prompt` on the ranks of the plan and print the text, on a terminal token by token;
    returns the exit code. With `chat`, `prompt` is a question in the chat template. `prompt` None:
    questions are the lines of stdin. `temperature` None is 0, with a note. `prompts`: continue the
    prompts of this file instead, `batch` at a time, that of line i (from 0) with the seed
    ``seed + i``; invalid prompts are reported, and the others continued."""
    config = config_of(source, overrides)
    # Keys and values are cached on every rank, so sequences are not split.
    problems = [
        Problem(
            code="conflict",
            key=f"plan.{axis}",
            value=getattr(config.plan, axis),
            message="generation keeps a sequence whole on every rank",
            fix=f"{axis} = 1; plan.tp and plan.ep spread weights",
        )
        for axis in ("pp", "cp")
        if getattr(config.plan, axis) > 1
    ]
    if problems:
        raise ConfigError(problems)
    if config.model.architecture is not None:
        batch = 1  # the modelling code's cache has no place for padding
    tokenizer = Tokenizer.open(config.data.tokenizer)
    template = ChatTemplate.open(tokenizer, "--chat needs one") if chat else None
    prints_notes = not launch.launched()  # a started rank: the command has printed them
    if prints_notes and template is None and answers_chats(source, config.data.tokenizer):
        to_stderr("note: this run was tuned on conversations: --chat uses their template")
    # Without a prompt and a file of prompts, the lines of stdin are questions.
    converses = prompt is None and prompts is None
    if converses and (ranks := config.plan.world_size) > 1:
        why = f"the plan has {ranks} ranks, and a conversation is held by one"
        raise UserError(f"{why}: give --prompt TEXT, or one rank")
    # A folder is used as by transformers, a run as in its training, which adds no token.
    is_run = not ((source / CONFIG).exists() or is_adapter_folder(source))
    beginning = [] if is_run or chat else tokenizer.beginning
    turns = [] if system is None else [{"role": "system", "content": system}]
    encoder = PromptEncoder(config, tokenizer, template, turns, beginning)
    prompt_ids = [] if prompt is None else encoder.ids(prompt)
    lines = [] if prompts is None else prompts_of(prompts)
    stop = "" if template is None else template.stop
    # The ids that end a text, from the first of these folders that names some.
    folders = [source, *([Path(config.model_path)] if config.model_path else [])]
    stops: Collection[int] = next(filter(None, map(text_ends, folders)), [])
    if template is not None and template.stop_token not in (None, stop):
        # A stop with more than its token, such as a blank before it, which a model may leave out.
        stops = [*stops, tokenizer.id_of(template.stop_token or "")]
    unapplied = next(filter(None, map(unapplied_settings, folders)), [])
    if prints_notes and unapplied:
        to_stderr(
            f"note: the folder of the model sets {', '.join(unapplied)}, which are not applied: "
            "the likeliest token is chosen, or with --temperature and --top-p a random one"
        )
    rows: dict[int, list[int]] = {}
    errors: dict[int, str] = {}
    for number, line in enumerate(lines, start=1):
        try:
            rows[number] = encoder.ids(line, f"line {number}")
        except UserError as error:
            errors[number] = str(error)
            if prints_notes:
                to_stderr(f"{prompts}: {error}")
    # After all checks: a refusal comes without a note.
    if temperature is None and rank_of(os.environ) == 0:
        note = "takes the likeliest token each time; --temperature 0.8 --top-p 0.95 draw from more"
        to_stderr(f"moemesh: note: {note}")
    temperature = temperature or 0.0
    new_text = partial(GrowingText, tokenizer, stops=stops, stop=stop, max_tokens=max_tokens)

    def work(mesh: Mesh) -> str:
        parallel = load(config, mesh, source, best=best)
        writer = AnswerWriter(
            model=parallel.model,
            mesh=mesh,
            encoder=encoder,
            new_text=new_text,
            chooser=partial(chooser, temperature, top_p),
            seed=seed,
            as_json=as_json,
        )
        output = ""
        if lines:
            writer.write_file([""] * len(lines) if chat else lines, rows, errors, batch)
        elif converses:
            writer.converse()
        else:
            output = writer.one_answer(prompt_ids, "" if chat else prompt or "")
        parallel.close()
        return output

    # With the option, started ranks print no second note on the temperature.
    code = on_ranks(config, work, "--temperature", str(temperature))
    return code or (2 if errors and prints_notes else 0)
