"""A decoder-only model as its Hugging Face ``config.json`` describes it, as far as the weight table
and the policy need it.

To add an architecture, write one entry in :data:`ARCHITECTURES` for its peculiarities and, if its
tensor names differ from Llama's, rows in :mod:`megatron_dcpo.weights.table`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from megatron_dcpo.errors import UserError, one_line
from megatron_dcpo.runtime.paths import places
from megatron_dcpo.runtime.text import read_json_object
from megatron_dcpo.weights.config_keys import (
    Keys,
    check_keys,
    check_said_once,
    check_unquantized,
)
from megatron_dcpo.weights.decoder import (
    LLAMA_NORMS,
    Activation,
    Architecture,
    DeltaNet,
    LayerNorms,
    LinearScaling,
    RopeScaling,
    RouterScore,
    SlidingWindow,
    YarnScaling,
    yarn_attention_factor,
)
from megatron_dcpo.weights.nearest import Family, unknown_architecture

# OWNER/NAME, as the hub writes it
HUB_NAME = re.compile(r"(?!\.)[\w.-]+/(?!\.)[\w.-]+")


@dataclass(frozen=True)
class _Windows:
    """A family in which some layers have a sliding window. Without ``layer_types`` every
    ``period``-th has none. The base of the others' rotary frequencies is ``rope_theta``, unless the
    key ``theta_key`` has another.
    """

    period: int
    rope_theta: float
    theta_key: str | None = None


@dataclass(frozen=True)
class _Traits:
    """What the name of an architecture implies, and the ``keys`` of its configuration. With
    ``always_qkv_bias`` there are biases whatever ``attention_bias`` says, which is also about the
    output projection if it ``biases_the_output``. transformers knows ``rope_types`` for it under
    these names, and takes ``rope_theta``, ``partial_rotary_factor``, ``hidden_act`` (under the name
    ``activation_key``) and ``tied_embeddings`` where the configuration is silent; a family without
    a ``partial_rotary_factor`` rotates all dimensions. With ``scaled_embeddings`` they are
    multiplied by the root of the hidden size. Every ``delta_nets``-th layer has attention and the
    others a gated delta net, unless ``layer_types`` says otherwise. ``rope_without_influence`` are
    keys of the rotary embedding that change nothing of a text. The other fields are those of
    :class:`~megatron_dcpo.weights.decoder.Architecture`.
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
    rope_without_influence: tuple[str, ...] = ()
    windows: _Windows | None = None
    delta_nets: int | None = None
    attention_output_gate: bool = False
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
            "attention_output_gate": self.attention_output_gate,
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

# of gated delta nets; transformers takes others' values for missing ones
_DELTA_NET = (
    "linear_conv_kernel_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
)

ARCHITECTURES: dict[str, _Traits] = {
    "Qwen3ForCausalLM": _Traits(
        keys=Keys(model_type="qwen3", window_is_optional=True),
        qk_layernorm=True,
    ),
    "Qwen3MoeForCausalLM": _Traits(
        keys=Keys(
            model_type="qwen3_moe",
            translated=_SOFTMAX_ROUTER,
            fixed={"n_shared_experts": (0,)},
            window_is_optional=True,
        ),
        qk_layernorm=True,
        experts=True,
    ),
    "Qwen2MoeForCausalLM": _Traits(
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
    "Glm4MoeForCausalLM": _Traits(
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
    "Dots1ForCausalLM": _Traits(
        keys=Keys(
            model_type="dots1",
            translated=_SIGMOID_ROUTER,
            spelled_out={"sliding_window": 4096},
        ),
        qk_layernorm=True,
        experts=True,
        router="sigmoid",
    ),
    # the language model of Qwen3.5
    "Qwen3_5ForCausalLM": _Traits(
        keys=Keys(
            model_type="qwen3_5_text",
            translated=frozenset(
                {
                    *_DELTA_NET,
                    "full_attention_interval",
                    "layer_types",
                    "partial_rotary_factor",
                    # the layers that predict further tokens, which transformers leaves out
                    "mtp_num_hidden_layers",
                    "mtp_use_dedicated_embeddings",
                }
            ),
            fixed={
                "attention_bias": (False,),
                "attn_output_gate": (True,),
                "hidden_act": ("silu",),
                "mamba_ssm_dtype": ("float32",),
                "output_gate_type": ("silu", "swish"),
                "mlp_only_layers": ([],),
            },
            spelled_out={"head_dim": 256, "num_key_value_heads": 4},
        ),
        qk_layernorm=True,
        zero_centered_norms=True,
        fused_projections=("in_proj_qkv", "conv1d"),
        rope_types=("default",),
        partial_rotary_factor=0.25,
        # where images are: the positions of a text are the same in all three directions
        rope_without_influence=("mrope_interleaved", "mrope_section"),
        delta_nets=4,
        attention_output_gate=True,
    ),
    "LlamaForCausalLM": _Traits(
        keys=Keys(model_type="llama", translated=frozenset({"mlp_bias"})),
    ),
    "MistralForCausalLM": _Traits(
        keys=Keys(
            model_type="mistral",
            fixed={"attention_bias": (False,)},
            spelled_out={"num_key_value_heads": 8, "sliding_window": 4096},
        ),
    ),
    "Qwen2ForCausalLM": _Traits(
        keys=Keys(
            model_type="qwen2",
            fixed={"attention_bias": (True,)},
            window_is_optional=True,
        ),
        always_qkv_bias=True,
    ),
    # Phi-4 too
    "Phi3ForCausalLM": _Traits(
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
    "GlmForCausalLM": _Traits(
        keys=Keys(
            model_type="glm",
            translated=frozenset({"partial_rotary_factor"}),
            spelled_out={
                "attention_bias": True,
                "head_dim": 128,
                "num_key_value_heads": 2,
            },
        ),
        biases_the_output=False,
        fused_projections=("gate_up_proj",),
        rope_types=("default",),
        partial_rotary_factor=0.5,
        rotary_interleaved=True,
    ),
    # GLM-4-0414 and GLM-Z1
    "Glm4ForCausalLM": _Traits(
        keys=Keys(
            model_type="glm4",
            translated=frozenset({"partial_rotary_factor"}),
            spelled_out={
                "attention_bias": True,
                "head_dim": 128,
                "num_key_value_heads": 2,
            },
        ),
        norms=LayerNorms(
            attention_output="post_self_attn_layernorm",
            mlp_output="post_mlp_layernorm",
        ),
        biases_the_output=False,
        fused_projections=("gate_up_proj",),
        rope_types=("default",),
        partial_rotary_factor=0.5,
        rotary_interleaved=True,
    ),
    "Olmo2ForCausalLM": _Traits(
        keys=Keys(model_type="olmo2"),
        norms=_BEHIND,
        whole_qk_layernorm=True,
    ),
    "Olmo3ForCausalLM": _Traits(
        keys=Keys(
            model_type="olmo3",
            translated=frozenset({"layer_types", "sliding_window"}),
            spelled_out={"sliding_window": 4096},
        ),
        norms=_BEHIND,
        whole_qk_layernorm=True,
        rope_theta=500000.0,
        windows=_Windows(period=4, rope_theta=500000.0),
    ),
    # the language model of Gemma 3
    "Gemma3ForCausalLM": _Traits(
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
            spelled_out={
                "head_dim": 256,
                "num_key_value_heads": 4,
                "sliding_window": 4096,
            },
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
        windows=_Windows(
            period=6, rope_theta=10000.0, theta_key="rope_local_base_freq"
        ),
        activation_key="hidden_activation",
        hidden_act="gelu_pytorch_tanh",
        tied_embeddings=True,
        scaled_embeddings=True,
    ),
}


_SIZES = (
    "num_attention_heads",
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "n_routed_experts",
    "moe_intermediate_size",
    "sliding_window",
    "sliding_window_pattern",
    "_sliding_window_pattern",
    "shared_expert_intermediate_size",
    "decoder_sparse_step",
    "n_group",
    "topk_group",
    "full_attention_interval",
    *_DELTA_NET,
)
# counts that may be 0
_NUMBERS = (
    "first_k_dense_replace",
    "n_shared_experts",
    "num_nextn_predict_layers",
)
_ABSURD = 1 << 40
_SWITCHES = (
    "attention_bias",
    "mlp_bias",
    "norm_topk_prob",
    "tie_word_embeddings",
    "use_qk_norm",
)


def read_architecture(
    model_dir: str | Path, weights_elsewhere: bool = False
) -> Architecture:
    """Read ``model_dir/config.json``. Raises :class:`UserError` for what is missing, unknown or
    not supported.

    With ``weights_elsewhere`` the directory gives its configuration to weights that are not its
    own, so that it may say that its own are quantized.
    """
    model_dir = Path(model_dir)
    path = model_dir / "config.json"
    check_model_dir(model_dir)
    config = read_json_object(path)
    if not weights_elsewhere:
        check_unquantized(config, str(path))
    return parse_architecture(config, str(path), model_dir)


def check_model_dir(model_dir: str | Path) -> None:
    """Raise :class:`UserError`, with what to pass instead, if there is no model."""
    directory = Path(model_dir)
    if (directory / "config.json").is_file():
        return
    if directory.is_file():
        raise UserError(
            f"{directory} is a file; pass the directory that holds config.json and the weights"
        )
    if (directory / "policy" / "config.json").is_file():
        raise UserError(
            f"{directory} is the directory of a run; its trained model is {directory / 'policy'}"
        )
    if directory.is_dir():
        raise UserError(
            f"{directory / 'config.json'} is missing; {directory} is not a Hugging Face checkpoint "
            "directory"
        )
    if HUB_NAME.fullmatch(str(model_dir)) and not directory.parent.is_dir():
        raise UserError(
            f"model directory {model_dir} does not exist{places(model_dir)}; if it is a name on "
            f"the hub, download it: hf download {model_dir} --local-dir {directory.name}, and pass "
            f"{directory.name}"
        )
    raise UserError(
        f"model directory {model_dir} does not exist{places(model_dir)}; pass a Hugging Face "
        "checkpoint directory"
    )


def is_known(config: dict[str, Any]) -> bool:
    """Return whether the dictionary of a ``config.json`` names an architecture of
    :data:`ARCHITECTURES`.
    """
    names = config.get("architectures") or []
    if not isinstance(names, list):
        names = [names]
    return any(name in ARCHITECTURES for name in names if isinstance(name, str))


def parse_architecture(
    config: dict[str, Any],
    source: str = "config.json",
    model_dir: Path | None = None,
) -> Architecture:
    """Translate the dictionary of a ``config.json``; ``source`` names it in errors. Weights in
    ``model_dir`` help to say what is near an architecture that is not known.

    Raises :class:`UserError` if a key may describe another model than the one that is built.
    """
    name, traits = _traits(config, source, model_dir)
    check_said_once(config, source)
    check_keys(config, traits.keys, source)
    _check_types(config, traits, source)
    attention_bias = bool(config.get("attention_bias")) and not traits.always_qkv_bias
    try:
        heads = config["num_attention_heads"]
        kv_channels = config.get("head_dim") or config["hidden_size"] // heads
        window = None
        if traits.windows is not None:
            window = _sliding_window(config, traits.windows, source)
        base, scaling = _rope(_of_full_layers(config, traits, source), traits, source)
        experts = _experts(config, traits, source) if traits.experts else {}
        return Architecture(
            num_layers=config["num_hidden_layers"],
            hidden_size=config["hidden_size"],
            ffn_hidden_size=config[
                "moe_intermediate_size" if traits.experts else "intermediate_size"
            ],
            num_attention_heads=heads,
            num_query_groups=config.get("num_key_value_heads") or heads,
            kv_channels=kv_channels,
            vocab_size=config["vocab_size"],
            max_position_embeddings=_positions(config, scaling),
            layernorm_epsilon=_positive(config, "rms_norm_eps", source),
            rotary_base=base,
            rope_scaling=scaling,
            tied_embeddings=bool(
                config.get("tie_word_embeddings", traits.tied_embeddings)
            ),
            qkv_bias=traits.always_qkv_bias or attention_bias,
            output_bias=attention_bias and traits.biases_the_output,
            mlp_bias=bool(config.get("mlp_bias")),
            activation=_activation(config, traits, source),
            rotary_percent=_rotary_percent(config, traits, kv_channels, source),
            query_scalar=_query_scalar(config, traits, source),
            embedding_scale=_embedding_scale(config, traits),
            sliding_window=window,
            delta_net=_delta_net(config, traits, source),
            **{**traits.implied, **_optional_norms(config), **experts},
        )
    except KeyError as error:
        raise UserError(f"{source}: {name} needs the key {error}") from None
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise UserError(
            f"{source}: not the configuration of a {name} ({one_line(error, 200)})"
        ) from None


def _check_types(config: dict[str, Any], traits: _Traits, source: str) -> None:
    """Raise :class:`UserError` for a key that is no count, number or switch and ought to be one."""
    for key in _SIZES:
        value = config.get(key)
        if key == "sliding_window" and traits.windows is None:
            continue  # transformers writes 0 for a model of Qwen2-MoE that has none
        if value is not None and not (type(value) is int and 0 < value < _ABSURD):
            raise UserError(f"{source}: {key} must be a count, not {value!r:.40}")
    for key in _NUMBERS:
        value = config.get(key)
        if value is not None and not (type(value) is int and 0 <= value < _ABSURD):
            raise UserError(f"{source}: {key} must be a number, not {value!r:.40}")
    for key in _SWITCHES:
        value = config.get(key)
        if value is not None and not isinstance(value, bool):
            raise UserError(f"{source}: {key} must be true or false, not {value!r:.40}")


def _traits(
    config: dict[str, Any], source: str, model_dir: Path | None
) -> tuple[str, _Traits]:
    """Return the architecture's name and its traits."""
    names = config.get("architectures") or ["(none)"]
    if not isinstance(names, list):
        names = [names]
    name = str(names[0])
    if len(names) > 1:
        raise UserError(f"{source}: architectures must be one name, not {names!r:.80}")
    if name not in ARCHITECTURES:
        raise UserError(
            unknown_architecture(config, name, source, model_dir, known_families())
        )
    return name, ARCHITECTURES[name]


def known_families() -> list[Family]:
    """Return the architectures as far as an unknown one is compared with them."""
    return [_family(name, traits) for name, traits in ARCHITECTURES.items()]


def _family(name: str, traits: _Traits) -> Family:
    """Return a known architecture with its smallest model, whose tensors have the names of all."""
    has_sigmoid = traits.router == "sigmoid"
    smallest = Architecture(
        num_layers=2 if traits.delta_nets else 1,
        hidden_size=1,
        ffn_hidden_size=1,
        num_attention_heads=1,
        num_query_groups=1,
        kv_channels=1,
        vocab_size=1,
        max_position_embeddings=1,
        layernorm_epsilon=1.0,
        rotary_base=1.0,
        rope_scaling=None,
        tied_embeddings=False,
        qkv_bias=traits.always_qkv_bias,
        num_experts=int(traits.experts),
        experts_per_token=int(traits.experts),
        shared_ffn_hidden_size=int(traits.shared_expert_gate or has_sigmoid),
        shared_expert_gate=traits.shared_expert_gate,
        router_score=traits.router,
        router_bias=has_sigmoid,
        delta_net=_SMALLEST_DELTA_NET if traits.delta_nets else None,
        **traits.implied,
    )
    return Family(
        name=name,
        keys=traits.keys,
        smallest=smallest,
        biases_the_output=traits.biases_the_output,
    )


# with attention in the other of two layers
_SMALLEST_DELTA_NET = DeltaNet(
    layers=(True, False),
    kernel_size=1,
    key_heads=1,
    value_heads=1,
    key_channels=1,
    value_channels=1,
)


def _given(config: dict[str, Any], key: str) -> Any:  # noqa: ANN401 - checked before
    """Return a value that must be there. Raises KeyError if it is missing or null."""
    if config.get(key) is None:
        raise KeyError(key)
    return config[key]


def _positive(config: dict[str, Any], key: str, source: str) -> float:
    """Return a number that must be positive and finite. Raises KeyError if it is missing."""
    value = float(config[key])
    if not 0 < value < math.inf:
        raise UserError(
            f"{source}: {key} must be positive and finite, not {config[key]!r:.40}"
        )
    return value


def _activation(config: dict[str, Any], traits: _Traits, source: str) -> Activation:
    key = traits.activation_key
    name = config.get(key) or traits.hidden_act
    if name == "swish":
        name = "silu"
    for known in get_args(Activation):
        if name == known:
            activation: Activation = known
            return activation
    raise UserError(
        f"{source}: {key}={name!r:.60} is not supported, and it changes the model; known: "
        f"{', '.join(get_args(Activation))}"
    )


def _optional_norms(config: dict[str, Any]) -> dict[str, Any]:
    """Return the norms that a key of the configuration decides about."""
    return {"qk_layernorm": True} if config.get("use_qk_norm") else {}


def _experts(config: dict[str, Any], traits: _Traits, source: str) -> dict[str, Any]:
    """Return the fields of an architecture with a mixture of experts. Raises :class:`UserError` for
    other mixtures.
    """
    chosen = _given(config, "num_experts_per_tok")
    if traits.router == "sigmoid":
        number = _given(config, "n_routed_experts")
        fields = _sigmoid_router(config, source)
    else:
        # transformers 5 writes num_local_experts, the checkpoints on the hub have num_experts
        number = config[
            "num_experts" if "num_experts" in config else "num_local_experts"
        ]
        fields = _softmax_router(config, traits, source)
    if chosen > number:
        raise UserError(
            f"{source}: num_experts_per_tok={chosen} is more than the {number} experts"
        )
    if len(fields["dense_layers"]) == config["num_hidden_layers"]:
        raise UserError(
            f"{source}: no layer has experts, which is not supported for "
            f"{config['architectures']!r:.60}"
        )
    if fields["dense_layers"]:
        fields["dense_ffn_hidden_size"] = config["intermediate_size"]
    return {"num_experts": number, "experts_per_token": chosen, **fields}


def _softmax_router(
    config: dict[str, Any], traits: _Traits, source: str
) -> dict[str, Any]:
    """Return the fields of Qwen's mixtures: every ``decoder_sparse_step``-th layer has experts,
    unless it is one of ``mlp_only_layers``.
    """
    layers = config["num_hidden_layers"]
    only_mlp = config.get("mlp_only_layers") or []
    if not all(type(layer) is int and 0 <= layer < layers for layer in only_mlp):
        raise UserError(
            f"{source}: mlp_only_layers must be numbers of the {layers} layers, from 0, not "
            f"{only_mlp!r:.60}"
        )
    step = config.get("decoder_sparse_step") or 1
    dense = [
        layer for layer in range(layers) if layer in only_mlp or (layer + 1) % step
    ]
    fields: dict[str, Any] = {
        "dense_layers": tuple(dense),
        "normalized_experts": bool(config.get("norm_topk_prob", False)),
    }
    if traits.shared_expert_gate:
        fields["shared_ffn_hidden_size"] = config["shared_expert_intermediate_size"]
        fields["shared_expert_gate"] = True
    return fields


def _sigmoid_router(config: dict[str, Any], source: str) -> dict[str, Any]:
    """Return the fields of DeepSeek-V3's mixtures: leading layers without experts, a sigmoid with
    a correction bias, and shared experts, which are one of their width together.
    """
    chosen = _given(config, "num_experts_per_tok")
    number = _given(config, "n_routed_experts")
    normalized = bool(_given(config, "norm_topk_prob"))
    layers = config["num_hidden_layers"]
    dense = min(_given(config, "first_k_dense_replace"), layers)
    width = _given(config, "moe_intermediate_size")
    if normalized != (chosen > 1):
        raise UserError(
            f"{source}: norm_topk_prob={normalized} with num_experts_per_tok={chosen} is not "
            "supported: Megatron's sigmoid router divides the weights of several experts by their "
            "sum, and leaves that of a single one"
        )
    groups = config.get("n_group") or 1
    group_topk = config.get("topk_group") or 1
    if group_topk > groups or number % groups:
        raise UserError(
            f"{source}: n_group={groups} and topk_group={group_topk} do not divide the {number} "
            "experts"
        )
    if groups > 1 and chosen != 2 * group_topk:
        raise UserError(
            f"{source}: n_group={groups} with topk_group={group_topk} and num_experts_per_tok="
            f"{chosen} is not supported: transformers compares groups by their best 2 experts, "
            "Megatron by their best num_experts_per_tok / topk_group"
        )
    scale = 1.0
    if config.get("routed_scaling_factor") is not None:
        scale = _positive(config, "routed_scaling_factor", source)
    return {
        "dense_layers": tuple(range(dense)),
        "normalized_experts": normalized,
        "shared_ffn_hidden_size": _given(config, "n_shared_experts") * width,
        "router_score": "sigmoid",
        "router_bias": True,
        "router_scale": scale,
        "router_groups": groups,
        "router_group_topk": group_topk,
        "nextn_layers": config.get("num_nextn_predict_layers") or 0,
    }


def _rotary_percent(
    config: dict[str, Any], traits: _Traits, kv_channels: int, source: str
) -> float:
    """Return the part of a head's dimensions that is rotated."""
    if traits.partial_rotary_factor is None:
        return 1.0
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    given = [config.get("partial_rotary_factor"), rope.get("partial_rotary_factor")]
    factors = {float(factor) for factor in given if factor is not None}
    if len(factors) > 1:
        raise UserError(
            f"{source}: partial_rotary_factor={given[0]!r:.40} and {given[1]!r:.40} among the "
            "parameters of the rotary embedding say one thing differently; remove one of them"
        )
    factor = factors.pop() if factors else traits.partial_rotary_factor
    rotated = int(kv_channels * factor) if 0 < factor <= 1 else 0
    if rotated < 2 or rotated % 2:
        raise UserError(
            f"{source}: partial_rotary_factor={factor:g} must be above 0, at most 1, and leave an "
            f"even number of a head's {kv_channels} dimensions"
        )
    return factor


def _query_scalar(config: dict[str, Any], traits: _Traits, source: str) -> float | None:
    """Return the number by whose root scores are divided, None for the dimensions of a head."""
    if "query_pre_attn_scalar" not in traits.keys.translated:
        return None
    return _positive(config, "query_pre_attn_scalar", source)


def _embedding_scale(config: dict[str, Any], traits: _Traits) -> float | None:
    if not traits.scaled_embeddings:
        return None
    return math.sqrt(config["hidden_size"])


_KINDS = ("full_attention", "sliding_attention")


def _sliding_window(
    config: dict[str, Any], windows: _Windows, source: str
) -> SlidingWindow | None:
    """Return the window of a family in which some layers have one."""
    layers = config["num_hidden_layers"]
    kinds = config.get("layer_types")
    if kinds is None:
        period = windows.period
        for key in ("sliding_window_pattern", "_sliding_window_pattern"):
            period = config.get(key) or period
        kinds = [_KINDS[(layer + 1) % period > 0] for layer in range(layers)]
    if len(kinds) != layers or not set(kinds) <= set(_KINDS):
        raise UserError(
            f"{source}: layer_types={kinds!r:.60} must name {' or '.join(_KINDS)} for each of the "
            f"{layers} layers"
        )
    size = config["sliding_window"]
    if "sliding_attention" not in kinds or size is None:
        return None
    return SlidingWindow(
        size=size,
        layers=tuple(kind == "sliding_attention" for kind in kinds),
        rotary_base=_sliding_base(config, windows, source),
    )


def _delta_net(config: dict[str, Any], traits: _Traits, source: str) -> DeltaNet | None:
    """Return the gated delta nets of a family in which some layers have one."""
    if traits.delta_nets is None:
        return None
    layers = config["num_hidden_layers"]
    kinds = config.get("layer_types")
    if kinds is None:
        period = config.get("full_attention_interval") or traits.delta_nets
        of_period = ["linear_attention"] * (period - 1) + ["full_attention"]
        kinds = [of_period[layer % period] for layer in range(layers)]
    known = ("linear_attention", "full_attention")
    if len(kinds) != layers or not set(kinds) <= set(known):
        raise UserError(
            f"{source}: layer_types={kinds!r:.60} must name {' or '.join(known)} for each of the "
            f"{layers} layers"
        )
    kernel, key_heads, value_heads, key_channels, value_channels = (
        _given(config, key) for key in _DELTA_NET
    )
    if value_heads % key_heads:
        raise UserError(
            f"{source}: linear_num_key_heads={key_heads} must divide linear_num_value_heads="
            f"{value_heads}"
        )
    return DeltaNet(
        layers=tuple(kind == "linear_attention" for kind in kinds),
        kernel_size=kernel,
        key_heads=key_heads,
        value_heads=value_heads,
        key_channels=key_channels,
        value_channels=value_channels,
    )


def _sliding_base(config: dict[str, Any], windows: _Windows, source: str) -> float:
    """Return the base of the rotary frequencies in the layers with a window. Raises
    :class:`UserError` if they would be scaled.
    """
    nested = config.get("rope_parameters")
    if nested:
        rope = {"rope_theta": windows.rope_theta, **nested["sliding_attention"]}
        if rope.get("rope_type", "default") != "default" or rope.keys() - {
            "rope_theta",
            "rope_type",
        }:
            raise UserError(
                f"{source}: rope_parameters.sliding_attention={rope!r:.80} is not supported, and "
                "it changes the model; known there: rope_theta, and the rope_type default"
            )
        return _positive(rope, "rope_theta", source)
    if windows.theta_key is not None and config.get(windows.theta_key) is not None:
        return _positive(config, windows.theta_key, source)
    given = config.get("rope_theta")
    if windows.theta_key is None and given not in (None, windows.rope_theta):
        raise UserError(
            f"{source}: rope_theta={given!r:.40} is of the layers without a sliding window only, "
            "or of all, depending on the release of transformers; write rope_parameters with "
            "full_attention and sliding_attention"
        )
    return windows.rope_theta


def _of_full_layers(
    config: dict[str, Any], traits: _Traits, source: str
) -> dict[str, Any]:
    """Return the configuration with the rotary embedding of the layers without a window as if it
    were that of all.
    """
    nested = config.get("rope_parameters")
    if traits.windows is None or not nested:
        return config
    if set(nested) != set(_KINDS) or not all(
        map(isinstance, nested.values(), [dict] * 2)
    ):
        raise UserError(
            f"{source}: rope_parameters={nested!r:.80} must have {' and '.join(_KINDS)}"
        )
    full = nested["full_attention"]
    theta = config.get("rope_theta")
    if theta is not None and full.get("rope_theta", theta) != theta:
        raise UserError(
            f"{source}: rope_theta={theta!r:.40} and rope_parameters.full_attention say one thing "
            "differently; remove one of them"
        )
    return {**config, "rope_parameters": full}


def _positions(
    config: dict[str, Any], scaling: RopeScaling | YarnScaling | LinearScaling | None
) -> int:
    """Return how many positions the model has. With YaRN this is the longer context, which model
    cards that add it to ``config.json`` do not write into ``max_position_embeddings``.
    """
    positions: int = config["max_position_embeddings"]
    if isinstance(scaling, YarnScaling):
        longer = int(scaling.factor * scaling.original_max_position_embeddings)
        positions = max(positions, longer)
    return positions


_YARN = (
    "factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "truncate",
    "attention_factor",
)
_LLAMA3 = (
    "factor",
    "high_freq_factor",
    "low_freq_factor",
    "original_max_position_embeddings",
)


def _rope(
    config: dict[str, Any], traits: _Traits, source: str
) -> tuple[float, RopeScaling | YarnScaling | LinearScaling | None]:
    """Return the base and the scaling of the rotary frequencies."""
    known = traits.rope_types
    # transformers 5 writes rope_parameters; older checkpoints have rope_theta and rope_scaling.
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    rope = dict(config.get(key) or {})
    # transformers prefers the theta inside, and the newer name of the type
    rope.setdefault("rope_theta", config.get("rope_theta"))
    if rope["rope_theta"] is None:
        rope["rope_theta"] = traits.rope_theta
    rope.setdefault("rope_type", rope.get("type", "default"))
    base = _positive(rope, "rope_theta", source)
    kind = rope["rope_type"]
    if kind not in known:
        raise UserError(
            f"{source}: {key} has the rope type {kind!r:.40}, which is not supported; known for "
            f"{config['architectures']!r:.60}: {', '.join(known)}"
        )
    understood = {"rope_theta", "rope_type", "type"}
    of_kind = {"llama3": set(_LLAMA3), "yarn": set(_YARN), "linear": {"factor"}}
    understood |= of_kind.get(kind, set())
    understood |= set(traits.rope_without_influence)
    is_partial = traits.partial_rotary_factor is not None
    if is_partial or rope.get("partial_rotary_factor") == 1:
        understood.add("partial_rotary_factor")
    for name, value in rope.items():
        if value is not None and name not in understood:
            raise UserError(
                f"{source}: {key}.{name}={value!r:.60} is not supported with the rope type {kind}, "
                "and it may change the model; remove the key if it does not"
            )
    if kind == "default":
        return base, None
    if kind == "linear":
        return base, LinearScaling(_positive(rope, "factor", source))
    if kind == "yarn":
        return base, _yarn(rope, key, source)
    factor, high, low, original = (_positive(rope, name, source) for name in _LLAMA3)
    if high <= low:
        raise UserError(
            f"{source}: {key}.high_freq_factor={high:g} must be more than low_freq_factor={low:g}"
        )
    return base, RopeScaling(
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=int(original),
    )


def _yarn(rope: dict[str, Any], key: str, source: str) -> YarnScaling:
    """Return YaRN's scaling. Raises :class:`UserError` for a factor of the attention that is not
    YaRN's own: engines compute it from ``factor`` alone.
    """
    factor = _positive(rope, "factor", source)
    if factor < 1:
        raise UserError(f"{source}: {key}.factor={factor:g} must be at least 1")
    numbers = {"beta_fast": 32.0, "beta_slow": 1.0}
    for name in numbers:
        if rope.get(name) is not None:
            numbers[name] = _positive(rope, name, source)
    if numbers["beta_fast"] <= numbers["beta_slow"]:
        raise UserError(
            f"{source}: {key}.beta_fast={numbers['beta_fast']:g} must be more than "
            f"beta_slow={numbers['beta_slow']:g}"
        )
    truncate = rope.get("truncate", True)
    if not isinstance(truncate, bool):
        raise UserError(
            f"{source}: {key}.truncate must be true or false, not {truncate!r:.40}"
        )
    given = rope.get("attention_factor")
    own = yarn_attention_factor(factor)
    if given is not None and not math.isclose(float(given), own, rel_tol=1e-6):
        raise UserError(
            f"{source}: {key}.attention_factor={given!r:.40} is not supported with the rope type "
            f"yarn, whose engines take {own:.6g} for factor={factor:g}; remove the key if that is "
            "the model's"
        )
    return YarnScaling(
        factor=factor,
        original_max_position_embeddings=int(
            _positive(rope, "original_max_position_embeddings", source)
        ),
        beta_fast=numbers["beta_fast"],
        beta_slow=numbers["beta_slow"],
        truncate=truncate,
    )
