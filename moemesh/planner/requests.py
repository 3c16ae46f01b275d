"""Requests to the planner: fields are options of the command and arguments from Python."""

# Light to import: the command line builds its options from this file.
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

if TYPE_CHECKING:
    from moemesh.config.cluster import Cluster
    from moemesh.config.model import ModelConfig
    from moemesh.planner.shapes.load_shape import Model

    ModelSource = str | Path | ModelConfig | Model
    ClusterSource = str | Path | Cluster
    Quantity = str | float
else:  # types of the command line
    ModelSource = ClusterSource = Quantity = str

#: Precisions of products that differ in speed; float16 is as fast as bfloat16.
ProductPrecision = Literal["bfloat16", "float8", "float4"]

#: Help of options that several verbs share.
MODEL_HELP = "Preset, folder of transformers or of a run, config.json or TOML file."
CLUSTER_HELP = "Preset, TOML file, or devices: 8xMI300X."
LENGTH_HELP = "Tokens of one sequence; 4k is 4096."
BATCH_HELP = "Sequences of one step."
PLAN_HELP = '"tp=2,dp=4,ep=8", a packaged plan or a TOML file.'
HEADROOM_HELP = (
    "Memory of each device to leave free, such as 10% or 6GiB. "
    "[default: 1.5% on GPUs, as calibrated]"
)
PRICE_HELP = "Price of a GPU-hour, such as 2.5: money beside hours. [default: the cluster's]"
_NODES = "Nodes, instead of the cluster's own number."
_LENGTH_KEYWORDS = {"tokens": "any sign", "metavar": "S"}


@dataclass(frozen=True)
class PlanRequest:
    """The search of `moemesh plan`: a model, a cluster, a batch, and limits of the layouts."""

    model: Annotated[ModelSource, MODEL_HELP, "M"]
    cluster: Annotated[ClusterSource, CLUSTER_HELP, "C"]
    seq_len: Annotated[int, LENGTH_HELP, _LENGTH_KEYWORDS]
    global_batch: Annotated[int, BATCH_HELP, "B"]
    nodes: Annotated[int | None, _NODES, "N"] = None
    #: Number of layouts that are kept; None keeps 5.
    top: Annotated[
        int | None, "Number of layouts to show. [default: those with a role; of --json 5]", "K"
    ] = None
    precision: Annotated[ProductPrecision, "Precision of the matrix products."] = "bfloat16"
    anywhere: Annotated[bool, "Let tensor groups cross nodes, too."] = False
    trainable: Annotated[bool, "Only what `moemesh train` carries out."] = False
    tokens: Annotated[
        Quantity | None, "Tokens of the training (14.8T, 300B): days, GPU-hours.", "N"
    ] = None
    headroom: Annotated[Quantity | None, HEADROOM_HELP, "SHARE|SIZE"] = None
    price: Annotated[float | None, PRICE_HELP, "MONEY"] = None
    why: Annotated[
        list[str] | None, 'Layout to judge: "tp=8,ep=64,data=zero3". May be repeated.', "PLAN"
    ] = None
    settings: Annotated[
        list[str] | None,
        "Key of what trains: lora.rank=8, train.freeze=[...], train.train_only=[...].",
        {"names": ("--set",), "metavar": "KEY=VALUE"},
    ] = None


@dataclass(frozen=True, kw_only=True)
class EstimateRequest:
    """The layout of `moemesh estimate`: a cluster with a model, a plan and a batch, or with the
    configuration of a run."""

    cluster: Annotated[str, CLUSTER_HELP, "C"]
    model: Annotated[str | None, MODEL_HELP, "M"] = None
    plan: Annotated[str | None, PLAN_HELP, "PLAN"] = None
    config: Annotated[
        Path | None,
        "A run's TOML file or folder, in place of --model, --plan, --seq-len and "
        "--global-batch: with its dtype and optimizer.",
        "FILE",
    ] = None
    seq_len: Annotated[int | None, LENGTH_HELP, _LENGTH_KEYWORDS] = None
    global_batch: Annotated[int | None, BATCH_HELP, "B"] = None
    rank: Annotated[
        str,
        "Pipeline rank of the traffic: first, inner, last, a number, or worst (memory).",
        "RANK",
    ] = "worst"
    headroom: Annotated[str | None, HEADROOM_HELP, "SHARE|SIZE"] = None
    price: Annotated[float | None, PRICE_HELP, "MONEY"] = None
    cache: Annotated[
        str | None,
        'Also the KV cache of BATCH sequences of TOKENS tokens: "32x4096".',
        {"names": ("--kv-cache",), "metavar": "BATCHxTOKENS"},
    ] = None


@dataclass(frozen=True, kw_only=True)
class PartitionRequest:
    """A model, a cluster and the numbers of `moemesh partition`. `stages` and `microbatches` None:
    chosen by the search."""

    model: Annotated[ModelSource, "Preset, config.json, TOML file, or branching-alexnet."]
    cluster: Annotated[ClusterSource, CLUSTER_HELP, "C"]
    global_batch: Annotated[int, "Sequences (or images) of one step."]
    method: Annotated[str, "dp, ilp, random, learned, or all."] = "dp"
    seq_len: Annotated[int, LENGTH_HELP, _LENGTH_KEYWORDS] = 4096
    nodes: Annotated[int | None, _NODES, "N"] = None
    stages: Annotated[int | None, "Number of stages; of branching-alexnet, of devices."] = None
    microbatches: Annotated[int | None, "Microbatches of one step."] = None
    schedule: Annotated[str, "1f1b or gpipe."] = "1f1b"
    evaluations: Annotated[int, "Divisions that they may try."] = 10_000
    seed: Annotated[int, "Seed of random and learned."] = 0
