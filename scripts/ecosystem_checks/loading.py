"""Checks of pipelines and remote code."""

import json

import torch
from transformers import AutoModel, AutoModelForMaskedLM, AutoModelForSequenceClassification

from .context import TEXTS, CheckContext, assert_close, check


@check("pipelines", "transformers")
def pipelines(context: CheckContext) -> str:
    """`text-classification`, `fill-mask` and `feature-extraction` with saved models."""
    from transformers import pipeline

    assert pipeline("text-classification", model=context.save(AutoModelForSequenceClassification))(TEXTS)[0]["label"]
    assert pipeline("fill-mask", model=context.save(AutoModelForMaskedLM))("the [MASK] ran")[0]["token_str"]
    assert len(pipeline("feature-extraction", model=context.save(AutoModel))(TEXTS[0])[0]) > 4
    return ""


@check("trust_remote_code", "transformers")
def trust_remote_code(context: CheckContext) -> str:
    """Equal logits in a process that does not import this package."""
    directory = context.save(AutoModelForSequenceClassification)
    code = (
        "from transformers import AutoModelForSequenceClassification, AutoTokenizer\n"
        f"model = AutoModelForSequenceClassification.from_pretrained({directory!r}, trust_remote_code=True)\n"
        f"tokenizer = AutoTokenizer.from_pretrained({directory!r}, trust_remote_code=True)\n"
        f"print(model.eval()(**tokenizer({TEXTS[0]!r}, return_tensors='pt')).logits.tolist())"
    )
    with torch.no_grad():
        expected = context.classifier()(**context.batch(TEXTS[:1])).logits
    assert_close(torch.tensor(json.loads(context.launch("-c", code).stdout.splitlines()[-1])), expected)
    return "the package must be installed, not imported"
