"""A small teacher, students of it, and a padded batch."""

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
    layers: int, kind: type[HeadModel] = CtxBertForMaskedLM, seed: int = 0, dropout: float = 0.0, **more: Any
) -> Any:
    torch.manual_seed(seed)
    rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout, "initializer_range": 0.3}
    return kind(CtxBertConfig(num_hidden_layers=layers, **rates, **{**SIZES, **more}))


def classifier(layers: int, seed: int = 0, labels: int = 3, **more: Any) -> Any:
    return new_model(layers, CtxBertForSequenceClassification, seed, num_labels=labels, **more)


def tagger(layers: int, seed: int = 0, labels: int = 3, **more: Any) -> Any:
    return new_model(layers, CtxBertForTokenClassification, seed, num_labels=labels, **more)


def tags(row: dict[str, Any]) -> Tensor:
    """Classes of the labeled tokens."""
    return torch.where(row["labels"] == IGNORE_INDEX, IGNORE_INDEX, row["labels"] % 3)


def features(seed: int = 0) -> list[dict[str, Any]]:
    """Rows of LENGTHS tokens, each with labels of masked tokens; the numbers of labels differ from row to row."""
    rng = torch.Generator().manual_seed(seed)
    rows = []
    for number, length in enumerate(LENGTHS):
        ids = torch.randint(5, VOCABULARY, (length,), generator=rng)
        labels = torch.full((length,), IGNORE_INDEX)
        labels[1 : 2 + number % 3] = ids[1 : 2 + number % 3]
        rows.append({"input_ids": ids, "labels": labels, "class": number % 3})
    return rows


def padded(rows: list[dict[str, Any]], kind: str = "text") -> dict[str, Tensor]:
    """A collator: padding at the end; labels of masked tokens ("text"), of classes of rows or of tokens ("tags")."""
    rows = [{**row, "labels": tags(row)} for row in rows] if kind == "tags" else rows
    width = max(len(row["input_ids"]) for row in rows)

    def pad(name: str, value: int) -> Tensor:
        return torch.stack(
            [torch.nn.functional.pad(row[name], (0, width - len(row[name])), value=value) for row in rows]
        )

    ones = [{"mask": torch.ones_like(row["input_ids"]), **row} for row in rows]
    mask = torch.stack([torch.nn.functional.pad(row["mask"], (0, width - len(row["mask"]))) for row in ones])
    labels = torch.tensor([row["class"] for row in rows]) if kind == "rows" else pad("labels", IGNORE_INDEX)
    return {"input_ids": pad("input_ids", 0), "attention_mask": mask, "labels": labels}


def batch_of(rows: list[dict[str, Any]], kind: str = "text") -> dict[str, Tensor]:
    """With what distillation counts."""
    return DistillationCollator(lambda features: padded(features, kind))(rows)


def gradients(model: CtxDistillationModel) -> dict[str, Tensor]:
    values = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    return values
