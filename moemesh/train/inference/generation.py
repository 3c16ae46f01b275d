"""`moemesh generate`: text from a run or a folder of transformers, token by token.

The keys and values of earlier tokens are cached, so that a token costs one forward of its own. This
is the model of training with its dispatchers and seams, for trying a model out: requests are not
batched, memory is not paged. For serving, convert the run and use a server.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import compress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moemesh.comm import launch
from moemesh.comm.mesh import Mesh
from moemesh.config.errors import ConfigError, Problem, UserError
from moemesh.config.limits import parse_json
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
    """The cache of growing sequences, without autograd.

    When a layer's buffer is full, it is replaced by one of twice the length, so that most tokens
    are appended without a copy of the others.
    """

    #: More slices may follow, so auxiliary losses, which training needs, are not computed.
    is_last = False

    def __init__(self) -> None:
        #: Layer -> number of positions in its buffers, and the buffers of keys and values.
        self._length: dict[int, int] = {}
        self._room: dict[int, tuple[Tensor, Tensor]] = {}

    def extend(self, layer: int, key_BMSD: Tensor, value_BMSD: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all positions, with the new ones appended: views of the buffer."""
        start = self._length.get(layer, 0)
        stop = self._length[layer] = start + key_BMSD.shape[2]
        both, kept = (key_BMSD, value_BMSD), self._room.get(layer)
        if kept is None or kept[0].shape[2] < stop:
            sizes = [(*x.shape[:2], max(stop, 2 * start), x.shape[3]) for x in both]
            key, value = (x.new_empty(size) for x, size in zip(both, sizes, strict=True))
            for room, before in zip((key, value), kept or (), strict=False):
                room[:, :, :start] = before[:, :, :start]
            kept = self._room[layer] = key, value
        for room, new in zip(kept, both, strict=True):
            room[:, :, start:stop] = new
        key, value = (room[:, :, :stop] for room in kept)
        return key, value

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only the sequences in these rows."""
        for layer, (key, value) in self._room.items():
            index = torch.tensor(rows, dtype=torch.int64, device=key.device)
            self._room[layer] = key[index], value[index]

    def total(self, layer: int, sums: ScopeSums) -> ScopeSums | None:
        return None


class Continuations:
    """Sequences of a model in one part that grow together, one token each at every step; all ranks
    of its plan do the same. Shorter prompts are padded at their beginning: their tokens are a
    document of their own for attention, and the padding is not routed."""

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
        for ids, one in zip(self._ids, chosen, strict=True):
            ids.append(one)
        return chosen

    def keep(self, rows: Sequence[int]) -> None:
        """Continue with these sequences only."""
        self._ids, self._starts, self.choosers = (
            [values[row] for row in rows] for values in (self._ids, self._starts, self.choosers)
        )
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

    It ends at an id of `stops`, after the text `stop`, or with `max_tokens` tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stops: Collection[int],
        stop: str,
        max_tokens: int,
        log: Callable[[str], object] = lambda text: None,
    ) -> None:
        self.tokenizer, self.stops, self.stop = tokenizer, stops, stop
        self.max_tokens, self.log = max_tokens, log
        self.tokens: list[int] = []
        #: Text that `log` has received.
        self._logged = ""

    def add(self, token: int) -> bool:
        """Append a token; returns False at a stop."""
        if token in self.stops:
            return False
        self.tokens.append(token)
        stop, decode = self.stop, self.tokenizer.decode
        if stop and decode(self.tokens[-len(stop) :], special=True).endswith(stop):
            return False
        # Wait for the rest of a character, and of a possible stop text.
        text = decode(self.tokens)
        if not text.endswith(("\ufffd", *(stop[:n] for n in range(1, len(stop))))):
            self.log(text[len(self._logged) :])
            self._logged = text
        return len(self.tokens) < self.max_tokens

    def text(self) -> str:
        """The whole text; passes its pending end to `log`."""
        text = self.tokenizer.decode(self.tokens).removesuffix(self.stop)
        self.log(text[len(self._logged) :])
        self._logged = text
        return text


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
            growing.keep([place for place, goes in enumerate(continues) if goes])
            open_answers = list(compress(open_answers, continues))


def prompts_of(file: Path) -> list[str]:
    """The prompts of a file: its lines, or the strings "prompt" of a ``.jsonl`` file. Raises
    UserError with the line that has none."""
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
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
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    best: bool = False,
    as_json: bool = False,
) -> int:
    """Continue `prompt` on the ranks of the plan and print the text, on a terminal token by token;
    returns the exit code. With `chat`, `prompt` is a question in the chat template. `prompt` None:
    questions are the lines of stdin. `prompts`: continue the prompts of this file instead, `batch`
    at a time, prompt i (from 0) with the seed ``seed + i``; invalid prompts are reported, and the
    others continued."""
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
    chats = answers_chats(source, config.data.tokenizer)
    if template is None and chats and not launch.launched():
        note = "this run was tuned on conversations: --chat uses their template"
        print(f"note: {note}", file=sys.stderr, flush=True)
    converses = prompt is None and prompts is None
    if converses and (ranks := config.plan.world_size) > 1:
        why = f"the plan has {ranks} ranks, and a conversation is held by one"
        raise UserError(f"{why}: give --prompt TEXT, or one rank")
    turns = [] if system is None else [{"role": "system", "content": system}]

    def ids_of(text: str, name: str = "--prompt") -> list[int]:
        if template is not None:
            text = template.prompt([*turns, {"role": "user", "content": text}])
        try:
            ids = tokenizer.encode(text.encode(), name).tolist()
        except UnicodeEncodeError as error:
            raise UserError(
                f"{name} is not UTF-8 text: character {error.start + 1} is invalid"
            ) from error
        if not ids:
            raise UserError(f"{name} is empty; it needs at least one token")
        if max(ids) >= config.model.vocab_size:
            raise UserError(
                f"{name} has the id {max(ids)}, not below model.vocab_size "
                f"{config.model.vocab_size}: another tokenizer than the model's?"
            )
        if len(ids) >= (most := config.model.max_position_embeddings or len(ids) + 1):
            raise UserError(
                f"{name} has {len(ids)} tokens, and the model has {most} positions: at most "
                f"{most - 1}, and a new one"
            )
        return ids

    prompt_ids = [] if prompt is None else ids_of(prompt)
    wanted = [] if prompts is None else prompts_of(prompts)
    stop = "" if template is None else template.stop
    # The ids that end a text, from the first file of the model's folder that names them.
    folders = [source, *([Path(config.model_path)] if config.model_path else [])]
    stops: Collection[int] = next(filter(None, map(text_ends, folders)), [])
    unapplied = next(filter(None, map(unapplied_settings, folders)), [])
    if unapplied and not launch.launched():
        to_stderr(
            f"note: the folder of the model sets {', '.join(unapplied)}, which are not applied: "
            "the likeliest token is chosen, or with --temperature and --top-p a random one"
        )

    def note_positions(length: int, name: str) -> None:
        if length > (most := config.model.max_position_embeddings or length):
            to_stderr(
                f"note: {name}: {length} tokens with the answer, and the model has {most} "
                "positions: the text after them is unreliable"
            )

    new_answer = partial(GrowingText, tokenizer, stops=stops, stop=stop, max_tokens=max_tokens)
    rows: dict[int, list[int]] = {}
    errors: dict[int, str] = {}
    for number, line in enumerate(wanted, start=1):
        try:
            rows[number] = ids_of(line, f"line {number}")
        except UserError as error:
            errors[number] = str(error)
            if not launch.launched():
                to_stderr(f"{prompts}: {error}")

    def work(mesh: Mesh) -> str:
        parallel = load(config, mesh, source, best=best)

        def answer(ids: list[int], log: Callable[[str], object]) -> tuple[str, list[int]]:
            growing = new_answer(log=log)
            # One random generator for all answers of a conversation.
            for token in continuation(parallel.model, ids, choose, mesh.device):
                if not growing.add(token):
                    break
            text = growing.text()
            if mesh.rank == 0:
                note_positions(len(ids) + len(growing.tokens), "--prompt")
            if not text and mesh.rank == 0:
                why = "its tokens have no text" if growing.tokens else "the model ends it at once"
                to_stderr(f"note: the answer is empty: {why}")
            return text, growing.tokens

        choose = chooser(temperature, top_p, seed)
        if wanted:
            for first in range(1, len(wanted) + 1, batch):
                numbers = range(first, min(first + batch, len(wanted) + 1))
                answers = {number: new_answer() for number in numbers if number in rows}
                choosers = [chooser(temperature, top_p, seed + number - 1) for number in answers]
                batch_ids = [rows[number] for number in answers]
                answer_together(
                    parallel.model, batch_ids, list(answers.values()), choosers, mesh.device
                )
                for number in numbers if mesh.rank == 0 else ():
                    growing, head = answers.get(number), "" if chat else wanted[number - 1]
                    if growing is not None:
                        note_positions(len(rows[number]) + len(growing.tokens), f"line {number}")
                    if growing is not None and not as_json:
                        print(f"== line {number}\n{head}{growing.text()}", flush=True)
                    elif as_json:
                        row: dict[str, Any] = {"line": number, "error": errors.get(number)}
                        if growing is not None:
                            row = {"line": number, "text": growing.text(), "tokens": growing.tokens}
                        print(strict_json(row), flush=True)
            parallel.close()
            return ""
        if converses:
            _converse(turns, ids_of, answer)
            return ""
        head = "" if chat else prompt or ""
        if mesh.rank == 0 and sys.stdout.isatty() and not as_json:
            # On a terminal, print as the text grows.
            _print_more(head)
            answer(prompt_ids, _print_more)
            print(flush=True)
            parallel.close()
            return ""
        text, tokens = answer(prompt_ids, lambda text: None)
        parallel.close()
        return strict_json({"text": text, "tokens": tokens}) if as_json else head + text

    code = on_ranks(config, work, "--temperature", str(temperature))  # one note is enough
    return code or (2 if errors and not launch.launched() else 0)


_print_more = partial(print, end="", flush=True)


def _converse(
    turns: list[dict[str, str]],
    ids_of: Callable[[str], list[int]],
    answer: Callable[[list[int], Callable[[str], object]], tuple[str, list[int]]],
) -> None:
    """Read questions from stdin, a line each, and print answers, until /exit or end of input."""
    is_terminal, before = sys.stdin.isatty(), len(turns)
    if is_terminal:
        print("/exit or Ctrl-D ends the conversation", file=sys.stderr)
    with suppress(EOFError, KeyboardInterrupt):
        while (question := input("> " if is_terminal else "").strip()) != "/exit":
            if question:
                text, _ = answer(ids_of(question), _print_more)
                turns.append({"role": "user", "content": question})
                turns.append({"role": "assistant", "content": text})
                print(flush=True)
    if is_terminal:
        print(flush=True)
    elif len(turns) == before:
        raise UserError("stdin holds no question: give one as --prompt, or a line each")
