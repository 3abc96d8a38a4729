"""Models as a module of sentence-transformers (extra `sentences`)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModel, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.layers.pooling import Pooling
from hf_ctxmodels.models._shared.sentence_encoder import encode_sentences, longest_input, sentence_vectors, tokenise

try:
    from sentence_transformers.base.modules import InputModule
except ImportError as missing:
    raise CtxError(
        "sentence-transformers is not installed.", hint="pip install 'hf_ctxmodels[sentences]'."
    ) from missing


class CtxSentenceEncoder(InputModule):
    """The first module of a `SentenceTransformer`, and the only one it needs: any base model, and how it pools.

    Its files lie in the directory itself, which `AutoModel` and `AutoTokenizer` therefore open as well. The class being
    none of theirs, sentence-transformers opens a saved directory with `trust_remote_code=True` only.

    Args:
        model: A base model, as `AutoModel` opens.
        tokenizer: Its own.
        pooling: How to pool the states of tokens; None takes what the model pools itself.
        normalize: Scale every vector to length 1.
        max_seq_length: Tokens of a sentence at most; None for the model's own limit, if there is one.

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
        """Of a model's directory or Hub id.

        Args:
            source: Where the model and its tokenizer are.
            settings: Of the class; those not given are as they were saved, or as the class has them.
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
        """As sentence-transformers opens a module."""
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
        """Weights, tokenizer and settings.

        Raises:
            CtxError: Asked for a pickle.
        """
        if not safe_serialization:
            raise CtxError("Weights are saved as safetensors only.", hint="leave safe_serialization as it is.")
        self.model.save_pretrained(output_path)
        self.tokenizer.save_pretrained(output_path)
        self.save_config(output_path)

    def preprocess(self, inputs: Sequence[Any], prompt: str | None = None, **kwargs: Any) -> dict[str, Tensor]:
        """Texts -> what the model reads, padded.

        Raises:
            CtxError: A text has no token.
        """
        texts = [f"{prompt or ''}{text}" for text in inputs]
        encoded = tokenise(self.tokenizer, texts, self.max_seq_length or longest_input(self.model, self.tokenizer))
        return dict(self.tokenizer.pad(encoded, return_tensors="pt"))

    def forward(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Add `sentence_embedding` (batch, width)."""
        names = {*self.tokenizer.model_input_names, "input_ids", "attention_mask"}
        inputs = {name: value for name, value in features.items() if name in names and torch.is_tensor(value)}
        vectors = sentence_vectors(self.model, inputs, self.pooling)
        features["sentence_embedding"] = F.normalize(vectors, dim=1) if self.normalize else vectors
        return features

    def get_embedding_dimension(self) -> int:
        """Width of a vector; in older versions `get_sentence_embedding_dimension`."""
        return self.width
