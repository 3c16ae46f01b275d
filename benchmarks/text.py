"""Results of benchmarks as text: a headline and tables."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.settings import GENERATED
from moemesh.cli.terminal import table
from moemesh.trace.memory_profile import format_bytes


def layer_text(found: dict[str, Any]) -> str:
    """A row for each measurement. MB are 10^6 bytes of the worst rank."""
    machine = found["machine"]
    kept = "keeps freed memory" if machine["keeps_freed_memory"] else "default allocator"
    head = (
        f"{machine['processor']}, {machine['cores']} cores, torch {machine['torch']}, "
        f"{machine['threads_per_rank']} thread(s) per rank, {kept}"
    )
    rows = []
    for result in found["results"]:
        seconds, ratio, parts = result["seconds"], result["ratio"], result["parts_seconds"]
        peaks = [peak for peak in result["peak_bytes"] if peak is not None]
        exchange = seconds.get("all_to_all")
        rows.append(
            (
                result["shape"],
                result["dtype"],
                result["workload"] or "router",
                str(result["ranks"]),
                _ms(seconds["layer"]["median"]),
                _ms(seconds["gemm"]["median"]),
                _ms(exchange["median"]) if exchange else "-",
                f"{ratio['median']:.3f}",
                f"{ratio['quartile_1']:.3f} .. {ratio['quartile_3']:.3f}",
                f"{result['cpu_ratio']['median']:.3f}",
                f"{max(result['saved_bytes']) / 1e6:.1f}",
                f"{max(peaks) / 1e6:.1f}" if peaks else "-",
                " ".join(f"{name} {_ms(value)}" for name, value in parts.items()),
            )
        )
    header = ("shape", "dtype", "load", "ranks", "layer ms", "GEMM ms", "all-to-all ms", "x bound")
    header += ("quartiles", "x bound, CPU", "saved MB", "peak MB", "slowest parts ms")
    return f"{head}\n{table(header, rows, left=3)}"


def step_text(found: dict[str, Any]) -> str:
    """A row for each number type; times of the slowest rank, memory of the largest."""
    settings = found["settings"]
    generates = settings["work"] == "generate"
    tokens = GENERATED if generates else settings["sequences"] * settings["seq_len"]
    header = ("", "moemesh ms", "transformers ms", "tokens/s", "ratio", "quartiles", "goal")
    header += ("moemesh peak", "transformers peak")
    header += ("ids differ by" if generates else "losses differ by", "TFLOP/s of experts")
    rows = [
        (
            result["dtype"],
            *(_ms(result["seconds"][name]) for name in ("moemesh", "transformers")),
            f"{tokens / result['seconds']['moemesh']:,.0f}",
            f"{result['ratio']['median']:.3f}",
            f"{result['ratio']['quartile_1']:.3f} .. {result['ratio']['quartile_3']:.3f}",
            "-" if (goal := result.get("goal")) is None else f"{goal:.2f}",
            *(format_bytes(result["peak_bytes"][name]) for name in ("moemesh", "transformers")),
            f"{result['loss_difference']:.1e}",
            _rate(result["flops"], result["seconds"]["moemesh"], 1e12),
        )
        for result in found["results"]
    ]
    work = settings["work"]
    if work == "train":
        work = f"LoRA of rank {settings['lora']}" if settings["lora"] else "full tuning"
    threads = " and ".join(str(n) for n in found["results"][0]["threads"].values())
    if settings["neighbours"]:
        work += f", beside {settings['neighbours']} busy process(es)"
    head = (
        f"{settings['layers']} layers, hidden {settings['hidden']}, top-{settings['top_k']} of "
        f"{settings['experts']} experts, {settings['sequences']} x {settings['seq_len']} tokens, "
        f"plan {settings['plan'] or 'of one rank'}, {threads} thread(s) a rank, "
        f"{work}, "
        f"transformers {found['transformers']}"
    )
    profiles = [profile_text(result["profile"]) for result in found["results"] if result["profile"]]
    return "\n\n".join([f"{head}\n{table(header, rows)}", *profiles])


def profile_text(found: dict[str, Any]) -> str:
    """Operations, then kernels, of our step, the slowest first, and the share of those listed."""
    blocks: list[str] = []
    for kind, rows in found.items():
        if not rows:
            continue
        lines = [
            (
                row["name"][:60],
                _fine(row["seconds"]),
                f"{row['calls']:.0f}",
                f"{row['bytes'] / 1e9:.3f}" if row["bytes"] else "-",
                _rate(row["bytes"], row["seconds"], 1e9),
                _rate(row["flops"], row["seconds"], 1e12),
            )
            for row in rows
        ]
        header = (kind, "ms a step", "calls", "GB", "GB/s", "TFLOP/s")
        total = f"{_fine(sum(row['seconds'] for row in rows))} ms in these {len(rows)} {kind}"
        blocks.append(f"{table(header, lines, left=1)}\n{total}")
    return "\n\n".join(blocks)


def _rate(amount: float | None, seconds: float, unit: float) -> str:
    return f"{amount / seconds / unit:.3g}" if amount and seconds else "-"


def dispatch_text(found: dict[str, Any]) -> str:
    """A block a workload, a row a contender."""
    settings = found["settings"]
    blocks = [
        f"{settings['mode']}, {settings['ranks']} ranks"
        + (f" on {settings['hosts']} hosts at {settings['link']}" if settings["hosts"] else "")
        + f", {settings['tokens']} tokens, hidden {settings['hidden']}, top-{settings['top_k']} of "
        f"{settings['experts']} experts, {settings['dtype']}, payload {settings['payload']}"
    ]
    header = ("", "p50 ms", "p95", "max", "x bare", "exposed ms", "hidden %")
    header += ("sent", "across", "link", "peak", "dropped")
    for result in found["workloads"]:
        named = [(name.replace("_", " "), entry) for name, entry in result["bounds"].items()]
        for entry in result["dispatchers"]:
            chunks = f", {entry['chunks']} chunks" if entry["chunks"] > 1 else ""
            chosen = f" = {entry['chosen']}" if entry["chosen"] != entry["dispatcher"] else ""
            named.append((entry["dispatcher"] + chosen + chunks, entry))
        rows = [_contender_row(name, entry) for name, entry in named]
        blocks.append(f"{result['workload']}\n{table(header, rows)}")
    if peer := found["single_process"]:
        blocks.append(
            f"one process, forward and backward: ours {_ms(peer['ours_seconds'])} ms, "
            f"transformers {peer['version']} {_ms(peer['transformers_seconds'])} ms"
        )
    return "\n\n".join(blocks)


def _contender_row(name: str, entry: dict[str, Any]) -> tuple[str, ...]:
    ratio, hidden = entry.get("ratio_to_bare_all_to_all"), entry.get("hidden_share")
    exposed = entry.get("exposed_seconds")
    sizes = (entry.get(f"{key}_bytes") for key in ("sent", "across", "link", "peak"))
    return (
        name,
        *(_ms(entry["seconds"][key]) for key in ("p50", "p95", "max")),
        "" if ratio is None else f"{ratio:.2f}",
        "" if exposed is None else _ms(exposed),
        "" if hidden is None else f"{hidden * 100:.0f}",
        *("" if size is None else format_bytes(size) for size in sizes),
        str(entry.get("dropped", "")),
    )


def pipeline_text(found: dict[str, Any]) -> str:
    """The executor's time, and with stages that sleep the makespan beside the simulated one."""
    overhead = found["overhead_seconds_per_action"] * 1e6
    lines = [
        f"{found['schedule']}, {found['ranks']} ranks, {found['microbatches']} microbatches, "
        f"{found['actions_per_rank']} actions on a rank, median of {found['rounds']} steps",
        f"executor, messages included   {overhead:8.1f} microseconds an action",
    ]
    if "seconds" in found:
        lines.append(
            f"sleeping stages               {found['seconds']:8.3f} s, simulated "
            f"{found['simulated_seconds']:.3f} s, ratio {found['measured_over_simulated']:.3f}"
        )
    return "\n".join(lines)


def balance_text(found: dict[str, Any]) -> str:
    """The tables of static placement, exact loads and drift."""
    lines = ["static placement: gap to the bound in %, time in us a layer"]
    for policy in ("hierarchical", "global"):
        rows = [row for row in found["static"] if row["policy"] == policy]
        lines += ["", policy, _columns(rows, [name for name in rows[0] if name != "policy"])]
        ratio, fast = (
            statistics.median(row["published_us"] / row[name] for row in rows)
            for name in ("quality_us", "fast_us")
        )
        lines.append(f"published in torch / ours, median: {ratio:.0f} (quality), {fast:.0f} (fast)")
    for title, key in (
        ("exact loads: imbalance in %", "exact"),
        ("8 steps of 10 % drift, tolerance 5 %: moved replicas", "drift"),
    ):
        lines += ["", title, _columns(found[key], list(found[key][0]))]
    shown = ", ".join(f"{name} {100 * value:.2f}" for name, value in found["next_step"].items())
    return "\n".join([*lines, "", f"gap in %, as planned and after 10 % drift: {shown}"])


#: Columns that are shares; all are shown in percent.
_SHARES = ("gap", "nothing", "permuted", "shadowed", "quotas", "stays_on_rank")


def _columns(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> str:
    def shown(name: str, value: Any) -> str:
        if isinstance(value, float):
            return f"{100 * value:.2f}" if name.endswith(_SHARES) else f"{value:.1f}"
        return str(value)

    return table(names, ([shown(name, row[name]) for name in names] for row in rows))


def replicas_text(found: Sequence[dict[str, Any]]) -> str:
    """A row for each number of ranks and load."""
    header = ("load", "ranks", "balance without", "with", "step ms without", "with", "ratio")
    header += ("busiest CPU ms without", "with", "ratio", "planning")
    rows = [
        (
            row["workload"],
            str(result["ranks"]),
            f"{row['balance']['without']:.2f}",
            f"{row['balance']['with']:.3f}",
            *(_ms(row["seconds"][key]) for key in ("without", "with")),
            f"{row['ratio']:.2f}",
            *(_ms(row["busiest_rank_cpu_seconds"][key]) for key in ("without", "with")),
            f"{row['cpu_ratio']:.2f}",
            f"{row['planning_share']:.2%}",
        )
        for result in found
        for row in result["workloads"]
    ]
    return table(header, rows)


def memory_text(found: dict[str, Any]) -> str:
    """A row for each strategy: the rank with the most of everything."""
    header = ("plan.data", "step ms", "ratio", "peak", "predicted", "ratio")
    header += ("states", "predicted", "sent", "received")
    rows = [
        (
            name,
            _ms(row["seconds"]),
            f"{row['seconds_ratio']:.2f}",
            *(format_bytes(max(row[key])) for key in ("peak_bytes", "predicted_peak_bytes")),
            f"{row['peak_ratio']:.2f}",
            *(
                format_bytes(max(row[key]))
                for key in ("state_bytes", "predicted_state_bytes", "wire_bytes", "received_bytes")
            ),
        )
        for name, row in found["strategies"].items()
    ]
    settings = found["settings"]
    head = (
        f"{found['parameters']:,} parameters, {settings['dtype']}, AdamW, {settings['ranks']} "
        f"ranks, {settings['microbatches']} microbatch(es); the rank with the most of each"
    )
    return f"{head}\n{table(header, rows)}"


def tokenize_text(found: dict[str, Any]) -> str:
    """A row for each way from text to tokens."""
    header = ("", "seconds", "MB/s", "speed", "cores' time")
    rows = [
        (
            name,
            f"{row['seconds']:.2f}",
            f"{row['megabytes_per_second']:.2f}",
            f"{row['speed_ratio']:.2f}",
            f"{row['cpu_ratio']:.2f}",
        )
        for name, row in found["contenders"].items()
    ]
    head = f"{found['documents']:,} documents, {found['bytes'] / 1e6:.1f} MB"
    return f"{head}\n{table(header, rows)}"


def checkpoint_text(found: dict[str, Any]) -> str:
    """A row for each way to save, and for its parts by themselves."""
    names = {
        "waiting": "a step waits for the whole save",
        "behind": "a step waits for a copy",
        "behind_rest": "the rest of it, behind the steps",
        "hash": "hashing alone",
        "write": "hashing and a plain write",
    }
    whole = found["seconds"]["waiting"]
    rows = [
        (
            words,
            f"{found['seconds'][name]:.3f}",
            f"{found['seconds'][name] / whole:.1%}",
            f"{found['first_seconds'][name]:.3f}",
        )
        for name, words in names.items()
    ]
    head = f"{found['bytes'] / 2**20:,.0f} MiB on {found['ranks']} rank(s)"
    return f"{head}\n{table(('', 'seconds', 'of a save', 'first time'), rows)}"


def load_text(found: dict[str, Any]) -> str:
    """A row for files in the page cache and for files that are not."""
    header = ("cache", "load s", "plain read s", "speed of it", "GB/s of all ranks")
    ranks = found["ranks"]
    needed = sum(rank["needed_bytes"] for rank in ranks)
    rows = [
        (
            name,
            f"{row['seconds']['load']:.3f}",
            f"{row['seconds']['plain']:.3f}",
            f"{row['speed_ratio']:.2f}",
            f"{needed / row['seconds']['load'] / 1e9:.2f}",
        )
        for name, row in found["rounds"].items()
    ]
    most = max(rank["read_bytes"] / rank["needed_bytes"] for rank in ranks)
    peak = max(rank["peak_bytes_beyond_model"] for rank in ranks)
    largest = max(rank["largest_tensor_bytes"] for rank in ranks)
    return (
        f"{format_bytes(found['folder_bytes'])} of weights in bf16, {len(ranks)} ranks\n"
        f"{table(header, rows)}\n"
        f"bytes read / needed, at most      {most:.2f}\n"
        f"memory beyond the model, at most  {format_bytes(peak)} "
        f"(the largest tensor of a rank: {format_bytes(largest)})"
    )


def device_text(found: dict[str, Any]) -> str:
    """A row for each way to compute the layer, and one for each dispatcher's exchanges."""
    planned = found["planned"]
    rows = [
        (
            row["name"],
            " + ".join(map(str, row["kernels"])),
            f"{sum(row['bytes']) / 1e9:.2f}",
            " + ".join(map(str, row["waits"])),
            _fine(row["roofline_seconds"]),
            f"{row['roofline_seconds'] / planned['device']:.2f}",
        )
        for row in found["rows"]
        if "kernels" in row
    ]
    header = ("", "kernels", "GB", "waits", "roofline ms", "/ planner")
    text = (
        f"shape {found['shape']}, bfloat16, one simulated device; data sheet: {found['cluster']}\n"
        f"counted: {found['counted']}\n"
        f"{table(header, rows, left=1)}\n"
        f"planner: {_fine(planned['device'])} ms on the device, {_fine(planned['with_host'])} with "
        "the host of the stack that it is calibrated on"
    )
    measured = [
        (
            row["name"],
            _fine(row["measured"]["seconds"]),
            f"{row['measured']['flops_per_second'] / 1e12:.0f}",
            f"{row['measured']['peak_bytes'] / 1e9:.2f}",
        )
        for row in found["rows"]
        if row["measured"]["seconds"] is not None
    ]
    if measured:  # by events, on the GPU of this machine
        header = ("", "measured ms", "TFLOP/s of products", "peak GB")
        text = f"{text}\n\nshape {found['shape']}, whole\n{table(header, measured, left=1)}"
        reasons = [
            f"{row['name']}: {row['measured']['reason']}"
            for row in found["rows"]
            if row["measured"]["seconds"] is None and row["name"] != "moemesh, nothing compiled"
        ]
        text = "\n".join([text, *reasons])
    if not found["exposed"]:
        return text
    rows = [
        (
            f"{row['dispatcher']}, {row['chunks']} chunk{'s' * (row['chunks'] > 1)}",
            *(_fine(row[key]) for key in ("seconds", "kernels", "exchanges", "exposed", "late")),
            f"{row['exposed'] / row['exchanges']:.0%}",
        )
        for row in found["exposed"]
    ]
    header = ("", "ms", "kernels", "exchanges", "exposed", "late", "share")
    return (
        f"{text}\n\nexperts over {found['ranks']} simulated devices, behind the router, "
        f"milliseconds\n{table(header, rows, left=1)}"
    )


def calls_text(found: dict[str, Any]) -> str:
    """The host's work in a layer and in a step, a row for each way to compute it."""

    def rows(work: list[dict[str, Any]]) -> str:
        keys = ("calls", "operations", "waits")
        lines = [
            (row["name"], *(" + ".join(map(str, row[key])) for key in keys))
            for row in work
            if row["calls"]
        ]
        header = ("", "Python calls", "ATen operations", "waits")
        return table(header, lines, left=1)

    return (
        f"shape {found['shape']}, one layer, forward + backward\n{rows(found['layer'])}\n\n"
        f"a whole step of {found['step_layers']} layers\n{rows(found['step'])}"
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


def _fine(seconds: float) -> str:
    """Milliseconds with three digits: of what takes microseconds."""
    return f"{seconds * 1e3:.3f}"
