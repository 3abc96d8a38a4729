"""Faults of sources and targets, and of what models write."""

from fault import Fault

_TASK = ("tests/data/test_tasks_seq2seq.py",)
_SMOOTHING = ("tests/training/test_label_smoothing.py",)
_GENERATE = ("tests/scripts/test_generate.py",)

GENERATION_FAULTS = [
    Fault(
        "beams read the keys of another source",
        "hf_ctxmodels/core/growing_cache.py",
        "        if not torch.equal(beam_idx // self.sharers, own):",
        "        if False and not torch.equal(beam_idx // self.sharers, own):",
        ("tests/layers/test_growing_cache.py",),
        "kept_once",
    ),
    Fault(
        "beams of a source are told apart by the wrong rows",
        "hf_ctxmodels/layers/attention/modules.py",
        "        query = query.unflatten(0, (-1, sharers)).flatten(1, 2)",
        "        query = query.unflatten(0, (sharers, -1)).transpose(0, 1).flatten(1, 2)",
        ("tests/models/test_seq2seq.py", "tests/models/test_generation.py"),
        "beam or generat",
    ),
    Fault(
        "padding of targets is learned",
        "hf_ctxmodels/data/padding.py",
        ".pad(targets, IGNORED)",
        ".pad(targets, 0)",
        _TASK,
        "padded",
    ),
    Fault(
        "smoothed losses of micro-batches are means of their own",
        "hf_ctxmodels/training/label_smoothing.py",
        'return mean_over_targets(total, labels, "labels", counts)',
        'return mean_over_targets(total, labels, "labels", None)',
        _SMOOTHING,
    ),
    Fault(
        "the evaluated loss is smoothed",
        "hf_ctxmodels/training/label_smoothing.py",
        "if labels is None or not model.training:",
        "if labels is None:",
        _SMOOTHING,
    ),
    Fault(
        "the ceiling is what the references get as they are",
        "hf_ctxmodels/data/tasks/normalized_references.py",
        "score_texts(self._metrics, self.texts(references), references,",
        "score_texts(self._metrics, references, references,",
        _TASK,
        "ceiling",
    ),
    Fault(
        "normalised metrics are against the references as they are",
        "hf_ctxmodels/data/tasks/normalized_references.py",
        "score_texts(self._metrics, predictions, self.texts(references),",
        "score_texts(self._metrics, predictions, references,",
        _TASK,
        "ceiling",
    ),
    Fault(
        "the worse baseline is the one to beat",
        "hf_ctxmodels/data/tasks/seq2seq.py",
        "max(scores, key",
        "min(scores, key",
        _TASK,
        "baseline",
    ),
    Fault(
        "the model writes another language",
        "hf_ctxmodels/core/generation.py",
        "return languages.index(language)",
        "return len(languages) - 1 - languages.index(language)",
        _TASK,
        "language",
    ),
    Fault(
        "prompts are followed by padding",
        "hf_ctxmodels/inference/generation.py",
        'tokenizer.padding_side if _has_encoder(model) else "left"',
        "tokenizer.padding_side",
        _GENERATE,
        "decoders",
    ),
    Fault(
        "a prompt is read as a whole text",
        "hf_ctxmodels/inference/generation.py",
        "rows.append(ids[:end] if max_length is None",
        "rows.append(ids if max_length is None",
        _GENERATE,
        "decoders",
    ),
    Fault(
        "the same contexts in training and validation",
        "hf_ctxmodels/data/tasks/pairs.py",
        "parts[question.context not in training]",
        "parts[len(parts[0]) > len(questions) * (1 - validation_fraction)]",
        _TASK,
        "split",
    ),
    Fault(
        "the summary stands in its article",
        "hf_ctxmodels/data/tasks/pairs.py",
        " and first not in source",
        "",
        _TASK,
        "summaries",
    ),
]
