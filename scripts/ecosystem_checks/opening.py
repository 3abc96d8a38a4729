"""What opens saved models by their name alone."""

import json

import torch
from transformers import AutoModel, AutoModelForMaskedLM, AutoModelForSequenceClassification

from .workplace import TEXTS, Workplace, assert_close, check


@check("pipelines", "transformers")
def pipelines(place: Workplace) -> str:
    """`text-classification`, `fill-mask` and `feature-extraction` on saved models."""
    from transformers import pipeline

    assert pipeline("text-classification", model=place.save(AutoModelForSequenceClassification))(TEXTS)[0]["label"]
    assert pipeline("fill-mask", model=place.save(AutoModelForMaskedLM))("the [MASK] ran")[0]["token_str"]
    assert len(pipeline("feature-extraction", model=place.save(AutoModel))(TEXTS[0])[0]) > 4
    return ""


@check("trust_remote_code", "transformers")
def trust_remote_code(place: Workplace) -> str:
    """In a process that does not import this package: equal logits."""
    directory = place.save(AutoModelForSequenceClassification)
    code = (
        "from transformers import AutoModelForSequenceClassification, AutoTokenizer\n"
        f"model = AutoModelForSequenceClassification.from_pretrained({directory!r}, trust_remote_code=True)\n"
        f"tokenizer = AutoTokenizer.from_pretrained({directory!r}, trust_remote_code=True)\n"
        f"print(model.eval()(**tokenizer({TEXTS[0]!r}, return_tensors='pt')).logits.tolist())"
    )
    with torch.no_grad():
        expected = place.classifier()(**place.batch(TEXTS[:1])).logits
    assert_close(torch.tensor(json.loads(place.launch("-c", code).stdout.splitlines()[-1])), expected)
    return "the package must be installed, not imported"
