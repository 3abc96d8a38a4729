"""Faults of UniLM and ERNIE-GEN: masks by ranges, query tokens, decoding, and their objectives."""

from fault import Fault

UNILM_FAULTS = [
    Fault(
        "a text read from right to left is read from left to right",
        "hf_ctxmodels/models/unilm/segments_unilm.py",
        "ahead = (types == LEFT_TO_RIGHT) | (types == TARGET)",
        "ahead = (types == LEFT_TO_RIGHT) | (types == TARGET) | (types == RIGHT_TO_LEFT)",
        ("tests/models/test_unilm.py",),
        "four_masks",
    ),
    Fault(
        "ranges of a subset of queries are those of the first tokens",
        "hf_ctxmodels/layers/attention/grouping.py",
        "return rows if self.query_layout.query is None else self.query_layout.query.cpu()[rows]",
        "return rows",
        ("tests/models/test_unilm.py",),
        "four_masks",
    ),
    Fault(
        "a query token sees the token that it predicts",
        "hf_ctxmodels/models/_shared/query_streams.py",
        "return self._rows(positions, torch.stack([positions, own, own + 1], -1))",
        "return self._rows(positions, torch.stack([positions + 1, own, own + 1], -1))",
        ("tests/models/test_query_generation.py",),
        "one_pass",
    ),
    Fault(
        "the keys of query tokens stay in the cache",
        "hf_ctxmodels/models/_shared/query_generation.py",
        "cache.crop(-steps.shape[1])",
        "cache.crop(0)",
        ("tests/models/test_query_generation.py",),
        "plain_loop or one_pass",
    ),
    Fault(
        "queries of a span do not see each other",
        "hf_ctxmodels/models/_shared/query_streams.py",
        "return self._rows(self.origin + self.steps, torch.stack([prefixes, start, stop], -1))",
        "return self._rows(self.origin + self.steps, torch.stack([prefixes, stop - 1, stop], -1))",
        ("tests/models/test_query_generation.py",),
        "spans",
    ),
    Fault(
        "the fourth segment of six is a copy of the wrong one",
        "hf_ctxmodels/models/unilm/segments_unilm.py",
        "COPIED_SEGMENTS = (FIRST, FIRST, FIRST, SECOND)",
        "COPIED_SEGMENTS = (FIRST, FIRST, SECOND, SECOND)",
        ("tests/models/test_unilm.py",),
        "copied",
    ),
    Fault(
        "a run of tokens goes on over a special token",
        "hf_ctxmodels/objectives/common/skipgrams.py",
        "start + int(stops[0]) if len(stops) else end",
        "end",
        ("tests/objectives/test_unified_lm.py",),
        "released_loop",
    ),
    Fault(
        "the end of a target is never predicted",
        "hf_ctxmodels/objectives/source_target.py",
        "chosen = masker.rule.select(np.ones(len(ids), dtype=bool), words, rng)",
        "chosen = masker.rule.select(np.arange(len(ids)) < len(ids) - 1, words, rng)",
        ("tests/objectives/test_unified_lm.py",),
        "masked_targets",
    ),
    Fault(
        "noise is in the labels",
        "hf_ctxmodels/objectives/infilling.py",
        "np.append(np.int64(self.tokenizer.cls_token_id), read), ids.astype(np.int64)",
        "np.append(np.int64(self.tokenizer.cls_token_id), read), np.append(read, ids[-1])",
        ("tests/objectives/test_unified_lm.py",),
        "noisy",
    ),
]
