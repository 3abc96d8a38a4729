"""ULMFiT configuration (Howard & Ruder 2018, arXiv 1801.06146; Merity et al. 2017, arXiv 1708.02182)."""

from typing import Literal

from huggingface_hub.dataclasses import strict

from hf_ctxmodels.models._shared.configuration_lstm_language_model import CtxLSTMLanguageModelConfig

_RATES = ("embedding", "input", "hidden", "output", "weight")


@strict
class CtxUlmfitConfig(CtxLSTMLanguageModelConfig):
    """Shape and regularisation of an AWD-LSTM; the defaults are those of the paper, section 4.1.

    Args:
        vocab_size: Number of words.
        hidden_size: Width of a word's vector, of what goes in and of what comes out.
        cell_size: Width of every layer's cell but the last one's, whose is `hidden_size`.
        num_hidden_layers: LSTM layers.
        embedding_dropout_prob: Share of words that are missing from a forward pass, wherever they stand.
        input_dropout_prob: Variational dropout of the vectors that go in: a row loses the same features at every step.
        hidden_dropout_prob: The same between layers.
        output_dropout_prob: The same of what comes out.
        weight_dropout_prob: Dropout of the weights from step to step.
        dropout_scale: Factor of these five rates, with which to regularise more or less.
        activation_penalty: Weight of the squared size of what comes out, after dropout (AR; alpha).
        slowness_penalty: Weight of the squared change of what comes out, before dropout (TAR; beta).
        backward: A text is read from its last word to its first, which stays its place: the backward model of section
            3.3, whose predictions are averaged with the forward one's.
        stateful: Return `past_key_values`, with which the next batch may continue, unless `use_cache=False` is given.
        bptt: Steps through which a classifier's gradient goes back (section 3.3); the text before is read all the same.
        classifier_size: Width of the classifier's hidden layer.
        classifier_norm: Of the classifier's two blocks: "batch" is the paper's, and bears higher rates; "layer" gives
            the same loss in any division into batches.
        classifier_dropout: Dropout before the hidden layer; behind it are 0.1.
        initializer_range: Embeddings are drawn uniformly from -this to this.
        pad_token_id, bos_token_id, eos_token_id: Ids of padding, of a text's first token, and of the one that ends a
            generated text, if there is such a one.
        tie_word_embeddings: The softmax has the words' vectors as its weights.
    """

    model_type = "ctx-ulmfit"

    vocab_size: int = 60_000
    hidden_size: int = 400
    cell_size: int = 1150
    num_hidden_layers: int = 3
    embedding_dropout_prob: float | int = 0.05
    input_dropout_prob: float | int = 0.4
    hidden_dropout_prob: float | int = 0.3
    output_dropout_prob: float | int = 0.4
    weight_dropout_prob: float | int = 0.5
    dropout_scale: float | int = 1.0
    activation_penalty: float | int = 2.0
    slowness_penalty: float | int = 1.0
    backward: bool = False
    stateful: bool = False
    bptt: int = 70
    classifier_size: int = 50
    classifier_norm: Literal["batch", "layer"] = "batch"
    classifier_dropout: float | int = 0.2
    initializer_range: float | int = 0.1
    pad_token_id: int | None = 1
    bos_token_id: int | None = 2
    eos_token_id: int | list[int] | None = None
    tie_word_embeddings: bool = True

    def validate_shape(self) -> None:
        """Check what must fit together (called at construction)."""
        self.require_positive("vocab_size", "hidden_size", "cell_size", "num_hidden_layers", "bptt", "classifier_size")
        for kind in _RATES:
            if not 0 <= self.rate(kind) < 1:
                raise ValueError(
                    f"{kind}_dropout_prob * dropout_scale is {self.rate(kind)}, expected 0 or more, below 1."
                )

    def rate(self, kind: str) -> float:
        """Dropout of a kind: "embedding", "input", "hidden", "output" or "weight"."""
        return getattr(self, f"{kind}_dropout_prob") * self.dropout_scale

    @property
    def layer_sizes(self) -> list[int]:
        """Width of the input of every layer, and of the last one's output."""
        return [self.hidden_size, *[self.cell_size] * (self.num_hidden_layers - 1), self.hidden_size]

    @property
    def pooled_size(self) -> int:
        """Width of `pooler_output`: the state of the word read last, the largest values and the mean (section 3.3)."""
        return 3 * self.hidden_size
