"""GPT (Radford et al. 2018): a causal post-norm Transformer, pretrained and fine-tuned with language modeling."""

from hf_ctxmodels.models.gpt.configuration_gpt import CtxGptConfig
from hf_ctxmodels.models.gpt.modeling_gpt import (
    GPT_CONVERSION,
    CtxGptForCausalLM,
    CtxGptForMultipleChoice,
    CtxGptForSequenceClassification,
    CtxGptForTokenClassification,
    CtxGptModel,
)
from hf_ctxmodels.models.gpt.tokenization_gpt import CtxGptTokenizer
from hf_ctxmodels.spec import SMALL_SIZES, FamilySpec, PublishedCount, Traits, encoder_size

SIZES = SMALL_SIZES | {"base": encoder_size(768, 12, 12)}

SPEC = FamilySpec(
    name="gpt",
    paper="Radford et al. 2018, Improving Language Understanding by Generative Pre-Training",
    config=CtxGptConfig,
    tokenizer=CtxGptTokenizer,
    models={
        "AutoModel": CtxGptModel,
        "AutoModelForPreTraining": CtxGptForCausalLM,
        "AutoModelForCausalLM": CtxGptForCausalLM,
        "AutoModelForSequenceClassification": CtxGptForSequenceClassification,
        "AutoModelForTokenClassification": CtxGptForTokenClassification,
        "AutoModelForMultipleChoice": CtxGptForMultipleChoice,
    },
    objective_classes={"clm": "DocumentLM", "prefix-lm": "PrefixLM"},
    sizes=SIZES,
    # parameter counts of the classes of transformers 5.23
    published={
        "base": PublishedCount(
            SIZES["base"],
            {
                "AutoModel": 116_534_784,
                "AutoModelForCausalLM": 116_534_784,
                "AutoModelForMultipleChoice": 116_535_553,
            },
        )
    },
    conversion=GPT_CONVERSION,
    traits=Traits(tiny={"embedding_dropout_prob": 0.0, "intermediate_size": None}),
)

__all__ = [
    "CtxGptConfig",
    "CtxGptForCausalLM",
    "CtxGptForMultipleChoice",
    "CtxGptForSequenceClassification",
    "CtxGptForTokenClassification",
    "CtxGptModel",
    "CtxGptTokenizer",
]
