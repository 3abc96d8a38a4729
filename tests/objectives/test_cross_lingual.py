"""XLM's objectives against reference loops of the released code: streams, translation pairs, masks and languages."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from numbered_text import check_independent_rows

from hf_ctxmodels import CtxError, CtxXLMConfig, CtxXLMTokenizer
from hf_ctxmodels.data import ExampleSet, build_training_set, load_documents
from hf_ctxmodels.data.documents import TranslatedText
from hf_ctxmodels.data.seeding import generator
from hf_ctxmodels.downstream.tasks.languages import set_language
from hf_ctxmodels.objectives import CrossLingualLM, StreamCausalLM, StreamMaskedLM, TranslationLM
from hf_ctxmodels.objectives.cross_lingual import DataCollatorForStreamMaskedLM, LanguageReader

NUM_WORDS = {
    "de": ["der", "kleine", "hund", "sah", "eine", "alte", "katze", "am", "haus"],
    "en": ["the", "small", "dog", "saw", "an", "old", "cat", "at", "home"],
}
END, PAD, MASK = 1, 2, 5


def sentence(language: str, number: int) -> str:
    rng = np.random.default_rng(number)
    return " ".join(rng.choice(NUM_WORDS[language], size=int(rng.integers(3, 9))))


DOCUMENTS = [
    [f"<{language}> {sentence(language, 10 * number + index)}" for index in range(1 + number % 4)]
    for number in range(30)
    for language in ("de", "en")
]
PAIRS = [TranslatedText([sentence("en", number), f"<de> {sentence('de', number)}"]) for number in range(25)]


@pytest.fixture(scope="module")
def tokenizer() -> CtxXLMTokenizer:
    texts = ["\n".join(document) for document in DOCUMENTS]
    return CtxXLMTokenizer.train(texts, vocab_size=90, min_frequency=1)


def encode(tokenizer: CtxXLMTokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False).input_ids


def test_stream_rows_match_reference_loop(tokenizer: CtxXLMTokenizer) -> None:
    streams: dict[int, list[int]] = {0: [END], 1: [END]}
    for document in DOCUMENTS:
        for text in document:
            streams[tokenizer.lang2id[text[1:3]]] += [*encode(tokenizer, text[5:]), END]
    for objective_class, length in ((StreamMaskedLM, 16), (StreamCausalLM, 7)):
        rows: dict[int, list[tuple[list[int], int | None]]] = {0: [], 1: []}
        for row in objective_class(tokenizer, max_length=length, seed=0).examples(DOCUMENTS):
            (language,) = set(row["langs"].tolist())
            rows[language].append((row["input_ids"].tolist(), row.get("following")))
        for language, text in streams.items():
            starts = range(0, len(text) - 1, length)  # a single token is not a row
            following = [*text[length::length], -100] if objective_class is StreamCausalLM else [None] * len(starts)
            expected = [(text[start : start + length], token) for start, token in zip(starts, following, strict=True)]
            assert rows[language] == expected


def test_translation_pair_rows(tokenizer: CtxXLMTokenizer) -> None:
    """</s> a </s></s> b </s>: positions restart, and the language changes, at the third </s>."""
    limit = 17
    objective = TranslationLM(tokenizer, max_length=limit, seed=0, language="en", mlm_probability=1e-9)
    batch = objective.collate(list(ExampleSet.build(objective.examples(PAIRS))))
    row = 0
    for text, translation in PAIRS:
        source_ids, target_ids = encode(tokenizer, text), encode(tokenizer, translation.removeprefix("<de> "))
        ids, langs, positions = [], [], []
        for language, tokens in ((1, source_ids), (0, target_ids)):
            for position, token in enumerate([END, *tokens, END]):
                ids.append(token)
                langs.append(language)
                positions.append(position)
        if len(ids) > limit:
            continue
        is_token = batch["attention_mask"][row] == 1
        for name, expected in {"input_ids": ids, "langs": langs, "position_ids": positions}.items():
            assert batch[name][row][is_token].tolist() == expected, name
        row += 1
    assert 0 < row == len(batch["input_ids"]) < len(PAIRS)
    assert objective.statistics["left_out"] == len(PAIRS) - row
    assert objective.rates(objective.count_batch(batch))["translation_share"] == 1


def reference_mask(ids: list[int], scores: list[float] | None, size: int, seed: int) -> tuple[list[int], list[int]]:
    """Mask token by token, with the random numbers of example 0 in epoch 0."""
    rng = generator(seed, 0, 0)
    if scores is None:
        selected = [column for column, draw in enumerate(rng.random(len(ids))) if draw < 0.15 and column > 0]
    else:
        weights = np.array([0.0 if column == 0 else scores[token] for column, token in enumerate(ids)])
        count = min(math.ceil(0.15 * len(ids)), int((weights > 0).sum()))
        selected = sorted(rng.choice(len(ids), count, replace=False, p=weights / weights.sum()).tolist())
    labels, corrupted = [-100] * len(ids), list(ids)
    draws = rng.random(len(selected)).tolist()
    random_ids = iter(rng.integers(size, size=sum(0.8 <= draw < 0.9 for draw in draws)).tolist())
    for column, draw in zip(selected, draws, strict=True):
        labels[column] = ids[column]
        corrupted[column] = MASK if draw < 0.8 else next(random_ids) if draw < 0.9 else ids[column]
    return corrupted, labels


@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_masks_match_reference_loop(tokenizer: CtxXLMTokenizer, alpha: float) -> None:
    counts = tokenizer.token_counts
    assert counts is not None
    assert sum(counts[number] for number in (0, END, PAD, MASK)) == 0
    scores = None if not alpha else [count**-alpha if count else 0.0 for count in counts]
    ids = encode(tokenizer, " ".join(sentence("en", number) for number in range(12)))
    for seed in range(5):
        collate = DataCollatorForStreamMaskedLM(tokenizer, seed=seed, sample_alpha=alpha)
        batch = collate([{"input_ids": [END, *ids], "example_index": 0, "epoch": 0}])
        corrupted, labels = reference_mask([END, *ids], scores, len(tokenizer), seed)
        assert (batch["input_ids"][0].tolist(), batch["labels"][0].tolist()) == (corrupted, labels)


@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_masking_rates(tokenizer: CtxXLMTokenizer, alpha: float) -> None:
    """15% of the tokens, 80/10/10, from the full vocabulary; never padding; </s> only without `sample_alpha`."""
    objective = StreamMaskedLM(tokenizer, max_length=40, seed=3, sample_alpha=alpha)
    examples = ExampleSet.build(objective.examples(DOCUMENTS))
    batches = [check_independent_rows(objective, [examples[epoch, n] for n in (0, 5, 9)]) for epoch in (1, 2)]
    assert not torch.equal(batches[0]["labels"], batches[1]["labels"])
    features = [examples[epoch, index] for epoch in range(100) for index in range(len(examples))]
    batch = objective.collate(features)
    selected = batch["labels"] != -100
    assert not selected[batch["attention_mask"] == 0].any()
    rates = objective.rates(objective.count_batch(batch))
    lengths = [len(feature["input_ids"]) for feature in features]
    rounded_up = sum(math.ceil(0.15 * length) for length in lengths) / sum(length - 1 for length in lengths)
    assert rates["selected_share"] == pytest.approx(rounded_up if alpha else 0.15, abs=0.01)
    assert rates["mask_token_share"] == pytest.approx(0.8, abs=0.02)
    assert rates["unchanged_token_share"] == pytest.approx(0.1, abs=0.02)
    assert rates["translation_share"] == 0
    is_random = selected & (batch["input_ids"] != MASK) & (batch["input_ids"] != batch["labels"])
    assert {0, PAD, 3, 4} <= set(batch["input_ids"][is_random].tolist()), "any token, including special tokens"
    assert (batch["labels"] == END).any() == (not alpha), "</s> has a count of zero"


def test_alternating_tasks_and_masked_lm_alone(tokenizer: CtxXLMTokenizer) -> None:
    """Each batch of MLM + TLM has one task; MLM alone reads the same sentences, and a pair as two sentences."""
    documents = [*DOCUMENTS, *PAIRS]
    joint = CrossLingualLM(tokenizer, max_length=40, seed=0, language="en")
    mixture = build_training_set(documents, joint, joint.sampling)
    tasks = mixture.choose(np.arange(400), 0)
    assert 0.4 < tasks.mean() < 0.6
    assert [{int(dataset[index]["task"]) for index in range(len(dataset))} for dataset in mixture.datasets] == [
        {0},
        {1},
    ]
    shuffled = CrossLingualLM(tokenizer, max_length=40, seed=0, language="en", alternate=False)
    assert len(build_training_set(documents, shuffled, shuffled.sampling)) == len(mixture)
    mlm = StreamMaskedLM(tokenizer, max_length=40, seed=0, language="en")
    counts = [sum(int((row["input_ids"] != END).sum()) for row in task.examples(documents)) for task in (mlm, joint)]
    assert counts[0] == counts[1]


def test_language_tags_of_files(tokenizer: CtxXLMTokenizer, tmp_path: Path) -> None:
    for name, texts in {"de": [d for d in DOCUMENTS if d[0][1:3] == "de"], "en": [[p[0]] for p in PAIRS]}.items():
        lines = "\n\n".join("\n".join(text.removeprefix("<de> ") for text in document) for document in texts)
        (tmp_path / f"{name}.txt").write_text(lines)
    (tmp_path / "en.lines.txt").write_text("\n".join(pair[0] for pair in PAIRS))
    (tmp_path / "de.lines.txt").write_text("\n".join(pair[1].removeprefix("<de> ") for pair in PAIRS))
    files = [str(tmp_path / name) for name in ("de.txt", "en.txt", "en.lines.txt")]
    translations = str(tmp_path / "de.lines.txt")
    documents = load_documents(*files, translations=["-", "-", translations], language_tags=["<de>", "<en>", "<de>"])
    objective = CrossLingualLM(tokenizer, max_length=60, seed=0, language="en")
    rows = list(objective.examples(documents))
    assert {(row["task"], *sorted(set(row["langs"].tolist()))) for row in rows} == {(0, 0), (0, 1), (1, 0, 1)}
    assert objective.config_fields == {"n_langs": 2, "lang2id": {"de": 0, "en": 1}, "causal": False}
    sampled = StreamMaskedLM(tokenizer, max_length=20, seed=0, language="en")
    mixture = build_training_set(load_documents(*files[:2], language_tags=["<de>", "<en>"]), sampled, alpha=0.5)
    assert mixture.is_per_example


def test_single_language_needs_no_tags() -> None:
    tokenizer = CtxXLMTokenizer.train([sentence("en", number) for number in range(40)], 80, min_frequency=1)
    objective = StreamMaskedLM(tokenizer, max_length=16, seed=0)
    rows = list(objective.examples([[sentence("en", 1)]]))
    assert "langs" not in rows[0]
    assert objective.config_fields == {"n_langs": 1, "lang2id": None, "causal": False}


def test_invalid_languages_and_data(tokenizer: CtxXLMTokenizer) -> None:
    with pytest.raises(CtxError, match="no language tag: 'a dog'"):
        list(StreamMaskedLM(tokenizer, max_length=16, seed=0).examples([["a dog"]]))
    with pytest.raises(CtxError, match="no language 'fr'"):
        list(StreamMaskedLM(tokenizer, max_length=16, seed=0).examples([["<fr> un chien"]]))
    with pytest.raises(CtxError, match="no language 'it'"):
        StreamMaskedLM(tokenizer, max_length=16, seed=0, language="it")
    with pytest.raises(CtxError, match="no translation"):
        list(TranslationLM(tokenizer, max_length=16, seed=0).examples(DOCUMENTS))
    plain = CtxXLMTokenizer(tokenizer.get_vocab(), [], word_splitting="punctuation")
    with pytest.raises(CtxError, match=r"sample_alpha=0.5 requires token frequencies"):
        StreamMaskedLM(plain, max_length=16, seed=0, sample_alpha=0.5)
    for documents, length, message in (
        (DOCUMENTS, 40, "No text has a translation"),
        (PAIRS, 40, "Every text has a translation"),
        ([*DOCUMENTS, *PAIRS], 6, r"\d+ pairs are longer than max_length"),
    ):
        for alternate in (True, False):
            objective = CrossLingualLM(tokenizer, max_length=length, seed=0, language="en", alternate=alternate)
            with pytest.raises(CtxError, match=message):
                build_training_set(documents, objective, objective.sampling)


def test_word_splitting_depends_on_language(
    tokenizer: CtxXLMTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The language is the tag in pretraining and --language in fine-tuning; released tokenizers use Moses' rules."""
    added_word = {"de": "haus", "en": "home"}
    split_function = "hf_ctxmodels.models.xlm.tokenization_xlm.split_words"
    monkeypatch.setattr(split_function, lambda text, language, lower: [*text.split(), added_word[language]])
    tokenizer.save_pretrained(tmp_path)
    released = CtxXLMTokenizer.from_pretrained(tmp_path, word_splitting="moses")
    sentences = [sentence for document in LanguageReader(released, "").read(DOCUMENTS) for sentence in document]
    plain = [text for document in DOCUMENTS for text in document]
    for (language_id, ids), text in zip(sentences, plain, strict=True):
        language = text[1:3]
        assert language_id == released.lang2id[language]
        assert ids.tolist() == encode(tokenizer, f"{text[5:]} {added_word[language]}"), text
    config = CtxXLMConfig(vocab_size=len(released), n_langs=2, lang2id=released.lang2id)
    set_language(config, released, "de", "--language")
    assert config.default_lang == released.lang2id["de"]
    assert encode(released, "eine") == encode(tokenizer, "eine haus")
    set_language(config, tokenizer, "de", "--language")
    assert tokenizer.language is None
