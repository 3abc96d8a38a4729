"""Faults of T5: its network, its objective, its tokenizer and its optimizer."""

from fault import Fault

_MODEL = "hf_ctxmodels/models/t5/modeling_t5.py"
_OBJECTIVE = "hf_ctxmodels/objectives/seq2seq/span_corruption.py"
_SPANS = "hf_ctxmodels/objectives/components/spans.py"
_OF_MODEL = ("tests/models/test_t5.py",)
_OF_OBJECTIVE = ("tests/objectives/test_span_corruption.py",)

T5_FAULTS = [
    Fault(
        "T5's logits are scaled in version 1.1 too",
        _MODEL,
        "if not self.config.scale_decoder_outputs:",
        "if False:",
        _OF_MODEL,
        "released_files",
    ),
    Fault(
        "T5's gate and its linear map change places",
        "hf_ctxmodels/models/t5/conversion_t5.py",
        '"wi_0": "gate_proj", "wi_1": "up_proj"',
        '"wi_1": "gate_proj", "wi_0": "up_proj"',
        _OF_MODEL,
        "released_files",
    ),
    Fault(
        "T5's queries start as wide as its keys",
        _MODEL,
        "spread[: module.inner_size] = head**-0.5",
        "spread[: module.inner_size] = 1.0",
        _OF_MODEL,
        "initial_weights",
    ),
    Fault(
        "T5's residual stream is not clamped in fp16",
        _MODEL,
        "return clamp_to_float16(super()._add(place, states, output, depth))",
        "return super()._add(place, states, output, depth)",
        _OF_MODEL,
        "half_precision",
    ),
    Fault(
        "a row of T5 starts with noise",
        _SPANS,
        "np.tile([False, True], spans)",
        "np.tile([True, False], spans)",
        _OF_OBJECTIVE,
        "counts_of_the_release",
    ),
    Fault(
        "sentinels of T5's targets are counted from the second span",
        "hf_ctxmodels/objectives/components/sentinels.py",
        "row[starts] = self.ids[:number]",
        "row[starts] = self.ids[1 : number + 1]",
        _OF_OBJECTIVE,
        "those_of_the_loop",
    ),
    Fault(
        "sentinels in the text are not noticed",
        "hf_ctxmodels/objectives/components/sentinels.py",
        "if found.any():",
        "if False:",
        _OF_OBJECTIVE,
        "refused",
    ),
    Fault(
        "the sentinels of T5's vocabulary count up",
        "hf_ctxmodels/models/t5/tokenization_t5.py",
        "for number in reversed(range(NUM_SENTINELS))",
        "for number in range(NUM_SENTINELS)",
        ("tests/data/test_tokenization_t5.py",),
        "",
    ),
    Fault(
        "AdamW's step is not relative to the parameter's size",
        "hf_ctxmodels/training/optim/scaled_adamw.py",
        "first / denominator * scale",
        "first / denominator",
        ("tests/training/test_optimization.py",),
        "scaled_adamw",
    ),
    Fault(
        "single tokens of a row of T5 get more spans than there are sentinels",
        _OBJECTIVE,
        "for _ in range(DRAWS):",
        "for _ in range(1):",
        _OF_OBJECTIVE,
        "sentinels_for_all",
    ),
]
