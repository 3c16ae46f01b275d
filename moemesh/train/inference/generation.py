"""`moemesh generate`: text from a run or a folder of transformers, token by token.

The keys and values of earlier tokens are kept, so that a token costs one forward of its own. This
is the model of training with its dispatchers and seams, to try a model out: no batching of
requests, no paged memory. For serving, convert the run and take a server.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from moemesh.comm import launch
from moemesh.comm.mesh import Mesh
from moemesh.config.errors import ConfigError, Problem, UserError
from moemesh.data.chat import ChatTemplate
from moemesh.data.tokenizer import Tokenizer
from moemesh.model.batch import Batch
from moemesh.model.seams import ScopeSums, SliceState
from moemesh.model.transformer import Transformer
from moemesh.trace.strict_json import strict_json
from moemesh.train.inference.evaluation import load, on_ranks
from moemesh.train.records.run_folder import was_tuned_on_conversations
from moemesh.train.weights.conversion import to_stderr
from moemesh.train.weights.weight_sources import config_of

_SETTINGS = ("generation_config.json", "config.json")
#: Logits [V] -> the id of the next token.
Choose = Callable[[Tensor], int]


class KeyValueCache(SliceState):
    """The state of a sequence that grows, without autograd.

    Each layer has room for twice the positions that it held when its room was full, so that a token
    is written behind the others, which are not copied.
    """

    #: Auxiliary losses are for training.
    is_last = False

    def __init__(self) -> None:
        self._length: dict[int, int] = {}
        self._room: dict[int, tuple[Tensor, Tensor]] = {}

    def extend(self, layer: int, key_BMSD: Tensor, value_BMSD: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all positions so far, these at the end: views of the layer's room."""
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

    def total(self, layer: int, sums: ScopeSums) -> ScopeSums | None:
        return None


@torch.no_grad()
def continuation(
    model: Transformer, prompt: Sequence[int], choose: Choose, device: torch.device | str = "cpu"
) -> Iterator[int]:
    """Ids behind `prompt` (at least one), without end; a model in one part, all ranks of its plan
    alike."""
    ids, done, cache = list(prompt), 0, KeyValueCache()
    while True:
        tokens_BS = torch.tensor([ids], device=device)
        whole = Batch(
            tokens_BS=tokens_BS,
            targets_BS=tokens_BS,
            sequences_B=torch.zeros(1, dtype=torch.int64, device=device),
            training=False,
        )
        logits_TV = model.logits(whole.slice(done, len(ids), cache))
        done = len(ids)
        ids.append(choose(logits_TV[-1]))
        yield ids[-1]


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
        # Of any temperature: the largest is 0, whatever that divides.
        scaled_V = (logits_V - logits_V.max()) / temperature
        shares_V, ids_V = scaled_V.softmax(0).sort(descending=True, stable=True)
        # The token that passes the bound is still one of them, the first one always.
        before_V = shares_V.cumsum(0) - shares_V
        shares_V = shares_V.masked_fill((before_V > 0) & (before_V >= top_p), 0.0)
        return int(ids_V[torch.multinomial(shares_V, 1, generator=generator)])

    return choose


def generate(
    source: Path,
    prompt: str | None,
    overrides: Sequence[str] = (),
    *,
    chat: bool = False,
    system: str | None = None,
    max_tokens: int = 100,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    as_json: bool = False,
) -> int:
    """Continue `prompt` on the ranks of the plan and print the text, on a terminal token by token;
    returns the exit code. With `chat`, `prompt` is a question, put and answered by the chat
    template; None: questions are the lines of stdin."""
    config = config_of(source, overrides)
    # Keys and values of a sequence are kept where its tokens are: on every rank.
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
    tokenizer = Tokenizer.open(config.data.tokenizer)
    template = ChatTemplate.open(tokenizer, "--chat asks by one") if chat else None
    if template is None and was_tuned_on_conversations(source) and not launch.launched():
        note = "this run was tuned on conversations: --chat asks by their template"
        print(f"note: {note}", file=sys.stderr, flush=True)
    if prompt is None and config.plan.world_size > 1:
        raise UserError(
            f"the plan has {config.plan.world_size} ranks, and a conversation is held by one: "
            "give --prompt TEXT, or one rank"
        )
    turns = [] if system is None else [{"role": "system", "content": system}]

    def ids_of(text: str) -> list[int]:
        if template is not None:
            text = template.prompt([*turns, {"role": "user", "content": text}])
        try:
            ids = tokenizer.encode(text.encode(), "--prompt").tolist()
        except UnicodeEncodeError as error:
            raise UserError(
                f"--prompt is not UTF-8 text: its character {error.start + 1} is none"
            ) from error
        if not ids:
            raise UserError("--prompt is empty; it needs at least one token")
        if max(ids) >= config.model.vocab_size:
            raise UserError(
                f"--prompt has the id {max(ids)}, not below model.vocab_size "
                f"{config.model.vocab_size}: another tokenizer than the model's?"
            )
        return ids

    asked = [] if prompt is None else ids_of(prompt)
    stop = "" if template is None else template.stop
    # The ids that end a text, as the first file of the model's folder says that names them.
    stops: Collection[int] = ()
    folders = [source, *([Path(config.model_path)] if config.model_path else [])]
    for file in (folder / name for folder in folders for name in _SETTINGS):
        if not file.is_file():
            continue
        try:
            found = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
        except (ValueError, AttributeError) as error:
            raise UserError(f"{file}: not a JSON object ({error})") from error
        if found is not None:
            stops = {found} if isinstance(found, int) else set(found)
            break

    def work(mesh: Mesh) -> str:
        parallel = load(config, mesh, source)
        choose = chooser(temperature, top_p, seed)

        def answer(ids: list[int], say: Callable[[str], object]) -> tuple[str, list[int]]:
            found: list[int] = []
            text = told = ""
            for one in continuation(parallel.model, ids, choose, mesh.device):
                if one in stops:
                    break
                found.append(one)
                if stop and tokenizer.decode(found[-len(stop) :], special=True).endswith(stop):
                    break
                # A token may be a part of a character, and a text end as the stop begins.
                text = tokenizer.decode(found)
                if not text.endswith(("\ufffd", *(stop[:n] for n in range(1, len(stop))))):
                    say(text[len(told) :])
                    told = text
                if len(found) == max_tokens:
                    break
            text = tokenizer.decode(found).removesuffix(stop)
            say(text[len(told) :])
            if not text and mesh.rank == 0:
                to_stderr("note: the answer is empty: the model ends the text at once")
            return text, found

        if prompt is None:
            _converse(turns, ids_of, answer)
            return ""
        head = "" if chat else prompt
        if mesh.rank == 0 and sys.stdout.isatty() and not as_json:
            # A person reads along.
            _print_more(head)
            answer(asked, _print_more)
            print(flush=True)
            parallel.close()
            return ""
        text, found = answer(asked, lambda text: None)
        parallel.close()
        return strict_json({"text": text, "tokens": found}) if as_json else head + text

    return on_ranks(config, work, "--temperature", str(temperature))  # one note is enough


_print_more = partial(print, end="", flush=True)


def _converse(
    turns: list[dict[str, str]],
    ids_of: Callable[[str], list[int]],
    answer: Callable[[list[int], Callable[[str], object]], tuple[str, list[int]]],
) -> None:
    """Questions from stdin, a line each, and their answers, until /exit or the end of the input."""
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
