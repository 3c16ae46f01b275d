"""Tables of ten authors: each row is priced, or named with one reason."""

from __future__ import annotations

import pytest

from moemesh.config.errors import UserError
from moemesh.planner.accuracy.published import read_runs, unclear_batch

NAMES = "Model,GPUs,GPU,TP,PP,Global batch,Seq,Step time (s)\n"
LLAMA = ("llama3-8B", 8, 128, 8192, 10.5, "ok")
OOM = ("llama3-8B", 8, 128, 8192, None, "OOM")
#: Author -> the file, and of each row model, devices, batch, sequence, seconds and outcome, or
#: words of its reason.
TABLES: dict[str, tuple[bytes, list[tuple[object, ...] | str]]] = {
    "MLPerf": (
        b"System,# of Accelerators,Accelerator,Benchmark,Global Batch Size,Sequence Length,"
        b'TP,PP,DP,Step time (s)\nEos,16,H100-SXM5-80GB,GPT3 175B,"1,536",2048,8,8,1,12.1\n'
        b"Eos,11616,H100-SXM5-80GB,GPT3 175B,2904,2048,4,8,363,3.0\n",
        ["tp 8 x pp 8", ("gpt3-175B", 11616, 2904, 2048, 3.0, "ok")],
    ),
    "Markdown": (
        b"| Model | GPUs | GPU | TP | PP | Global batch | Seq | Step time (s) |\n"
        b"|:--|--:|---|---|---|---|---|---|\n"
        b"| Llama-3-8B | 8 | H100 | 1 | 1 | 128 | 8,192 tokens | 10.5 \xc2\xb1 0.2 |\n"
        b"| Llama-3-8B | 8 | H100 | 1 | 1 | 128 | 8192 | OOM |\n",
        [LLAMA, OOM],
    ),
    "torchtitan": (
        b"GPUs|Model|TPS/GPU|Memory (GiB)|Seq Len|Local BS|Hardware|Sharding Strategy\n"
        b"8|Llama 3 8B|12483.047619|58.0|8192|16|H100|FSDP\n"
        b"8|Llama 3 8B|OOM|OOM|8192|16|H100|FSDP\n",
        [LLAMA, OOM],
    ),
    "DeepSpeed": (
        b"model_name,ds_zero_stage,num_gpus,train_micro_batch_size_per_gpu,"
        b"gradient_accumulation_steps,seq_length,gpu,iter_time\n"
        b"llama3-8b,2,8,2,8,8192,H100,10500 ms\n"
        b"llama3-8b,ZeRO-3 + offload,8,2,8,8192,H100,35 sec\n",
        [LLAMA, "zero is `ZeRO-3 + offload`"],
    ),
    "MosaicML": (
        b"Model,SeqLen (T),# GPUs,GPU,Global Batch Size (T),Global Batch Size (S),MicroBatchSize,"
        b"GradAccum,Sharding Strategy,Step time\nllama3-8b,8192,8,h100_80gb,1048576,128,8,2,"
        b"FULL_SHARD,10.5\n7b,8192,8,h100_80gb,1048576,128,8,2,FULL_SHARD,10.5\n",
        [LLAMA, "arch is `7b`"],
    ),
    "AMD": (
        b"Model,GPU,Nodes,GPUs per node,GBS,Seq,TP,PP,tokens/s/GPU\n"
        b'Llama-3-8B,AMD Instinct MI300X,1,8,128,8192,1,1,"12.483,05"\n'
        b"Llama-3-8B,MI300X,1,8,128,8192,1,1,12483.047619\n",
        ["tokens_s_gpu is `12.483,05`", LLAMA],
    ),
    "MaxText": (
        b"Model,Accelerator,TFLOP/chip/sec,Global batch,seq_len,chips,TP,PP\n"
        b"llama3-8b,v5p-128,3.28e+02,128,8192,64,1,1\nllama3-8b,v9x-128,328,128,8192,64,1,1\n",
        [("llama3-8B", 64, 128, 8192, 2.571009, "ok"), "hardware is `v9x-128`"],
    ),
    "LaTeX": (
        b"\\textbf{Model} & \\textbf{\\#GPUs} & GPU & TP & PP & Seq. & Global batch & "
        b"Iteration time [ms] \\\\\n\\midrule\nLlama-3-8B & 8 & H100 & 1 & 1 & 8{,}192 & $128$ & "
        b"10\\,500$\\pm$30 \\\\\nLlama-3-8B & 8 & H100 & 1 & 1 & 8192 & 128 & \\textbf{OOM} \\\\\n",
        [LLAMA, OOM],
    ),
    "a German Excel": (
        "Modell;Anzahl GPUs;Karte;TP;PP;Sequenzlänge;Globale Batchgröße;Schrittzeit (s)\r\n"
        "Llama-3-8B;8;H100;1;1;8’192;128;10,5\r\n;;;;;;;\r\n"
        "Llama-3-8B;8;H100;1;1;8.192;128;10,5\r\nSumme;8;;;;;;1.234,5\r\n".encode("cp1252"),
        [LLAMA, LLAMA, "hardware is ``"],
    ),
    "merged names under a title": (
        b"Table 3: our runs,,,,,,,\nModel,System,,Parallelism,,Batch,,Step time\n"
        b",GPU,GPUs,TP,PP,GBS,Seq,(s)\nLlama-3-8B,H100,8,1,1,128,8192,10.5\n",
        [LLAMA],
    ),
    "a list of objects": (
        b'[{"Model": "Llama-3-8B", "GPUs": 8, "GPU": "H100", "TP": 1, "Global batch": 128, "Seq": '
        b'8192, "Step time (s)": 10.5}, {"Model": "Llama-3-8B", "GPUs": 8, "GPU": "H100", "TP": 1, '
        b'"Global batch": 128, "Seq": 8192, "Step time (s)": null, "status": "OOM"}]',
        [LLAMA, OOM],
    ),
    "an object on each line": (
        b'{"Model": "Llama-3-8B", "GPUs": 8, "GPU": "H100", "TP": 1, "Global batch": 128, "Seq": '
        b'8192, "Step time (s)": 10.5}\n\n{"Model": "Llama-3-8B", "GPUs": 0}\n',
        [LLAMA, "hardware is ``"],
    ),
    "a spreadsheet in UTF-16": (
        (NAMES + "Llama-3-8B,8,H100,1,1,128,8192,10.5\n").replace(",", "\t").encode("utf-16"),
        [LLAMA],
    ),
}


def test_a_title_with_commas_names_device_and_number_type(tmp_path):
    """Above tabs, and above commas."""
    title = "Container: 25.04, System: DGX-GB200, MXFP8 (block scales), pre-training"
    cells = {key: cell for key, cell in LLAMA_CELLS.items() if key != "GPU"} | {"Step time": "2.5"}
    for mark in "\t,":
        lines = [title, mark.join(cells), mark.join(cells.values())]
        (tmp_path / "runs.csv").write_text("\n".join(lines))
        (run,) = read_runs(tmp_path / "runs.csv")
        assert not run.reason and run.layout is not None and run.device is not None
        assert (run.device.name, run.layout.precision, run.seconds) == ("GB200", "float8", 2.5)
        assert run.software.block_scales


@pytest.mark.parametrize(
    "title", ["Container: NeMo 25.02, System: DGX-B200, FP8", "NeMo24.07, H100"]
)
def test_a_title_names_the_software_and_its_release(title, tmp_path):
    """NeMo's containers are the Megatron of Megatron Bridge: ZeRO-1, sums in 16 bit, and tensor
    traffic beside products."""
    cells = {key: cell for key, cell in LLAMA_CELLS.items() if key != "GPU"} | {"TP": "2"}
    run = only_run(tmp_path / "runs.csv", cells | {"Step time": "10.5"}, title)
    assert run.device is not None and run.cluster == f"megatron_bridge/{run.device.name}"
    assert run.release == f"megatron_bridge {title.partition('NeMo')[2].strip()[:5]}"
    assert run.priced[1].zero == 1 and run.software.overlapped_tensor
    assert run.software.wire_gradient_bytes == 2
    run = only_run(tmp_path / "runs.csv", cells | {"Step time": "10.5"}, "Container of H100")
    assert run.cluster.startswith("own/") and run.release == ""


#: Name -> a table as READMEs and papers print it, and of each row model, device, devices, tp, dp,
#: ZeRO, batch, sequence and number type, or words of its reason; or words of the refusal.
PRINTED: dict[str, tuple[str, list[tuple[object, ...] | str] | str]] = {
    "a model of several words": (
        "## Llama 3 8B training on 8x H100 (FP8)\n\n|TP|GBS|Seq length|Step time|\n|-|-|-|-|\n"
        "|1|128|8192|8 s|\n|2|128|8192|9 s|\n\nMeasured with NCCL 2.20.\n",
        [("llama3-8B", "H100-80G", 8, 1, 8, 0, 128, 8192, "float8"),
         ("llama3-8B", "H100-80G", 8, 2, 4, 0, 128, 8192, "float8"), "gbs"],
    ),
    "every fact in the title": (
        "Mistral 7B with FSDP on 16 A100-80GB, global batch size 64, sequence length 4,096\n\n"
        "|Checkpointing|MFU|\n|--|--|\n|none|52%|\n",
        [("mistral-7B", "A100-80G", 16, 1, 16, 3, 64, 4096, "bfloat16")],
    ),
    "sizes under a family": (
        "Llama 3 on DGX H100\nSize,GPUs,TP,PP,GBS,MBS,Seq,MFU\n8B,8,1,1,128,1,8192,40\n"
        "70B,64,4,4,128,1,8192,41\n",
        [("llama3-8B", "H100-80G", 8, 1, 8, 0, 128, 8192, "bfloat16"),
         ("llama3-70B", "H100-80G", 64, 4, 4, 0, 128, 8192, "bfloat16")],
    ),
    "sizes as models": (
        "Llama 3.1, 8k context, H100\nModel,GPUs,TP,PP,GBS,MBS,Step time\n8B,8,1,1,128,1,11 s\n",
        [("llama3-8B", "H100-80G", 8, 1, 8, 0, 128, 8192, "bfloat16")],
    ),
    "sizes beside families": (
        "Family,Model size,GPUs,GPU,TP,GBS,Seq,Step time\nLlama 3,8B,8,H100,1,128,8192,11 s\n"
        "Qwen3,30B-A3B,8,H100,1,128,4096,6 s\nLlama-3-8B,8.03B,8,H100,1,128,8192,11 s\n",
        [("llama3-8B", "H100-80G", 8, 1, 8, 0, 128, 8192, "bfloat16"),
         ("qwen3-30b-a3b", "H100-80G", 8, 1, 8, 0, 128, 4096, "bfloat16"),
         ("llama3-8B", "H100-80G", 8, 1, 8, 0, 128, 8192, "bfloat16")],
    ),
    "models as columns": (
        "||Llama 3 8B|Llama 3 70B|\n|--|--|--|\n|GPUs|8|64|\n|GPU|H100|H100|\n|TP|1|4|\n|PP|1|4|\n"
        "|GBS|128|128|\n|Seq|8192|8192|\n|MFU|40|41|\n",
        [("llama3-8B", "H100-80G", 8, 1, 8, 0, 128, 8192, "bfloat16"),
         ("llama3-70B", "H100-80G", 64, 4, 4, 0, 128, 8192, "bfloat16")],
    ),
    "devices from degrees": (
        "Llama 2 13B on up to 64 A100-80GB\nTP,PP,DP,GBS,MBS,Seq,MFU\n2,2,8,128,1,4096,50\n",
        [("llama2-13B", "A100-80G", 32, 2, 8, 0, 128, 4096, "bfloat16")],
    ),
    "two settings": (
        "Model,GPU,GPUs,TP,GBS,Seq,Precision,MFU\nLlama 3 8B,B200,8,1,128,8192,BF16 (FP8-MX),50\n"
        'Llama 3 8B,B200,8,1,128,8192,"BF16, FP8",5\nLlama 3 8B,B200,8,1,128,8192,FP8/BF16,5\n',
        [("llama3-8B", "B200", 8, 1, 8, 0, 128, 8192, "bfloat16"),
         "precision is `bf16, fp8`: two number types", "precision is `fp8/bf16`: two number types"],
    ),
    "two number types in the title": (
        "Llama 3 8B in BF16 and FP8 on 8 H100\nTP,PP,GBS,Seq,MFU\n1,1,128,8192,40\n",
        ["precision is `bf16 or fp8`: two number types"],
    ),
    "a range in the title": (
        "Llama 3 8B from 8 to 64 H100\nTP,PP,GBS,Seq,MFU\n1,1,128,8192,40\n",
        ["the row prints no `gpus`"],
    ),
    "two layouts in the title": (
        "Llama 3 8B on 8 H100: TP 2 vs TP 4\nGBS,MBS,Seq,MFU\n128,1,8192,40\n",
        ["the row prints no layout"],
    ),
    "LoRA and more in the title": (
        "Llama 3 8B, full fine-tuning and LoRA, 8 H100\nTP,PP,GBS,Seq,MFU\n1,1,128,8192,40\n",
        ["the title names LoRA and more"],
    ),
    "two models in the title": (
        "Llama 3 8B against Mixtral 8x7B on 64 H100\nTP,PP,GBS,Seq,MFU\n1,1,128,8192,40\n",
        "lacks the column arch",
    ),
    "sizes of two families": (
        "Qwen2.5 and Llama 2 on H100\nSize,GPUs,TP,GBS,Seq,MFU\n7B,8,1,128,4096,40\n",
        "sizes are those of a family that the title names",
    ),
    "sizes alone": (
        "Model,GPU,GPUs,TP,GBS,Seq,MFU\n8B,H100,8,1,128,8192,40\n",
        ["arch is `8B`: a size; write its family"],
    ),
    "facts in the names": (
        "Model,8xH100 tok/s/GPU,16xH100 tok/s/GPU\nLlama-3-8B,11800,11500\n",
        "`8xH100 tok/s/GPU` is a device and a measure: write one row for each device",
    ),
    "two tables": (
        "### Llama 3 8B, 8k context, H100\n\n|GPUs|TP|PP|GBS|MFU|\n|-|-|-|-|-|\n|8|1|1|128|40|\n\n"
        "### Llama 3 70B\n\n|GPUs|TP|PP|GBS|MFU|\n|--|--|--|--|--|\n|64|4|4|128|41|\n",
        "line 7 (`### Llama 3 70B`) is a fact of several rows",
    ),
    "two tables of other columns": (
        "Model,GPU,GPUs,TP,PP,GBS,Seq,MFU\nLlama 3 8B,H100,8,1,1,128,8192,40\n"
        "Model,GPU,GPUs,PP,TP,GBS,Seq,MFU\nLlama 3 70B,H100,64,4,8,128,8192,41\n",
        "line 3 (`Model, GPU, GPUs, PP, TP, GBS, Seq, MFU`) is a fact of several rows",
    ),
    "a title with commas": (
        "Table 2, GPT-3 175B, A100 80GB, TP 8, PP 4, seq 2048, GBS 1536\nGPUs,MFU\n128,48\n",
        [("gpt3-175B", "A100-80G", 128, 8, 4, 0, 1536, 2048, "bfloat16")],
    ),
    "a batch of tokens in the title": (
        "Llama 2 7B, 64 A100-80GB, global batch 4M tokens, seq 4096\nTP,PP,MBS,MFU\n1,1,4,55\n",
        [("llama2-7B", "A100-80G", 64, 1, 64, 0, 1024, 4096, "bfloat16")],
    ),
    "one node in the title": (
        "# Trainer\n\nFast.\n\nLlama-3.1-8B, a single node with 8x H100 80GB, seq length 8192.\n\n"
        "|Setup|Micro batch|Global batch|Tok/s/GPU|\n|-|-|-|-|\n|FSDP|1|8|8,150|\n",
        ["the row prints no layout"],
    ),
    "a range of lengths": (
        "Llama 3 8B at sequence length 4096 to 131072 on 8 H100\nCP,DP,GBS,MFU\n1,8,128,40\n",
        "lacks the column seq",
    ),
    "a footnote with a fact": (
        "Model,GPU,GPUs,TP,GBS,Seq,MFU\nLlama 3 8B,H100,8,1,128,8192,40\nAll with FP8.,,,,,,\n",
        "line 3 (`All with FP8.`) is a fact of several rows",
    ),
    "two devices in a row": (
        "Model,GPU,GPUs,TP,GBS,Seq,MFU\nLlama 3 8B,H100 & A100,8,1,128,8192,40\n",
        ["H100-80G, not one device"],
    ),
    "parts of a table": (
        "Model,GPU,GPUs,TP,GBS,Seq,MFU\nBF16,,,,,,\nLlama 3 8B,H100,8,1,128,8192,40\nFP8,,,,,,\n"
        "Llama 3 8B,H100,8,1,128,8192,55\n",
        "line 2 (`BF16`) is a fact of several rows",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PRINTED)
def test_facts_of_a_title_are_those_of_every_row_or_of_none(name, tmp_path):
    text, rows = PRINTED[name]
    (tmp_path / "runs.csv").write_text(text)
    if isinstance(rows, str):
        with pytest.raises(UserError) as caught:
            read_runs(tmp_path / "runs.csv")
        assert rows in str(caught.value)
        return
    for run, row in zip(read_runs(tmp_path / "runs.csv"), rows, strict=True):
        if isinstance(row, str):
            assert row in run.reason
            continue
        assert run.layout is not None and run.shape is not None and run.device is not None
        plan = run.layout
        read = plan.world_size, plan.tp, plan.dp, plan.zero, plan.global_batch, plan.seq_len
        assert (run.shape.name, run.device.name, *read, plan.precision) == row


@pytest.mark.parametrize(
    ("title", "cells", "adapters"),
    [("LoRA on 8 H100", {}, True), ("", {"Method": "LoRA"}, True), ("", {"Method": "SFT"}, False)],
)
def test_adapters_are_named_in_the_title_or_a_column(title, cells, adapters, tmp_path):
    run = only_run(tmp_path / "runs.csv", LLAMA_CELLS | cells | {"Step time": "10.5"}, title)
    assert run.layout is not None and run.layout.adapters == adapters


@pytest.mark.parametrize("author", TABLES)
def test_each_row_is_read_or_named(author, tmp_path):
    data, rows = TABLES[author]
    (tmp_path / "runs.csv").write_bytes(data)
    runs = read_runs(tmp_path / "runs.csv")
    for run, row in zip(runs, rows, strict=True):
        if isinstance(row, str):
            assert row in run.reason
            continue
        assert not run.reason and run.layout is not None and run.shape is not None
        *sizes, seconds, ended = row
        layout = run.layout
        read = [run.shape.name, layout.world_size, layout.global_batch, layout.seq_len]
        assert read == sizes
        assert (run.ended, run.seconds) == (ended, pytest.approx(seconds) if seconds else None)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("runs.xlsx", b"PK\x03\x04\x14\x00\x06\x00" + bytes(100), "it is not text; save it as CSV"),
        ("runs.json", b'[{"TP": 1, "TP": 2}]', "JSON that cannot be read: the key TP is repeated"),
        ("runs.jsonl", b'{"TP": 1}\n{"TP": 1\n', "line 2: JSON that cannot be read: Expecting"),
    ],
)
def test_a_file_that_is_no_table_is_refused(name, data, message, tmp_path):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError, match=message):
        read_runs(tmp_path / name)


def test_a_column_that_is_there_twice_is_named(tmp_path):
    names = NAMES.replace("\n", ",step_time_s\n")
    (tmp_path / "runs.csv").write_text(f"{names}Llama-3-8B,8,H100,1,1,128,8192,10.5,10.6\n")
    with pytest.raises(UserError, match="two columns step_time_s"):
        read_runs(tmp_path / "runs.csv")


LLAMA_CELLS = {"Model": "Llama-3-8B", "GPUs": "8", "GPU": "H100", "TP": "1", "PP": "1",
               "Global batch": "128", "Seq": "8192"}  # fmt: skip


def only_run(path, cells, title=""):
    """The run of a table with one row."""
    lines = [title] * bool(title) + ["\t".join(cells), "\t".join(cells.values())]
    path.write_text("\n".join(lines))
    (run,) = read_runs(path)
    return run


@pytest.mark.parametrize(
    ("column", "cell", "seconds"),
    [
        ("Step time (s)", "10.5*", 10.5),
        ("Step time (s)", "**10.5**", 10.5),
        ("Step time (s)", "10.5†‡", 10.5),
        ("Step time (s)", "10.5 [1]", 10.5),
        ("Step time (s)", "~10.5", 10.5),
        ("Step time (ms)", "10500*", 10.5),
        ("Step time (ms)", "~10,500", 10.5),
        ("Step time (ms)", "10500 ± 12.5", 10.5),
        ("Step time (ms)", "10500 (±0.1)", 10.5),
        ("Step time", "10.5 (± 2 %) s", 10.5),
        ("Step time (ms)", "10.5k", 10.5),
        ("Step time (ms)", "10.5 s", 10.5),
        ("Step time (min)", "1.5", 90),
        ("Step time (hours)", "0.01", 36),
        ("Avg step time [s]", "10.5", 10.5),
        ("Elapsed time per iteration (ms)", "10500", 10.5),
        ("Time per Global Step (s)", "10.5", 10.5),
        ("Step time", "1m30s", 90),
        ("Step time", "00:01:30", 90),
        ("Step time", "1h 0m 1.5s", 3601.5),
        ("Step time", "10.5 s/it", 10.5),
        ("Step time", "0.5 it/s", 2),
        ("it/s", "0.5", 2),
        ("s/it", "10.5", 10.5),
        ("steps/sec", "0.5", 2),
        ("Achieved teraFLOP/s per GPU", "~400 TFLOP/s/GPU", pytest.approx(17.0, rel=0.2)),
        ("MFU", "40 %", pytest.approx(17.0, rel=0.2)),
        ("samples/s", "12.5 seq/s", 10.24),
        ("Throughput", "12.5 sentences/sec", 10.24),
        ("Total tokens/s", "100000", 10.48576),
        ("Tokens/sec (all GPUs)", "100000", 10.48576),
        ("Model FLOPs utilization (MFU) (%)", "40", pytest.approx(17.0, rel=0.2)),
        ("Throughput", "0.1M tokens/s", "throughput is `0.1M tokens/s`"),
        ("Throughput", "100k tok/s", 10.48576),
        ("Throughput", "12.5k tokens/s/GPU", 10.48576),
        ("Throughput per GPU", "12.5k tok/s", 10.48576),
        ("Throughput", "12.5k tokens/s per GPU", 10.48576),
        ("Training speed", "12.5 (±0.1) seq/s", 10.24),
        ("Throughput", "400 TFLOP/s/GPU", pytest.approx(17.0, rel=0.2)),
        ("Throughput", "0.5 it/s", 2),
        ("Throughput (T/s)", "100000", 10.48576),
        ("Throughput (T/s/GPU)", "12500", 10.48576),
        ("token/p/s", "12500", 10.48576),
        ("Tokens / sec / GPU", "12500 (9100)", 10.48576),
        ("Throughput", "9100", "throughput is `9100`"),
        ("Throughput", "3 samples/s/GPU", "throughput is `3 samples/s/GPU`"),
        ("Throughput", "—", None),
        ("TFLOP/s", "3200", "tflops_gpu is 3200, above the peak of H100-80G (989.5)"),
        ("MFU", "140", "mfu_pct is 140, above the peak"),
        ("Step time", "01:30", "step_time_s is `01:30`"),
        ("Step time", "<12", "step_time_s is `<12`"),
        ("Step time", "0 it/s", "step_time_s is `0 it/s`"),
        ("tokens/s", "9.1k tok/s/GPU", "tokens_s is `9.1k tok/s/GPU`"),
        ("Step time", "—", None),
        ("Step time", "N.A.", None),
    ],
)
def test_a_measure_in_any_unit(column, cell, seconds, tmp_path):
    """A unit of the column counts for cells with marks, too; a unit of a cell wins."""
    run = only_run(tmp_path / "runs.csv", LLAMA_CELLS | {column: cell})
    if isinstance(seconds, str):
        assert seconds in run.reason
    else:
        assert (run.reason, run.seconds) == ("", seconds)


@pytest.mark.parametrize("cell", ["9100", "1.4x", "good", "OOM†", "0", ""])
@pytest.mark.parametrize("other", [{"mem_gib": "60"}, {"status": "OOM"}])
def test_a_row_without_a_legible_rate_keeps_its_other_measurements(other, cell, tmp_path):
    run = only_run(tmp_path / "runs.csv", LLAMA_CELLS | other | {"Performance": cell})
    ended = "ok" if "mem_gib" in other and "OOM" not in cell else "OOM"
    assert (run.reason, run.seconds, run.ended) == ("", None, ended)
    assert run.memory_bytes == (60 * 2**30 if "mem_gib" in other else None)


@pytest.mark.parametrize(
    ("column", "cell", "gib"),
    [
        ("Memory (%)", "75", None),  # of the device: not read as GiB
        ("Max memory allocated (GiB)", "60", 60),
        ("Memory usage (GB)", "60", 60 / 1.073741824),
    ],
)
def test_a_memory_in_its_unit(column, cell, gib, tmp_path):
    run = only_run(tmp_path / "runs.csv", LLAMA_CELLS | {column: cell})
    assert run.reason == ""
    assert run.memory_bytes == (pytest.approx(gib * 2**30) if gib else None)


@pytest.mark.parametrize(
    ("column", "cell", "sequences"),
    [
        ("Global batch", "1M tokens", 128),
        ("Global batch", "256K tokens", 32),
        ("Global batch", "1048576 tokens", 128),
        ("Batch size (M tokens)", "1.05", 128),
        ("Global batch", "128 sequences", 128),
    ],
)
def test_a_batch_of_tokens_or_sequences(column, cell, sequences, tmp_path):
    cells = {key: cell for key, cell in LLAMA_CELLS.items() if key != "Global batch"}
    run = only_run(tmp_path / "runs.csv", cells | {column: cell, "Step time": "10.5"})
    assert run.layout is not None, run.reason
    assert run.layout.global_batch == sequences


@pytest.mark.parametrize(
    ("title", "cells", "precision", "microbatch"),
    [
        ("", {"Techniques": "FSDP + torch.compile + Float8"}, "float8", 1),
        ("", {"Remarks": "all layers"}, "bfloat16", 1),
        ("", {"Remarks": "fp32 gradients"}, "bfloat16", 1),
        ("", {"Remarks": "FP32"}, "float32", 1),
        ("bf16", {"Notes": "float8 products"}, "precision is `bf16 or fp8`: two number types", 1),
        ("Local batch size 2 on 8 GPUs", {"Precision": "BF16", "Notes": "fp8"}, "bfloat16", 2),
    ],
)
def test_a_number_type_in_a_remark_is_that_of_its_row(
    title, cells, precision, microbatch, tmp_path
):
    run = only_run(tmp_path / "runs.csv", LLAMA_CELLS | {"Step time": "10.5"} | cells, title)
    if run.layout is None:
        assert precision in run.reason
    else:
        assert (run.layout.precision, run.layout.microbatch) == (precision, microbatch)


@pytest.mark.parametrize("cell", ["8k", "8K", "8,192", "8192†", "8,192 tokens", "SeqLen (K) 8"])
def test_a_sequence_length_in_any_form(cell, tmp_path):
    name, _, number = cell.rpartition(" ") if "(K)" in cell else ("Seq", "", cell)
    cells = {key: cell for key, cell in LLAMA_CELLS.items() if key != "Seq"} | {name: number}
    run = only_run(tmp_path / "runs.csv", cells | {"Step time": "10.5"})
    assert run.layout is not None and run.layout.seq_len == 8192


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        ({"Sequence Parallel": "4"}, {"cp": 4, "dp": 2}),
        ({"Ulysses": "4"}, {"cp": 4, "dp": 2}),
        ({"Sequence Parallel": "2", "TP": "2"}, {"cp": 1, "dp": 4, "sequence_parallel": True}),
        ({"TP": "2 (4)", "VP": "1 (5)", "FSDP": "0 (1)"}, {"tp": 2, "stages_per_rank": 1}),
    ],
)
def test_degrees_of_sequences_and_the_first_of_two_settings(cells, expected, tmp_path):
    run = only_run(tmp_path / "runs.csv", LLAMA_CELLS | {"Step time": "10.5"} | cells)
    assert run.layout is not None, run.reason
    assert {name: getattr(run.layout, name) for name in expected} == expected


def test_memory_of_a_whole_and_flops_without_a_prefix_do_no_harm(tmp_path):
    """ "59/80" is 59 GiB of a device's 80; 4.2E+14 is a rate in FLOP/s, not in TFLOP/s."""
    cells = {"mem": "59/80", "mem_kind": "peak", "Model TFLOP": "4.2E+14", "tokens/s": "100000"}
    run = only_run(tmp_path / "runs.csv", LLAMA_CELLS | cells)
    assert (run.reason, run.seconds, run.memory_bytes) == ("", 10.48576, 59 * 2**30)


def test_one_model_of_the_title_is_that_of_the_rows(tmp_path):
    cells = {key: cell for key, cell in LLAMA_CELLS.items() if key != "Model"} | {"Step time": "9"}
    assert only_run(tmp_path / "runs.csv", cells, "Pre-training of LLAMA3-8B (BF16)").layout
    for title in ("", "LLAMA3-8B and LLAMA3-70B", "Table 3a"):
        with pytest.raises(UserError, match="lacks the column arch"):
            only_run(tmp_path / "runs.csv", cells, title)


#: Column and cell -> tp, pp, dp, ZeRO and its group on 64 devices, or words of the reason.
LAYOUTS = {
    ("Parallelism", "FSDP 16 + TP 4"): (4, 1, 16, 3, 0),
    ("Parallelism", "FSDP2, TP 4"): (4, 1, 16, 3, 0),
    ("Parallelism", "FSDP"): (1, 1, 64, 3, 0),
    ("Layout", "TP=4, PP=2"): (4, 2, 8, 0, 0),
    ("Layout", "DP8×TP4×PP2"): (4, 2, 8, 0, 0),
    ("Layout", "DP8xTP4xPP2"): (4, 2, 8, 0, 0),
    ("Layout", "tp4-pp2-dp8"): (4, 2, 8, 0, 0),
    ("Strategy", "8-way tensor, 4-way pipeline"): (8, 4, 2, 0, 0),
    ("Strategy", "8-way tensor parallelism and 4-way pipeline parallelism"): (8, 4, 2, 0, 0),
    ("Strategy", "ZeRO-1, TP 8"): (8, 1, 8, 1, 0),
    ("Strategy", "HSDP 8x8"): (1, 1, 64, 3, 8),
    ("Strategy", "HSDP"): (1, 1, 64, 3, 8),
    ("Strategy", "DP 8 + FSDP 8"): (1, 1, 64, 3, 8),
    ("TP×PP", "4x2"): (4, 2, 8, 0, 0),
    ("TP/PP/DP", "4/2/8"): (4, 2, 8, 0, 0),
    ("TPxPP", "(4, 2)"): (4, 2, 8, 0, 0),
    ("(t, p, d)", "(4, 2, 8)"): (4, 2, 8, 0, 0),
    ("tp_pp", "4-2"): (4, 2, 8, 0, 0),
    ("Parallelism (TP, PP)", "(4, 2)"): (4, 2, 8, 0, 0),
    ("3D parallelism [t/p/d]", "4/2/8"): (4, 2, 8, 0, 0),
    ("Tensor/pipeline parallel size", "4/2"): (4, 2, 8, 0, 0),
    ("Layout (DP, TP)", "TP 4, PP 2"): (4, 2, 8, 0, 0),
    ("Strategy", "HSDP 16x4"): "which number is that of the shards is not stated",
    ("Strategy", "HSDP 8, TP 2"): "write HSDP with replicas and shards",
    ("Strategy", "FSDP + offload"): "`offload` is not read",
    ("Strategy", "TP 4 PP 2 TP 8"): "two numbers for tp",
    ("Strategy", "3D"): "`3d` is not read",
    ("Strategy", "TP 4 x 2"): "is not read",
    ("Strategy", "SP 4"): "sp is on or off",
    ("Strategy", "FSDP, ZeRO-2"): "FSDP is ZeRO-3",
    ("Strategy", "TP 4, PP 3"): "tp 4 x pp 3",
    ("TP×PP", "4x2x8"): "layout is `4x2x8`",
    ("TP×PP", "8"): "layout is `8`",
}


@pytest.mark.parametrize(("column", "cell"), LAYOUTS)
def test_a_layout_in_one_cell_is_read_whole_or_refused(column, cell, tmp_path):
    cells = {key: cell for key, cell in LLAMA_CELLS.items() if key not in ("TP", "PP")}
    cells |= {"GPUs": "64", column: cell, "Step time": "2.5"}
    run, expected = only_run(tmp_path / "runs.csv", cells), LAYOUTS[column, cell]
    if isinstance(expected, str):
        assert expected in run.reason
        return
    assert not run.reason and run.layout is not None
    layout = run.layout
    assert (layout.tp, layout.pp, layout.dp, layout.zero, layout.zero_group) == expected


def test_a_batch_of_unstated_extent_is_named(tmp_path):
    """Such a column is not read, and its row has another batch or none."""
    cells = LLAMA_CELLS | {"Batch size": "64", "Step time": "10.5"}
    run = only_run(tmp_path / "runs.csv", cells)
    assert not run.reason and "`batch_size` is not read" in unclear_batch(run.row)
    assert not unclear_batch(run.row | {"batch_size": ""})
    del cells["Global batch"]
    assert "`batch_size` is not read" in only_run(tmp_path / "runs.csv", cells).reason


def test_a_layout_in_words_does_not_contradict_its_columns(tmp_path):
    """Words that are not read do no harm beside columns that state the layout."""
    cells = LLAMA_CELLS | {"Strategy": "TP 2", "Step time": "10.5"}
    assert "but tp is `1`" in only_run(tmp_path / "runs.csv", cells).reason
    assert not only_run(tmp_path / "runs.csv", cells | {"Strategy": "ours"}).reason


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"Number of parameters (billion)": "18.4"}, ""),
        ({"Model": "GPT 18.4B"}, ""),
        ({"Model": "GPT 0.0184T"}, ""),
        ({"Number of parameters (billion)": "7"}, "has 18.4 billion parameters"),
        ({}, "the row prints none"),
    ],
)
def test_a_gpt_of_sizes_is_confirmed_by_its_parameters(sizes, reason, tmp_path):
    """Row 4 of table 1 of Megatron's SC21 paper; sizes alone may be those of any model."""
    sizes |= {"Attention heads": "48", "Hidden size": "6144", "Number of layers": "40"}
    cells = {key: cell for key, cell in LLAMA_CELLS.items() if key != "Model"} | sizes
    cells |= {"GPUs": "256", "TP": "8", "Global batch": "1024", "Seq": "2048", "GPU": "A100"}
    run = only_run(tmp_path / "runs.csv", cells | {"Achieved teraFLOP/s per GPU": "135"})
    assert reason in run.reason and bool(reason) == bool(run.reason)
    assert reason or run.priced[0].name == "gpt:40x6144a48v51200"


def test_one_device_of_the_title_or_of_the_cluster_is_that_of_the_rows(tmp_path):
    cells = {key: cell for key, cell in LLAMA_CELLS.items() if key != "GPU"} | {"Step time": "10.5"}
    run = only_run(tmp_path / "runs.csv", cells, "Table 2: runs on H200 GPUs")
    assert run.device is not None and run.device.name == "H200-141G"
    (run,) = read_runs(tmp_path / "runs.csv", hardware="A100-80G")
    assert run.device is not None and run.device.name == "A100-80G"
    for title in ("", "H100 against A100"):
        with pytest.raises(UserError, match=r"lacks the column hardware.*--cluster NAME"):
            only_run(tmp_path / "runs.csv", cells, title)


@pytest.mark.parametrize("corner", ["", "Setting"])
def test_a_table_with_its_names_down_the_side(corner, tmp_path):
    lines = [
        [corner, "first", "second"],
        *([name, cell, cell] for name, cell in LLAMA_CELLS.items()),
    ]
    lines.append(["Step time (s)", "10.5", "OOM"])
    (tmp_path / "runs.csv").write_text("\n".join(map(",".join, lines)))
    first, second = read_runs(tmp_path / "runs.csv")
    assert [first.id, second.id, first.reason, second.reason] == ["first", "second", "", ""]
    assert (first.seconds, second.ended) == (10.5, "OOM")


def test_calibrate_takes_the_device_of_its_cluster(tmp_path, invoke):
    cells = {key: cell for key, cell in LLAMA_CELLS.items() if key != "GPU"}
    rows = [",".join([*cells.values(), seconds]) for seconds in ("10.5", "10.6", "10.7", "10.8")]
    (tmp_path / "runs.csv").write_text("\n".join([",".join([*cells, "Step time"]), *rows]))
    out = str(tmp_path / "mine.toml")
    run = ("calibrate", str(tmp_path / "runs.csv"), "--out", out)
    assert "lacks the column hardware" in invoke(*run)[2]
    assert invoke(*run, "--cluster", "dgx_h100")[0] == 0


def test_model_parallelism_alone_does_not_state_the_layout(tmp_path):
    table = tmp_path / "runs.csv"
    head = "model,hardware,seq,gpus,Model-parallel size,dp,gbs,step_time_s"
    rows = [f"llama2-7b,H100-80G,4096,8,{ways},{8 // ways},64,3.1" for ways in (1, 2)]
    table.write_text("\n".join([head, *rows]))
    one, two = read_runs(table)
    assert not one.reason and two.reason.startswith("mp is `2`: tensor or pipeline")
