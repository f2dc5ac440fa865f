"""The families of models that are known: what the name of an architecture in a ``config.json``
implies, one entry each.

To add a family, write an entry and, if it has other tensors than the traits describe, rows in
:mod:`megatron_dcpo.weights.table` (CONTRIBUTING.md, An architecture).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_dcpo.architectures.architecture import LLAMA_NORMS, LayerNorms, RouterScore
from megatron_dcpo.architectures.keys import Keys


@dataclass(frozen=True)
class Windows:
    """A family in which some layers have a sliding window. Without ``layer_types`` every
    ``period``-th has none. The base of the others' rotary frequencies is ``rope_theta``, unless the
    key ``theta_key`` has another.
    """

    period: int
    rope_theta: float
    theta_key: str | None = None


@dataclass(frozen=True)
class Traits:
    """What the name of an architecture implies, and the ``keys`` of its configuration. With
    ``always_qkv_bias`` there are biases whatever ``attention_bias`` says, which is also about the
    output projection if it ``biases_the_output``. transformers knows ``rope_types`` for it under
    these names, and takes ``rope_theta``, ``partial_rotary_factor``, ``hidden_act`` (under the name
    ``activation_key``) and ``tied_embeddings`` where the configuration is silent; a family without
    a ``partial_rotary_factor`` rotates all dimensions. With ``scaled_embeddings`` they are
    multiplied by the root of the hidden size. The other fields are those of
    :class:`~megatron_dcpo.architectures.architecture.Architecture`.
    """

    keys: Keys
    qk_layernorm: bool = False
    whole_qk_layernorm: bool = False
    norms: LayerNorms = LLAMA_NORMS
    zero_centered_norms: bool = False
    always_qkv_bias: bool = False
    biases_the_output: bool = True
    experts: bool = False
    fused_projections: tuple[str, ...] = ()
    rope_types: tuple[str, ...] = ("default", "llama3", "yarn")
    rope_theta: float = 10000.0
    partial_rotary_factor: float | None = None
    rotary_interleaved: bool = False
    windows: Windows | None = None
    activation_key: str = "hidden_act"
    hidden_act: str = "silu"
    tied_embeddings: bool = False
    scaled_embeddings: bool = False
    router: RouterScore = "softmax"
    shared_expert_gate: bool = False

    @property
    def implied(self) -> dict[str, Any]:
        """Return the fields of an architecture that no key of its configuration decides."""
        return {
            "name": self.keys.model_type,
            "qk_layernorm": self.qk_layernorm,
            "whole_qk_layernorm": self.whole_qk_layernorm,
            "norms": self.norms,
            "zero_centered_norms": self.zero_centered_norms,
            "fused_projections": self.fused_projections,
            "rotary_interleaved": self.rotary_interleaved,
        }


_BEHIND = LayerNorms(
    attention_input=None,
    attention_output="post_attention_layernorm",
    mlp_input=None,
    mlp_output="post_feedforward_layernorm",
)

# of a mixture of experts whose router has a sigmoid, as DeepSeek-V3 has it
_SIGMOID_ROUTER = frozenset(
    {
        "first_k_dense_replace",
        "moe_intermediate_size",
        "n_group",
        "n_routed_experts",
        "n_shared_experts",
        "norm_topk_prob",
        "num_experts_per_tok",
        "num_local_experts",
        "routed_scaling_factor",
        "topk_group",
    }
)
# of Qwen's mixtures of experts
_SOFTMAX_ROUTER = frozenset(
    {
        "decoder_sparse_step",
        "mlp_only_layers",
        "moe_intermediate_size",
        "norm_topk_prob",
        "num_experts",
        "num_experts_per_tok",
        "num_local_experts",
    }
)

ARCHITECTURES: dict[str, Traits] = {
    "Qwen3ForCausalLM": Traits(
        keys=Keys(model_type="qwen3", window_is_optional=True), qk_layernorm=True
    ),
    "Qwen3MoeForCausalLM": Traits(
        keys=Keys(
            model_type="qwen3_moe",
            translated=_SOFTMAX_ROUTER,
            fixed={"n_shared_experts": (0,)},
            window_is_optional=True,
        ),
        qk_layernorm=True,
        experts=True,
    ),
    "Qwen2MoeForCausalLM": Traits(
        keys=Keys(
            model_type="qwen2_moe",
            translated=_SOFTMAX_ROUTER | {"shared_expert_intermediate_size"},
            fixed={"attention_bias": (True,), "qkv_bias": (True,)},
            window_is_optional=True,
        ),
        always_qkv_bias=True,
        experts=True,
        shared_expert_gate=True,
    ),
    # GLM-4.5 and 4.6
    "Glm4MoeForCausalLM": Traits(
        keys=Keys(
            model_type="glm4_moe",
            translated=_SIGMOID_ROUTER
            | {"num_nextn_predict_layers", "partial_rotary_factor", "use_qk_norm"},
        ),
        experts=True,
        router="sigmoid",
        biases_the_output=False,
        rope_types=("default",),
        partial_rotary_factor=0.5,
    ),
    "Dots1ForCausalLM": Traits(
        keys=Keys(
            model_type="dots1", translated=_SIGMOID_ROUTER, spelled_out={"sliding_window": 4096}
        ),
        qk_layernorm=True,
        experts=True,
        router="sigmoid",
    ),
    "LlamaForCausalLM": Traits(keys=Keys(model_type="llama", translated=frozenset({"mlp_bias"}))),
    "MistralForCausalLM": Traits(
        keys=Keys(
            model_type="mistral",
            fixed={"attention_bias": (False,)},
            spelled_out={"num_key_value_heads": 8, "sliding_window": 4096},
        )
    ),
    "Qwen2ForCausalLM": Traits(
        keys=Keys(model_type="qwen2", fixed={"attention_bias": (True,)}, window_is_optional=True),
        always_qkv_bias=True,
    ),
    # Phi-4 too
    "Phi3ForCausalLM": Traits(
        keys=Keys(
            model_type="phi3",
            # which only longrope reads
            translated=frozenset({"original_max_position_embeddings"}),
            fixed={"attention_bias": (False,)},
            window_may_cover_all=True,
        ),
        fused_projections=("qkv_proj", "gate_up_proj"),
        # transformers takes yarn for longrope here
        rope_types=("default",),
    ),
    # GLM-4-9B-Chat as transformers has it, GLM-Edge
    "GlmForCausalLM": Traits(
        keys=Keys(
            model_type="glm",
            translated=frozenset({"partial_rotary_factor"}),
            spelled_out={"attention_bias": True, "head_dim": 128, "num_key_value_heads": 2},
        ),
        biases_the_output=False,
        fused_projections=("gate_up_proj",),
        rope_types=("default",),
        partial_rotary_factor=0.5,
        rotary_interleaved=True,
    ),
    # GLM-4-0414 and GLM-Z1
    "Glm4ForCausalLM": Traits(
        keys=Keys(
            model_type="glm4",
            translated=frozenset({"partial_rotary_factor"}),
            spelled_out={"attention_bias": True, "head_dim": 128, "num_key_value_heads": 2},
        ),
        norms=LayerNorms(
            attention_output="post_self_attn_layernorm", mlp_output="post_mlp_layernorm"
        ),
        biases_the_output=False,
        fused_projections=("gate_up_proj",),
        rope_types=("default",),
        partial_rotary_factor=0.5,
        rotary_interleaved=True,
    ),
    "Olmo2ForCausalLM": Traits(
        keys=Keys(model_type="olmo2"), norms=_BEHIND, whole_qk_layernorm=True
    ),
    "Olmo3ForCausalLM": Traits(
        keys=Keys(
            model_type="olmo3",
            translated=frozenset({"layer_types", "sliding_window"}),
            spelled_out={"sliding_window": 4096},
        ),
        norms=_BEHIND,
        whole_qk_layernorm=True,
        rope_theta=500000.0,
        windows=Windows(period=4, rope_theta=500000.0),
    ),
    # the language model of Gemma 3
    "Gemma3ForCausalLM": Traits(
        keys=Keys(
            model_type="gemma3_text",
            translated=frozenset(
                {
                    "_sliding_window_pattern",
                    "hidden_activation",
                    "layer_types",
                    "query_pre_attn_scalar",
                    "rope_local_base_freq",
                    "sliding_window",
                    "sliding_window_pattern",
                }
            ),
            fixed={
                "attn_logit_softcapping": (),
                "final_logit_softcapping": (),
                "hidden_act": (),  # which is not read
                "use_bidirectional_attention": (False,),
            },
            spelled_out={"head_dim": 256, "num_key_value_heads": 4, "sliding_window": 4096},
        ),
        qk_layernorm=True,
        norms=LayerNorms(
            attention_output="post_attention_layernorm",
            mlp_input="pre_feedforward_layernorm",
            mlp_output="post_feedforward_layernorm",
        ),
        zero_centered_norms=True,
        rope_types=("default", "linear"),
        rope_theta=1e6,
        windows=Windows(period=6, rope_theta=10000.0, theta_key="rope_local_base_freq"),
        activation_key="hidden_activation",
        hidden_act="gelu_pytorch_tanh",
        tied_embeddings=True,
        scaled_embeddings=True,
    ),
}
