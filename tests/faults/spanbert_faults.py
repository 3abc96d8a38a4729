"""Faults of SpanBERT and StructBERT: their heads and objectives."""

from fault import Fault

SPANBERT_FAULTS = [
    Fault(
        "the boundary before a span is the span's first token",
        "hf_ctxmodels/models/spanbert/span_boundary.py",
        "self.before, self.after = rows * length + before, rows * length + after",
        "self.before, self.after = rows * length + before + 1, rows * length + after",
        ("tests/models/test_spanbert.py",),
        "loops",
    ),
    Fault(
        "the span boundary term has no one beside its number of targets",
        "hf_ctxmodels/models/spanbert/modeling_spanbert.py",
        "counts) + 1)",
        "counts) + 0)",
        ("tests/models/test_spanbert.py",),
        "loops",
    ),
    Fault(
        "shuffled tokens are counted as masked ones",
        "hf_ctxmodels/heads/pretraining.py",
        "counts, not some, task.target)",
        'counts, not some, "labels")',
        ("tests/models/test_common_training.py",),
        "structbert and each_target",
    ),
    Fault(
        "a span runs over its budget",
        "hf_ctxmodels/objectives/components/spans.py",
        "np.flatnonzero(~selected[begin:stop])[:left]",
        "np.flatnonzero(~selected[begin:stop])[: left + 1]",
        ("tests/objectives/test_span_boundary.py",),
        "loops",
    ),
    Fault(
        "each token of a span has a replacement of its own",
        "hf_ctxmodels/objectives/components/masking.py",
        "rng.random(int(starts.sum()))[np.cumsum(starts) - 1]",
        "rng.random(len(chosen))",
        ("tests/objectives/test_span_boundary.py",),
        "one_replacement",
    ),
    Fault(
        "a span beside a special token has boundary targets",
        "hf_ctxmodels/objectives/masked/span_boundary.py",
        "text.gather(1, before + 1) & text.gather(1, after + 1)",
        "text.gather(1, before + 1) | text.gather(1, after + 1)",
        ("tests/objectives/test_span_boundary.py",),
        "boundary_targets",
    ),
    Fault(
        "shuffled trigrams overlap",
        "hf_ctxmodels/objectives/pairs/structure.py",
        "not taken[window].any()",
        "not taken[start]",
        ("tests/objectives/test_structure.py",),
        "overlaps",
    ),
    Fault(
        "the preceding segment is told to follow",
        "hf_ctxmodels/objectives/pairs/structure.py",
        "Choice((first, rest) if kind == NEXT else (rest, first), kind)",
        "Choice((first, rest), kind)",
        ("tests/objectives/test_structure.py",),
        "segments_say",
    ),
]
