"""What options are called elsewhere: names of verl, TRL and Megatron-LM, and ours."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_MODEL_PARALLEL = "parallel.tensor_model_parallel_size"
ELSEWHERE: Mapping[str, str] = MappingProxyType(
    {
        # TRL (GRPOConfig, TrainingArguments)
        "learning_rate": "optimizer.lr",
        "num_generations": "rollout.group_size",
        "max_completion_length": "rollout.max_response_length",
        "per_device_train_batch_size": "training.micro_batch_size",
        "max_steps": "training.steps",
        "num_iterations": "training.updates_per_rollout",
        "beta": "objective.kl_coef",
        "epsilon": "objective.clip_low",
        "epsilon_high": "objective.clip_high",
        "delta": "objective.dual_clip",
        "max_grad_norm": "optimizer.clip_grad",
        "warmup_steps": "optimizer.lr_warmup_iters",
        "lr_scheduler_type": "optimizer.lr_decay_style",
        "save_steps": "training.save_interval",
        "eval_steps": "evaluation.interval",
        "save_total_limit": "training.keep_checkpoints",
        "resume_from_checkpoint": "training.resume",
        "output_dir": "run_dir",
        "reward_funcs": "judging.verifier",
        "model_name_or_path": "model.path",
        "dataset_name": "data.path",
        "vllm_importance_sampling_cap": "objective.tis_cap",
        "mask_truncated_completions": "objective.mask_truncated",
        "report_to": "logging.wandb_project",
        # verl
        "n": "rollout.group_size",
        "train_batch_size": "data.prompts_per_step",
        "train_files": "data.path",
        "val_files": "evaluation.benchmarks",
        "ppo_mini_batch_size": "training.updates_per_rollout",
        "ppo_micro_batch_size_per_gpu": "training.micro_batch_size",
        "ppo_max_token_len_per_gpu": "training.max_tokens_per_micro_batch",
        "use_dynamic_bsz": "parallel.sequence_packing",
        "use_remove_padding": "parallel.sequence_packing",
        "clip_ratio_low": "objective.clip_low",
        "clip_ratio_high": "objective.clip_high",
        "clip_ratio_c": "objective.dual_clip",
        "entropy_coeff": "objective.entropy_coef",
        "kl_loss_coef": "objective.kl_coef",
        "kl_loss_type": "objective.kl_estimator",
        "loss_agg_mode": "objective.loss_aggregation",
        "adv_estimator": "objective.name",
        "tis_imp_ratio_cap": "objective.tis_cap",
        "total_training_steps": "training.steps",
        "save_freq": "training.save_interval",
        "test_freq": "evaluation.interval",
        "resume_mode": "training.resume",
        "project_name": "logging.wandb_project",
        "compute_score": "judging.verifier",
        "log_prob_micro_batch_size_per_gpu": "training.micro_batch_size",
        # Megatron-LM
        "tp": _MODEL_PARALLEL,
        "tensor_parallel_size": _MODEL_PARALLEL,
        "pp": "parallel.pipeline_model_parallel_size",
        "pipeline_parallel_size": "parallel.pipeline_model_parallel_size",
        "cp": "parallel.context_parallel_size",
        "ep": "parallel.expert_model_parallel_size",
        "train_iters": "training.steps",
        "global_batch_size": "data.prompts_per_step",
        "seq_length": "rollout.max_response_length",
        "load": "model.path",
        "save": "run_dir",
        "bf16": "model.params_dtype",
        "min_learning_rate": "optimizer.min_lr",
    }
)
