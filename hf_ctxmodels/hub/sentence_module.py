"""Module for sentence-transformers (extra `sentences`)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModel, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hf_ctxmodels.architectures.sentence_encoder import (
    check_strings,
    encode_sentences,
    max_sentence_length,
    sentence_vectors,
    tokenize_sentences,
)
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.layers.pooling import Pooling

try:
    from sentence_transformers.base.modules import InputModule
except ImportError as error:
    raise CtxError("sentence-transformers is not installed.", hint="pip install 'hf_ctxmodels[sentences]'.") from error


class CtxSentenceEncoder(InputModule):
    """Base model with pooling, as the only module of a `SentenceTransformer`.

    The files are saved in the top-level directory, so that `AutoModel` and `AutoTokenizer` can open it.
    sentence-transformers needs `trust_remote_code=True` to open modules of other packages.

    Args:
        model, tokenizer: A base model of `AutoModel`, and its tokenizer.
        pooling: Pooling of the hidden states; None for the pooling of the model.
        normalize: Whether to scale vectors to unit length.
        max_seq_length: Maximum length in tokens; None for the limit of the model.

    Example:
        >>> from sentence_transformers import SentenceTransformer
        >>> model = SentenceTransformer(modules=[CtxSentenceEncoder.from_pretrained("runs/sentences")])
        >>> vectors = model.encode(["A cat sat on a mat."])
        >>> model.save("runs/saved")
        >>> model = SentenceTransformer("runs/saved", trust_remote_code=True)
    """

    tokenizer: PreTrainedTokenizerBase
    config_file_name = "sentence_module.json"
    config_keys = ["pooling", "normalize", "max_seq_length"]

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        pooling: Pooling | None = None,
        normalize: bool = False,
        max_seq_length: int | None = None,
    ) -> None:
        super().__init__()
        self.model, self.tokenizer = model, tokenizer
        self.pooling, self.normalize, self.max_seq_length = pooling, normalize, max_seq_length
        self.width = encode_sentences(model, tokenizer, [], pooling=pooling).shape[1]

    @classmethod
    def from_pretrained(cls, source: str | Path, **settings: Any) -> Self:
        """Create the module from the directory or Hub id of a saved model; `settings` are arguments of the class."""
        return cls.load(str(source), **settings)

    @classmethod
    def load(  # type: ignore[override]
        cls,
        model_name_or_path: str,
        subfolder: str = "",
        token: bool | str | None = None,
        cache_folder: str | None = None,
        revision: str | None = None,
        local_files_only: bool = False,
        **kwargs: Any,
    ) -> Self:
        """Load a saved module, called by `SentenceTransformer`."""
        location: dict[str, Any] = {"revision": revision, "local_files_only": local_files_only}
        location |= {"token": token, "subfolder": subfolder}
        saved_settings = cls.load_config(model_name_or_path, cache_folder=cache_folder, **location)
        settings = saved_settings | {name: kwargs[name] for name in cls.config_keys if name in kwargs}
        options = {"cache_dir": cache_folder, **location}
        model = AutoModel.from_pretrained(model_name_or_path, **options, **(kwargs.get("model_kwargs") or {}))
        tokenizer = AutoTokenizer.from_pretrained(model_name_or_path, **options)
        return cls(model, tokenizer, **settings)

    def save(self, output_path: str, *args: Any, safe_serialization: bool = True, **kwargs: Any) -> None:
        """Save weights, tokenizer and settings; raises CtxError if `safe_serialization` is False."""
        if not safe_serialization:
            raise CtxError("Weights can only be saved as safetensors.", hint="omit safe_serialization.")
        self.model.save_pretrained(output_path)
        self.tokenizer.save_pretrained(output_path)
        self.save_config(output_path)

    def preprocess(self, inputs: Sequence[Any], prompt: str | None = None, **kwargs: Any) -> dict[str, Tensor]:
        """Encode and pad texts; raises CtxError for a text without tokens, and for other inputs, such as pairs."""
        check_strings(inputs)
        max_length = self.max_seq_length or max_sentence_length(self.model, self.tokenizer)
        encoded = tokenize_sentences(self.tokenizer, [f"{prompt or ''}{text}" for text in inputs], max_length)
        return dict(self.tokenizer.pad(encoded, return_tensors="pt"))

    def forward(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Add the `sentence_embedding` (batch, width) to the features."""
        names = {*self.tokenizer.model_input_names, "input_ids", "attention_mask"}
        inputs = {name: value for name, value in features.items() if name in names and torch.is_tensor(value)}
        vectors = sentence_vectors(self.model, inputs, self.pooling)
        features["sentence_embedding"] = F.normalize(vectors, dim=1) if self.normalize else vectors
        return features

    def get_embedding_dimension(self) -> int:
        """Width of the sentence vectors."""
        return self.width
