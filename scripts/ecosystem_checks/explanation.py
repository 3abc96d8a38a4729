"""Checks of explanation tools."""

import torch
from torch import Tensor
from transformers import AutoModel, AutoModelForSequenceClassification, pipeline

import hf_ctxmodels

from .context import TEXTS, CheckContext, assert_close, check


@check("captum", "captum")
def captum(context: CheckContext) -> str:
    """Integrated gradients of the embeddings sum to the difference of the logits."""
    from captum.attr import LayerIntegratedGradients

    model, batch = context.classifier(), context.batch(TEXTS[:1])
    ids = batch.pop("input_ids")
    baseline = torch.full_like(ids, context.tokenizer.pad_token_id)

    def score(ids: Tensor, *inputs: Tensor) -> Tensor:
        return model(ids, **dict(zip(batch, inputs, strict=True))).logits[:, 0]

    with hf_ctxmodels.inspection_mode(model):
        explain = LayerIntegratedGradients(score, model.get_input_embeddings())
        inputs = tuple(batch.values())
        attributions = explain.attribute(ids, baseline, additional_forward_args=inputs, n_steps=200)
        difference = score(ids, *inputs) - score(baseline, *inputs)
    assert difference.abs() > 0.01
    assert_close(attributions.sum((1, 2)).float(), difference.detach(), 0.02)
    return "within `inspection_mode(model)`"


@check("bertviz", "bertviz")
def bertviz(context: CheckContext) -> str:
    """Attention head view."""
    from bertviz import head_view

    model, batch = AutoModel.from_pretrained(context.save(AutoModel)).eval(), context.batch(TEXTS[:1])
    with hf_ctxmodels.inspection_mode(model), torch.no_grad():
        attentions = model(**batch, output_attentions=True).attentions
    tokens = context.tokenizer.convert_ids_to_tokens(batch["input_ids"][0])
    assert "svg" in head_view(attentions, tokens, html_action="return").data
    return "within `inspection_mode(model)`"


@check("SHAP", "shap")
def shap(context: CheckContext) -> str:
    """SHAP values of the tokens and the base value sum to the probabilities of a `text-classification` pipeline."""
    from shap import Explainer

    classify = pipeline("text-classification", model=context.save(AutoModelForSequenceClassification), top_k=None)
    explanation = Explainer(classify, seed=0)(TEXTS[:1], silent=True)
    probabilities = {label["label"]: label["score"] for label in classify(TEXTS[:1])[0]}
    total = torch.tensor(explanation.values[0].sum(0) + explanation.base_values[0])
    assert_close(total.float(), torch.tensor([probabilities[name] for name in explanation.output_names]))
    return ""
