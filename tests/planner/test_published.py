"""Rows of run tables: layout, software, conversions, and reasons for rows with too few values."""

from __future__ import annotations

import csv
import json

import pytest

from moemesh.config.devices import GIB, accelerator_of
from moemesh.config.errors import UserError
from moemesh.config.sources import read_preset_table
from moemesh.planner.accuracy.cells import annotated_row, uniform_row
from moemesh.planner.accuracy.published import parse_run, read_runs, step_flops
from moemesh.planner.accuracy.validate import predict
from moemesh.planner.memory import estimate_memory
from moemesh.planner.parameters import count_parameters
from moemesh.planner.timing.calibration import shipped_calibration
from tests.planner.closed_forms import gpt_iteration
from tests.planner.published_rows import ARCHS, llama, row, truncated_llama, write_table


def parse(**values):
    base = {"src": "x", "arch": "llama-13B", "hardware": "H100-80G NVL8", "gpus": 8, "dp": 8,
            "mbs": 1, "gbs": 64, "seq": 2048, "step_time_s": 2.5}  # fmt: skip
    return parse_run(row(1, **base | values), ARCHS)


@pytest.mark.parametrize(
    ("text", "name", "intra", "inter", "node"),
    [
        ("A100-80G NVL8 200G HDR-IB", "A100-80G", 300, 3.125, 8),
        ("A100-40G NVL8 1600G RoCE", "A100-40G", 300, 25, 8),
        ("A100/A800-80G 4x100G RoCE per node", "A100-80G", 300, 6.25, 8),
        ("A100-80G 8x200G RoCE", "A100-80G", 300, 25, 8),
        ("H800-80G NVL8(400GB/s) 8x400G IB", "H800-80G", 200, 50, 8),
        ("H100-80G NVL8 IB8x50GB/s", "H100-80G", 450, 50, 8),
        ("GB200 NVL72", "GB200", 900, 50, 72),
        ("B200-SXM NVL8 (single node)", "B200", 900, 50, 8),
        ("A800-80G", "A800-80G", 200, 25, 8),
        ("A100-80G 400G", "A100-80G", 300, 6.25, 8),
        ("H100-80G 800G", "H100-80G", 450, 12.5, 8),
        ("8x NVIDIA H100 80GB, 400 Gbps per GPU", "H100-80G", 450, 50, 8),
        ("MI355X-288G x8 (4 nodes)", "MI355X", 538, 50, 8),
        ("A100 (40GB) 2x100Gbit", "A100-40G", 300, 3.125, 8),
        ("GeForce 4090 24 GB", "RTX4090", 25, 12.5, 8),
        ("16xH20-141G", "H20-96G", 450, 50, 8),
        ("AWS p4d.24xlarge", "A100-40G", 300, 6.25, 8),
        ("4 x a3-megagpu-8g (GCP)", "H100-80G", 450, 25, 8),
    ],
)
def test_hardware_descriptions(text, name, intra, inter, node):
    device = accelerator_of(text)
    assert device is not None
    assert device.name == name
    assert device.intra_node_bandwidth == pytest.approx(intra * 1e9)
    assert device.inter_node_bandwidth == pytest.approx(inter * 1e9)
    assert device.node_size == node


def read(folder, text):
    table = folder / "runs.csv"
    table.write_text(text)
    return read_runs(table)


def test_notes_become_software():
    fused = parse_run(llama(1, 1, 1, 1, 26.5), ARCHS)
    assert fused.layout.attention_kernel == "flash"
    old = parse_run(llama(1, 1, 1, 1, 26.5, notes="attention kernel: torch"), ARCHS)
    assert old.layout.attention_kernel == "eager"
    assert (fused.layout.fused_norm, old.layout.fused_norm) == (True, False)
    first = parse_run(
        llama(1, 1, 1, 1, 26.5, notes="attention kernel: flash_attentionv1.0.8"), ARCHS
    ).layout
    assert first.attention_kernel == "first_flash"
    moe = {"arch": "moe-30B", "ep": 8}
    deep = parse(**moe, notes="dispatcher DeepEP; +1f1b A2A overlap").software
    assert (deep.deduplicated, deep.overlapped_exchange) == (True, True)
    assert not parse(**moe, notes="dispatcher A2A").software.deduplicated
    new = {**moe, "hardware": "GB200 NVL72"}
    assert not parse(**moe).software.deduplicated and parse(**new).software.deduplicated
    assert not parse(**new, notes="dispatcher A2A").software.deduplicated
    assert parse(**moe, notes="dropless natural routing").software.natural_routing
    lora = parse(notes="LoRA Performance")
    assert lora.layout.adapters and not lora.software.adapts_qkv_alone
    for one in ({"src": "nemo_ft", "notes": "LoRA"}, {"notes": "LoRA on linear_qkv, rank 16"}):
        assert parse(**one).software.adapts_qkv_alone
    assert not parse(src="nemo_automodel", notes="LoRA").software.adapts_qkv_alone
    assert parse(precision="MXFP8").software.block_scales
    assert parse().software.native_kernel and not parse(zero=3).software.native_kernel
    assert parse(zero=3, hardware="A100-80G NVL8").software.native_kernel
    graphs = {"src": "megatron_bridge", "hardware": "GB200 NVL72"}
    assert parse(**graphs, notes="26.06 NeMo Container").software.graphs
    assert not parse(**graphs, notes="26.04 NeMo Container").software.graphs


def test_a_batch_follows_from_time_and_rate_or_is_one_microbatch():
    alone = {"gbs": "", "gpus": 1, "dp": 1, "mbs": 4, "seq": 4096, "step_time_s": ""}
    run = parse(**alone, tokens_s_gpu=8192)
    assert (run.layout.global_batch, run.seconds) == (4, 2.0)
    assert parse(gbs="", mbs=2).layout.global_batch == 16
    implied = parse(gbs="", step_time_s=2.0, tokens_s_gpu=48 * 2048 / 8 / 2.0)
    assert implied.layout.global_batch == 48


def test_notes_become_layouts():
    assert parse(zero=3, notes="FSDP1 HSDP, torch.compile").layout.zero_group == 8
    copies = parse(zero=3, gpus=64, dp=64, notes="fsdp 8 x 4, 2 replicas")
    assert copies.layout.zero_group == 32
    assert parse(cp=2, dp=4, notes="Ulysses 2").layout.context == "all_to_all"
    assert parse(src="trl_dpo").layout.loss == "chunked"
    moe = {"arch": "moe-30B", "ep": 8}
    drops = parse(**moe, notes="real routing, capacity factor 2.5, DeepEP")
    assert drops.layout.imbalance == 2.5
    assert drops.software.deduplicated and not drops.software.natural_routing
    padded = parse(**moe, notes="capacity factor 1.0 padded")
    assert (padded.layout.imbalance, padded.software.token_drop) == (1.0, True)
    wide = parse(**moe, notes="capacity factor 1.5, padded")
    assert (wide.layout.imbalance, wide.software.token_drop) == (1.5, False)
    assert parse(recompute="none", notes="recompute not stated").recompute_printed is False
    assert parse(recompute="selective(blocks; share not stated)").row["rest"] == "blocks"
    new = parse(zero=3, source="github.com/huggingface/trl PR 6845 (2026-08)")
    assert new.software.native_kernel and not parse(zero=3).software.native_kernel
    titan = parse(src="titan_float8", zero=3, recompute="")
    assert titan.cluster == "torchtitan/H100-80G"
    assert titan.layout.recompute == {"operators"}
    assert parse(hardware="B200", precision="nvfp4 (bf16 tail)").software.wide_share == 0.15


def test_measured_seconds_come_from_what_was_reported():
    assert (parse().seconds, parse().reason) == (2.5, "")
    rate = parse(step_time_s="", tokens_s_gpu=1000)
    assert rate.seconds == pytest.approx(64 * 2048 / 8 / 1000)
    flops = step_flops("6N + 12 L d s (full attention); MFU", rate.shape, rate.layout)
    mfu = parse(step_time_s="", mfu_pct=40, flop_conv="6N + 12 L d s (full attention); MFU")
    assert mfu.seconds == pytest.approx(flops / 8 / (0.4 * 989.5e12))
    assert parse(status="OOM").seconds is None


def test_conventions_differ_by_attention_and_recomputation():
    run = parse()
    causal = step_flops("model FLOPs, causal-halved attention", run.shape, run.layout)
    full = step_flops("PaLM MFU 6N+12LHQT", run.shape, run.layout)
    shape = run.shape
    core = 12 * shape.num_layers * shape.hidden_size * 2048 / 2
    assert full - causal == pytest.approx(core * 64 * 2048)


def test_sc21_convention_is_the_papers_formula():
    values = {"arch": "gpt:24x2304a24v51200", "recompute": "full", "precision": "fp16"}
    run = parse(**values)
    counted = step_flops("Megatron SC21 Eq.3", run.shape, run.layout)
    assert counted == pytest.approx(
        gpt_iteration(64, 2048, 24, 2304, 51200, recompute=True), rel=1e-9
    )


def test_memory_counts_only_where_an_allocator_measured_it():
    assert parse_run(truncated_llama(1, 2, 1, 16, 0.7, 60.68), ARCHS).memory_bytes == 60.68 * GIB
    assert parse(mem_gib=45.5, mem_kind="activations (first stage)").memory_bytes is None
    assert parse(mem_gib=75, mem_kind="GPU memory (nvidia-smi-like, GB)").memory_bytes is None


def test_a_table_needs_no_ids_and_no_degrees_of_one(tmp_path):
    names = "model,gpu,gpus,zero,microbatch,global_batch,seq_len,step_time\n"
    (run,) = read(tmp_path, names + "llama3-8b,p4de.24xlarge,8,3,1,32,4096,11.1 s\n")
    assert run.id == "line 2" and run.layout is not None and run.reason == ""
    assert (run.layout.tp, run.layout.pp, run.layout.dp, run.layout.zero) == (1, 1, 8, 3)


def test_tables_that_cannot_be_read(tmp_path):
    with pytest.raises(UserError, match="cannot read"):
        read_runs(tmp_path / "nothing.csv")
    with pytest.raises(UserError, match="lacks the columns arch, hardware"):
        read(tmp_path, "a,b\n1,2\n")
    twice = write_table(tmp_path, [llama(7, 1, 1, 1, 26.5), llama(7, 2, 1, 1, 31.3)])
    with pytest.raises(UserError, match="two rows have the id 7"):
        read_runs(twice)
    (tmp_path / "model_archs.json").write_text("[]")
    with pytest.raises(UserError, match="one JSON object"):
        read_runs(twice)


def test_other_spellings_are_the_same_row():
    plain = truncated_llama(1, 1, 2, 16, 0.843, 66.55)
    other = plain | {"zero": "ZeRO-1", "status": "OK", "seq": "4k", "sp": "False"}
    first, second = parse_run(plain, ARCHS), parse_run(other | {"arch": "LLAMA3-70B#L12"}, ARCHS)
    assert second.layout == first.layout
    assert second.shape == first.shape
    assert second.seconds == first.seconds
    sized = {"step_time_s": "60", "dp": "8", "tp": "1", "pp": "1", "gbs": "64"}
    known = parse_run(plain | sized | {"arch": "DeepSeek V3 671B"}, ARCHS)
    assert known.shape is not None and known.shape.num_experts == 256
    assert "no entry" in parse_run(plain | sized | {"arch": "DeepSeek V3 236B"}, ARCHS).reason


def test_column_names_may_be_padded_and_capital(tmp_path):
    table = write_table(tmp_path)
    names, rest = table.read_text(encoding="utf-8").split("\n", 1)
    table.write_text("\ufeff" + names.upper().replace(",", ", ") + "\r\n" + rest, encoding="utf-8")
    assert all(run.layout for run in read_runs(table))


def test_architectures_are_known_without_a_table_beside(tmp_path):
    table = write_table(tmp_path, [truncated_llama(1, 1, 2, 16, 0.843, 66.55)])
    (tmp_path / "model_archs.json").unlink()
    (run,) = read_runs(table)
    assert run.shape is not None
    assert (run.shape.num_layers, run.shape.hidden_size) == (12, 8192)


OTHER_NAMES = """\
ID,Architecture,GPU,World_Size,tensor_parallel_size,pp_size,global_batch_size,seq_length,{}
a,llama2-13B,H100 80GB,8,1,1,64,4096,{}
"""


@pytest.mark.parametrize(
    ("column", "cell", "seconds"),
    [
        ("step_time_s", "5.2", 5.2),
        ("step_time_s", "5200 ms", 5.2),
        ("iteration_time_ms", "5200", 5.2),
        ("sec_per_step", "5.2 sec", 5.2),
        ("samples_per_second", "16", 4.0),
        ("tokens_per_sec", "65,536", 4.0),
        ("tokens_per_sec", "65.536k tok/s", 4.0),
        ("tokens/s/gpu", "8192", 4.0),
        ("tgs", "8.192k", 4.0),
        ("tokens_s_gpu", "8192 tokens/s/gpu", 4.0),
    ],
)
def test_times_and_rates_in_other_columns_and_units(tmp_path, column, cell, seconds):
    (run,) = read(tmp_path, OTHER_NAMES.format(column, f'"{cell}"'))
    assert not run.reason
    assert run.seconds == pytest.approx(seconds)
    assert (run.layout.global_batch, run.layout.seq_len, run.layout.dp) == (64, 4096, 8)


#: Tables in the words of others (column -> cell) whose rows are the same run: 64 H100, tp 4, pp 2,
#: dp 8, 256 sequences of 4096 tokens in 8.192 seconds.
CUT = {"TP": "4", "PP": "2"}
FOREIGN = {
    "a page of performance": CUT | {
        "Model": "LLAMA2-70B", "System": "DGX-H100", "#-GPUs": "64", "GBS": "256", "MBS": "2",
        "Sequence Length": "4096", "CP": "1", "VP": "1", "Precision": "BF16",
        "Tokens / sec / GPU": "2,000", "Model TFLOP / sec / GPU": "",
    },
    "a paper": {
        "Network": "llama2-70B", "Accelerator": "H100 80GB", "Number of accelerators": "64",
        "Batch size (tokens)": "1M", "Sequence length": "4k", "Tensor parallelism": "4",
        "Pipeline parallel size": "2", "Data-parallel degree": "8", "Micro batch size": "2",
        "Iteration time [s]": "8.192",
    },
    "a decimal comma": CUT | {
        "Model": "Llama-2-70b-hf", "GPU type": "H100", "Nodes": "8", "GPUs/node": "8",
        "Global BS": "256", "Micro BS": "2", "Seq": "4096", "Act. ckpt": "",
        "Time/iter (s)": "~8,19",
    },
    "names of our own": CUT | {
        "model.preset": "llama2-70b", "cluster": "dgx_h100", "gpus": "64", "plan.dp": "8",
        "data.global_batch": "256", "mbs": "2", "data.seq_len": "4k", "seconds": "8.192",
    },
    "a trainer of the hub": CUT | {
        "Run name": "x", "Model name": "meta-llama/Llama-2-70b-hf", "gpu": "H100 SXM",
        "Nodes": "8", "per_device_train_batch_size": "2", "gradient_accumulation_steps": "16",
        "max_seq_length": "4096", "Throughput (tokens/s)": "128k",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", FOREIGN)
def test_tables_in_the_words_of_others(tmp_path, name):
    table = tmp_path / "runs.csv"
    with table.open("w", newline="") as file:
        csv.writer(file).writerows([FOREIGN[name].keys(), FOREIGN[name].values()])
    (run,) = read_runs(table)
    assert not run.reason
    assert run.shape.num_layers == 80
    layout = run.layout
    assert (layout.world_size, layout.tp, layout.pp, layout.dp) == (64, 4, 2, 8)
    assert (layout.global_batch, layout.seq_len, layout.microbatch) == (256, 4096, 2)
    assert run.seconds == pytest.approx(8.192, rel=1e-3)


@pytest.mark.parametrize(
    ("tokens", "dp", "mbs", "sequences"),
    [("4M", 8, 2, 2048), ("8.65M", 24, 1, 4224), ("1572864", 12, 1, 768), ("37.7M", 64, 1, 9216)],
)
def test_a_batch_in_tokens_is_one_that_the_replicas_divide(tmp_path, tokens, dp, mbs, sequences):
    seq = {2048: 2048, 4224: 2048, 768: 2048, 9216: 4096}[sequences]
    names = "arch,hardware,gpus,tp,pp,dp,batch size (tokens),mbs,seq\n"
    cells = f"llama2-70B,A100-80G,{dp * 32},4,8,{dp},{tokens},{mbs},{seq}\n"
    (run,) = read(tmp_path, names + cells)
    assert (run.reason, run.layout.global_batch) == ("", sequences)


def test_hfu_counts_the_recomputation(tmp_path):
    head = "arch,hardware,gpus,dp,gbs,seq,recompute,{}\nllama2-13B,H100,8,8,64,4096,full,50%\n"
    (plain,) = read(tmp_path, head.format("MFU"))
    (hardware,) = read(tmp_path, head.format("HFU"))
    assert 1.25 < hardware.seconds / plain.seconds < 4 / 3


@pytest.mark.parametrize(
    ("zero", "stage", "group"),
    [("FULL_SHARD", 3, 0), ("HYBRID_SHARD", 3, 8), ("SHARD_GRAD_OP", 2, 0), ("NO_SHARD", 0, 0)],
)
def test_strategies_of_fsdp(tmp_path, zero, stage, group):
    names = "arch,hardware,gpus,gbs,seq,sharding strategy\n"
    (run,) = read(tmp_path, f"{names}llama2-13B,H100,16,64,4096,{zero}\n")
    assert (run.layout.zero, run.layout.zero_group) == (stage, group)


@pytest.mark.parametrize(
    ("cell", "stage", "group"),
    [("0", 0, 0), ("1", 3, 0), ("8", 3, 8), ("No", 0, 0), ("True", 3, 0), ("✓", 3, 0), ("✗", 0, 0)],
)
def test_a_column_fsdp_is_no_stage_of_zero(tmp_path, cell, stage, group):
    """NVIDIA's tables print 0 for the distributed optimizer, 1 or a number of shards for FSDP."""
    names = "arch,hardware,gpus,dp,gbs,seq,fsdp\n"
    (run,) = read(tmp_path, f"{names}llama2-13B,H100,16,16,64,4096,{cell}\n")
    assert not run.reason and (run.layout.zero, run.layout.zero_group) == (stage, group)
    assert stage or not run.row["zero"]


@pytest.mark.parametrize(
    ("source", "kernel"),
    [("arXiv:2204.06745", "masked"), ("arxiv.org/abs/2210.02414", "masked"),
     ("arXiv:2307.09288", "flash"), ("", "flash")],
)  # fmt: skip
def test_a_paper_of_2022_is_older_than_flash_attention(tmp_path, source, kernel):
    table = "arch,hardware,gpus,tp,gbs,seq,source\ngpt-neox-20B,A100,96,2,1536,2048,"
    (run,) = read(tmp_path, f"{table}{source}\n")
    assert run.layout.attention_kernel == kernel


@pytest.mark.parametrize(
    ("column", "cell", "gib"),
    [
        ("mem_gib", "60", 60),
        ("peak_mem_gb", "60", 60e9 / GIB),
        ("memory", "60 GB", 60e9 / GIB),
        ("max_memory_mib", "61440", 60),
    ],
)
def test_memory_in_other_columns_and_units(tmp_path, column, cell, gib):
    (run,) = read(tmp_path, OTHER_NAMES.format(column, cell))
    assert run.memory_bytes == pytest.approx(gib * GIB)


@pytest.mark.parametrize(("column", "cell"), [("mfu_pct", "0.4"), ("mfu", "40%"), ("mfu", "40")])
def test_utilization_is_a_share_or_per_cent(tmp_path, column, cell):
    (run,) = read(tmp_path, OTHER_NAMES.format(column, cell))
    done = step_flops("", run.shape, run.layout)
    assert run.seconds == pytest.approx(done / 8 / (0.4 * 989.5e12))


def test_a_line_with_other_columns_than_the_first_is_named(tmp_path):
    text = OTHER_NAMES.format("zero", "1").replace("\na,", "\n,")
    first, second = read(tmp_path, text + "b,llama2-13B,H100 80GB,8,1,1,64,4096,1,9,9\n")
    assert (first.id, first.reason) == ("line 2", "")
    assert second.reason == "line 3 has 2 more cells than the first line has columns"


@pytest.mark.parametrize(
    ("arch", "layers", "experts"),
    [
        ("Llama_13B", 40, 0),
        ("someone/LLaMA-13b-chat-hf", 40, 0),
        ("llama-13b#L4", 4, 0),
        ("mixtral-8x7b", 32, 8),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", 32, 8),
        ("deepseek-ai/DeepSeek-R1", 61, 256),
        ("deepseek-v3#L8", 8, 256),
        ("Mixtral-8x7B", 32, 8),
        ("Llama 3.1 8B", 32, 0),
        ("LLAMA3.1-405B", 126, 0),
        ("Qwen3 30B A3B", 48, 128),
        ("BLOOM-176B", 70, 0),
        ("Nemotron-4 340B", 96, 0),
        ("allenai/OLMoE-1B-7B", 16, 64),
    ],
)
def test_a_model_has_the_name_of_an_entry_a_preset_or_the_hub_or_of_papers(arch, layers, experts):
    entries = read_preset_table("architectures", "calibration") | ARCHS
    run = parse_run(row(1, arch=arch, hardware="H100", gpus=8, dp=8, gbs=8, seq=128), entries)
    shape = run.shape
    assert shape is not None and (shape.num_layers, shape.num_experts) == (layers, experts)


def test_a_model_may_be_a_file(tmp_path):
    file = tmp_path / "config.json"
    sizes = {"hidden_size": 512, "num_hidden_layers": 3, "num_attention_heads": 8}
    sizes |= {"model_type": "llama", "intermediate_size": 1024, "vocab_size": 1000}
    file.write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **sizes}))
    assert parse(arch=str(file)).shape.num_layers == 3


@pytest.mark.parametrize(
    ("said", "precision", "dtype"),
    [
        ("", "bfloat16", "bfloat16"),
        ("bf16-mixed", "bfloat16", "bfloat16"),
        ("AMP", "bfloat16", "bfloat16"),
        ("half", "float16", "float16"),
        ("FP32", "float32", "float32"),
        ("fp8 e4m3, delayed scaling", "float8", "bfloat16"),
        ("NVFP4 (bf16 tail)", "float4", "bfloat16"),
    ],
)
def test_number_types_by_their_words(said, precision, dtype):
    layout = parse(precision=said).layout
    assert (layout.precision, layout.dtype) == (precision, dtype)


def test_weights_under_adapters_may_be_packed():
    """A packed weight takes 0.516 bytes instead of 2 (4 bits, a scale of 8 bits for 64, and their
    scales), and a frozen one has neither gradients nor optimizer states."""
    whole, frozen, packed = (
        parse(zero=0, notes=notes).layout for notes in ("", "LoRA r=16", "QLoRA, NF4 base")
    )
    assert (whole.base, frozen.base, packed.base) == ("same", "same", "nf4")
    assert frozen.adapters and packed.adapters and not whole.adapters
    shape = parse().shape
    states = [estimate_memory(shape, layout).worst.states for layout in (whole, frozen, packed)]
    weights = count_parameters(shape).total
    assert states[:2] == pytest.approx([18 * weights, 2 * weights])
    assert 0.5 * weights < states[2] < 0.9 * weights


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"gbs": "", "pp": 2, "dp": 4}, "gbs"),
        ({"gbs": "", "mbs": ""}, "gbs"),
        ({"tp": "", "pp": "", "dp": "", "zero": ""}, "prints no layout"),
        ({"hardware": "X9000 NET400"}, "hardware is `X9000 NET400`: no known device"),
        ({"arch": "nemotron"}, "no entry"),
        ({"arch": "lama-13b"}, "did you mean llama-13b?"),
        ({"dp": 16}, "= 16, but the row has 8 gpus"),
        ({"step_time_s": "2500 ls"}, "step_time_s is `2500 ls`: not a number"),
        ({"step_time_s": 0.0025}, "times the peak of H100-80G"),
        ({"tokens_s_gpu": 64 * 2048 / 8 / 2.5 * 1000}, "another unit, or another batch"),
        ({"tokens_s_gpu": "9 furlongs"}, "tokens_s_gpu is `9 furlongs`: not a number"),
        ({"precision": "int8"}, "precision is `int8`: known are bf16"),
        ({"precision": "tf32"}, "precision is `tf32`"),
        ({"zero": "ZeRO++"}, "zero is `ZeRO++`: a stage of ZeRO from 0 to 3"),
        ({"tp": "2.5"}, "tp is `2.5`: not a whole number"),
        ({"gpus": "inf"}, "gpus is `inf`: not a whole number"),
        ({"tp": 0, "dp": ""}, "tp is `0`: at least 1"),
        ({"seq": "long"}, "seq is `long`: not a whole number"),
        ({"arch": "moe-30B", "ep": 7}, "ep"),
        ({"cp": 3, "gpus": 24}, "cp"),
        ({"gpus": "", "dp": ""}, "gpus"),
        ({"gpus": "8x8"}, "8x8"),
        ({"gbs": "4M"}, "gbs is `4M`"),
        ({"mbs": 128}, "mbs is 128, more than the 8 sequences of a replica"),
        ({"vpp": 1000000000, "pp": 2, "dp": 4}, "40 layers"),
        ({"pp": 4, "vpp": 2, "dp": 2, "mbs": 8, "gbs": 96}, "got 6 % 4 == 2"),
    ],
)
def test_a_row_without_a_price_has_a_reason(values, reason):
    run = parse(**values)
    assert run.layout is None
    assert reason in run.reason


def test_only_microbatches_of_which_the_schedule_exists_are_tried():
    run = parse(pp=4, vpp=2, dp=2, mbs="", gbs=8, recompute="full")
    prediction = predict([run], shipped_calibration())[0]
    assert prediction.run.layout is not None and prediction.run.layout.microbatches == 4
    assert prediction.seconds is not None and prediction.seconds > 0


def test_recomputation_in_unknown_words_counts_as_not_published():
    run = parse(recompute="uniform, 1 layer")
    assert run.layout is not None
    assert not run.recompute_printed


def test_releases_are_read_at_the_head_of_the_notes():
    parsed = parse(src="megatron_bridge", notes="26.02.01 NeMo Container; Pre-Training")
    assert parsed.release == "megatron_bridge 26.02.01"
    assert parse(notes="grad-accum 26.02").release == ""


def test_capacity_needs_the_plain_exchange():
    """Dispatchers that deduplicate are dropless."""
    bridge = {"src": "megatron_bridge", "arch": "moe-30B", "ep": 8}
    assert parse(**bridge).software.deduplicated
    dropping = parse(**bridge, notes="25.09 NeMo Container; Qwen3_30B_a3B (tokendrop)").software
    assert (dropping.token_drop, dropping.deduplicated) == (True, False)


# Spellings of other teams' tables.


@pytest.mark.parametrize(
    ("column", "said", "meant"),
    [
        ("status", "oom", "OOM"),
        ("status", "Out of memory", "OOM"),
        ("status", "success", "ok"),
        ("status", "error", "error"),
        ("zero", "ZeRO-1", "1"),
        ("zero", "stage 2", "2"),
        ("zero", "1.0", "1"),
        ("zero", "FULL_SHARD", "3"),
        ("zero", "FSDP2", "3"),
        ("zero", "1(shard within 8)", "1(shard within 8)"),
        ("zero", "ZeRO-1 (within 16)", "1(shard within 16)"),
        ("zero", "n/a", ""),
        ("sp", "True", "1"),
        ("sp", "no", "0"),
        ("vpp", "-", ""),
        ("vpp", "DualPipe", "DualPipe"),
        ("recompute", "FULL", "full"),
        ("recompute", "0", "none"),
        ("recompute", "full (all layers)", "full"),
        ("recompute", "selective(op)", "selective(op)"),
        ("seq", "4k", "4096"),
        ("seq", "131,072", "131072"),
        ("seq", "1M", "1048576"),
        ("gbs", "4M", "4M"),
        ("gpus", "n/a", ""),
        ("gbs", "abc", "abc"),
    ],
)
def test_a_cell_means_what_it_says(column, said, meant):
    assert uniform_row({column: said, "notes": "As It Is"}) == {column: meant, "notes": "As It Is"}


def test_a_table_of_nobody_says_in_columns_what_known_sources_imply() -> None:
    """Every quirk of a known source is a column that any table may have; its own cell wins."""
    known = parse_run(llama(1, 2, 2, 1, 34.8), ARCHS)
    columns = {"balanced": "1", "scatter_gather": "0", "slow_startup": "1", "stack": "ours"}
    other = parse_run(llama(1, 2, 2, 1, 34.8, src="somebody", **columns), ARCHS)
    assert (other.software, other.layout) == (known.software, known.layout)
    assert other.cluster == "ours/A100-80G" != known.cluster
    masked = parse_run(llama(1, 1, 1, 1, 26.5, kernel="masked", dedup="1"), ARCHS)
    assert masked.layout.attention_kernel == "masked"
    assert masked.software.deduplicated
    assert annotated_row({"src": "mpf_tab3", "dedup": "1"}, "")["dedup"] == "1"
    assert annotated_row({"src": "mpf_tab3"}, "") | {"generation": ""} == {
        "src": "mpf_tab3", "generation": "", "stack": "mpf", "token_drop": "1", "dedup": "0",
        "kernel": "flash",
    }  # fmt: skip
