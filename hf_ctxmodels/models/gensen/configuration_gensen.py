"""GenSen configuration (Subramanian et al. 2018, arXiv 1804.00079)."""

from typing import Any, Literal

from huggingface_hub.dataclasses import strict

from hf_ctxmodels.core.config import CtxConfig


@strict
class CtxGenSenConfig(CtxConfig):
    """Shape of the encoder that all tasks share, and which tasks it learns from.

    Args:
        vocab_size: Subwords.
        target_vocab_size: Subwords that the decoders write: the same.
        written_tasks: Names of the texts that are written, each by a decoder of its own, such as "<de>" and "next".
        relations: Names of how two texts may be related; none for no such task.
        embedding_size: Width of a subword, in the encoder and in the decoders.
        hidden_size: Width of a subword's state and of a sentence's vector, that of both directions together; and of the
            decoders' states.
        num_hidden_layers: GRU layers of the encoder.
        pooling: What stands for a sentence: the states in which both directions end ("ends"), the largest value ("max")
            or the "mean" of its subwords' states.
        hidden_dropout_prob: Dropout on what a GRU layer reads, and on the vector that the decoders read.
        text_pairs: The head that classifies sequences reads two texts; else it is a linear one of a single text.
        classifier_size: Width of the hidden layer of what compares two texts.
        classifier_dropout: Dropout before that, or before a task head.
        initializer_range: Standard deviation of the initialisation of embeddings and of what stands on the GRUs.
        pad_token_id: Padding.
        decoder_start_token_id, eos_token_id: What a target begins and ends with.
    """

    model_type = "ctx-gensen"

    vocab_size: int = 80_000
    target_vocab_size: int = 80_000
    written_tasks: list[str] | None = None
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

    def __post_init__(self, **kwargs: Any) -> None:
        self.written_tasks = ["next", "previous"] if self.written_tasks is None else self.written_tasks
        self.relations = ["contradiction", "entailment", "neutral"] if self.relations is None else self.relations
        super().__post_init__(**kwargs)

    def validate_shape(self) -> None:
        """Check what must fit together (called at construction)."""
        if self.hidden_size % 2 or self.hidden_size < 2:
            raise ValueError(f"hidden_size={self.hidden_size} must be even: each direction has half of it.")
        for name in ("vocab_size", "target_vocab_size", "embedding_size", "num_hidden_layers", "classifier_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be 1 or more.")
        for name in ("written_tasks", "relations"):
            if len(set(getattr(self, name))) != len(getattr(self, name)):
                raise ValueError(f"{name}={getattr(self, name)} holds a name twice.")

    @property
    def num_languages(self) -> int:
        """Decoders: what is written is told by its number among `written_tasks`."""
        return len(self.written_tasks or [])

    @property
    def layer_sizes(self) -> list[int]:
        """Width of every hidden state: the embeddings, and the layers."""
        return [self.embedding_size, *[self.hidden_size] * self.num_hidden_layers]
