"""Models whose attention is not what transformers' interface of attention describes, refused by name."""

from __future__ import annotations

import sys
from functools import lru_cache, wraps

import torch
from transformers import PreTrainedModel

from attnlib.hf.forward import NAME
from attnlib.hf.layout import require


def check_when_chosen() -> None:
    """From now on transformers asks `check_model` wherever a model is to use attnlib: when it is made, and in
    `set_attn_implementation`. It has no hook for that, so the method that refuses "sdpa" is wrapped."""
    choose = PreTrainedModel.get_correct_attn_implementation
    if hasattr(choose, "attnlib_wraps"):
        return

    @wraps(choose)
    def checked(self, requested_attention, *args, **kwargs):
        if requested_attention == NAME:
            check_model(type(self))
        return choose(self, requested_attention, *args, **kwargs)

    checked.attnlib_wraps = choose
    PreTrainedModel.get_correct_attn_implementation = checked


def check_model(model: type[PreTrainedModel]) -> None:
    """ValueError for a class of models that would not call attnlib, or not say all that it has to know: one
    that does not support "sdpa", or whose code computes attention without transformers' interface."""
    if not model._supports_sdpa and _type_of(model) not in WITH_SCORES:
        raise ValueError(
            f"attn_implementation: expected a model that supports 'sdpa' for {NAME!r}, got {model.__name__}, "
            "which does not. Use attn_implementation='eager'"
        )
    if not _calls_the_interface(model) or _has_a_table(model):
        raise ValueError(
            "attn_implementation: expected a model that calls transformers' AttentionInterface for "
            f"{NAME!r}, got {model.__name__}, which computes attention itself. Use attn_implementation='sdpa'"
        )


WITH_SCORES = {"gemma2", "gpt_oss"}
"""Types of models that don't support "sdpa" because of a soft cap or sinks, and of nothing else."""


COMPUTE_WITH_MASKS = {"axk2", "deepseek_v32", "doge", "dots3_note_text", "glm_moe_dsa", "qwen4_exp_text"}
"""Types of models that choose keys of their own, or add to the mask, in each layer: they get a tensor."""


LOOK_AT_PADDING = {"blt", "blt_local_encoder", "blt_patcher"}
"""Types of models in which the outputs of padded tokens reach others: they get a tensor, too."""


def gets_tensor(config) -> bool:
    """Whether the models of a configuration want the mask that "sdpa" has."""
    return getattr(config, "model_type", None) in COMPUTE_WITH_MASKS | LOOK_AT_PADDING


def check_tensor(dense: torch.Tensor, config) -> None:
    """ValueError if a token sees nothing and its output matters: attnlib's is 0, that of "eager" a mean."""
    if getattr(config, "model_type", None) in LOOK_AT_PADDING:
        require(
            dense.any(-1).all(),
            "attention_mask: expected no padding on the left for a model in which the outputs of padded "
            f"tokens reach others, got some for one with a {type(config).__name__}. Use "
            "attn_implementation='eager'",
        )


def _type_of(model: type[PreTrainedModel]) -> str | None:
    return getattr(model.config_class, "model_type", None)


def _calls_the_interface(model: type[PreTrainedModel]) -> bool:
    """Whether the source of its module, or of a class that it inherits from, does. A model of models, and one
    from a script or a notebook, may have its attention elsewhere."""
    if getattr(model.config_class, "sub_configs", None) or model.__module__ == "__main__":
        return True
    classes = (c for c in model.__mro__ if issubclass(c, PreTrainedModel) and c is not PreTrainedModel)
    return any(c._can_set_attn_implementation() for c in classes)


def _has_a_table(model: type[PreTrainedModel]) -> bool:
    """Whether a module of its classes chooses the class of an attention from a table of implementations."""
    modules = {c.__module__ for c in model.__mro__ if issubclass(c, PreTrainedModel)}
    tables = (value for name in modules for value in vars(sys.modules[name]).values())
    return any(isinstance(table, dict) and "sdpa" in table and NAME not in table for table in tables)


@lru_cache
def check_config(config: type) -> None:
    """The same for the models of a configuration, none of which supports "sdpa": for a configuration on which
    somebody set `_attn_implementation` without asking the model."""
    models = [model for model in _below(PreTrainedModel) if model.config_class is config]
    if models and not any(m._supports_sdpa or _type_of(m) in WITH_SCORES for m in models):
        check_model(models[-1])


def _below(cls: type) -> list[type]:
    found = []
    for child in cls.__subclasses__():
        found += [child, *_below(child)]
    return found
