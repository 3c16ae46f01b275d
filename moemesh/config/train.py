"""The section [train]: steps, optimizer, precision, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from typing_extensions import TypeAliasType

from moemesh.config.errors import Problem
from moemesh.config.learning_rate import DECAYING, FALLING, DecayShape, LrSchedule, scheduled_rate
from moemesh.config.names import Names
from moemesh.config.optimizer_table import OPTIMIZERS
from moemesh.config.section import (
    Count,
    NotNegative,
    Positive,
    Range,
    Section,
    Share,
    Size,
    UsedWith,
)

OptimizerName = TypeAliasType("OptimizerName", Annotated[str, Names(OPTIMIZERS)])
Resume = Literal["auto", "never", "must"]
Device = Literal["auto", "cpu", "cuda"]


def usual_rate(*, loads_weights: bool, lora_rank: int) -> float:
    """Default peak learning rate of a run from scratch, on loaded weights, of adapters on those."""
    return (1e-4 if lora_rank else 1e-5) if loads_weights else 3e-3


class TrainConfig(Section):
    """The training of a run."""

    section: ClassVar[str] = "train"

    steps: Size = 200
    #: Number of passes through the training samples, in place of `steps`.
    epochs: Positive | None = None
    #: Counter-based random numbers take a 64-bit key; TOML integers are signed.
    seed: Annotated[int, Range(0, 2**63 - 1)] = 0
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    optimizer: OptimizerName = "adamw"
    #: Peak learning rate, after a linear warm-up.
    lr: Positive = 3e-3
    #: Course of the learning rate after the warm-up (:mod:`moemesh.config.learning_rate`).
    lr_schedule: LrSchedule = "cosine"
    #: The last learning rate, as a share of the peak.
    final_lr_ratio: Annotated[float, Range(0.0, 1.0), UsedWith("lr_schedule", FALLING)] = 0.1
    #: Steps of the decay at the end of the run, and its shape; None: a fifth of the steps.
    decay_steps: Annotated[Size | None, UsedWith("lr_schedule", DECAYING)] = None
    decay_shape: Annotated[DecayShape, UsedWith("lr_schedule", DECAYING)] = "linear"
    #: Steps of the warm-up; if not given, the smaller of 20 and a tenth of the steps.
    warmup_steps: Count = 20
    #: Decay of the first and second moment of adamw, and of muon's other parameters.
    adam_betas: tuple[Share, Share] = (0.9, 0.95)
    epsilon: Positive = 1e-8
    weight_decay: NotNegative = 0.1
    #: Momentum of sgd.
    momentum: Share = 0.0
    #: Momentum of the matrices of muon, whose other parameters use the keys of adamw.
    muon_momentum: Share = 0.95
    #: Largest norm of the gradient; 0 turns clipping off.
    clip: NotNegative = 1.0
    #: Patterns over names of parameters: those that keep their values, and those that alone train
    #: (none: all); see :mod:`moemesh.config.tuning`.
    freeze: tuple[str, ...] = ()
    train_only: tuple[str, ...] = ()
    #: A table of experts that alone train, besides what matches `train_only` (ESFT).
    esft: str | None = None
    #: Steps between checkpoints; 0 saves only at the end.
    checkpoint_every: Count = 100
    checkpoints_kept: Size = 2
    #: Folder of this run's checkpoints, or an fsspec address; empty: in the run folder.
    checkpoint_folder: str = ""
    #: Write a copy of the state while training continues, if the memory of the host suffices.
    checkpoint_async: bool = True
    #: Steps between migrations of experts to other ranks, by their recent loads; 0: none.
    rebalance_every: Count = 0
    #: Steps between log lines, besides those of the first and the last step; 0: a line after a
    #: minute, 50 steps or a quarter of the run, whichever comes first.
    log_every: Count = 0
    #: Programs that get the rows of metrics besides metrics.jsonl.
    sinks: tuple[Literal["csv", "tensorboard", "wandb"], ...] = ()
    #: Half the largest number of rows in loads.jsonl, which sums neighbouring steps to keep it; 0:
    #: a row for each step.
    load_bins: Count = 128
    #: Steps between validations; 0 validates only at the end.
    validate_every: Count = 100
    validation_batches: Size = 8
    #: Successive validations without a new lowest loss that end the run; 0: no early stopping.
    patience: Count = 0
    #: Reaction to a step with a non-finite loss or gradient, which no rank applies: continue
    #: without it, return to the newest checkpoint and skip the data since, or stop.
    on_nonfinite: Literal["skip", "rollback", "stop"] = "skip"
    #: Number of consecutive non-finite steps that ends a run; largest number of consecutive spikes
    #: that are skipped, and of returns to one checkpoint.
    max_skips: Size = 5
    #: Largest size of one replay bundle of a non-finite step; 0: none is written.
    bundle_gib: NotNegative = 8.0
    #: Least robust z-score (standard deviations above the recent losses) that makes a loss a spike;
    #: 0: no detection.
    spike_sigma: NotNegative = 7.0
    #: Reaction to a spike: an event, a step without update, or a rollback as with `on_nonfinite`.
    on_spike: Literal["alarm", "skip", "rollback"] = "alarm"
    #: Steps between comparisons of the copies of weights on different ranks, besides those before
    #: each checkpoint; 0 compares none.
    vote_every: Count = 100
    #: When copies differ: stop, or take the copy that most ranks hold.
    on_mismatch: Literal["stop", "majority"] = "stop"
    resume: Resume = "auto"
    #: Most successive restarts from the newest checkpoint without progress; 0: none.
    restarts: Count = 2
    device: Device = "auto"
    #: Pointwise operations on a GPU (SwiGLU, rotary positions, cross-entropy) run as kernels of
    #: torch.compile if Triton is installed; otherwise, and on a CPU, operation by operation.
    compile: bool = True
    #: Products of the experts on a GPU: torch's grouped products, or a kernel of another package
    #: where it can; auto: the fastest that is installed, measured when a run starts.
    experts: Literal["auto", "grouped_mm", "liger", "sonicmoe"] = "auto"
    #: The machine, as `moemesh plan --cluster` takes it: its peak turns rates into MFU.
    cluster: str | None = None
    #: Longest wait of a collective; after it a rank counts as lost. The upper end, ten years, keeps
    #: the launcher's timedelta from overflowing.
    timeout_seconds: Annotated[float, Range(0.0, 315_360_000, open_low=True)] = 600.0

    @property
    def updates_matrices(self) -> bool:
        """Whether the optimizer updates weight matrices as a whole."""
        return bool(OPTIMIZERS[self.optimizer].matrix_states)

    def num_states(self, name: str) -> int:
        """The number of state tensors that the optimizer keeps for the parameter `name`."""
        row = OPTIMIZERS[self.optimizer]
        keeps = not row.states_need or getattr(self, row.states_need)
        return len(row.states_of(name)) if keeps else 0

    def learning_rate(self, step: int) -> float:
        """The learning rate of `step`, which counts from 1."""
        return scheduled_rate(
            step,
            schedule=self.lr_schedule,
            peak=self.lr,
            lowest=self.lr * self.final_lr_ratio,
            warmup_steps=self.warmup_steps,
            decay_steps=self.steps // 5 if self.decay_steps is None else self.decay_steps,
            decay_shape=self.decay_shape,
            steps=self.steps,
        )

    def check(self) -> list[Problem]:
        """Problems of the section by itself."""
        problems = self.range_problems()
        problems += self.unused_problems()
        if self.decay_steps is not None and self.epochs is None:
            stable = self.steps - self.warmup_steps - self.decay_steps
            if stable < 0 and self.decay_steps > 1:
                message = (
                    f"warmup_steps ({self.warmup_steps}) and decay_steps ({self.decay_steps}) "
                    f"need more than the {self.steps} steps of the run"
                )
                fix = f"decay_steps = {max(self.steps - self.warmup_steps, 1)}"
                keys = ("steps", "warmup_steps")
                problems.append(self.problem("too-large", "decay_steps", message, fix, *keys))
        if self.epochs is not None and "steps" in self.model_fields_set:
            message = "train.epochs and train.steps both set the end of the run"
            problems.append(self.problem("conflict", "epochs", message, "keep one", "steps"))
        if self.patience and not self.validate_every:
            message = f"patience ({self.patience}) counts validations: validate_every is 0"
            fix = f"validate_every = {type(self)().validate_every}, or patience = 0"
            problems.append(self.problem("conflict", "patience", message, fix, "validate_every"))
        folder = self.checkpoint_folder
        if folder and not folder.startswith(("/", "~")) and "://" not in folder:
            message = "is a path that depends on where a command is called"
            fix = f"{Path(folder).absolute()}, or an address such as s3://bucket/prefix"
            problems.append(self.problem("not-a-choice", "checkpoint_folder", message, fix))
        return problems
