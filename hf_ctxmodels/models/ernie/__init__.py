"""ERNIE 1.0 (Sun et al. 2019) and 2.0 (Sun et al. 2020): BERT's network, pretrained by knowledge masking and, in 2.0,
by continual multi-task learning."""

from hf_ctxmodels.models import bert
from hf_ctxmodels.models.bert.conversion_bert import BERT_CONVERSION
from hf_ctxmodels.models.ernie.configuration_ernie import SEQUENCE_TASKS, TASKS, TOKEN_TASKS, CtxErnieConfig
from hf_ctxmodels.models.ernie.modeling_ernie import (
    CtxErnieForMaskedLM,
    CtxErnieForMaskedLMWithPair,
    CtxErnieForMultipleChoice,
    CtxErnieForNextSentencePrediction,
    CtxErnieForPreTraining,
    CtxErnieForQuestionAnswering,
    CtxErnieForSequenceClassification,
    CtxErnieForTokenClassification,
    CtxErnieModel,
)
from hf_ctxmodels.models.ernie.tokenization_ernie import CtxErnieTokenizer
from hf_ctxmodels.spec import FamilySpec, PublishedCount, ShortTraining, Target, Traits

# ERNIE 2.0 for English: BERT's vocabulary, positions and activation, four segments
_VERSION_2 = {"vocab_size": 30522, "max_position_embeddings": 512, "type_vocab_size": 4, "hidden_act": "gelu"}

# released models for Chinese (1.0) and English (2.0), see paddlenlp/transformers/ernie/configuration.py
SIZES = {
    **{name: bert.SIZES[name] for name in ("tiny", "mini", "small", "base")},
    "base-2.0": {**bert.SIZES["base"], **_VERSION_2},
    "large-2.0": {**bert.SIZES["large"], **_VERSION_2},
}

SPEC = FamilySpec(
    name="ernie",
    paper="Sun et al. 2019, ERNIE: Enhanced Representation through Knowledge Integration (arXiv 1904.09223); Sun et "
    "al. 2020, ERNIE 2.0: A Continual Pre-training Framework for Language Understanding (arXiv 1907.12412)",
    config=CtxErnieConfig,
    tokenizer=CtxErnieTokenizer,
    models={
        "AutoModel": CtxErnieModel,
        "AutoModelForPreTraining": CtxErnieForPreTraining,
        "AutoModelForMaskedLM": CtxErnieForMaskedLM,
        "AutoModelForNextSentencePrediction": CtxErnieForNextSentencePrediction,
        "AutoModelForSequenceClassification": CtxErnieForSequenceClassification,
        "AutoModelForTokenClassification": CtxErnieForTokenClassification,
        "AutoModelForQuestionAnswering": CtxErnieForQuestionAnswering,
        "AutoModelForMultipleChoice": CtxErnieForMultipleChoice,
    },
    reference_heads={"AutoModelForPreTraining": CtxErnieForMaskedLMWithPair},
    objective_classes={
        "unit-mlm+pairs": "UnitMaskingWithPairs",
        "continual-tasks": "ContinualTasks",
        "mlm": "MaskedLM",
    },
    sizes=SIZES,
    # parameter counts of the classes of transformers 5.23; the encoder has its pooler
    published={
        name: PublishedCount(
            SIZES[name], dict(zip(("AutoModel", "AutoModelForMaskedLM", "AutoModelForPreTraining"), counts))
        )
        for name, counts in {
            "base": (99_866_112, 99_885_648, 100_477_778),
            "base-2.0": (109_483_776, 109_515_834, 110_107_964),
            "large-2.0": (335_143_936, 335_176_506, 336_228_156),
        }.items()
    },
    conversion=BERT_CONVERSION,
    parent="bert",
    traits=Traits(
        short_training=ShortTraining(steps=240),
        tiny={"use_task_id": True, "pretraining_tasks": dict.fromkeys(TASKS, 3)},
        targets={
            **{f"{task}_labels": Target.PAIR_CLASS for task in SEQUENCE_TASKS},
            **{f"{task}_labels": Target.TOKEN_PAIR_CLASS for task in TOKEN_TASKS},
        },
    ),
)

__all__ = [
    "CtxErnieConfig",
    "CtxErnieForMaskedLM",
    "CtxErnieForMaskedLMWithPair",
    "CtxErnieForMultipleChoice",
    "CtxErnieForNextSentencePrediction",
    "CtxErnieForPreTraining",
    "CtxErnieForQuestionAnswering",
    "CtxErnieForSequenceClassification",
    "CtxErnieForTokenClassification",
    "CtxErnieModel",
    "CtxErnieTokenizer",
]
