"""Faults of Transformer encoder-decoders, of BART and of its objective."""

from fault import Fault

SEQ2SEQ_FAULTS = [
    Fault(
        "the decoder of an encoder-decoder sees later tokens",
        "hf_ctxmodels/models/_shared/transformer_stack.py",
        "return CAUSAL if self.is_decoder else BIDIRECTIONAL",
        "return BIDIRECTIONAL",
        ("tests/models/test_seq2seq.py",),
        "a_cache_gives",
    ),
    Fault(
        "the decoder attends to padding of the source",
        "hf_ctxmodels/models/_shared/transformer_stack.py",
        "place = build_memory_layout(layout, source.states, source.attention_mask, source.sequence_ids)",
        "place = build_memory_layout(layout, source.states, None, source.sequence_ids)",
        ("tests/models/test_seq2seq.py",),
        "sources_alone",
    ),
    Fault(
        "the decoder is computed to one token before the last label",
        "hf_ctxmodels/models/_shared/seq2seq_heads.py",
        'written["attention_mask"] = until_last(target_mask)',
        'written["attention_mask"] = until_last(target_mask[:, 1:])',
        ("tests/models/test_seq2seq.py",),
        "what_the_decoder_reads",
    ),
    Fault(
        "a sequence's first token reads the sequence before it",
        "hf_ctxmodels/models/_shared/transformer_seq2seq.py",
        "return before.masked_fill(before < first, -1)",
        "return before",
        ("tests/models/test_common_layouts.py",),
        "bart and packed_sequences",
    ),
    Fault(
        "classification reads the first end token",
        "hf_ctxmodels/models/_shared/seq2seq_heads.py",
        "torch.where(ends.any(1), last_columns(given, ends), last)",
        "torch.where(ends.any(1), ends.int().argmax(1), last)",
        ("tests/models/test_seq2seq.py",),
        "last_end_token",
    ),
    Fault(
        "BART's positions begin with the table's first row",
        "hf_ctxmodels/models/bart/modeling_bart.py",
        "super().embed(words, position_ids + _FIRST_ROW, **beside)",
        "super().embed(words, position_ids, **beside)",
        ("tests/models/test_common_reference.py",),
        "bart and the_outputs",
    ),
    Fault(
        "a masked span stops within a word",
        "hf_ctxmodels/objectives/common/noising.py",
        "np.append(starts, len(text.ids))[np.minimum(words + lengths, len(starts))]",
        "np.minimum(starts[words] + lengths, len(text.ids))",
        ("tests/objectives/test_denoising.py",),
        "loops",
    ),
    Fault(
        "empty spans cost budget",
        "hf_ctxmodels/objectives/common/noising.py",
        "totals = np.cumsum(lengths)",
        "totals = np.cumsum(np.maximum(lengths, 1))",
        ("tests/objectives/test_denoising.py",),
        "loops or poisson",
    ),
]
