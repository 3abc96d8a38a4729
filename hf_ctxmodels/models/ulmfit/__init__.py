"""ULMFiT (Howard & Ruder 2018): a regularized LSTM language model, fine-tuned on a task's text and then on the task."""

from typing import Any

from hf_ctxmodels.models.ulmfit.configuration_ulmfit import CtxUlmfitConfig
from hf_ctxmodels.models.ulmfit.modeling_ulmfit import (
    CtxUlmfitForCausalLM,
    CtxUlmfitForQuestionAnswering,
    CtxUlmfitForSequenceClassification,
    CtxUlmfitForTokenClassification,
    CtxUlmfitModel,
)
from hf_ctxmodels.models.ulmfit.tokenization_ulmfit import CtxUlmfitTokenizer
from hf_ctxmodels.spec import FamilySpec, PublishedCount, ShortTraining, Traits

# base: the paper's; the others have its proportions, for a CPU
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 128, "cell_size": 256, "num_hidden_layers": 2},
    "small": {"hidden_size": 200, "cell_size": 400, "num_hidden_layers": 3},
    "base": {"hidden_size": 400, "cell_size": 1150, "num_hidden_layers": 3},
}

SPEC = FamilySpec(
    name="ulmfit",
    paper="Howard & Ruder 2018, Universal Language Model Fine-tuning for Text Classification (arXiv 1801.06146)",
    config=CtxUlmfitConfig,
    tokenizer=CtxUlmfitTokenizer,
    models={
        "AutoModel": CtxUlmfitModel,
        "AutoModelForPreTraining": CtxUlmfitForCausalLM,
        "AutoModelForCausalLM": CtxUlmfitForCausalLM,
        "AutoModelForSequenceClassification": CtxUlmfitForSequenceClassification,
        "AutoModelForTokenClassification": CtxUlmfitForTokenClassification,
        "AutoModelForQuestionAnswering": CtxUlmfitForQuestionAnswering,
    },
    objective_classes={"clm": "CausalLM"},
    sizes=SIZES,
    # Of an AWD-LSTM with a tied softmax (Merity et al. 2017), by vocabulary.
    published={
        f"{words} words": PublishedCount(
            {**SIZES["base"], "vocab_size": words},
            {"AutoModel": 20_211_600 + 400 * words, "AutoModelForPreTraining": head, "AutoModelForCausalLM": head},
        )
        for words, head in ((10_000, 24_221_600), (33_278, 33_556_078), (60_000, 44_271_600))
    },
    traits=Traits(
        is_recurrent=True,
        uses_batch_norm=("AutoModelForSequenceClassification",),
        tiny={"dropout_scale": 0.0},
        short_training=ShortTraining(
            learning_rate=1e-2, config_options=("dropout_scale=0.1", "activation_penalty=0", "slowness_penalty=0")
        ),
    ),
)

__all__ = [
    "CtxUlmfitConfig",
    "CtxUlmfitForCausalLM",
    "CtxUlmfitForQuestionAnswering",
    "CtxUlmfitForSequenceClassification",
    "CtxUlmfitForTokenClassification",
    "CtxUlmfitModel",
    "CtxUlmfitTokenizer",
]
