"""GenSen configuration (Subramanian et al. 2018, arXiv 1804.00079)."""

from typing import Any, ClassVar, Literal

from huggingface_hub.dataclasses import strict

from hf_ctxmodels.core.config import CtxConfig


@strict
class CtxGenSenConfig(CtxConfig):
    """Shape of the shared encoder, and its pretraining tasks. See `CtxConfig` for the other arguments.

    Args:
        vocab_size, target_vocab_size: Size of the subword vocabulary of the encoder and the decoders.
        decoder_tasks: Names of the generation tasks, such as "<de>" and "next"; each has a separate decoder.
        relations: Labels of text pairs; empty to omit this task.
        embedding_size: Width of the encoder's and the decoders' embeddings.
        hidden_size: Width of the decoders' hidden states, and of the encoder's hidden states and sentence embeddings,
            both directions concatenated.
        num_hidden_layers: Number of GRU layers of the encoder.
        pooling: Pooling of a sentence's hidden states: the final states of both directions ("ends"), "max" or "mean".
        hidden_dropout_prob: Dropout on the input of GRU layers, and on the sentence embedding in the decoders' input.
        text_pairs: Whether text pairs are classified; False for a linear classifier of single texts.
        classifier_size: Width of the hidden layer of the pair classifier.
        classifier_dropout: Dropout before the pair classifier or a task head.
        initializer_range: Standard deviation of the initialization of embeddings and heads.
    """

    model_type = "ctx-gensen"

    vocab_size: int = 80_000
    target_vocab_size: int = 80_000
    decoder_tasks: list[str] | None = None
    relations: list[str] | None = None
    embedding_size: int = 512
    hidden_size: int = 2048
    num_hidden_layers: int = 1
    pooling: Literal["ends", "max", "mean"] = "ends"
    hidden_dropout_prob: float | int = 0.0
    text_pairs: bool = True
    classifier_size: int = 512
    classifier_dropout: float | int = 0.3
    initializer_range: float | int = 0.05
    pad_token_id: int | None = 1
    decoder_start_token_id: int | None = 0
    eos_token_id: int | None = 2
    is_encoder_decoder: bool = True

    padded_vocabularies: ClassVar[tuple[str, ...]] = ("vocab_size", "target_vocab_size")

    def __post_init__(self, **kwargs: Any) -> None:
        self.decoder_tasks = ["next", "previous"] if self.decoder_tasks is None else self.decoder_tasks
        self.relations = ["contradiction", "entailment", "neutral"] if self.relations is None else self.relations
        super().__post_init__(**kwargs)

    def validate_shape(self) -> None:
        """Check shape and tasks (called at construction)."""
        self.require_even_hidden_size()
        self.require_positive("target_vocab_size", "num_hidden_layers", "classifier_size")
        for field, names in (("decoder_tasks", self.decoder_tasks), ("relations", self.relations)):
            if len(set(names or ())) != len(names or ()):
                raise ValueError(f"{field}={names} has a repeated name.")

    @property
    def num_languages(self) -> int:
        """Number of decoders; `target_languages` are indices in `decoder_tasks`."""
        return len(self.decoder_tasks or [])

    @property
    def layer_sizes(self) -> list[int]:
        """Widths of all hidden states: the embeddings and the layers."""
        return [self.embedding_size, *[self.hidden_size] * self.num_hidden_layers]
