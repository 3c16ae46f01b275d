"""Verbs of the command, one row each: the module that defines it, and its names in other tools.

A verb is a function under `@app.command` (or the app of its group) and a row of :data:`VERBS`. The
help lists verbs in the order of the rows.
"""

from typing import NamedTuple


class VerbRow(NamedTuple):
    """The module of a verb, and words that users of other tools type for it."""

    module: str
    words: str = ""


VERBS: dict[str, VerbRow] = {
    "train": VerbRow(
        "moemesh.cli.train", "finetune fine-tune sft pretrain fit run resume continue start lora"
    ),
    "report": VerbRow("moemesh.cli.insight", "html page dashboard plot visualize compare"),
    "explain": VerbRow("moemesh.cli.insight", "why diagnose debug analyze"),
    "profile": VerbRow("moemesh.cli.insight", "trace"),
    "launch": VerbRow("moemesh.cli.train", "submit slurm sbatch srun torchrun k8s sky distributed"),
    "convert": VerbRow("moemesh.cli.weights", "export import merge save push upcycle huggingface"),
    "evaluate": VerbRow("moemesh.cli.weights", "eval test perplexity ppl score"),
    "generate": VerbRow(
        "moemesh.cli.weights", "chat infer inference sample complete predict serve prompt"
    ),
    "esft scores": VerbRow("moemesh.cli.weights", "experts specialize"),
    "tokenize": VerbRow("moemesh.cli.data", "tokenise preprocess prepare encode"),
    "data show": VerbRow(
        "moemesh.cli.data", "dataset batch samples view print look preview inspect"
    ),
    "config show": VerbRow("moemesh.cli.configuration", "print get dump view list"),
    "config diff": VerbRow("moemesh.cli.configuration", "compare"),
    "config check": VerbRow(
        "moemesh.cli.configuration", "verify validate lint test migrate upgrade update"
    ),
    "config schema": VerbRow("moemesh.cli.configuration", "json-schema"),
    "doctor": VerbRow("moemesh.cli.machine", "env environment health info version"),
    "checkpoint ls": VerbRow("moemesh.cli.checkpoints", "checkpoints ckpt list show"),
    "checkpoint verify": VerbRow("moemesh.cli.checkpoints", "check validate"),
    "checkpoint diff": VerbRow("moemesh.cli.checkpoints", "compare"),
    "checkpoint prune": VerbRow("moemesh.cli.checkpoints", "delete remove rm clean purge"),
    "replay": VerbRow("moemesh.cli.train", "nan"),
    "estimate": VerbRow("moemesh.cli.planning", "cost price memory flops size"),
    "plan": VerbRow("moemesh.cli.planning", "search optimize suggest recommend autotune tune auto"),
    "validate": VerbRow("moemesh.cli.accuracy", "accuracy"),
    "calibrate": VerbRow("moemesh.cli.accuracy", "calibration"),
    "layout": VerbRow("moemesh.cli.layout", "mesh groups ranks topology shard"),
    "dispatch": VerbRow("moemesh.cli.layout", "alltoall all-to-all route routing router"),
    "cluster init": VerbRow("moemesh.cli.machine", "create new write add make"),
    "cluster show": VerbRow("moemesh.cli.machine", "explain describe info print"),
    "cluster list": VerbRow("moemesh.cli.machine", "clusters hardware machines devices ls"),
    "partition": VerbRow("moemesh.cli.planning", "split cut alpa stages"),
    "schedule": VerbRow("moemesh.cli.pipelines", "simulate simulator pipeline bubble"),
    "balance": VerbRow("moemesh.cli.balancing", "eplb rebalance place placement"),
    "bench": VerbRow("moemesh.cli.machine", "benchmark measure speed"),
    "repro": VerbRow("moemesh.cli.train", "reproduce repeat"),
    "watch": VerbRow("moemesh.cli.insight", "tail follow monitor top logs status"),
}
