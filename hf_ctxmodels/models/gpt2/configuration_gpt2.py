"""GPT-2 configuration (Radford et al. 2019, section 2.3, and the released models)."""

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict

from hf_ctxmodels.architectures.configurations import CtxDecoderConfig


@strict
class CtxGpt2Config(CtxDecoderConfig):
    """Configuration of GPT-2; the defaults are the released model with 124 million parameters.

    See `CtxDecoderConfig` for the other arguments.
    """

    model_type = "ctx-gpt2"
    reference_model_types: ClassVar[tuple[str, ...]] = ("gpt2",)
    attribute_map: ClassVar[dict[str, str]] = {
        **CtxDecoderConfig.attribute_map,
        "n_inner": "intermediate_size",
        "activation_function": "hidden_act",
    }

    bos_token_id: int | None = 50256
    eos_token_id: int | list[int] | None = 50256

    supported_reference_values: ClassVar[dict[str, tuple[Any, ...]]] = {
        "add_cross_attention": (False,),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
    }
