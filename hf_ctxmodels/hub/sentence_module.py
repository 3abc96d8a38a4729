"""Models as a module of sentence-transformers (extra `sentences`)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModel, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hf_ctxmodels.architectures.sentence_encoder import encode_sentences, max_input_length, sentence_vectors, tokenise
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.layers.pooling import Pooling

try:
    from sentence_transformers.base.modules import InputModule
except ImportError as missing:
    raise CtxError(
        "sentence-transformers is not installed.", hint="pip install 'hf_ctxmodels[sentences]'."
    ) from missing


class CtxSentenceEncoder(InputModule):
    """The only module of a `SentenceTransformer`: a base model with its pooling.

    Its files are saved in the directory itself, so `AutoModel` and `AutoTokenizer` can open it. sentence-transformers
    needs `trust_remote_code=True` to open it, since the class is not its own.

    Args:
        model: A base model of `AutoModel`.
        tokenizer: Its tokenizer.
        pooling: Pooling of the tokens' states; None for the pooling of the model.
        normalize: Scale every vector to length 1.
        max_seq_length: Maximum length in tokens; None for the limit of the model, if any.

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
        """The module of a saved model.

        Args:
            source: Directory or Hub id of the model and its tokenizer.
            settings: Arguments of the class; by default the saved ones, if any.
        """
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
        """See `InputModule.load`."""
        where: dict[str, Any] = {
            "revision": revision,
            "local_files_only": local_files_only,
            "token": token,
            "subfolder": subfolder,
        }
        saved = cls.load_config(model_name_or_path, cache_folder=cache_folder, **where)
        settings = saved | {name: kwargs[name] for name in cls.config_keys if name in kwargs}
        options = {"cache_dir": cache_folder, **where}
        model = AutoModel.from_pretrained(model_name_or_path, **options, **(kwargs.get("model_kwargs") or {}))
        tokenizer = AutoTokenizer.from_pretrained(model_name_or_path, **options)
        return cls(model, tokenizer, **settings)

    def save(self, output_path: str, *args: Any, safe_serialization: bool = True, **kwargs: Any) -> None:
        """Save weights, tokenizer and settings; raises CtxError for `safe_serialization=False`."""
        if not safe_serialization:
            raise CtxError("Weights are saved as safetensors only.", hint="omit safe_serialization.")
        self.model.save_pretrained(output_path)
        self.tokenizer.save_pretrained(output_path)
        self.save_config(output_path)

    def preprocess(self, inputs: Sequence[Any], prompt: str | None = None, **kwargs: Any) -> dict[str, Tensor]:
        """The padded model inputs of texts; raises CtxError for a text without tokens."""
        texts = [f"{prompt or ''}{text}" for text in inputs]
        encoded = tokenise(self.tokenizer, texts, self.max_seq_length or max_input_length(self.model, self.tokenizer))
        return dict(self.tokenizer.pad(encoded, return_tensors="pt"))

    def forward(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Add `sentence_embedding` (batch, width)."""
        names = {*self.tokenizer.model_input_names, "input_ids", "attention_mask"}
        inputs = {name: value for name, value in features.items() if name in names and torch.is_tensor(value)}
        vectors = sentence_vectors(self.model, inputs, self.pooling)
        features["sentence_embedding"] = F.normalize(vectors, dim=1) if self.normalize else vectors
        return features

    def get_embedding_dimension(self) -> int:
        """Width of a vector."""
        return self.width
