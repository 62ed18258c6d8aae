"""Small models of transformers with random weights, the same ones whatever computes their attention."""

from __future__ import annotations

import torch
import transformers

SMALL = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.2,
}  # fmt: skip
FAMILIES = {
    "llama": ("Llama", {}),
    "one key head for each": ("Llama", {"num_key_value_heads": 4}),
    "sliding window": ("Mistral", {"sliding_window": 7}),
    "a window beyond the text": ("Mistral", {"sliding_window": 64}),
    "qwen2": ("Qwen2", {}),
    "gemma": ("Gemma", {}),
    "latent attention": ("DeepseekV3", {  # values of 16 columns beside queries of 24; no experts
        "num_key_value_heads": 4, "head_dim": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
        "v_head_dim": 16, "q_lora_rank": 16, "kv_lora_rank": 16, "first_k_dense_replace": 9,
    }),
    "gemma3": ("Gemma3", {
        "sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 16,
    }),
}


def build(name: str, implementation: str, device: str, dtype: torch.dtype = torch.float32, layers: int = 2):
    family, config = FAMILIES[name]
    config = SMALL | config | {"num_hidden_layers": layers}
    torch.manual_seed(0)
    configure = getattr(transformers, f"{family}{'Text' if family == 'Gemma3' else ''}Config")
    settings = configure(**config, attn_implementation=implementation)
    model = getattr(transformers, f"{family}ForCausalLM")(settings).to(device, dtype)
    assert model.config._attn_implementation == implementation
    return model


def tokens(batch: int, length: int, device: str, seed: int = 0) -> torch.Tensor:
    """(batch, length), none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, SMALL["vocab_size"], (batch, length), generator=generator).to(device)
