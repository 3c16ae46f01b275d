"""Verbs that measure: bench layer, links, dispatch, pipeline, partition, balance, replicas."""

# No `from __future__ import annotations` in these files: typer reads the annotations.
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from moemesh.cli.application import AsJson, bench_app


class Shape(StrEnum):
    """The MoE layers that `bench layer` knows."""

    A = "A"
    B = "B"
    TINY = "tiny"
    ALL = "all"


class Dtype(StrEnum):
    """Number types that can be measured."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    ALL = "all"


@bench_app.command("layer", short_help="One MoE layer against its bounds.")
def bench_layer(
    shape: Annotated[Shape, typer.Option(help="Which MoE layer; all: A and B.")] = Shape.ALL,
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, with commas.")] = "1,4",
    dtype: Annotated[Dtype, typer.Option(help="Number type.")] = Dtype.FLOAT32,
    rounds: Annotated[int, typer.Option(min=1, help="Timed repetitions.")] = 15,
    workload: Annotated[
        str,
        typer.Option(help="Loads W0 to W7, with commas, or all; default: the router's own choice."),
    ] = "",
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write the JSON object there.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Time one MoE layer against its bare matrix products and exchanges."""
    from moemesh.bench import layer
    from moemesh.parallel.expert.build import make_dispatcher

    code = layer.command(
        shape=shape.value,
        ranks=ranks,
        dtype=dtype.value,
        rounds=rounds,
        json=as_json,
        out=out,
        make_dispatcher=make_dispatcher,
        workload=workload,
    )
    if code:
        raise typer.Exit(code)


@bench_app.command("dispatch", short_help="All dispatchers under a load.")
def bench_dispatch(
    workload: Annotated[str, typer.Option(help="W0 to W7, several with commas, or all.")] = "W0",
    dispatcher: Annotated[str, typer.Option(help="Names with commas, or all.")] = "all",
    ranks: Annotated[int, typer.Option(min=1, help="Ranks; all share the experts.")] = 4,
    ranks_per_node: Annotated[
        int, typer.Option(min=0, help="Where node borders lie; 0: one node.")
    ] = 0,
    hosts: Annotated[
        int, typer.Option(min=0, help="Emulate as many hosts (Linux, root); 0: none.")
    ] = 0,
    link: Annotated[str, typer.Option(help="Rate of each host's link.")] = "1gbit",
    experts: Annotated[int, typer.Option(min=1, help="Experts of the layer.")] = 64,
    top_k: Annotated[int, typer.Option(min=1, help="Experts per token.")] = 8,
    groups: Annotated[int, typer.Option(min=1, help="Placement groups of the workload.")] = 8,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of all ranks together.")] = 4096,
    hidden: Annotated[int, typer.Option(min=1, help="Numbers of a token's row.")] = 512,
    width: Annotated[int, typer.Option(min=1, help="Width of one expert.")] = 256,
    payload: Annotated[str, typer.Option(help="Dispatched rows: same or fp8.")] = "same",
    dtype: Annotated[Dtype, typer.Option(help="Number type.")] = Dtype.FLOAT32,
    mode: Annotated[str, typer.Option(help="dispatch_only or moe_fwd_bwd.")] = "dispatch_only",
    chunks: Annotated[int, typer.Option(min=1, help="Also measure so many chunks.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="Timed steps of each.")] = 10,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the routing.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Time every dispatcher under a given load, against the bare all-to-all.

    All take turns; a step takes as long as its slowest rank. Example:

        moemesh bench dispatch --workload W3 --hosts 2 --link 1gbit
    """
    from moemesh.bench import dispatch
    from moemesh.parallel.expert import build

    settings = dispatch.Settings(
        workload=workload,
        dispatcher=dispatcher,
        ranks=ranks,
        ranks_per_node=ranks_per_node,
        hosts=hosts,
        link=link,
        experts=experts,
        top_k=top_k,
        groups=groups,
        tokens=tokens,
        hidden=hidden,
        width=width,
        payload=payload,
        dtype=dtype.value,
        mode=mode,
        chunks=chunks,
        rounds=rounds,
        seed=seed,
    )
    raise typer.Exit(dispatch.command(settings, build, as_json=as_json))


# The plural, beside `bench links`.
bench_app.command("layers", hidden=True)(bench_layer)


@bench_app.command("links", short_help="Collectives over sizes and groups.")
def bench_links(
    ranks: Annotated[int, typer.Option(help="Ranks at hand.")] = 4,
    ranks_per_node: Annotated[
        int, typer.Option(min=0, help="Where node borders lie; 0: one node.")
    ] = 0,
    hosts: Annotated[
        int, typer.Option(min=0, help="Emulate as many hosts (Linux, root); 0: none.")
    ] = 0,
    link: Annotated[str, typer.Option(help="Rate of each host's link.")] = "1gbit",
    sizes: Annotated[
        str, typer.Option(help="Bytes of the full tensor, with commas; k, m, g.")
    ] = "1k,8k,64k,512k,4m",
    operations: Annotated[str, typer.Option(help="Names with commas, or all.")] = "all",
    rounds: Annotated[int, typer.Option(min=1, help="Timed repetitions.")] = 9,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    name: Annotated[str, typer.Option(help="Of the cluster in the file.")] = "measured",
    out: Annotated[
        Path | None, typer.Option("--out", metavar="CLUSTER.toml", help="Write a Cluster file.")
    ] = None,
    as_json: AsJson = False,
    found: Annotated[Path | None, typer.Option("--found", hidden=True)] = None,
) -> None:
    """Time collectives over sizes, group sizes and members per node; write a Cluster file.

    `estimate` and `plan` take their times from the file. Example:

        moemesh bench links --hosts 2 --link 1gbit --out cluster.toml
    """
    from moemesh.bench import links

    settings = links.Settings(
        ranks=ranks,
        ranks_per_node=ranks_per_node,
        hosts=hosts,
        link=link,
        sizes=sizes,
        operations=operations,
        rounds=rounds,
        device=device,
    )
    if found is not None:
        raise typer.Exit(links.rank_command(settings, found))
    raise typer.Exit(links.command(settings, as_json=as_json, out=out, name=name))


@bench_app.command("pipeline", short_help="The executor of pipelines.")
def bench_pipeline(
    schedule: Annotated[str, typer.Option(help="Name of a schedule.")] = "1f1b",
    ranks: Annotated[int, typer.Option(min=1, help="Pipeline ranks.")] = 4,
    microbatches: Annotated[int, typer.Option(min=1, help="Microbatches of a step.")] = 16,
    stages_per_rank: Annotated[int, typer.Option(min=1, help="Chunks on a rank.")] = 1,
    seconds: Annotated[
        float, typer.Option(min=0, help="How long a stage sleeps for F, I and W each; 0: not.")
    ] = 0.0,
    rounds: Annotated[int, typer.Option(min=1, help="Timed steps.")] = 5,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write the JSON object there.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Time the executor of pipelines, with empty stages or with stages that sleep."""
    from moemesh.bench import pipeline

    settings = pipeline.Settings(
        schedule=schedule,
        ranks=ranks,
        microbatches=microbatches,
        stages_per_rank=stages_per_rank,
        seconds=seconds,
        rounds=rounds,
    )
    raise typer.Exit(pipeline.command(settings, as_json=as_json, out=out))


@bench_app.command("partition", short_help="Divisions into stages.")
def bench_partition(
    case: Annotated[str, typer.Option(help="Name of a case, or all.")] = "all",
    evaluations: Annotated[int, typer.Option(min=1, help="Divisions a baseline tries.")] = 25_600,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each; the median counts.")] = 3,
    as_json: AsJson = False,
) -> None:
    """Compare learned and random division into stages with the exact one."""
    from moemesh.bench import partition
    from moemesh.planner.stages.partition_cases import compare

    raise typer.Exit(
        partition.command(compare, case=case, evaluations=evaluations, seeds=seeds, json=as_json)
    )


@bench_app.command("balance", short_help="Balancers of experts, side by side.")
def bench_balance(
    layers: Annotated[int, typer.Option(min=1, help="Layers of each load shape.")] = 58,
    experts: Annotated[int, typer.Option(min=1, help="Experts of a layer.")] = 256,
    replicas: Annotated[int, typer.Option(min=1, help="Slots of a layer.")] = 288,
    groups: Annotated[int, typer.Option(min=1, help="Groups of experts.")] = 8,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes.")] = 4,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs of the static placement.")] = 32,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks of the exact loads.")] = 64,
    spare_slots: Annotated[int, typer.Option(min=0, help="Spare slots of each rank.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Timed repetitions.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the loads.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Compare expert balancers with the published one, on loads of every shape."""
    from moemesh.bench import balance as bench

    settings = bench.Settings(
        layers=layers,
        experts=experts,
        replicas=replicas,
        groups=groups,
        nodes=nodes,
        gpus=gpus,
        ranks=ranks,
        spare_slots=spare_slots,
        rounds=rounds,
        seed=seed,
    )
    raise typer.Exit(bench.command(settings, as_json=as_json))


@bench_app.command("replicas", short_help="Steps with spare slots and without.")
def bench_replicas(
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, with commas.")] = "2,4",
    workload: Annotated[str, typer.Option(help="W0 to W7, several with commas.")] = "W2,W6",
    spare_slots: Annotated[int, typer.Option(min=1, help="Spare slots of each rank.")] = 2,
    policy: Annotated[str, typer.Option(help="quota or shadow.")] = "quota",
    rounds: Annotated[int, typer.Option(min=1, help="Timed steps of each.")] = 7,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write the JSON object there.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Time training steps with spare slots and without, in turns, under skewed routing."""
    from moemesh.bench import replicas

    code = replicas.command(
        ranks=ranks,
        workload=workload,
        spare_slots=spare_slots,
        policy=policy,
        rounds=rounds,
        as_json=as_json,
        out=out,
    )
    raise typer.Exit(code)
