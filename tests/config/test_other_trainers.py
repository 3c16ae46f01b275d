"""Names of other trainers are answered with the key of the same meaning, in the right direction."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from dataclasses import fields

import pytest

from moemesh.config.errors import ConfigError
from moemesh.config.schema import SECTIONS, all_keys, explain_unknown_key
from moemesh.config.suggest import alias_hint, aliases, choices_of, hints, nearest_name
from moemesh.sharding.load_run import load_run

#: trainer -> name there -> the words that the answer must have, and after "not" those it must not.
#: Further names are in tests/mistakes.
ANSWERS: dict[str, dict[str, str]] = {
    "Megatron-LM": {
        "pipeline_model_parallel_size": "plan.pp",
        "context_parallel_size": "plan.cp",
        "expert_tensor_parallel_size": "plan.etp",
        "global_batch_size": "data.global_batch",
        "num_query_groups": "model.num_kv_heads",
        "moe_ffn_hidden_size": "model.expert_intermediate_size",
        "use_distributed_optimizer": "plan.data zero1",
        "distributed_timeout_minutes": "train.timeout_seconds 60 times",
        "lr_decay_style": "train.lr_schedule not plan.schedule",
        "lr_warmup_fraction": "train.warmup_steps times train.steps",
        "train_iters": "train.steps",
        "seq_length": "data.seq_len",
        "clip_grad": "train.clip",
        "lr_warmup_samples": "train.warmup_steps data.global_batch",
        "vocab_file": "data.tokenizer not vocab_size",
        "encoder_seq_length": "data.seq_len",
        "adam_beta2": "second number of train.adam_betas",
        "untie_embeddings_and_output_weights": "model.tied_embeddings opposite",
        "moe_aux_loss_coeff": "model.aux_loss_coefficient",
        "moe_token_dispatcher_type": "plan.dispatcher",
        "sequence_parallel": "plan.tp always",
    },
    "torchtitan": {
        "memory_estimation.enable": "moemesh estimate",
        "fault_tolerance.enable": "train.restarts",
        "data_parallel_replicate_degree": "plan.dp is the product plan.shard_group not called",
        "data_parallel_shard_degree": 'plan.data = "zero3"',
        "dp_replicate": 'product of plan.data = "zero3" plan.shard_group not called',
        "tensor_parallel_degree": "plan.tp",
        "expert_parallel_degree": "plan.ep",
        "pipeline_parallel_schedule": "plan.schedule",
        "local_batch_size": "data.global_batch / (plan.dp",
        "max_norm": "train.clip",
        "min_lr_factor": "train.final_lr_ratio",
        "activation_checkpoint": "plan.recompute",
        "load_balance_coeff": "model.router_bias_rate",
        "dump_folder": "--out",
    },
    "torchtune": {
        "tensor_parallel_dim": "plan.tp",
        "context_parallel_dim": "plan.cp",
        "data_parallel_shard_dim": 'plan.dp is the product plan.data = "zero3" not called',
        "run_val_every_n_steps": "train.validate_every not log_every",
        "merge_file": "data.tokenizer",
        "recipe_checkpoint": "--out train.resume not model.path",
        "column_map": "data.text_key",
        "train_on_input": "assistant",
        "new_system_prompt": "system turn",
    },
    "NeMo": {
        "model.restore_from_path": "model.path",
        "model.activations_checkpoint_granularity": "plan.recompute",
        "model.data.splits_string": "data.held_out",
        "model.peft.lora_tuning.adapter_dim": "lora.rank",
        "model.answer_only_loss": "assistant",
        "packed_sequence.packed_sequence_size": "data.seq_len",
        "trainer.num_sanity_val_steps": "train.validate_every",
    },
    "transformers and accelerate": {
        "lr_scheduler_type": "train.lr_schedule cosine not plan.schedule",
        "num_train_epochs": "train.epochs",
        "warmup_ratio": "train.warmup_steps",
        "bf16": "train.dtype bfloat16",
        "gradient_checkpointing": "plan.recompute",
        "num_experts_per_tok": "model.experts_per_token",
        "output_dir": "--out",
        "resume_from_checkpoint": "--out train.resume",
        "query_pre_attn_scalar": "model.attention_multiplier power of -1/2",
        "mlp_only_layers": "without experts; model.moe_layers lists those with them",
    },
    "DeepSpeed": {
        "train_micro_batch_size_per_gpu": "data.global_batch / (plan.dp",
        "train_batch_size": "data.global_batch",
        "zero_optimization": "plan.data zero3",
        "zero_stage": "plan.data zero1",
        "gradient_clipping": "train.clip",
        "offload_optimizer": "plan.offload optimizer",
        "offload_param": "stay on the device plan.data",
    },
    "TRL": {
        "dpo_beta": "preference",
        "num_generations": "preference and reinforcement",
        "max_length": "data.seq_len",
        "assistant_only_loss": "assistant turns",
        "packing": "data.documents",
    },
    "Axolotl and LLaMA-Factory": {
        "base_model": "model.path",
        "cutoff_len": "data.seq_len",
        "val_set_size": "data.held_out",
        "load_in_4bit": 'lora.base = "nf4"',
        "lora_target": "lora.targets",
        "early_stopping_patience": "train.patience",
        "early_stopping": "train.patience",
        "early_stopping_threshold": "train.patience any lower loss",
        "load_best_model_at_end": "--best train.patience",
        "metric_for_best_model": "lowest validation loss --best",
        "wandb_project": 'train.sinks = ["wandb"]',
    },
    "PEFT and Unsloth": {
        "r": "lora.rank",
        "bnb_4bit_quant_type": 'lora.base = "nf4" not exist while',
        "save_adapter_weights_only": "convert RUN OUT --adapter",
        "use_dora": "plain LoRA",
        "init_lora_weights": "plain LoRA",
        "modules_to_save": "train.train_only",
        "max_seq_length": "data.seq_len",
        "use_gradient_checkpointing": "plan.recompute",
    },
    "nanochat": {
        "depth": "model.num_layers",
        "matrix_lr": "for some parameters alone not did you mean",
        "unembedding_lr": "for some parameters alone",
        "warmdown_ratio": "wsd train.decay_steps",
        "sample_every": "moemesh generate not train.checkpoint_every",
        "core_metric_every": "moemesh evaluate",
        "model_tag": "--out",
        "target_param_data_ratio": "train.steps x data.global_batch",
    },
    "ms-swift and NeMo": {
        "train_type": "lora.rank not train.dtype",
        "split_dataset_ratio": "data.held_out",
        "blend": "data.sources",
        "exp_dir": "--out",
        "seed_everything": "train.seed",
        "ema": "not exist here not train.lr",
    },
    "Megatron-LM and DeepSpeed": {
        "moe_grouped_gemm": "train.experts not by hand",
        "position_embedding_type": "RoPE model.rope_theta not not exist",
        "normalization": "RMSNorm not not exist",
        "disable_bias_linear": "model.qkv_bias",
        "split": "data.held_out",
        "group_query_attention": "model.num_kv_heads",
        "accumulate_allreduce_grads_in_fp32": "fp32 masters",
        "override_opt_param_scheduler": "--allow-change",
        "straggler_minmax_count": "train.restarts",
        "use_residual": "model.num_shared_experts",
        "noisy_gate_policy": "model.router_jitter",
        "ds_config": "plan.data",
        "autotuning": "moemesh plan",
        "reduce_scatter": "plan.data",
    },
    "torchrun": {
        "nproc_per_node": "plan.pp moemesh train not ranks_per_node",
        "max_restarts": "train.restarts",
        "rdzv_endpoint": "moemesh launch",
    },
    "several": {
        "report_to": "train.sinks not metrics.jsonl always",
        "grad_accumulation": "plan.microbatches",
        "eval_freq": "train.validate_every",
        "optimizer_cpu_offload": "plan.offload optimizer",
        "activation_offloading": "only the optimizer plan.recompute",
    },
    "nanotron": {
        "batch_accumulation_per_replica": "plan.microbatches",
        "sequence_length": "data.seq_len",
        "train_steps": "train.steps",
        "min_decay_lr": "train.final_lr_ratio",
        "checkpoint_interval": "train.checkpoint_every",
        "checkpoints_path": "--out",
    },
}
CASES = [(trainer, name) for trainer, names in ANSWERS.items() for name in names]


@pytest.mark.parametrize(("trainer", "name"), CASES)
def test_a_name_has_the_right_answer(trainer: str, name: str) -> None:
    wanted, _, forbidden = ANSWERS[trainer][name].partition(" not ")
    for written in (f"train.{name}", name):
        _, answer = explain_unknown_key(written)
        # The answer has the words in this order.
        place = 0
        for word in wanted.split():
            place = answer.find(word, place)
            assert place >= 0, (answer, word)
        assert not forbidden or forbidden not in answer, answer


@pytest.mark.parametrize(
    ("key", "words", "never"),
    [
        ("train.schedule", "train.lr_schedule", "plan.schedule"),
        ("train.dpo", "preference", "train.dtype"),
        ("train.data", "data.path", "plan.data"),
        ("zero_optimization.stage", "plan.data", "lora"),
        ("plan.zero_optimization.stage", "plan.data", "lora"),
        ("train.adapter", "lora.rank", "lora.path"),
        ("train.zero_optimization.stage", "plan.data", "lora"),
        ("bf16.enabled", "train.dtype", "plugins"),
        ("validation.enable", "data.validation", "plugins"),
        ("checkpoint.interval", "train.checkpoint_every", "log_every"),
        ("train.trust_remote_code", "model.implementation", "OWNER/NAME"),
        ("validation.freq", "train.validate_every", "sections"),
        ("validation.steps", "train.validation_batches", "train.steps"),
        ("optimizer.implementation", "kernel", "model.implementation"),
        ("optimizer.params.lr", "train.lr", "did you mean"),
        ("train.per-device-train-batch-size", "data.global_batch", "did you mean"),
        ("train.zzqxv", "moemesh config show", "epochs"),
    ],
)
def test_a_name_in_its_section(key: str, words: str, never: str) -> None:
    fix = explain_unknown_key(key)[1]
    assert words in fix
    assert never not in fix


@pytest.mark.parametrize(
    ("override", "words", "never"),
    [
        ("train.dtype=float8", "bfloat16", "float64?"),
        ("train.dtype=fp16", "no float16", "did you mean"),
        ("train.optimizer=adamw_torch_fused", "adamw", "sgd"),
        ("train.optimizer=dist_muon", "updates weight matrices", "sgd"),
        ("train.sinks=['mlflow']", "metrics.jsonl", "did you mean"),
        ("plan.data=fsdp", "zero3", "did you mean"),
        ("plan.schedule=wsd", "train.warmup_steps", "did you mean"),
        ("plan.context=ulysses", "all_to_all", "did you mean"),
        ("plan.recompute=uniform", "full", "did you mean"),
        ("train.device=mps", "not available", "did you mean"),
    ],
)
def test_a_value_of_another_trainer(override: str, words: str, never: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_run([], [override], {})
    (problem,) = caught.value.problems
    assert words in problem.fix
    assert never not in problem.fix


def test_another_number_is_another_name() -> None:
    assert nearest_name("gemma4", ("gemma3", "gemma3_text", "gemma2")) == ""
    assert nearest_name("float8", ("float32", "float64")) == ""
    assert nearest_name("gema3", ("gemma3", "gemma3_text")) == "gemma3"
    families = ("glm2_moe", "glm4_moe", "glm4v")
    assert nearest_name("glm5_moe", families) == ""
    assert nearest_name("glm5_moe", families, any_number=True) == "glm4_moe"


def test_every_setting_of_libraries_has_an_answer() -> None:
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    names = {field.name for field in fields(transformers.TrainingArguments) if field.init}
    lora = {
        name for name in inspect.signature(peft.LoraConfig).parameters if not name.startswith("_")
    }
    unknown = {
        name
        for section, known in (("train", names), ("lora", lora))
        for name in known
        if "moemesh config show" in (fix := explain_unknown_key(f"{section}.{name}")[1])
        or fix.startswith("keys of [")
    }
    # Internals of the two libraries that no recipe sets.
    assert unknown <= {
        "eval_do_concat_batches", "eval_use_gather_object", "megatron_config", "megatron_core",
        "peft_version", "runtime_config", "revision",
    }  # fmt: skip


def test_every_name_stands_once_and_names_keys_that_exist() -> None:
    count = Counter([*aliases(), *(name for names, _ in hints() for name in names)])
    assert not [name for name, times in count.items() if times > 1]
    keys = set(all_keys())
    assert set(aliases().values()) <= keys
    assert not set(count) & {key.partition(".")[2] for key in keys}
    for names, hint in hints():
        sections = ("model", "plan", "data", "train", "lora")
        words = [word.strip("`;:,.()") for word in hint.replace("/", " ").split()]
        named = [word for word in words if word.partition(".")[0] in sections and "." in word]
        assert set(named) <= keys, (names, set(named) - keys)
        assert alias_hint(names[0]) == hint
        # A list of the values of a key is complete.
        without_remarks = re.sub(r" \([^)]*\)", "", hint)
        for key, listed, last in re.findall(r"(\S+) is one of (.*?) and (\w+)", without_remarks):
            section, _, leaf = key.partition(".")
            legal = choices_of(SECTIONS[section].model_fields[leaf].annotation)
            assert {*listed.split(", "), last} == {*legal}, hint
