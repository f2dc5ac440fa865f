"""One rank: load an imported checkpoint into a stock ``GPTModel`` with Megatron's own code,
compare, save with it again.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from megatron_dcpo.architectures.config_json import read_architecture
from megatron_dcpo.checkpoints.saver import Saver
from megatron_dcpo.checkpoints.state import checkpoint_state
from megatron_dcpo.config import Config, DataConfig, ModelConfig, OptimizerConfig
from megatron_dcpo.policy.model import build_policy, tensors_of
from megatron_dcpo.policy.optimizer import PolicyOptimizer
from megatron_dcpo.runtime.device import capabilities
from megatron_dcpo.runtime.distributed import all_gather_objects, barrier
from megatron_dcpo.weights.layout import UNEVEN_PIPELINE, Layout
from megatron_dcpo.weights.table import ROUTER_BIAS
from tests.distributed.cases.common import initialize_layout, parallel_config

from megatron.core import dist_checkpointing, parallel_state  # isort: skip
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.transformer_config import TransformerConfig


def stock_chunks(arch, vocab_size, dtype, parallel, loads, **config_options):
    """What ``pretrain_gpt.py`` would build: Megatron's classes and layer spec, none of ours."""
    vp = parallel.virtual_pipeline_model_parallel_size
    config = TransformerConfig(
        num_layers=arch.num_layers,
        hidden_size=arch.hidden_size,
        ffn_hidden_size=arch.dense_ffn_hidden_size or arch.ffn_hidden_size,
        num_attention_heads=arch.num_attention_heads,
        num_query_groups=arch.num_query_groups,
        kv_channels=arch.kv_channels,
        normalization="RMSNorm",
        layernorm_epsilon=arch.layernorm_epsilon,
        qk_layernorm=arch.qk_layernorm,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=arch.qkv_bias,
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=vp if vp > 1 else None,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=True,
        **{option: getattr(parallel, option) for option in UNEVEN_PIPELINE},
        **(experts_of(arch, parallel) if arch.num_experts else {}),
        **config_options,
    )
    if capabilities().transformer_engine:  # the stand-in
        spec = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=arch.qk_layernorm)
    else:
        spec = local_spec(arch, loads, arch.num_experts or None)
    stage, stages = (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel.pipeline_model_parallel_size,
    )
    chunks = []
    for virtual in range(vp):
        if arch.dense_layers:
            spec = block_of(arch, loads, config, virtual if vp > 1 else None, stage)
        chunk = GPTModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=vocab_size,
            max_sequence_length=arch.max_position_embeddings,
            pre_process=stage == 0 and virtual == 0,
            post_process=stage == stages - 1 and virtual == vp - 1,
            share_embeddings_and_output_weights=arch.tied_embeddings,
            position_embedding_type="rope",
            vp_stage=virtual if vp > 1 else None,
        )
        for parameter in chunk.parameters():
            torch.nn.init.constant_(parameter, 7.0)  # whatever is not loaded shows
        chunks.append(chunk)
    return chunks


def local_spec(arch, loads, num_experts):
    spec = get_gpt_layer_local_spec(
        num_experts=num_experts,
        moe_grouped_gemm=False,
        qk_layernorm=arch.qk_layernorm,
        normalization="RMSNorm",
    )
    if num_experts and loads:
        # the local spec names the norm before experts otherwise than Transformer Engine's
        del spec.submodules.sharded_state_dict_keys_map["pre_mlp_layernorm."]
    return spec


def block_of(arch, loads, config, vp_stage, pp_rank):
    """As ``get_gpt_decoder_block_spec``, with the layers' own names of norms."""
    kinds = {True: arch.num_experts, False: None}
    block = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=False,
        normalization="RMSNorm",
        vp_stage=vp_stage,
        pp_rank=pp_rank,
    )
    block.layer_specs = [
        local_spec(arch, loads, kinds["MoELayer" in repr(spec.submodules.mlp)])
        for spec in block.layer_specs
    ]
    return block


def experts_of(arch, parallel):
    router = {}
    if arch.router_bias:
        router = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    if arch.dense_layers:
        router["moe_layer_freq"] = [
            int(arch.has_experts(layer)) for layer in range(arch.num_layers)
        ]
    if arch.shared_ffn_hidden_size:
        router["moe_shared_expert_intermediate_size"] = arch.shared_ffn_hidden_size
        router["moe_shared_expert_gate"] = arch.shared_expert_gate
    return router | {
        "num_moe_experts": arch.num_experts,
        "moe_ffn_hidden_size": arch.ffn_hidden_size,
        "moe_router_topk": arch.experts_per_token,
        "moe_token_dispatcher_type": "alltoall",
        "expert_model_parallel_size": parallel.expert_model_parallel_size,
        "expert_tensor_parallel_size": parallel.expert_tensor_parallel_size,
    }


def run(options: dict[str, Any]) -> Any:
    parallel = parallel_config(options["parallel"])
    topology = initialize_layout(parallel)
    different = []
    for index, case in enumerate(options["cases"]):
        arch = read_architecture(case["model"])
        dtype = torch.bfloat16 if case["dtype"] == "bf16" else torch.float32
        chunks = stock_chunks(
            arch, case["padded"], dtype, parallel, "checkpoint" in case, **case.get("config", {})
        )
        if not case.get("mixed"):
            chunks = [
                chunk.to(dtype) for chunk in chunks
            ]  # as Float16Module does: the local RMSNorm is fp32 otherwise
        if "checkpoint" in case:
            state = {f"model{i}": chunk.sharded_state_dict() for i, chunk in enumerate(chunks)}
            if len(chunks) == 1:
                state = state["model0"]
            loaded = dist_checkpointing.load(state, case["checkpoint"])
            for i, chunk in enumerate(chunks):
                chunk.load_state_dict(
                    loaded if len(chunks) == 1 else loaded[f"model{i}"], strict=True
                )
        model = ModelConfig(path=case["model"], params_dtype=case["dtype"])
        with vocabulary_of(case["padded"]):
            policy = build_policy(model, parallel, topology, training=False)
        for i, chunk in enumerate(chunks):
            expected = policy.parameters(i)
            found = tensors_of(chunk)
            if set(found) != set(expected):
                different.append(f"names {sorted(set(found) ^ set(expected))}")
            for name, parameter in found.items():
                if "checkpoint" not in case:
                    parameter.data.copy_(expected[name])
                rows = _vocabulary_rows(arch, case["padded"], name, topology)
                # the biases of routers stay fp32
                own = torch.float32 if name.endswith(ROUTER_BIAS) else dtype
                here = parameter.data[:rows].to(own)
                if expected[name].dtype != own or not torch.equal(here, expected[name][:rows]):
                    different.append(f"case {index} chunk {i} {name}")
        if case.get("run"):
            with vocabulary_of(case["padded"]):
                save_run(Path(case["save"]), model, parallel, topology)
        elif case.get("save"):
            if topology.rank == 0:
                Path(case["save"]).mkdir(parents=True)
            barrier()
            metadata = case.get("metadata")
            state = {
                f"model{i}": chunk.sharded_state_dict(metadata=metadata)
                for i, chunk in enumerate(chunks)
            }
            dist_checkpointing.save(state["model0"] if len(chunks) == 1 else state, case["save"])
    everyone = [name for names in all_gather_objects(different) for name in names]
    return {"different": everyone}


def vocabulary_of(padded):
    """A policy whose vocabulary has ``padded`` rows, as that of another Megatron may."""
    of = Layout.of

    def padded_otherwise(parallel, transformer_engine=False):
        divisor = padded // parallel.tensor_model_parallel_size
        return dataclasses.replace(
            of(parallel, transformer_engine), make_vocab_size_divisible_by=divisor
        )

    return patch.object(Layout, "of", padded_otherwise)


def save_run(directory, model, parallel, topology):
    """A training run's checkpoint, optimizer included, with the weights still those of the
    model.
    """
    config = Config(
        run_dir="unused",
        model=model,
        data=DataConfig(path="unused"),
        parallel=parallel,
        optimizer=OptimizerConfig(lr=0.0),
    )
    policy = build_policy(model, parallel, topology)
    optimizer = PolicyOptimizer(policy, config)
    # gradients and learning rate are zero: it makes the moments and leaves the weights
    optimizer.megatron.step()
    run = dict.fromkeys(("seed", "data", "reward", "engine"), 0)
    state = checkpoint_state(policy, optimizer, 0, run)
    saver = Saver(directory, topology.rank, keep=1, background=False)
    saver.begin(0, state)
    saver.wait()


def _vocabulary_rows(arch, padded, name, topology):
    """Rows of a shard that hold real tokens; the rest is padding, which a model of another padding
    does not load.
    """
    if name not in ("embedding.word_embeddings.weight", "output_layer.weight"):
        return None
    size = padded // topology.tp_size
    return max(0, min(size, arch.vocab_size - topology.tp_rank * size))
