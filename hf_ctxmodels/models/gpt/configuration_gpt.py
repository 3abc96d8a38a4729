"""GPT configuration (Radford et al. 2018, section 4.1, and the released code)."""

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict

from hf_ctxmodels.architectures.configurations import CtxDecoderConfig

# The name of an activation in transformers' GPT -> its usual name. "gelu" is the tanh approximation there.
ACTIVATIONS = {"gelu": "gelu_new", "relu": "relu", "silu": "silu", "swish": "silu"}


@strict
class CtxGptConfig(CtxDecoderConfig):
    """Configuration of GPT; the defaults are the released model with 117 million parameters.

    `afn`, the activation in transformers, is accepted: `afn="gelu"` is `hidden_act="gelu_new"`. See `CtxDecoderConfig`
    for the other arguments.

    Args:
        vocab_size: Number of tokens of the tokenizer, including the task tokens once they are added.
        classifier_dropout: Dropout before the task heads; the choices of an example share the dropout mask.
        both_orders: Whether the sequence classifier was fine-tuned on pairs of texts in both orders.
    """

    model_type = "ctx-gpt"
    reference_model_types: ClassVar[tuple[str, ...]] = ("openai-gpt",)
    attribute_map: ClassVar[dict[str, str]] = {
        **CtxDecoderConfig.attribute_map,
        "summary_first_dropout": "classifier_dropout",
    }

    vocab_size: int = 40478
    max_position_embeddings: int = 512
    classifier_dropout: float | int | None = 0.1
    both_orders: bool = False

    non_reference_fields: ClassVar[tuple[str, ...]] = (
        *CtxDecoderConfig.non_reference_fields,
        "hidden_act",
        "intermediate_size",
        "both_orders",
    )
    supported_reference_values: ClassVar[dict[str, tuple[Any, ...]]] = {
        "summary_type": ("cls_index", "last"),
        "summary_use_proj": (True,),
        "summary_activation": (None, ""),
        "summary_proj_to_labels": (True,),
    }

    def __post_init__(self, **kwargs: Any) -> None:
        if (name := kwargs.pop("afn", None)) is not None:
            if name not in ACTIVATIONS:
                raise ValueError(f"afn={name!r} is not supported; use one of {', '.join(ACTIVATIONS)}.")
            self.hidden_act = ACTIVATIONS[name]
        super().__post_init__(**kwargs)
