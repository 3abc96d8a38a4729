"""Faults of XLM: its network, its objectives and its tokenizer."""

from fault import Fault

_MODEL = "hf_ctxmodels/models/xlm/modeling_xlm.py"
_MASKING = "hf_ctxmodels/objectives/cross_lingual_masking.py"
_STREAMS = "hf_ctxmodels/objectives/language_streams.py"
_OBJECTIVES = ("tests/objectives/test_cross_lingual.py",)

XLM_FAULTS = [
    Fault(
        "the language is not embedded",
        _MODEL,
        "embedded = embedded + self.language_embeddings(langs)",
        "embedded = embedded + 0 * self.language_embeddings(langs)",
        ("tests/models/test_xlm.py",),
        "languages_are_those",
    ),
    Fault(
        "generation goes on in the prompt's first language",
        "hf_ctxmodels/models/xlm/languages.py",
        'mode="replicate")[:, :length]',
        "value=0)[:, :length]",
        ("tests/models/test_xlm.py",),
        "generation_in_a_language",
    ),
    Fault(
        "a missing language is the first one",
        "hf_ctxmodels/models/xlm/languages.py",
        "if config.default_lang is None:",
        "if False:",
        ("tests/models/test_xlm.py",),
        "missing_and_wrong",
    ),
    Fault(
        "a causal XLM sees later tokens",
        _MODEL,
        "CAUSAL if config.causal else BIDIRECTIONAL",
        "BIDIRECTIONAL",
        ("tests/models/test_xlm.py",),
        "directions or causal_model",
    ),
    Fault(
        "linear maps start as those of the peer in transformers",
        _MODEL,
        "init.uniform_(module.weight, -bound, bound)",
        "init.normal_(module.weight, std=0.02)",
        ("tests/models/test_xlm.py",),
        "initial_weights",
    ),
    Fault(
        "sines and cosines change places",
        "hf_ctxmodels/models/xlm/languages.py",
        "torch.where(even, angles.sin(), angles.cos())",
        "torch.where(even, angles.cos(), angles.sin())",
        ("tests/models/test_xlm.py",),
        "sinusoids",
    ),
    Fault(
        "positions go on in the translation",
        _MASKING,
        "np.where(columns < second, columns, columns - second) if second else columns",
        "columns",
        _OBJECTIVES,
        "rows_of_pairs",
    ),
    Fault(
        "the translation has the language of the text",
        _MASKING,
        "self.langs((first, len(one) + 2), (second, len(other) + 2))",
        "self.langs((first, len(one) + 2), (first, len(other) + 2))",
        _OBJECTIVES,
        "rows_of_pairs",
    ),
    Fault(
        "a row's first token is predicted",
        _MASKING,
        "selected[:1] = False",
        "selected[:0] = False",
        _OBJECTIVES,
        "rates or plain_loop",
    ),
    Fault(
        "frequent tokens are preferred",
        _MASKING,
        "known[known > 0] ** -self.sample_alpha",
        "known[known > 0] ** self.sample_alpha",
        _OBJECTIVES,
        "rates or plain_loop",
    ),
    Fault(
        "a stream's rows overlap",
        _STREAMS,
        "            start = stop\n",
        "            start = stop - 1\n",
        _OBJECTIVES,
        "streams_are_cut",
    ),
    Fault(
        "sentences of a stream have no symbol between them",
        _STREAMS,
        "np.concatenate([rest, ids, [self.end]], dtype=np.int32)",
        "np.concatenate([rest, ids], dtype=np.int32)",
        _OBJECTIVES,
        "streams_are_cut",
    ),
    Fault(
        "MLM and TLM share their steps",
        _MASKING,
        'self.sampling = SamplingPolicy(task_column="task")',
        "self.sampling = SamplingPolicy()",
        _OBJECTIVES,
        "alternation",
    ),
    Fault(
        "a subword outside of the vocabulary keeps its own number",
        "hf_ctxmodels/models/xlm/tokenization_xlm.py",
        "return unknown if ids >= limit else ids",
        "return ids",
        ("tests/data/test_tokenization_xlm.py",),
        "special_tokens_stay",
    ),
    Fault(
        "the heads have the encoder's rate",
        "hf_ctxmodels/training/optim/optimization.py",
        "[*group_rates(groups[:-1], learning_rate, decay), head_rate]",
        "[*group_rates(groups[:-1], learning_rate, decay), learning_rate]",
        ("tests/training/test_depth.py",),
        "rate_of_their_own",
    ),
    Fault(
        "padding has states after the last layer",
        "hf_ctxmodels/models/xlm/modeling_xlm.py",
        "zeroes_padding = True",
        "zeroes_padding = False",
        ("tests/models/test_xlm.py",),
        "every_path",
    ),
]
