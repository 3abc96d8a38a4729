"""Scores of texts under a discriminator of replaced tokens (ELECTRA)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.host_copies import CollatedBatch
from hf_ctxmodels.core.model import evaluation_mode
from hf_ctxmodels.data.padding import batches_by_length


def detects_replaced_tokens(model: PreTrainedModel) -> bool:
    """Whether a model has a head for replaced token detection."""
    return hasattr(model, "rtd_head")


def score_originality(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, batch_size: int = 32
) -> list[float]:
    """Sums of the log-probabilities, in nats, that the discriminator gives to its tokens being original; a higher score
    means a more plausible text. Special tokens do not count.

    Raises:
        CtxError: The model does not detect replaced tokens.
    """
    if not detects_replaced_tokens(model):
        raise CtxError(
            f"{type(model).__name__} does not detect replaced tokens.", hint="use a checkpoint of the objective `rtd`."
        )
    encoded = [tokenizer(text, return_special_tokens_mask=True, verbose=False) for text in texts]
    scores = [0.0] * len(texts)
    with evaluation_mode(model):
        for indices in batches_by_length([len(encoding["input_ids"]) for encoding in encoded], batch_size):
            names = [*tokenizer.model_input_names, "special_tokens_mask"]
            features = [{name: encoded[index][name] for name in names if name in encoded[index]} for index in indices]
            padded: Any = tokenizer.pad(features, return_tensors="pt")
            is_token = (padded["special_tokens_mask"] == 0) & (padded["attention_mask"] != 0)
            inputs = {name: padded[name] for name in tokenizer.model_input_names if name in padded}
            logits = model(**CollatedBatch(inputs).to(model.device)).logits.float().cpu()
            sums = torch.where(is_token, F.logsigmoid(-logits).double(), 0.0).sum(1)
            for index, value in zip(indices, sums.tolist(), strict=True):
                scores[index] = value
    return scores
