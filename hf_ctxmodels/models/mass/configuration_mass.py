"""MASS configuration (Song et al. 2019, section 4.1, and the released code)."""

from huggingface_hub.dataclasses import strict

from hf_ctxmodels.architectures.configuration_seq2seq import CtxSeq2SeqConfig


@strict
class CtxMassConfig(CtxSeq2SeqConfig):
    """Shape, languages and regularisation of MASS; the defaults are the translation model of two languages.

    The model for summaries has `scale_embedding`, one language and no `output_bias`.

    Args: those of `CtxSeq2SeqConfig`, and
        activation_dropout: Dropout after the activation of the feed-forward layer.
        scale_embedding: Multiply the word embeddings by sqrt(hidden_size).
        output_bias: Whether the output layer has a bias.
        n_langs: Number of languages.
        use_lang_emb: Whether several languages have embeddings, so that `langs` must be given.
        lang2id: Name of each language -> its number; None where they have no names.
        default_lang: Number of the language of inputs without `langs`; None makes them an error.
    """

    model_type = "ctx-mass"

    vocab_size: int = 60000
    num_hidden_layers: int = 6
    decoder_layers: int = 6
    num_attention_heads: int = 8
    decoder_attention_heads: int = 8
    attention_probs_dropout_prob: float | int = 0.1
    activation_dropout: float | int = 0.0
    max_position_embeddings: int = 512
    scale_embedding: bool = False
    output_bias: bool = True
    n_langs: int = 2
    use_lang_emb: bool = True
    lang2id: dict[str, int] | None = None
    default_lang: int | None = None
    layer_norm_eps: float = 1e-12
    pad_token_id: int | None = 2
    bos_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 1
    decoder_start_token_id: int | None = 1

    def validate_languages(self) -> None:
        """Check that the languages are numbered from 0 to `n_langs` - 1 (called at construction)."""
        self.require_positive("n_langs")
        if self.default_lang is not None and not 0 <= self.default_lang < self.n_langs:
            raise ValueError(f"default_lang={self.default_lang} is outside [0, n_langs={self.n_langs}).")
        if self.lang2id is not None and sorted(self.lang2id.values()) != list(range(self.n_langs)):
            raise ValueError(f"lang2id={self.lang2id} must number the n_langs={self.n_langs} languages from 0 on.")

    @property
    def embeds_languages(self) -> bool:
        """Whether there are language embeddings."""
        return self.use_lang_emb and self.n_langs > 1
