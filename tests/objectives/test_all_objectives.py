"""Tests of all objectives: options, collators, class hierarchy, seeds and errors."""

from dataclasses import fields, replace
from functools import cache
from inspect import getdoc
from typing import Any

import pytest
import torch
from numbered_text import check_independent_rows, numbered_documents, with_index

from hf_ctxmodels import CtxError, objectives
from hf_ctxmodels.data import ExampleSet
from hf_ctxmodels.data.documents import TranslatedText
from hf_ctxmodels.models.albert.tokenization_albert import CtxAlbertTokenizer
from hf_ctxmodels.models.bert.tokenization_bert import CtxBertTokenizer
from hf_ctxmodels.models.xlnet.tokenization_xlnet import CtxXLNetTokenizer
from hf_ctxmodels.objectives import Objective
from hf_ctxmodels.registry import FAMILIES

OBJECTIVES = sorted({objective for family in FAMILIES.values() for objective in family.objectives.values()}, key=str)


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda objective: objective.__name__)
def test_class_hierarchy_and_documentation(objective: type[Objective]) -> None:
    """An objective extends its collator, and documents its options, references and related objectives."""
    package_bases = [base for base in objective.__mro__ if base.__module__.startswith("hf_ctxmodels")]
    assert len(package_bases) <= 7
    assert len({base.__module__ for base in package_bases}) <= 5
    collator = next(base for base in package_bases if base.__name__.startswith("DataCollatorFor"))
    assert issubclass(objective, Objective)
    assert not issubclass(collator, Objective)
    assert getattr(objectives, collator.__name__) is collator
    assert getattr(objectives, objective.__name__) is objective
    documentation = getdoc(objective) or ""
    for section in ("References:", "Related:", "Example:", ">>> "):
        assert section in documentation
    common_arguments = {"tokenizer", "max_length", "seed"}
    arguments = {field.name for field in fields(objective) if field.init} - common_arguments
    undocumented = arguments - objective.option_help().keys()
    internal = {"decoder_start_token_id", "classification_tasks", "backward", "pad_to_multiple_of"}
    assert undocumented <= internal, "options need a help text: declare them with `flag`"


DOCUMENTS, _ = numbered_documents([[5, 9, 3], [30, 2, 2], [40] * 3, [4] * 12])
TRANSLATIONS = [TranslatedText(document) for document in numbered_documents([[8, 5]] * 12)[0]]
# Objective -> family of its word-level tokenizer; other objectives use `tokenizer` or `trailing_tokenizer`.
WORD_LEVEL = {"CausalLM": "ulmfit", "SequenceAutoencoding": "seqae", "BidirectionalLM": "elmo", "SkipGram": "word2vec"}
WITHOUT_OPTIONS = ("MaskedLM", "FullSentences", "ReplacedTokenDetection", "SpanBoundary", "MaskedLMWithNextSentence")
WITHOUT_OPTIONS += ("UnifiedLM", "UnitMaskingWithPairs", "ContinualTasks", "Denoising", "Infilling", "MaskedSegment")
WITHOUT_OPTIONS += ("MaskedSequenceToSequence", "PermutationLM")
SEEDED = [
    *((name, {}) for name in WITHOUT_OPTIONS),
    ("MaskedLM", {"whole_word": True}),
    ("MaskedLM", {"ngram": 3}),
    ("MaskedLMWithSentenceOrder", {"ngram": 3}),
    ("MaskedLMWithStructure", {"shuffle_probability": 0.5}),
    ("MaskedTranslation", {"target_share": 0.5}),
    ("NoisySequenceToSequence", {"max_span": 2}),
    ("PermutationLM", {"memory_length": 8}),
]
SAMPLED_PER_PASS = ("WithNextSentence", "WithSentenceOrder", "WithStructure", "UnifiedLM", "WithPairs")
SAMPLED_PER_PASS += ("PermutationLM", "CausalLM")


def make_objective(request: pytest.FixtureRequest, name: str, **options: Any) -> Objective:
    """Build an objective with a suitable tokenizer."""
    if name in WORD_LEVEL:
        tokenizer = word_tokenizer(WORD_LEVEL[name])
    else:
        tokenizer = request.getfixturevalue("trailing_tokenizer" if name == "PermutationLM" else "tokenizer")
    options = {"max_length": 24, "seed": 0, **options}
    if name == "ContinualTasks":
        options.setdefault("schedule", "knowledge_masking, sentence_distance")
    return getattr(objectives, name)(tokenizer, **options)


@cache
def word_tokenizer(family: str) -> Any:
    return FAMILIES[family].tokenizer.train([" ".join(document) for document in DOCUMENTS], 2000, min_count=1)


def documents_of(objective: Objective) -> list[list[str]]:
    return TRANSLATIONS if objective.requires_translations else DOCUMENTS


def differ(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return any(not torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(("name", "options"), SEEDED)
def test_batch_depends_only_on_seed_epoch_and_example(
    request: pytest.FixtureRequest, name: str, options: dict[str, Any]
) -> None:
    objective = make_objective(request, name, **options)
    rows = ExampleSet.build(objective.examples(documents_of(objective)))
    rng_state = torch.get_rng_state()
    batch = check_independent_rows(objective, [rows[1, index] for index in range(len(rows))])
    assert torch.equal(torch.get_rng_state(), rng_state)
    assert differ(batch, objective.collate([rows[2, index] for index in range(len(rows))]))
    other_seed = make_objective(request, name, **options, seed=1)
    assert differ(batch, other_seed.collate([rows[1, index] for index in range(len(rows))]))
    static = make_objective(request, name, **options, static=True)
    batches = []
    for epoch in (0, 3):
        features = [rows[epoch, index] for index in range(len(rows))]
        batches.append(static.collate([{**feature, "epoch": epoch} for feature in features]))
    assert not differ(*batches)
    if hasattr(objective, "static_masks"):
        check_static_masks_repeat(make_objective(request, name, **options, static_masks=3), rows)


def check_static_masks_repeat(objective: Any, rows: ExampleSet) -> None:
    """An example has three masks, which repeat every three epochs and equal those of the first three dynamic epochs."""
    features = [rows[0, index] for index in range(len(rows))]
    batches = [objective.collate([{**feature, "epoch": epoch} for feature in features]) for epoch in range(7)]
    for epoch in range(3, 7):
        assert not differ(batches[epoch], batches[epoch - 3])
    assert differ(batches[0], batches[1])
    assert differ(batches[1], batches[2])
    assert differ(batches[0], batches[2])
    dynamic = replace(objective, static_masks=0)
    for epoch in range(3):
        assert not differ(batches[epoch], dynamic.collate([{**feature, "epoch": epoch} for feature in features]))


@pytest.mark.parametrize("name", sorted(WORD_LEVEL.keys() - {"SkipGram"}))
def test_word_level_rows_do_not_depend_on_batch(request: pytest.FixtureRequest, name: str) -> None:
    objective = make_objective(request, name, **({"negatives": 50} if name == "BidirectionalLM" else {}))
    rows = list(objective.examples(DOCUMENTS))
    batch = check_independent_rows(objective, with_index(rows))
    if name == "BidirectionalLM":
        assert not torch.equal(batch["negatives"][0], batch["negatives"][1])
        assert not torch.equal(objective.collate(with_index(rows, epoch=1))["negatives"], batch["negatives"])
        assert batch["negatives"].max() < len(objective.tokenizer)
        assert "negatives" not in make_objective(request, name).collate(with_index(rows))


@pytest.mark.parametrize(
    ("name", "options", "contiguous", "config_fields"),
    [
        ("CausalLM", {"carry": True}, True, {"stateful": True, "backward": False}),
        ("CausalLM", {"carry": False, "backward": True}, False, {"stateful": False, "backward": True}),
        ("SequenceAutoencoding", {}, False, {"stateful": False, "eos_token_id": 2}),
        ("BidirectionalLM", {}, True, {"stateful": True}),
        ("BidirectionalLM", {"carry": False}, False, {"stateful": False}),
        ("PermutationLM", {}, False, {}),
        ("SpanBoundary", {}, False, {"max_pair_targets": 15}),
        ("SpanBoundary", {"boundary": False}, False, {}),
        ("Denoising", {}, False, {"decoder_start_token_id": 3}),
        ("UnitMaskingWithPairs", {}, False, {"pretraining_tasks": {"next_sentence": 2}}),
    ],
)
def test_sampling_and_configuration(
    request: pytest.FixtureRequest, name: str, options: dict[str, Any], contiguous: bool, config_fields: dict[str, Any]
) -> None:
    objective = make_objective(request, name, **options)
    assert objective.sampling.contiguous == contiguous
    assert objective.config_fields == config_fields


SEEDED_EXAMPLES = [*SEEDED, ("CausalLM", {}), ("SequenceAutoencoding", {})]


@pytest.mark.parametrize(("name", "options"), SEEDED_EXAMPLES)
def test_examples_depend_only_on_seed_and_pass(
    request: pytest.FixtureRequest, name: str, options: dict[str, Any]
) -> None:
    def ids(seed: int, epoch: int) -> list[list[int]]:
        objective = make_objective(request, name, **options, seed=seed)
        column = "text_ids" if name == "Infilling" else "input_ids"
        examples = objective.examples(iter(documents_of(objective)), epoch)
        return [example[column].tolist() for example in examples]

    assert ids(1, 0) == ids(1, 0)
    if name == "SequenceAutoencoding":
        assert ids(1, 0) == ids(1, 1) == ids(2, 0)
    if name.endswith(SAMPLED_PER_PASS):
        assert ids(1, 0) != ids(1, 1)
        assert ids(1, 0) != ids(2, 0)


@pytest.mark.parametrize(
    "name",
    sorted({name for name, _ in SEEDED_EXAMPLES if not getattr(objectives, name).requires_translations}),
)
def test_document_without_sentences_is_skipped(request: pytest.FixtureRequest, name: str) -> None:
    def rows(document: list[str]) -> list[dict[str, Any]]:
        objective = make_objective(request, name)
        return [{key: str(value) for key, value in row.items()} for row in objective.examples([document, *DOCUMENTS])]

    assert rows([]) == rows([""]) != []


@pytest.mark.parametrize(
    ("name", "options", "columns"),
    [
        ("MaskedLM", {"ngram": 3}, ("example_index", "epoch", "word_ids")),
        ("MaskedLMWithNextSentence", {}, ("token_type_ids", "next_sentence_label")),
        ("MaskedLMWithSentenceOrder", {}, ("token_type_ids", "sentence_order_label")),
        ("PermutationLM", {}, ("example_index", "epoch", "word_ids")),
        ("SpanBoundary", {}, ("replacement_ids",)),
        ("Denoising", {}, ("word_ids", "sentence_starts")),
    ],
)
def test_missing_column_raises(
    request: pytest.FixtureRequest, name: str, options: dict[str, Any], columns: tuple[str, ...]
) -> None:
    objective = make_objective(request, name, **options)
    feature = ExampleSet.build(objective.examples(DOCUMENTS))[0]
    for column in columns:
        with pytest.raises(CtxError, match=f"`{column}`"):
            objective.collate([{key: value for key, value in feature.items() if key != column}])


@pytest.mark.parametrize("name", ["MaskedLM", "ReplacedTokenDetection", "PermutationLM", "MaskedSegment"])
@pytest.mark.parametrize("token", ["mask_token", "pad_token"])
def test_missing_special_token_raises(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, name: str, token: str
) -> None:
    tokenizer = make_objective(request, name).tokenizer
    monkeypatch.setitem(tokenizer._special_tokens_map, token, None)
    with pytest.raises(CtxError, match=f"has no {token}"):
        make_objective(request, name)


# Objective -> option -> a value out of range; the error names both.
OUT_OF_RANGE: dict[str, dict[str, float]] = {
    "MaskedLM": {"mask_share": -0.1, "max_predictions": 0, "ngram": 0, "seed": -1},
    "ReplacedTokenDetection": {"single_segment_share": 1.5},
    "SpanBoundary": {"geometric_p": 0.0, "max_span": 0, "max_pair_targets": 0},
    "MaskedLMWithNextSentence": {"short_seq_probability": 1.5},
    "MaskedLMWithStructure": {"shuffle_probability": 1.5, "shuffled_length": 1},
    "UnifiedLM": {"skipgram_probability": 1.5},
    "UnitMaskingWithPairs": {"unit_rows": 1.5},
    "ContinualTasks": {"reordering_segments": 1},
    "Denoising": {"mask": 1.5, "poisson_lambda": 0.0},
    "Infilling": {"target_share": 1.0},
    "NoisySequenceToSequence": {"max_span": -1},
    "MaskedSequenceToSequence": {"max_target_length": 1},
    "MaskedSegment": {"block": 1, "lambda_span": 0, "min_length": 2},
    "MaskedTranslation": {"target_share": 1.5},
    "PermutationLM": {"partial_prediction": 0.5, "max_span": 0, "num_predictions": 0, "memory_length": -1},
    "CausalLM": {"bptt": -1, "bptt_deviation": -1.0},
    "SequenceAutoencoding": {"max_length": 2},
    "BidirectionalLM": {"max_length": 2, "negatives": -1},
    "SkipGram": {"window": 0},
}


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        *(
            (name, {option: value}, f"{option}={value}")
            for name in OUT_OF_RANGE
            for option, value in OUT_OF_RANGE[name].items()
        ),
        ("MaskedLM", {"mlm_probability": 0.0}, "probability=0.0"),
        ("MaskedLM", {"mlm_probability": 1.5}, "probability=1.5"),
        ("MaskedSegment", {"share": 0.0}, "out of range"),
        ("CausalLM", {"bptt": 30}, "bptt=30"),
        ("MaskedLM", {"mask_share": 0.8, "random_share": 0.3}, "not shares of a whole"),
        ("MaskedLM", {"max_length": 513}, "max_length=513.*limit of 512"),
        ("MaskedLMWithNextSentence", {"packing": True}, "'packing'"),
        ("MaskedLMWithNextSentence", {"max_length": 4}, "leaves no room"),
        ("MaskedLMWithSentenceOrder", {"one_segment": "skip"}, "one_segment='skip'(.|\n)*unlabeled, random, drop"),
        ("MaskedLMWithStructure", {"sentence_task": "two"}, "is unknown"),
        ("UnifiedLM", {"bidirectional": 0.5}, "not shares of a whole"),
        ("UnitMaskingWithPairs", {"pairs": "other"}, "pairs='other'(.|\n)*random, swapped"),
        ("UnitMaskingWithPairs", {"units": "/nowhere/units.txt"}, "No such file"),
        ("UnitMaskingWithPairs", {"whole_word": True}, "'whole_word'"),
        ("Denoising", {"mask_length": "letters"}, "mask_length='letters' is unknown"),
        ("Denoising", {"replace_length": 2}, "replace_length=2 is unknown"),
        ("Denoising", {"full_stops": True}, 'no token "."'),
        ("NoisySequenceToSequence", {"noise": "some"}, "is unknown"),
        ("NoisySequenceToSequence", {"noise": "token"}, r"no \[NOISE\]"),
        (
            "MaskedSequenceToSequence",
            {"max_target_length": 22},
            "(?s)max_target_length=22 .* no room for a source.*=24",
        ),
        ("MaskedSegment", {"lambda_span": 3, "block": 64}, "exclude each other"),
        ("MaskedSegment", {"hidden": "mask"}, "hidden='mask' is unknown"),
        ("PermutationLM", {"max_length": 4}, "leaves no room"),
        ("PermutationLM", {"reuse_length": 8}, "needs a memory"),
        ("PermutationLM", {"memory_length": 8, "reuse_length": 0}, "reuse_length=0"),
        ("PermutationLM", {"memory_length": 8, "reuse_length": 20}, "use 1 to 19"),
        ("PermutationLM", {"document_end": "[END]"}, r"has no token '\[END\]' for the end of a document"),
        ("PermutationLM", {"mlm_probability": 0.1}, "'mlm_probability'"),
        ("MaskedLM", {"max_length": 2}, "leaves no room"),
        ("MaskedLM", {"masking": 0.1}, "'masking'"),
        ("SkipGram", {"subsampling": -1.0}, "subsampling"),
    ],
)
def test_invalid_options_raise(
    request: pytest.FixtureRequest, name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises((CtxError, TypeError), match=message):
        make_objective(request, name, **options)


@pytest.mark.parametrize(
    ("name", "tokenizer_class", "options"),
    [
        ("MaskedLMWithNextSentence", CtxBertTokenizer, {"whole_word": True}),
        ("MaskedLM", CtxAlbertTokenizer, {"ngram": 3, "mask_share": 0.0, "random_share": 0.0}),
        ("MaskedLM", CtxXLNetTokenizer, {"ngram": 3, "mask_share": 0.0, "random_share": 0.0}),
        ("PermutationLM", CtxXLNetTokenizer, {}),
    ],
)
def test_whole_word_selection(name: str, tokenizer_class: Any, options: dict[str, Any]) -> None:
    """Either all tokens of a word are targets or none; special tokens are never targets."""
    text = [["a sailor carried seven letters over the bridge.", "the bridge was small and the river deep."] * 6] * 3
    tokenizer = tokenizer_class.train([" ".join(sentences) for sentences in text], 45)
    objective = getattr(objectives, name)(tokenizer, max_length=128, seed=0, **options)
    batch = objective.collate(with_index(objective.examples(text)))
    ids, selected = batch["input_ids"], batch["labels"] != -100
    if name == "PermutationLM":
        positions, is_target = batch["target_positions"], selected
        selected = torch.zeros_like(ids, dtype=torch.bool)
        for row in range(len(ids)):
            selected[row, positions[row][is_target[row]]] = True
    else:
        ids = ids.where(~selected, batch["labels"])
    is_wordpiece = tokenizer_class is CtxBertTokenizer
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    starts = torch.tensor([not token.startswith("##") if is_wordpiece else token.startswith("▁") for token in tokens])
    is_special = torch.isin(ids, torch.tensor(tokenizer.all_special_ids))
    continues_word = ~is_special[:, 1:] & ~is_special[:, :-1] & ~starts[ids[:, 1:]]
    assert continues_word.any()
    assert selected.any(1).all()
    assert (selected[:, 1:] == selected[:, :-1])[continues_word].all()
    assert not selected[is_special].any()
