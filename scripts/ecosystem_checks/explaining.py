"""Tools that explain."""

import torch
from torch import Tensor
from transformers import AutoModel

import hf_ctxmodels

from .workplace import TEXTS, Workplace, assert_close, check


@check("captum", "captum")
def captum(place: Workplace) -> str:
    """Integrated gradients of the embeddings add up to the difference of the logits."""
    from captum.attr import LayerIntegratedGradients

    model, batch = place.classifier(), place.batch(TEXTS[:1])
    ids = batch.pop("input_ids")
    baseline = torch.full_like(ids, place.tokenizer.pad_token_id)

    def score(ids: Tensor, *others: Tensor) -> Tensor:
        return model(ids, **dict(zip(batch, others, strict=True))).logits[:, 0]

    with hf_ctxmodels.inspection_mode(model):
        explain = LayerIntegratedGradients(score, model.get_input_embeddings())
        others = tuple(batch.values())
        attributions = explain.attribute(ids, baseline, additional_forward_args=others, n_steps=200)
        difference = score(ids, *others) - score(baseline, *others)
    assert difference.abs() > 0.01
    assert_close(attributions.sum((1, 2)).float(), difference.detach(), 0.02)
    return "within `inspection_mode(model)`"


@check("bertviz", "bertviz")
def bertviz(place: Workplace) -> str:
    """The view of attention heads."""
    from bertviz import head_view

    model, batch = AutoModel.from_pretrained(place.save(AutoModel)).eval(), place.batch(TEXTS[:1])
    with hf_ctxmodels.inspection_mode(model), torch.no_grad():
        attentions = model(**batch, output_attentions=True).attentions
    tokens = place.tokenizer.convert_ids_to_tokens(batch["input_ids"][0])
    assert "svg" in head_view(attentions, tokens, html_action="return").data
    return "within `inspection_mode(model)`"
