"""ULMFiT configuration (Howard & Ruder 2018, arXiv 1801.06146; Merity et al. 2017, arXiv 1708.02182)."""

from typing import Literal

from huggingface_hub.dataclasses import strict

from hf_ctxmodels.architectures.configurations import CtxLSTMLanguageModelConfig


@strict
class CtxUlmfitConfig(CtxLSTMLanguageModelConfig):
    """Shape and regularization of an AWD-LSTM; the defaults follow section 4.1 of the paper.

    See `CtxLSTMLanguageModelConfig` for the other arguments.

    Args:
        hidden_size: Width of the embeddings and of the last layer's output.
        cell_size: Width of the other layers.
        embedding_dropout_prob: Dropout of whole words of the vocabulary, the same throughout a forward pass.
        input_dropout_prob: Variational dropout of the embeddings: the same features of a sequence at every step.
        hidden_dropout_prob: Variational dropout between layers.
        output_dropout_prob: Variational dropout of the last layer's output.
        weight_dropout_prob: Dropout of the recurrent weights.
        dropout_scale: Factor of these five rates.
        activation_penalty: Weight of activation regularization (AR, alpha), on the output after dropout.
        slowness_penalty: Weight of temporal activation regularization (TAR, beta), on the output before dropout.
        backward: Whether the model reads from right to left (the backward model of section 3.3, whose predictions are
            averaged with a forward model's). Outputs remain in the order of the text.
        bptt: Number of steps of back-propagation in a classifier (section 3.3); longer texts are encoded completely.
        classifier_size: Width of the classifier's hidden layer.
        classifier_norm: Normalization in the classifier's two blocks: "batch" as in the paper; with "layer", the loss
            does not depend on the composition of batches.
        classifier_dropout: Dropout before the hidden layer; the rate after it is 0.1.
        bos_token_id, eos_token_id: Ids of a text's first token, and of the end of a generated text, if any.
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
        """Check the shape and the rates (called at construction)."""
        self.require_positive("vocab_size", "hidden_size", "cell_size", "num_hidden_layers", "bptt", "classifier_size")
        for name in ("embedding", "input", "hidden", "output", "weight"):
            if not 0 <= (rate := self.dropout_rate(name)) < 1:
                raise ValueError(f"{name}_dropout_prob * dropout_scale is {rate}, expected 0 or more, below 1.")

    def dropout_rate(self, name: str) -> float:
        """Scaled dropout rate of "embedding", "input", "hidden", "output" or "weight"."""
        return getattr(self, f"{name}_dropout_prob") * self.dropout_scale

    @property
    def layer_sizes(self) -> list[int]:
        """Widths of the layers' inputs and of the last layer's output."""
        return [self.hidden_size, *[self.cell_size] * (self.num_hidden_layers - 1), self.hidden_size]

    @property
    def pooler_size(self) -> int:
        """Width of `pooler_output`: last state, maximum and mean (section 3.3)."""
        return 3 * self.hidden_size
