"""Faults of distillation."""

from fault import Fault

TERMS, MODEL = ("tests/compression/test_terms.py",), ("tests/compression/test_distilled_model.py",)

DISTILLATION_FAULTS = [
    Fault(
        "frequent tokens are predicted more often",
        "hf_ctxmodels/objectives/components/masking.py",
        "np.maximum(counts, 1.0) ** -self.rule.smoothing",
        "np.maximum(counts, 1.0) ** self.rule.smoothing",
        ("tests/objectives/test_masking.py",),
        "rare_tokens",
    ),
    Fault(
        "an opened DistilBERT has BERT's activation",
        "hf_ctxmodels/models/bert/distilbert.py",
        '    "hidden_act": "activation",\n',
        "",
        ("tests/compression/test_distilled_model.py",),
        "distilbert_of_transformers",
    ),
    Fault(
        "a head with a ReLU is opened as one with a tanh",
        "hf_ctxmodels/models/bert/distilbert.py",
        "if found := _POOLED.intersection(architectures or ()):",
        "if found := _POOLED.intersection(()):",
        ("tests/compression/test_distilled_model.py",),
        "distilbert_of_transformers",
    ),
    Fault(
        "soft targets lose the square of the temperature",
        "hf_ctxmodels/layers/lm_loss/kl_divergence.py",
        "return total * temperature**2",
        "return total * temperature",
        TERMS,
        "chunks or plain_loops",
    ),
    Fault(
        "a chunk of rows takes the teacher's first rows",
        "hf_ctxmodels/layers/lm_loss/kl_divergence.py",
        "teacher.log_softmax(teacher_rows[part].to(dtype))",
        "teacher.log_softmax(teacher_rows[: len(own)].to(dtype))",
        TERMS,
        "chunks",
    ),
    Fault(
        "scores that are masks count",
        "hf_ctxmodels/compression/distillation/state_losses.py",
        "each.float().masked_fill((each <= _MASKED_SCORE) | ~pairs, 0.0)",
        "each.float().masked_fill(~pairs, 0.0)",
        TERMS,
        "plain_loops",
    ),
    Fault(
        "patience compares states of any length",
        "hf_ctxmodels/compression/distillation/state_losses.py",
        "return (F.normalize(own, dim=-1) - F.normalize(other, dim=-1)).square().mean((1, 2)).sum()",
        "return (own - other).square().mean((1, 2)).sum()",
        TERMS,
        "plain_loops",
    ),
    Fault(
        "the last layer is learned from in the map of skipped ones",
        "hf_ctxmodels/compression/distillation/layer_maps.py",
        'layers = range(1, student) if name == "skip" else range(first, student + 1)',
        'layers = range(1, student + 1) if name == "skip" else range(first, student + 1)',
        TERMS,
        "layer_maps",
    ),
    Fault(
        "a micro-batch is divided by its own number of targets",
        "hf_ctxmodels/compression/distillation/model.py",
        "losses[term] = total / (_count(entry, student) if number is None else number)",
        "losses[term] = total / _count(entry, student)",
        TERMS,
        "two_of_two",
    ),
    Fault(
        "the teacher is trained and has dropout",
        "hf_ctxmodels/compression/distillation/model.py",
        "self._held = (teacher.eval().requires_grad_(False),)",
        "self._held = (teacher.train(),)",
        MODEL,
        "as_it_was",
    ),
    Fault(
        "projections are not saved with the student",
        "hf_ctxmodels/compression/distillation/model.py",
        'if projections := _without_prefix(maps, "projections."):',
        'if projections := _without_prefix(maps, "projection."):',
        MODEL,
        "uninterrupted",
    ),
    Fault(
        "DistilBERT's norms change places",
        "hf_ctxmodels/models/bert/conversion_bert.py",
        'WeightRenaming(r"sa_layer_norm\\.", r"attention_norm."),\n    WeightRenaming(r"ffn\\.lin1\\.", '
        'r"feed_forward.up_proj."),\n    WeightRenaming(r"ffn\\.lin2\\.", r"feed_forward.down_proj."),\n'
        '    WeightRenaming(r"output_layer_norm\\.", r"feed_forward_norm."),',
        'WeightRenaming(r"output_layer_norm\\.", r"attention_norm."),\n    WeightRenaming(r"ffn\\.lin1\\.", '
        'r"feed_forward.up_proj."),\n    WeightRenaming(r"ffn\\.lin2\\.", r"feed_forward.down_proj."),\n'
        '    WeightRenaming(r"sa_layer_norm\\.", r"feed_forward_norm."),',
        MODEL,
        "distilbert",
    ),
]
