"""MASS (Song et al. 2019): an encoder-decoder pretrained to generate a masked segment of its source."""

from hf_ctxmodels.models.mass.configuration_mass import CtxMassConfig
from hf_ctxmodels.models.mass.modeling_mass import CtxMassForConditionalGeneration, CtxMassModel
from hf_ctxmodels.models.mass.tokenization_mass import CtxMassTokenizer
from hf_ctxmodels.spec import SMALL_SEQ2SEQ_SIZES, FamilySpec, PublishedCount, ShortTraining, Traits, seq2seq_size

# the summarization model, with BERT's uncased vocabulary and the LayerNorm epsilon of fairseq
_SUMMARIES = {
    "vocab_size": 30522,
    "pad_token_id": 0,
    "bos_token_id": 101,
    "eos_token_id": 102,
    "decoder_start_token_id": 101,
    "n_langs": 1,
    "activation_dropout": 0.1,
    "scale_embedding": True,
    "output_bias": False,
    "layer_norm_eps": 1e-5,
}

# base: translation (section 4.1); summaries, summaries-middle: released summarization models
SIZES = SMALL_SEQ2SEQ_SIZES | {
    "base": seq2seq_size(1024, 6, 8),
    "summaries": {**seq2seq_size(768, 6, 12), **_SUMMARIES},
    "summaries-middle": {**seq2seq_size(1024, 6, 16), **_SUMMARIES},
}

SPEC = FamilySpec(
    name="mass",
    paper="Song et al. 2019, MASS: Masked Sequence to Sequence Pre-training for Language Generation (arXiv 1905.02450)",
    config=CtxMassConfig,
    tokenizer=CtxMassTokenizer,
    models={
        "AutoModel": CtxMassModel,
        "AutoModelForPreTraining": CtxMassForConditionalGeneration,
        "AutoModelForSeq2SeqLM": CtxMassForConditionalGeneration,
    },
    objective_classes={
        "masked-segment": "MaskedSegment",
        "masked-translation": "MaskedTranslation",
        "back-translation": "BackTranslation",
    },
    sizes=SIZES,
    # counts of this implementation (transformers has no such class); 123 and 208 million according to the release
    published={
        "summaries": PublishedCount(
            SIZES["summaries"], dict.fromkeys(("AutoModel", "AutoModelForSeq2SeqLM"), 123_468_288)
        ),
        "summaries-middle": PublishedCount(SIZES["summaries-middle"], {"AutoModel": 208_664_576}),
    },
    parent="xlm",
    traits=Traits(
        tiny={
            "decoder_layers": 3,
            "decoder_attention_heads": 2,
            "decoder_ffn_dim": 40,
            "decoder_start_token_id": 2,
            "n_langs": 1,
        },
        short_training=ShortTraining(steps=60, config_options=("decoder_layers=1", "decoder_ffn_dim=128")),
    ),
)

__all__ = ["CtxMassConfig", "CtxMassForConditionalGeneration", "CtxMassModel", "CtxMassTokenizer"]
