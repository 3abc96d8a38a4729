"""Grover configuration (Zellers et al. 2019, appendix A, and the released models)."""

from typing import Any

from huggingface_hub.dataclasses import strict

from hf_ctxmodels.architectures.configurations import CtxDecoderConfig

# distance of the ids of `CtxGroverTokenizer` from the end of the vocabulary
_DISTANCE_FROM_END = {"bos_token_id": 5, "eos_token_id": 4, "classifier_token_id": 3}


@strict
class CtxGroverConfig(CtxDecoderConfig):
    """Configuration of Grover; the defaults are the released base model.

    See `CtxDecoderConfig` for the other arguments.

    Args:
        hidden_act: Activation of the feed-forward layer; "gelu" is the exact GELU.
        embedding_dropout_prob, attention_probs_dropout_prob: 0, as in the released code.
        initializer_range: Standard deviation of the truncated normal initialization, except for feed-forward layers.
        feed_forward_initializer_range: Standard deviation for the feed-forward layers, the same in all released sizes.
        pad_token_id: Id of <|padding|>, which is never a target.
        classifier_token_id: Id of <|beginsummary|>, whose state is the classifier's input.
        bos_token_id, eos_token_id: Ids of <|beginarticle|> and <|endofarticle|>. By default, these and
            `classifier_token_id` are the ids of `CtxGroverTokenizer`, at the end of the vocabulary.
    """

    model_type = "ctx-grover"

    vocab_size: int = 50270
    hidden_act: str = "gelu"
    embedding_dropout_prob: float | int = 0.0
    attention_probs_dropout_prob: float | int = 0.0
    feed_forward_initializer_range: float | int = 0.02
    classifier_dropout: float | int | None = 0.1
    classifier_token_id: int | None = None
    pad_token_id: int | None = 0

    def __post_init__(self, **kwargs: Any) -> None:
        for name, distance in _DISTANCE_FROM_END.items():
            if getattr(self, name) is None and self.vocab_size >= distance:
                setattr(self, name, self.vocab_size - distance)
        super().__post_init__(**kwargs)
