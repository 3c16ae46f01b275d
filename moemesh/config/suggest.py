"""Did you mean: the key or value that a wrong one was probably meant to be."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher, get_close_matches
from typing import get_args

from moemesh.config.schema import SECTIONS, all_keys, keys_of, sections_with

#: Names of the same thing in other trainers and model files.
FOREIGN_NAMES: dict[str, str] = {
    "tensor_parallel_size": "plan.tp",
    "tensor_model_parallel_size": "plan.tp",
    "tensor_parallel_degree": "plan.tp",
    "tensor_parallel": "plan.tp",
    "tp_size": "plan.tp",
    "pipeline_parallel_size": "plan.pp",
    "pipeline_model_parallel_size": "plan.pp",
    "pipeline_parallel_degree": "plan.pp",
    "pp_size": "plan.pp",
    "data_parallel_size": "plan.dp",
    "data_parallel_replicate_degree": "plan.dp",
    "data_parallel_shard_degree": "plan.dp",
    "dp_size": "plan.dp",
    "dp_replicate": "plan.dp",
    "dp_shard": "plan.dp",
    "context_parallel_size": "plan.cp",
    "context_parallel_degree": "plan.cp",
    "cp_size": "plan.cp",
    "ulysses_size": "plan.context",
    "expert_parallel_size": "plan.ep",
    "expert_model_parallel_size": "plan.ep",
    "expert_parallel_degree": "plan.ep",
    "ep_size": "plan.ep",
    "expert_tensor_parallel_size": "plan.etp",
    "expert_tensor_parallel_degree": "plan.etp",
    "virtual_pipeline_model_parallel_size": "plan.stages_per_rank",
    "num_virtual_stages_per_pipeline_rank": "plan.stages_per_rank",
    "pipeline_parallel_schedule": "plan.schedule",
    "pp_schedule": "plan.schedule",
    "micro_batches": "plan.microbatches",
    "num_microbatches": "plan.microbatches",
    "micro_batch_size": "plan.microbatches",
    "microbatch_size": "plan.microbatches",
    "local_batch_size": "plan.microbatches",
    "gradient_accumulation_steps": "plan.microbatches",
    "grad_accum_steps": "plan.microbatches",
    "per_device_train_batch_size": "plan.microbatches",
    "moe_token_dispatcher_type": "plan.dispatcher",
    "moe_dispatcher": "plan.dispatcher",
    "zero_stage": "plan.data",
    "zero_optimization": "plan.data",
    "use_distributed_optimizer": "plan.data",
    "fsdp": "plan.data",
    "sharding_strategy": "plan.data",
    "activation_checkpointing": "plan.recompute",
    "activation_checkpoint": "plan.recompute",
    "gradient_checkpointing": "plan.recompute",
    "recompute_granularity": "plan.recompute",
    "gpus_per_node": "plan.ranks_per_node",
    "nproc_per_node": "plan.ranks_per_node",
    "num_redundant_experts": "plan.spare_slots",
    "num_local_experts": "model.num_experts",
    "n_routed_experts": "model.num_experts",
    "moe_num_experts": "model.num_experts",
    "num_experts_per_tok": "model.experts_per_token",
    "moe_router_topk": "model.experts_per_token",
    "moe_top_k": "model.experts_per_token",
    "top_k": "model.experts_per_token",
    "topk": "model.experts_per_token",
    "moe_intermediate_size": "model.expert_intermediate_size",
    "moe_ffn_hidden_size": "model.expert_intermediate_size",
    "n_shared_experts": "model.num_shared_experts",
    "moe_shared_expert_intermediate_size": "model.shared_intermediate_size",
    "shared_expert_intermediate_size": "model.shared_intermediate_size",
    "first_k_dense_replace": "model.first_dense_layers",
    "num_dense_layers": "model.first_dense_layers",
    "num_hidden_layers": "model.num_layers",
    "n_layers": "model.num_layers",
    "n_layer": "model.num_layers",
    "num_attention_heads": "model.num_heads",
    "n_heads": "model.num_heads",
    "n_head": "model.num_heads",
    "num_key_value_heads": "model.num_kv_heads",
    "num_query_groups": "model.num_kv_heads",
    "n_kv_heads": "model.num_kv_heads",
    "kv_channels": "model.head_dim",
    "n_embd": "model.hidden_size",
    "d_model": "model.hidden_size",
    "dim": "model.hidden_size",
    "hidden_dim": "model.hidden_size",
    "ffn_hidden_size": "model.intermediate_size",
    "tie_word_embeddings": "model.tied_embeddings",
    "rms_norm_eps": "model.norm_eps",
    "layernorm_epsilon": "model.norm_eps",
    "initializer_range": "model.init_std",
    "init_method_std": "model.init_std",
    "rotary_base": "model.rope_theta",
    "use_qk_norm": "model.qk_norm",
    "qk_layernorm": "model.qk_norm",
    "qk_rope_head_dim": "model.qk_rotary_head_dim",
    "scoring_func": "model.router_score",
    "moe_router_score_function": "model.router_score",
    "norm_topk_prob": "model.router_normalize",
    "routed_scaling_factor": "model.router_scale",
    "moe_router_topk_scaling_factor": "model.router_scale",
    "n_group": "model.router_groups",
    "topk_group": "model.router_groups_kept",
    "moe_router_num_groups": "model.router_groups",
    "moe_router_group_topk": "model.router_groups_kept",
    "e_score_correction_bias": "model.router_selection_bias",
    "moe_router_enable_expert_bias": "model.router_selection_bias",
    "moe_router_bias_update_rate": "model.router_bias_rate",
    "router_aux_loss_coef": "model.aux_loss_coefficient",
    "aux_loss_alpha": "model.aux_loss_coefficient",
    "moe_aux_loss_coeff": "model.aux_loss_coefficient",
    "moe_z_loss_coeff": "model.z_loss_coefficient",
    "router_z_loss_coef": "model.z_loss_coefficient",
    "num_nextn_predict_layers": "model.num_mtp_layers",
    "mtp_num_layers": "model.num_mtp_layers",
    "model_name_or_path": "model.path",
    "hf_path": "model.path",
    "hf_assets_path": "model.path",
    "model_name": "model.preset",
    "flavor": "model.preset",
    "dataset": "data.path",
    "dataset_path": "data.path",
    "data_path": "data.path",
    "train_files": "data.path",
    "tokenizer_model": "data.tokenizer",
    "tokenizer_path": "data.tokenizer",
    "sequence_length": "data.seq_len",
    "seq_length": "data.seq_len",
    "sequence_len": "data.seq_len",
    "max_seq_len": "data.seq_len",
    "max_length": "data.seq_len",
    "context_length": "data.seq_len",
    "block_size": "data.seq_len",
    "batch_size": "data.global_batch",
    "global_batch_size": "data.global_batch",
    "train_batch_size": "data.global_batch",
    "validation_split": "data.held_out",
    "val_split": "data.held_out",
    "learning_rate": "train.lr",
    "max_lr": "train.lr",
    "base_lr": "train.lr",
    "min_lr": "train.final_lr_ratio",
    "min_lr_ratio": "train.final_lr_ratio",
    "warmup": "train.warmup_steps",
    "lr_warmup_iters": "train.warmup_steps",
    "lr_warmup_steps": "train.warmup_steps",
    "warmup_iters": "train.warmup_steps",
    "max_steps": "train.steps",
    "total_steps": "train.steps",
    "num_steps": "train.steps",
    "train_iters": "train.steps",
    "max_iters": "train.steps",
    "training_steps": "train.steps",
    "beta1": "train.adam_betas",
    "beta2": "train.adam_betas",
    "betas": "train.adam_betas",
    "adam_beta1": "train.adam_betas",
    "adam_beta2": "train.adam_betas",
    "eps": "train.epsilon",
    "adam_eps": "train.epsilon",
    "adam_epsilon": "train.epsilon",
    "wd": "train.weight_decay",
    "clip_grad": "train.clip",
    "grad_clip": "train.clip",
    "gradient_clipping": "train.clip",
    "max_norm": "train.clip",
    "max_grad_norm": "train.clip",
    "gradient_clip_val": "train.clip",
    "precision": "train.dtype",
    "mixed_precision": "train.dtype",
    "bf16": "train.dtype",
    "torch_dtype": "train.dtype",
    "param_dtype": "train.dtype",
    "save_interval": "train.checkpoint_every",
    "save_steps": "train.checkpoint_every",
    "save_every": "train.checkpoint_every",
    "checkpoint_interval": "train.checkpoint_every",
    "save_total_limit": "train.checkpoints_kept",
    "keep_latest_k": "train.checkpoints_kept",
    "eval_interval": "train.validate_every",
    "eval_steps": "train.validate_every",
    "eval_every": "train.validate_every",
    "eval_iters": "train.validation_batches",
    "resume_from_checkpoint": "train.resume",
    "auto_resume": "train.resume",
    "distributed_timeout_minutes": "train.timeout_seconds",
    "nccl_timeout": "train.timeout_seconds",
    "random_seed": "train.seed",
    "accelerator": "train.device",
}


#: Values that other trainers call otherwise.
FOREIGN_VALUES = {"gpu": "cuda", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}


def explain_unknown_key(key: str) -> tuple[str, str]:
    """(what is wrong, what was probably meant) for a dotted key that no section has.

    Order: the same thing's name in another trainer, a sibling that differs by a letter or two, the
    same leaf in another section, then ever weaker resemblances.
    """
    section, _, leaf = key.rpartition(".")
    if not section and (close := _close(leaf, SECTIONS, 0.6)) and leaf not in FOREIGN_NAMES:
        return f"there is no section [{leaf}]", f"did you mean [{close[0]}]?"
    elsewhere = [f"{name}.{leaf}" for name in sections_with(leaf)]
    siblings = keys_of(section) if section in SECTIONS else ()
    fix = ""
    if leaf in FOREIGN_NAMES:
        fix = f"here it is called {FOREIGN_NAMES[leaf]}"
    elif near := _close(leaf, siblings, 0.8):
        fix = _did_you_mean(f"{section}.{name}" for name in near)
    elif elsewhere:
        homes = " and ".join(f"[{name}]" for name in sections_with(leaf))
        fix = f"`{leaf}` belongs to {homes}: {' or '.join(elsewhere)}"
    elif near := _close(leaf, siblings, 0.45 if len(leaf) <= 4 else 0.6):
        fix = _did_you_mean(f"{section}.{name}" for name in near)
    else:
        fix = _far(leaf)
    if section and section not in SECTIONS:
        if section in all_keys():
            return f"{section} is a value and has no keys", f"did you mean {section}?"
        fix = fix or _did_you_mean(f"[{name}]" for name in _close(section, SECTIONS, 0.6))
        return f"there is no section [{section}]", fix or f"sections: {', '.join(SECTIONS)}"
    message = f"[{section}] has no key `{leaf}`" if section else f"`{leaf}` stands in no section"
    known = f"keys of [{section}]: {', '.join(siblings)}" if siblings else ""
    return message, fix or known or f"sections: {', '.join(SECTIONS)}"


def nearest_choice(value: str, choices: Sequence[str]) -> str:
    """The fix for a value outside a list of names: the nearest one, then all of them.

    Case and hyphens do not count as differences.
    """
    folded = value.strip().lower().replace("-", "_").replace(" ", "_")
    if FOREIGN_VALUES.get(folded) in choices:
        folded = FOREIGN_VALUES[folded]
    near = [folded] if folded in choices else _close(folded, choices, 0.5)
    listed = ", ".join(choices)
    return f"did you mean {near[0]}? (choices: {listed})" if near else f"choices: {listed}"


def choices_of(annotation: object) -> tuple[str, ...]:
    """The names that a Literal, or a union with one, allows; empty for any other type."""
    names: list[str] = []
    for choice in get_args(annotation):
        names += [choice] if isinstance(choice, str) else choices_of(choice)
    return tuple(names)


def _close(word: str, names: Iterable[str], cutoff: float) -> list[str]:
    """Up to three names like `word`, best first; the rest only when nearly as good as the best."""
    found = get_close_matches(word.lower().replace("-", "_"), list(names), n=3, cutoff=cutoff)
    if not found:
        return []
    scores = {name: SequenceMatcher(None, name, word).ratio() for name in found}
    best = max(scores.values())
    return [name for name in found if scores[name] > best - 0.05]


def _far(leaf: str) -> str:
    """A key of any section, or a foreign name, that resembles `leaf`."""
    every = {name: f"{section}.{name}" for section in SECTIONS for name in keys_of(section)}
    if near := _close(leaf, every, 0.75):
        return _did_you_mean(every[name] for name in near)
    if near := _close(leaf, FOREIGN_NAMES, 0.85):
        return _did_you_mean(FOREIGN_NAMES[name] for name in near)
    return ""


def _did_you_mean(names: Iterable[str]) -> str:
    listed = list(dict.fromkeys(names))
    return f"did you mean {' or '.join(listed)}?" if listed else ""
