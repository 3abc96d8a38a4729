"""Tiny teachers and students, examples, and padded batches."""

from typing import Any

import torch
from torch import Tensor

from hf_ctxmodels import (
    CtxBertConfig,
    CtxBertForMaskedLM,
    CtxBertForSequenceClassification,
    CtxBertForTokenClassification,
)
from hf_ctxmodels.compression.distillation import CtxDistillationModel, DistillationCollator
from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.heads import HeadModel

VOCABULARY = 23
LENGTHS = (7, 3, 5, 6)
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 12}


def new_model(
    layers: int, head: type[HeadModel] = CtxBertForMaskedLM, seed: int = 0, dropout: float = 0.0, **overrides: Any
) -> Any:
    torch.manual_seed(seed)
    rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout, "initializer_range": 0.3}
    return head(CtxBertConfig(num_hidden_layers=layers, **rates, **{**SIZES, **overrides}))


def make_classifier(layers: int, seed: int = 0, labels: int = 3, **overrides: Any) -> Any:
    return new_model(layers, CtxBertForSequenceClassification, seed, num_labels=labels, **overrides)


def make_tagger(layers: int, seed: int = 0, labels: int = 3, **overrides: Any) -> Any:
    return new_model(layers, CtxBertForTokenClassification, seed, num_labels=labels, **overrides)


def token_classes(row: dict[str, Any]) -> Tensor:
    """Token classification labels of the labeled tokens."""
    return torch.where(row["labels"] == IGNORE_INDEX, IGNORE_INDEX, row["labels"] % 3)


def features(seed: int = 0) -> list[dict[str, Any]]:
    """Examples of LENGTHS tokens with labels of masked tokens; the number of labels differs between examples."""
    rng = torch.Generator().manual_seed(seed)
    rows = []
    for number, length in enumerate(LENGTHS):
        ids = torch.randint(5, VOCABULARY, (length,), generator=rng)
        labels = torch.full((length,), IGNORE_INDEX)
        labels[1 : 2 + number % 3] = ids[1 : 2 + number % 3]
        rows.append({"input_ids": ids, "labels": labels, "class": number % 3})
    return rows


def collate_padded(rows: list[dict[str, Any]], task: str = "text") -> dict[str, Tensor]:
    """Pad at the end, with labels of masked tokens ("text"), examples ("rows") or token classes ("tags")."""
    rows = [{**row, "labels": token_classes(row)} for row in rows] if task == "tags" else rows
    width = max(len(row["input_ids"]) for row in rows)

    def pad(name: str, value: int) -> Tensor:
        return torch.stack(
            [torch.nn.functional.pad(row[name], (0, width - len(row[name])), value=value) for row in rows]
        )

    masked_rows = [{"mask": torch.ones_like(row["input_ids"]), **row} for row in rows]
    mask = torch.stack([torch.nn.functional.pad(row["mask"], (0, width - len(row["mask"]))) for row in masked_rows])
    labels = torch.tensor([row["class"] for row in rows]) if task == "rows" else pad("labels", IGNORE_INDEX)
    return {"input_ids": pad("input_ids", 0), "attention_mask": mask, "labels": labels}


def distillation_batch(rows: list[dict[str, Any]], task: str = "text") -> dict[str, Tensor]:
    return DistillationCollator(lambda features: collate_padded(features, task))(rows)


def gradients(model: CtxDistillationModel) -> dict[str, Tensor]:
    values = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    return values
