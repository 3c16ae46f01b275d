"""A whole run: model, plan, data and training together, and the rules between them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from moemesh.config.cluster import load_cluster
from moemesh.config.data import NUM_BYTES, DataConfig
from moemesh.config.errors import ConfigError, Problem, independent
from moemesh.config.esft import TableError, misfit, read_table
from moemesh.config.lora import LoraConfig
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.config.projections import adapter_rules
from moemesh.config.shown import Shown
from moemesh.config.train import TrainConfig, usual_rate
from moemesh.config.tuning import Tuning, tuning_problems

DEFAULT_PRESET = "tiny"


@dataclass(frozen=True, kw_only=True, repr=False)
class RunConfig(Shown):
    """Everything a run is told. Fields of `model` already include those of the preset, and `model`
    has the adapters of `lora`.

    `model_path` is the Hugging Face folder whose weights the run starts from, as given.
    """

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
        """Which parameters train: of a model with adapters these, and what `train_only` or a table
        of experts adds."""
        train = self.train
        experts = {} if train.esft is None else read_table(train.esft)
        return Tuning(
            freeze=train.freeze,
            train_only=(*self.lora.trains, *train.train_only),
            experts=tuple(sorted(experts.items())),
        )

    def with_following(self, **train: object) -> RunConfig:
        """The same with the values `train` of [train], and where nobody has given them with the
        rate and the warm-up that follow from the rest, which do not count as given then."""
        given = self.train.model_copy(update=train)
        follows = {"lr": self.usual_rate, "warmup_steps": max(min(20, given.steps // 10), 0)}
        found = {key: value for key, value in follows.items() if key not in given.model_fields_set}
        copy = given.model_copy(update=found)
        copy.model_fields_set.difference_update(found)
        return replace(self, train=copy)

    @property
    def usual_rate(self) -> float:
        """The peak learning rate of such a run."""
        return usual_rate(loads_weights=self.model_path is not None, lora_rank=self.lora.rank)

    def check(self) -> list[Problem]:
        """Every problem inside the sections and between them; an empty list is a good run."""
        model = self.model.check()
        own = model + self.data.check() + self.train.check() + self.lora.check()
        if any(problem.key in ("model.num_layers", "model.num_mtp_layers") for problem in model):
            return own  # rules between sections go through the layers, one by one
        rules = self.plan.check(
            self.model, seq_len=self.data.seq_len, global_batch=self.data.global_batch
        )
        rules += self._vocabulary_rules(self.model) + self._position_rules(self.model)
        own += adapter_rules(self.model) + self._cluster_problems()
        if not own:
            own += self._table_problems() or tuning_problems(self.tuning, self.model, self.plan)
        return own + independent(rules, {problem.key for problem in own})

    def _cluster_problems(self) -> list[Problem]:
        """Problems of the description of the machine."""
        if self.train.cluster is None:
            return []
        try:
            load_cluster(self.train.cluster)
        except ConfigError as error:
            return [
                self.train.problem(one.code, "cluster", f"{one.key}: {one.message}", one.fix)
                for one in error.problems
            ]
        return []

    def _table_problems(self) -> list[Problem]:
        """Problems of the table of experts."""
        if self.train.esft is None:
            return []
        try:
            reason = misfit(read_table(self.train.esft), self.model)
        except TableError as error:
            problem = self.train.problem("no-file", "esft", str(error), "moemesh esft scores")
            return [problem]
        if not reason:
            return []
        message = f"{self.train.esft} {reason}: it is a table of another model"
        return [self.train.problem("conflict", "esft", message, "moemesh esft scores")]

    def _vocabulary_rules(self, model: ModelConfig) -> list[Problem]:
        if self.data.tokenizer != "bytes" or model.vocab_size >= NUM_BYTES:
            return []
        return [
            Problem(
                code="too-small",
                key="model.vocab_size",
                value=model.vocab_size,
                message=f"vocab_size ({model.vocab_size}) is below the {NUM_BYTES} ids of the "
                'tokenizer "bytes"',
                fix=f"vocab_size = {NUM_BYTES}",
                related=("data.tokenizer",),
            )
        ]

    def _position_rules(self, model: ModelConfig) -> list[Problem]:
        longest, length = model.max_position_embeddings, self.data.seq_len
        if not longest or length <= longest:
            return []
        return [
            Problem(
                code="too-large",
                key="data.seq_len",
                value=length,
                message=f"seq_len ({length}) exceeds the positions that RoPE is made for, "
                f"max_position_embeddings ({longest})",
                fix=f"data.seq_len = {longest}, or RoPE stretched by model.rope_type and "
                "model.rope_factor",
                related=("model.max_position_embeddings",),
            )
        ]
