"""A whole run: model, plan, data and training together, and the rules between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import NamedTuple

from moemesh.config.cluster import load_cluster
from moemesh.config.data import NUM_BYTES, DataConfig
from moemesh.config.errors import ConfigError, Problem, independent
from moemesh.config.esft_table import TableError, misfit, read_table
from moemesh.config.lora import ALL_LINEAR, LoraConfig
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.config.shown import Shown
from moemesh.config.suggest import nearest_choice
from moemesh.config.train import TrainConfig, usual_rate
from moemesh.config.tuning import Tuning

# The projections of a model under transformers' names, and the rules of [lora] for them.


class Projection(NamedTuple):
    """A projection of one kind of block: its name, its block, and its channels in and out."""

    target: str
    block: str
    inputs: int
    outputs: int

    def size(self) -> int:
        """The smaller dimension, which is the largest rank of an adapter."""
        return min(self.inputs, self.outputs)


def projections(model: ModelConfig) -> list[Projection]:
    """Every projection that `model` has in some layer and that can have an adapter."""
    if model.architecture is not None:
        return [
            Projection(
                part.target,
                record.module.rpartition(".")[2],
                sizes[-1],
                prod(sizes[record.is_expert : -1]),
            )
            for record in model.architecture.parameters
            for part in record.parts
            for sizes in (part.shape(record.logical_shape, is_stack=record.is_expert),)
        ]
    hidden, heads, rank = model.hidden_size, model.num_heads, model.q_lora_rank
    queries, keys = model.query_width, model.num_kv_heads * model.head_dim
    latent = model.kv_lora_rank
    attention = [("q_proj", hidden, queries), ("k_proj", hidden, keys), ("v_proj", hidden, keys)]
    if model.attention == "mla":
        low_rank = [("q_a_proj", hidden, rank), ("q_b_proj", rank, queries)]
        attention = [
            *(low_rank if rank else attention[:1]),
            ("kv_a_proj_with_mqa", hidden, latent + model.qk_rotary_head_dim),
            ("kv_b_proj", latent, heads * (model.qk_nope_head_dim + model.v_head_dim)),
        ]
    attention.append(("o_proj", model.output_width, hidden))
    all_projections = [Projection(target, "attention", *sizes) for target, *sizes in attention]
    for block, width in (
        ("mlp", model.intermediate_size if model.num_dense_layers else 0),
        ("shared experts", model.shared_width if model.num_moe_layers else 0),
        ("experts", model.expert_intermediate_size if model.num_moe_layers else 0),
    ):
        if width:
            all_projections += [
                Projection(name, block, hidden, width) for name in ("gate_proj", "up_proj")
            ]
            all_projections.append(Projection("down_proj", block, width, hidden))
    return all_projections


#: Target that PEFT has and moemesh lacks -> what it is. PEFT's "all-linear" has shared_expert_gate,
#: and gate where a family's router is a linear layer.
_NOT_ADAPTED = {
    "gate": "the router",
    "shared_expert_gate": "the gate of the shared expert",
    "router": "the router",
    "lm_head": "the head",
    "embed_tokens": "the embedding",
}


def adapter_rules(model: ModelConfig) -> list[Problem]:
    """Problems of the adapters of `model`: targets that it lacks, a rank above the smaller
    dimension of a projection."""
    lora = model.lora
    if not lora.rank:
        return []
    modules, problems = projections(model), list[Problem]()
    names = tuple(dict.fromkeys(module.target for module in modules))
    if not names:
        kind = model.architecture.model_type if model.architecture is not None else "the model"
        message = f"no layer of {kind} can have an adapter: none is an nn.Linear (GPT-2 has Conv1D)"
        fix = "rank = 0, which trains the weights themselves"
        return [lora.problem("not-available", "rank", message, fix, "model.path")]
    for target in lora.targets:
        if target not in (*names, ALL_LINEAR):
            message = f"targets names {target}, and the model has no such projection"
            fix = nearest_choice(target, (*names, ALL_LINEAR))
            if (what := _NOT_ADAPTED.get(target)) is not None:
                message = f"targets names {target}, and {what} cannot have an adapter here"
                fix = f"choices: {', '.join((*names, ALL_LINEAR))}"
            problems.append(lora.problem("not-a-choice", "targets", message, fix))
    # In a model of transformers "all-linear" leaves out projections that are too small: the largest
    # must have an adapter.
    has_all = model.architecture is None and ALL_LINEAR in lora.targets
    named = [module for module in modules if has_all or module.target in lora.targets]
    if named or ALL_LINEAR in lora.targets:
        limiting = min(named, key=Projection.size) if named else max(modules, key=Projection.size)
        if lora.rank > (most := limiting.size()):
            message = (
                f"rank ({lora.rank}) exceeds the smaller dimension of {limiting.target} of "
                f"{limiting.block} ({limiting.inputs} in, {limiting.outputs} out)"
            )
            problems.append(lora.problem("too-large", "rank", message, f"rank = {most}", "targets"))
    return problems


DEFAULT_PRESET = "tiny"


@dataclass(frozen=True, kw_only=True, repr=False)
class RunConfig(Shown):
    """The whole configuration of a run. `model` has the values of the preset or folder unless
    others are given, and the adapters of `lora`. `model_path`: the Hugging Face folder whose
    weights the run starts from, as the user wrote it; of a name of the hub the snapshot."""

    model: ModelConfig = field(default_factory=ModelConfig)
    plan: Plan = field(default_factory=Plan)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    model_preset: str = DEFAULT_PRESET
    model_path: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", self.model.with_lora(self.lora))

    @property
    def tuning(self) -> Tuning:
        """Which parameters train: adapters, `train_only`, a table of experts."""
        train = self.train
        experts = {} if train.esft is None else read_table(train.esft)
        return Tuning(
            freeze=train.freeze,
            train_only=(*self.lora.trains, *train.train_only),
            experts=tuple(sorted(experts.items())),
        )

    @property
    def trains_adapters(self) -> bool:
        """Whether adapters train, all of them, and nothing else."""
        return self.lora.rank > 0 and self.tuning == Tuning(train_only=self.lora.trains)

    def with_following(self, **train: object) -> RunConfig:
        """This configuration with the values `train` of [train]. A learning rate and a warm-up that
        were not given are recomputed from them, and still count as not given."""
        given = self.train.model_copy(update=train)
        follows = {"lr": self.usual_rate, "warmup_steps": max(min(20, given.steps // 10), 0)}
        unset = {key: value for key, value in follows.items() if key not in given.model_fields_set}
        copy = given.model_copy(update=unset)
        copy.model_fields_set.difference_update(unset)
        return replace(self, train=copy)

    @property
    def usual_rate(self) -> float:
        """Default peak learning rate of this run."""
        return usual_rate(loads_weights=self.model_path is not None, lora_rank=self.lora.rank)

    def check(self, further: Sequence[RunCheck] = ()) -> list[Problem]:
        """Every problem inside the sections and between them; an empty list is a good run. The
        `further` checks run only without problems of adapters, cluster, table of experts, and of
        every section but [plan] by itself."""
        model = self.model.check()
        problems = model + self.data.check() + self.train.check() + self.lora.check()
        if any(problem.key in ("model.num_layers", "model.num_mtp_layers") for problem in model):
            return problems  # the rules between sections loop over that many layers
        rules = self.plan.check(
            self.model, seq_len=self.data.seq_len, global_batch=self.data.global_batch
        )
        vocab_size, length = self.model.vocab_size, self.data.seq_len
        if self.data.tokenizer == "bytes" and vocab_size < NUM_BYTES:
            name = 'the tokenizer "bytes"'
            message = f"vocab_size ({vocab_size}) is below the {NUM_BYTES} ids of {name}"
            fix, key = f"vocab_size = {NUM_BYTES}", "data.tokenizer"
            rules.append(self.model.problem("too-small", "vocab_size", message, fix, key))
        if (longest := self.model.max_position_embeddings) and length > longest:
            message = (
                f"seq_len ({length}) exceeds the positions that RoPE is made for, "
                f"max_position_embeddings ({longest})"
            )
            fix = (
                f"data.seq_len = {longest}, or RoPE stretched by model.rope_type and "
                "model.rope_factor"
            )
            key = "model.max_position_embeddings"
            rules.append(self.data.problem("too-large", "seq_len", message, fix, key))
        problems += adapter_rules(self.model)
        try:
            if self.train.cluster is not None:
                load_cluster(self.train.cluster)
        except ConfigError as error:
            for problem in error.problems:
                message = f"{problem.key}: {problem.message}"
                problems.append(self.train.problem(problem.code, "cluster", message, problem.fix))
        if not problems and (table := self.train.esft) is not None:
            fix = "moemesh esft scores"
            try:
                if reason := misfit(read_table(table), self.model):
                    message = f"{table} {reason}: it is a table of another model"
                    problems.append(self.train.problem("conflict", "esft", message, fix))
            except TableError as error:
                problems.append(self.train.problem("no-file", "esft", str(error), fix))
        if not problems:
            problems += [problem for check in further for problem in check(self)]
        return problems + independent(rules, {problem.key for problem in problems})


#: A check of a whole configuration, from a package that may import more than this one.
RunCheck = Callable[[RunConfig], list[Problem]]
