"""Faults of MASS and of its objective."""

from fault import Fault

MASS_FAULTS = [
    Fault(
        "the decoder of MASS sees the masked states",
        "hf_ctxmodels/models/mass/modeling_mass.py",
        "return Source(states, mask if padding is None else (mask != 0) & (padding != 0))",
        "return Source(states, padding)",
        ("tests/objectives/test_masked_segment.py",),
        "no_masked_state",
    ),
    Fault(
        "the decoder of MASS is in the language of the source",
        "hf_ctxmodels/models/mass/modeling_mass.py",
        'inputs["decoder_langs"] = continued(decoder_langs, end)[:, end - steps :]',
        'inputs["decoder_langs"] = 1 - continued(decoder_langs, end)[:, end - steps :]',
        ("tests/objectives/test_masked_segment.py",),
        "languages",
    ),
    Fault(
        "a segment's positions are those of its targets",
        "hf_ctxmodels/objectives/masked_segment.py",
        "steps.pad([each - 1 for each in places], 0)",
        "steps.pad(places, 0)",
        ("tests/objectives/test_masked_segment.py",),
        "decoder_is_given",
    ),
    Fault(
        "a row's first token is masked",
        "hf_ctxmodels/objectives/masked_segment.py",
        "begin, stop = max(first, 1), min(first + self.block, length)",
        "begin, stop = first, min(first + self.block, length)",
        ("tests/objectives/test_masked_segment.py",),
        "decoder_is_given",
    ),
    Fault(
        "a row of MASS mixes languages",
        "hf_ctxmodels/objectives/masked_segment.py",
        "joins = not self.options.by_sentence and language == current",
        "joins = not self.options.by_sentence",
        ("tests/objectives/test_masked_segment.py",),
        "languages",
    ),
    Fault(
        "pieces of a segment begin with the row's first token",
        "hf_ctxmodels/objectives/masked_segment.py",
        "return 1 + np.flatnonzero(chosen)",
        "return np.flatnonzero(chosen)",
        ("tests/objectives/test_masked_segment.py",),
        "pieces",
    ),
    Fault(
        "the decoder of a translation is given masked targets as labels",
        "hf_ctxmodels/objectives/masked_translation.py",
        '"labels": steps.pad(labels, IGNORED),',
        '"labels": steps.pad([np.append(self.given(each)[1:], 1) for each in features], IGNORED),',
        ("tests/objectives/test_masked_segment.py",),
        "masked_translation",
    ),
    Fault(
        "the decoder's start is masked",
        "hf_ctxmodels/objectives/masked_translation.py",
        "self.target_rule.select(np.arange(len(ids)) > 0, None, rng)",
        "self.target_rule.select(np.arange(len(ids)) >= 0, None, rng)",
        ("tests/objectives/test_masked_segment.py",),
        "masked_translation",
    ),
]
