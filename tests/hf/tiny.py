"""Every text architecture of the installed transformers, tiny and with random weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from attnlib.hf.models import WITH_SCORES

ROLES = {
    "decoder": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "encoder-decoder": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "encoder": {
        **modeling_auto.MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES,
        **modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    },
}
"""What a text model does -> transformers' own table of model types and classes for it."""

WIDE, NARROW = 64, 5
"""Sliding windows beyond every text of a case, and much shorter than it."""


@dataclass(frozen=True)
class Architecture:
    """A class of text models. role: a key of `ROLES`."""

    model_type: str
    role: str
    class_name: str

    @property
    def name(self) -> str:
        return f"{self.model_type} ({self.role})"

    @property
    def model_class(self) -> type:
        return getattr(transformers, self.class_name)

    @property
    def is_taken(self) -> bool:
        """By attnlib: it claims to support "sdpa", or lacks it for its scores alone."""
        return self.claims_sdpa or self.model_type in WITH_SCORES

    @property
    def claims_sdpa(self) -> bool:
        return self.model_class._supports_sdpa


def architectures() -> list[Architecture]:
    """Those that take text alone. Of models that also see or hear, transformers lists the text part too."""
    found = []
    for role, table in ROLES.items():
        for model_type, classes in table.items():
            class_name = classes if isinstance(classes, str) else classes[0]
            if _is_text(model_type, getattr(transformers, class_name)):
                found.append(Architecture(model_type, role, class_name))
    unique = {(a.class_name, a.role): a for a in reversed(found)}
    return [a for a in found if unique[a.class_name, a.role] is a]


_OTHER_SENSES = ("vision", "audio", "vq", "image", "speech", "acoustic", "semantic")


def _is_text(model_type: str, model_class: type) -> bool:
    config = CONFIG_MAPPING[model_type]
    parts = [*config.sub_configs, model_type]
    if any(sense in part for part in parts for sense in _OTHER_SENSES):
        return False
    return model_class.main_input_name == "input_ids" and model_type not in _NOT_TEXT


_NOT_TEXT = (
    *("fuyu", "layoutlmv2", "layoutlmv3", "perceiver", "t5gemma2", "trocr"),  # images
    *("musicgen", "musicgen_melody", "moshi", "whisper", "seamless_m4t", "seamless_m4t_v2", "nemo_speechlm"),
    *("gemma4_assistant", "gemma4_unified_assistant"),  # hidden states of another model
    "encoder-decoder",  # made of two of the others
)
"""Model types in transformers' tables of text models that need something besides text."""


# ---------------------------------------------------------------- configurations

_HIDDEN, _HEADS, _LAYERS = 64, 4, 2
_SIZES = (
    (
        _HIDDEN,
        """
        hidden_size d_model n_embd dim emb_dim embedding_size word_embed_proj_dim pooler_hidden_size
        embedding_dim lru_width true_hidden_size intra_bottleneck_size input_embedding_size
        hidden_size_global""",
    ),
    (
        _HEADS,
        """
        num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads
        attention_heads linear_num_key_heads linear_num_value_heads linear_num_heads""",
    ),
    (
        _LAYERS,
        """
        num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers
        num_encoder_layers""",
    ),
    (
        96,
        """
        intermediate_size encoder_ffn_dim decoder_ffn_dim d_ff ffn_dim dff hidden_dim n_inner
        ffn_hidden_size moe_intermediate_size shared_expert_intermediate_size intermediate_size_mlp
        expert_ffn_hidden_size shared_intermediate_size dense_intermediate_size prediction_head_size
        shared_experts_intermediate_size moe_shared_expert_intermediate_size""",
    ),
    (97, "vocab_size vocab_size_per_layer_input decoder_vocab_size unpadded_vocab_size"),
    (128, "max_position_embeddings n_positions n_ctx max_seq_len"),
    (32, "qk_head_dim"),
    (
        16,
        """
        head_dim d_kv kv_channels attention_head_size attention_head_dim qk_rope_head_dim qk_nope_head_dim
        v_head_dim kv_lora_rank q_lora_rank index_head_dim gated_norm_rank mamba_d_state state_size
        ssm_state_size mamba_d_ssm linear_key_head_dim linear_value_head_dim linear_head_dim rotary_dim
        hidden_size_per_layer_input""",
    ),
    (4, "num_experts n_routed_experts num_local_experts moe_num_experts"),
    (
        2,
        """
        num_key_value_heads num_kv_heads num_query_groups num_experts_per_tok num_experts_per_token moe_topk
        moe_k index_n_heads type_vocab_size eos_token_id""",
    ),
    (
        1,
        """
        n_group topk_group num_expert_group n_shared_experts num_shared_experts first_k_dense_replace
        num_dense_layers moe_layer_start_index bos_token_id decoder_start_token_id""",
    ),
    (0, "pad_token_id num_nextn_predict_layers num_kv_shared_layers"),
    (0.2, "initializer_range init_std initializer_factor"),
    (None, "forced_bos_token_id forced_eos_token_id"),
    (False, "scale_embedding"),
)
_SMALL = {name: size for size, names in _SIZES for name in names.split()}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_LINEAR = ["linear_attention"]
_HEADS_ALIKE = {"num_key_value_heads": _HEADS}
_BY_TYPE: dict[str, dict] = {
    **dict.fromkeys(
        (
            *(
                "axk1",
                "axk2",
                "bailing_hybrid",
                "deepseek_v2",
                "deepseek_v3",
                "deepseek_v32",
                "glm4_moe_lite",
            ),
            *("glm_moe_dsa", "kimi_linear", "longcat_flash", "minicpm3", "youtu", "esmc", "dots3_note_text"),
        ),
        _HEADS_ALIKE,
    ),
    **dict.fromkeys(("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral"), {"head_dim": 16}),
    "blt": {"encoder_hash_byte_group_vocab": 97, "use_cache": False, "num_hidden_layers": _LAYERS},
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 16},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"sliding_attention": _ROPE, "full_attention": _ROPE},
    },
    "qwen4_exp_text": {
        **dict.fromkeys(("indexer_n_heads", "indexer_compress_ratio"), 2),
        **{"indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8},
    },
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_ssm": 128},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "mamba_n_heads": 8, "mamba_d_head": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 5,
        "layers_block_type": [*_LINEAR, *_LINEAR, "hybrid", *_LINEAR, "hybrid"],
    },
    "zamba2": {"num_hidden_layers": 4, "layers_block_type": [*_LINEAR, "hybrid", *_LINEAR, "hybrid"]},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0}},
    "zaya": {"num_experts_per_tok": 1},
}
"""What single architectures need besides."""

_WINDOWS = (
    *("sliding_window", "attention_window_size", "local_attention", "sliding_window_size"),
    "attention_chunk_size",
)


def config_of(architecture: Architecture, window: int = WIDE):
    """A small configuration, with all kinds of layers that the default one has, and no dropout."""
    config_class = CONFIG_MAPPING[architecture.model_type]
    settings = _settings(config_class, window) | _BY_TYPE.get(architecture.model_type, {})
    if architecture.role == "decoder" and "is_decoder" in config_class().to_dict():
        settings["is_decoder"] = True
    return config_class(**settings)


def _settings(config_class: type, window: int) -> dict:
    default = config_class()
    given = default.to_dict()
    settings = {name: value for name, value in _SMALL.items() if name in given}
    if given.get("head_dim") is None and "head_dim" in settings:
        del settings["head_dim"]
    for name, value in given.items():
        if ("drop" in name or name.endswith("pdrop")) and isinstance(value, float):
            settings[name] = 0.0
    kinds = list(dict.fromkeys(given.get("layer_types") or ()))
    if kinds:
        settings["layer_types"] = kinds if len(kinds) > 1 else kinds * _LAYERS
        settings["num_hidden_layers"] = len(settings["layer_types"])
    if given.get("mlp_layer_types"):
        ends = list(dict.fromkeys(given["mlp_layer_types"]))
        number = settings.get("num_hidden_layers", _LAYERS)
        settings["mlp_layer_types"] = (ends + [ends[-1]] * number)[:number]
    for name in _WINDOWS:
        if name in given:
            settings[name] = window
    for name, part in config_class.sub_configs.items():
        if hasattr(part, "model_type"):
            settings[name] = _settings(part, window)
    return settings


def has_window(architecture: Architecture) -> bool:
    """Whether a sliding window can be set for it."""
    config_class = CONFIG_MAPPING[architecture.model_type]
    parts = [config_class, *config_class.sub_configs.values()]
    return any(name in part().to_dict() for part in parts if hasattr(part, "model_type") for name in _WINDOWS)


def build(
    architecture: Architecture,
    implementation: str,
    window: int = WIDE,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    cross_attention: bool = False,
):
    """The model in inference mode; the same weights whatever computes attention. cross_attention: a decoder
    gets layers for it."""
    config = config_of(architecture, window)
    if cross_attention and architecture.role == "decoder":
        config.add_cross_attention = True
    config._attn_implementation = implementation
    if dtype is torch.float64:
        config._experts_implementation = "eager"  # the fast one knows no float64
    torch.manual_seed(0)
    return architecture.model_class(config).to(device, dtype).eval()
