"""Verbs of the command, one row each: the module that defines it, and its names in other tools.

A verb is a function under `@app.command` (or the app of its group) and a row of :data:`VERBS`. The
help lists verbs in the order of the rows.
"""

from typing import NamedTuple


class VerbRow(NamedTuple):
    """The module of a verb (".name": one of this package), and words that users of other tools type
    for it."""

    module: str
    words: str = ""


VERBS: dict[str, VerbRow] = {
    "train": VerbRow(
        ".train", "finetune fine-tune sft pretrain fit run resume continue start lora"
    ),
    "report": VerbRow(".insight", "html page dashboard plot visualize compare"),
    "explain": VerbRow(".insight", "why diagnose debug analyze"),
    "profile": VerbRow(".insight", "trace"),
    "launch": VerbRow(".train", "submit slurm sbatch srun torchrun k8s sky distributed"),
    "convert": VerbRow(".weights", "export import merge save push upcycle huggingface"),
    "evaluate": VerbRow(".weights", "eval test perplexity ppl score"),
    "generate": VerbRow(".weights", "chat infer inference sample complete predict serve prompt"),
    "esft scores": VerbRow(".weights", "experts specialize"),
    "tokenize": VerbRow(".data", "tokenise preprocess prepare encode"),
    "data show": VerbRow(".data", "dataset batch samples view print look preview inspect"),
    "config show": VerbRow(".configuration", "print get dump view list ls"),
    "config diff": VerbRow(".configuration", "compare"),
    "config check": VerbRow(".configuration", "verify validate lint test migrate upgrade update"),
    "config schema": VerbRow(".configuration", "json-schema"),
    "doctor": VerbRow(".machine", "env environment health info version"),
    "checkpoint ls": VerbRow(".checkpoints", "checkpoints ckpt list show"),
    "checkpoint verify": VerbRow(".checkpoints", "check validate"),
    "checkpoint diff": VerbRow(".checkpoints", "compare"),
    "checkpoint prune": VerbRow(".checkpoints", "delete remove rm clean purge"),
    "replay": VerbRow(".train", "nan"),
    "estimate": VerbRow(".planning", "cost price memory flops size"),
    "plan": VerbRow(".planning", "search optimize suggest recommend autotune tune auto"),
    "validate": VerbRow(".accuracy", "accuracy"),
    "calibrate": VerbRow(".accuracy", "calibration"),
    "layout": VerbRow(".layout", "mesh groups ranks topology shard"),
    "dispatch": VerbRow(".layout", "alltoall all-to-all route routing router"),
    "cluster init": VerbRow(".machine", "create new write add make"),
    "cluster show": VerbRow(".machine", "explain describe info print"),
    "cluster list": VerbRow(".machine", "clusters hardware machines devices ls"),
    "partition": VerbRow(".planning", "split cut alpa stages"),
    "schedule": VerbRow(".pipelines", "simulate simulator pipeline bubble"),
    "balance": VerbRow(".balancing", "eplb rebalance place placement"),
    "bench": VerbRow(".machine", "benchmark measure speed"),
    "repro": VerbRow(".train", "reproduce repeat"),
    "watch": VerbRow(".insight", "tail follow monitor top logs status"),
}
