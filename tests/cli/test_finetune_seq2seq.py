"""`hf-ctxmodels finetune seq2seq`: all encoder-decoders and prefix LMs, and a T5 of transformers."""

import json
import random
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import run_command
from test_finetune import check_two_processes, finetune
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    T5Config,
)

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.documents import TranslatedText
from hf_ctxmodels.downstream.finetuning.task_loss import TaskLoss
from hf_ctxmodels.downstream.tasks import TaskArguments
from hf_ctxmodels.downstream.tasks.seq2seq import Seq2Seq, SourceTarget
from hf_ctxmodels.inference import generate_texts
from hf_ctxmodels.registry import FAMILIES
from hf_ctxmodels.spec import FamilySpec
from hf_ctxmodels.training.model_loading import new_config
from hf_ctxmodels.training.summary import TrainingSummary
from hf_ctxmodels.training.training_step import EpochIndexed

WORDS = {"red": "rot", "cat": "katze", "sees": "sieht", "one": "ein", "big": "gross", "dog": "hund"}
SEQ2SEQ_FAMILIES = [family for family in FAMILIES.values() if "AutoModelForSeq2SeqLM" in family.models]
SEQ2SEQ_OBJECTIVE_FAMILIES = [family for family in SEQ2SEQ_FAMILIES if family.seq2seq_finetuning is not None]
SIZES = ["hidden_size=32", "num_hidden_layers=2", "hidden_dropout_prob=0", "attention_probs_dropout_prob=0"]
SIZES += ["num_attention_heads=2", "intermediate_size=128", "max_position_embeddings=16", "initializer_range=0.1"]


def build_translation_tokenizer(family: FamilySpec) -> PreTrainedTokenizerBase:
    """Train a tokenizer on the words of both languages."""
    texts = [f"{source}\t{target}" for source, target in WORDS.items()]
    if hasattr(family.tokenizer, "target_start"):
        return family.tokenizer.train(texts * 3, 60, min_count=1, min_target_count=1)
    if next(iter(family.objectives.values())).requires_language_tags:
        return family.tokenizer.train([f"{source}\t<de> {target}" for source, target in WORDS.items()] * 3, 60)
    return family.tokenizer.train([text.replace("\t", " ") for text in texts] * 3, vocab_size=300)


def model_flags(family: FamilySpec, folder: Path) -> list[Any]:
    """Flags of a small new model."""
    fields = family.config.__dataclass_fields__
    sizes = [size for size in SIZES if size.partition("=")[0] in fields]
    sizes += [f"{name}={size}" for name, size in (("decoder_layers", 2), ("embedding_size", 16)) if name in fields]
    sizes += ["decoder_attention_heads=2", "decoder_ffn_dim=128"] * ("decoder_ffn_dim" in fields)
    sizes += ["n_langs=1"] * ("n_langs" in fields)
    return ["--family", f"{family.name}:tokenizer={folder}", "--config_options", *sizes]


def write_pairs(
    folder: Path, words: dict[str, str] = WORDS, source: str = "source", target: str = "target"
) -> dict[str, Any]:
    """Write word-by-word translations; returns the file flags. dev.txt contains the validation sources."""
    rng = random.Random(0)
    for name, size in (("train", 400), ("dev", 20)):
        texts = [rng.choices(list(words), k=rng.randint(1, 3)) for _ in range(size)]
        rows = [{source: " ".join(text), target: " ".join(map(words.get, text))} for text in texts]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
        (folder / f"{name}.txt").write_text("".join(row[source] + "\n" for row in rows))
    return {"train_file": folder / "train.jsonl", "validation_file": folder / "dev.jsonl"}


@pytest.mark.parametrize("family", SEQ2SEQ_FAMILIES, ids=lambda family: family.name)
def test_predictions_equal_generate(family, tmp_path, capsys):
    """Predictions equal the output of `generate`; families with an objective for seq2seq fine-tuning train longer."""
    files = write_pairs(tmp_path)
    lengths = ["--max_length", 7, "--max_target_length", 6, "--num_beams", 2, "--metrics", "exact_match"]
    loop = ["--learning_rate", "5e-3", "--save_steps", 0, "--per_device_batch_size", 32, "--eval_steps", 0]
    folder, out, predictions_file = (tmp_path / f"{family.name}{name}" for name in ("", "_out", ".jsonl"))
    build_translation_tokenizer(family).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    language = ["--target_language", "<de>"] if getattr(tokenizer, "languages", None) else []
    steps = [
        "--max_steps",
        100 if family in SEQ2SEQ_OBJECTIVE_FAMILIES else 40,
        "--output_dir",
        out,
        "--predictions_file",
        predictions_file,
    ]
    flags = [*model_flags(family, folder), *lengths, *loop, *language, *steps]
    exit_code = finetune("seq2seq", *flags, **files)
    output = capsys.readouterr()
    assert exit_code == 0, output.err
    assert ("training on the targets of" in output.err) == (family in SEQ2SEQ_OBJECTIVE_FAMILIES)
    rows = [json.loads(line) for line in predictions_file.read_text().splitlines()]
    texts, model = [row["prediction"] for row in rows], AutoModelForSeq2SeqLM.from_pretrained(out)
    options = {"num_beams": 2, "max_new_tokens": 6, **({"language": "<de>"} if language else {})}
    assert generate_texts(model, tokenizer, [row["source"] for row in rows], **options) == texts
    assert sum(map(bool, texts)) > 10, "most outputs are empty"
    if family in SEQ2SEQ_OBJECTIVE_FAMILIES:
        assert model.config.label_smoothing == family.seq2seq_finetuning.label_smoothing
        num_correct = sum(" ".join(map(WORDS.get, row["source"].split())) == row["prediction"] for row in rows)
        assert num_correct / len(rows) == TrainingSummary.load(out).metrics["eval_exact_match"] > 0.5


@pytest.mark.slow
def test_mass_with_source_and_target_language(tmp_path, capsys):
    """MASS translates from one language to another in training, evaluation and `generate`."""
    family, files, out = FAMILIES["mass"], write_pairs(tmp_path), tmp_path / "out"
    texts = [f"<en> {source}" for source in WORDS] + [f"<de> {target}" for target in WORDS.values()]
    tokenizer = family.tokenizer.train(texts * 3, 300)
    tokenizer.save_pretrained(tmp_path / "words")
    model_args = [*model_flags(family, tmp_path / "words")[:-1], "n_langs=2", 'lang2id={"de": 0, "en": 1}']
    lengths = ["--max_length", 7, "--max_target_length", 6, "--metrics", "exact_match", "--learning_rate", "5e-3"]
    loop = ["--save_steps", 0, "--per_device_batch_size", 32, "--eval_steps", 0, "--max_steps", 40]
    command = [*model_args, *lengths, *loop, "--output_dir", out, "--predictions_file", tmp_path / "predicted"]
    for flags, message in (
        ((), r"source language is missing(.|\n)*--language(.|\n)*one of de, en"),
        (("--language", "en"), r"target language is missing(.|\n)*--target_language"),
        (("--language", "en", "--target_language", "<de>"), r"no language '<de>'(.|\n)*one of de, en"),
    ):
        assert finetune("seq2seq", *command, *flags, **files) == 2
        assert re.search(message, capsys.readouterr().err), flags
    assert finetune("seq2seq", *command, **files, language="en", target_language="de") == 0
    model = AutoModelForSeq2SeqLM.from_pretrained(out).eval()
    language_tables = [stack.language_embeddings.weight for stack in (model.mass.encoder, model.mass.decoder)]
    rows = [json.loads(line) for line in (tmp_path / "predicted").read_text().splitlines()]
    sources, predictions = [row["source"] for row in rows], [row["prediction"] for row in rows]
    assert sum(map(bool, predictions)) > 10
    with torch.no_grad():  # a wrong language would change the output
        language_tables[0][0], language_tables[1][1] = language_tables[0][0] + 9, language_tables[1][1] - 9
    options = {"max_new_tokens": 6, "language": "de"}
    assert generate_texts(model, tokenizer, sources, **options) == predictions, "the source language is --language"
    assert generate_texts(model, tokenizer, sources, **options, source_language="en", batch_size=1) == predictions
    assert generate_texts(model, tokenizer, sources, **options, source_language="de") != predictions
    assert generate_texts(model, tokenizer, sources, **options | {"language": "en"}) != predictions
    for invalid_options in ({}, {"language": "fr"}, {"language": "de", "source_language": "fr"}):
        with pytest.raises(CtxError, match=r"target language is missing(.|\n)*language|no language 'fr'"):
            generate_texts(model, tokenizer, sources, **invalid_options)
    model.config.default_lang = None
    with pytest.raises(CtxError, match=r"(?s)source language is missing.*source_language"):
        generate_texts(model, tokenizer, sources, language="de")
    model.config.lang2id = None
    with pytest.raises(CtxError, match=r"(?s)without names.*lang2id"):
        generate_texts(model, tokenizer, sources, language="de")


def test_special_token_ids_of_new_configuration(subtests):
    """A new configuration has the token ids of its tokenizer, not of the released vocabulary."""
    for family in SEQ2SEQ_FAMILIES:
        with subtests.test(family=family.name):
            tokenizer = build_translation_tokenizer(family)
            assert len(tokenizer) < 100 or family not in SEQ2SEQ_OBJECTIVE_FAMILIES, "the released ids would fit"
            config = new_config(family, tokenizer, "tiny")
            token_ids = {name: value for name, value in config.to_dict().items() if name.endswith("_token_id")}
            assert all(value is None or value < config.vocab_size for value in token_ids.values()), token_ids
            if family in SEQ2SEQ_OBJECTIVE_FAMILIES:
                query = {"unilm": "[MASK]", "ernie_gen": "[ATTN]"}[family.name]
                names = ("query_token_id", "decoder_start_token_id", "eos_token_id")
                tokens = tokenizer.convert_ids_to_tokens([token_ids[name] for name in names])
                assert tokens == [query, "[CLS]", "[SEP]"]
                tokenizer.mask_token = tokenizer.cls_token = None
                assert new_config(family, tokenizer, "tiny").vocab_size == len(tokenizer)
    bert_tokenizer = build_translation_tokenizer(FAMILIES["unilm"])  # without bos_token and eos_token
    config = new_config(FAMILIES["mass"], bert_tokenizer, "summaries")
    assert (config.bos_token_id, config.eos_token_id) == (bert_tokenizer.cls_token_id, bert_tokenizer.sep_token_id)


def prepare(family: FamilySpec, pairs: list[SourceTarget], **arguments: Any) -> tuple[Seq2Seq, PreTrainedConfig, Any]:
    """A task with its configuration and tokenizer."""
    tokenizer = build_translation_tokenizer(family)
    task = Seq2Seq(TaskArguments(**{"max_length": 20, "max_target_length": 10, "metrics": "exact_match", **arguments}))
    if family in SEQ2SEQ_OBJECTIVE_FAMILIES:
        config = family.config(vocab_size=len(tokenizer), pad_token_id=0)
        task.set_token_fields(config, tokenizer)
    else:  # plain targets
        language_fields = {"n_langs": 1} if "n_langs" in family.config.__dataclass_fields__ else {}
        config = family.config(vocab_size=300, eos_token_id=tokenizer.eos_token_id, **language_fields)
    task.configure(config, pairs, pairs)
    return task, config, tokenizer


PAIRS = [SourceTarget("one red cat sees", "ein rot katze sieht", "a:1"), SourceTarget("big dog", "gross hund", "a:2")]
TARGET_OPTIONS = {
    "unilm": ([], ["mlm_probability=0.4", "mask_share=0.5"], ["whole_word=true", "static=true"]),
    "ernie_gen": ([], ["noise_probability=0.7", "noise=token"], ["max_span=2", "noise_probability=0.05"]),
}


def test_batches_match_pretraining_batches(subtests):
    """Batches equal those of `pretrain` for the same pairs, objective, seed, epoch and example."""
    assert TARGET_OPTIONS.keys() == {family.name for family in SEQ2SEQ_OBJECTIVE_FAMILIES}
    for family in SEQ2SEQ_OBJECTIVE_FAMILIES:
        for option_texts in TARGET_OPTIONS[family.name]:
            with subtests.test(family=family.name, options=option_texts):
                task, config, tokenizer = prepare(family, PAIRS, target_options=option_texts)
                collate = task.training_collator(config, tokenizer, seed=7)
                features = EpochIndexed(task.encode(PAIRS, tokenizer).features)
                batches = [collate([features[epoch, index] for index in (1, 0)]) for epoch in (0, 1)]
                pairs = dict(text.split("=") for text in option_texts)
                options = {name: value if name == "noise" else json.loads(value) for name, value in pairs.items()}
                objective = family.seq2seq_finetuning.objective(
                    tokenizer, max_length=30, seed=7, max_target_length=10, **options
                )
                documents = [TranslatedText([pair.source, pair.target]) for pair in PAIRS]
                examples = EpochIndexed(list(objective.examples(documents)))
                for epoch, batch in enumerate(batches):
                    expected = objective.collate([examples[epoch, index] for index in (1, 0)])
                    assert batch.keys() == expected.keys()
                    assert all(torch.equal(batch[name], expected[name]) for name in expected), (epoch, batch, expected)
                is_same = all(torch.equal(batches[0][name], batches[1][name]) for name in batches[0])
                assert is_same == ("static=true" in option_texts), "masks change between epochs"


def test_plain_targets_and_invalid_options():
    for family in SEQ2SEQ_OBJECTIVE_FAMILIES:
        task, config, tokenizer = prepare(family, PAIRS, plain_targets=True)
        batch = task.training_collator(config, tokenizer, seed=7)(task.encode(PAIRS, tokenizer).features)
        assert batch.keys() == {"input_ids", "attention_mask", "labels"}
        labels = [*tokenizer(PAIRS[1].target).input_ids[1:]]
        assert batch["labels"][1, : len(labels)].tolist() == labels
        assert task.label_smoothing(config) == 0
        for smoothing, expected in ((None, 0.1), (0.0, 0.0), (0.3, 0.3)):
            task, config, tokenizer = prepare(family, PAIRS, label_smoothing=smoothing)
            assert task.label_smoothing(config) == expected
        config.label_smoothing, task.arguments.label_smoothing = 0.2, None
        assert task.label_smoothing(config) == 0.2, "the value of the configuration"
        model = AutoModelForSeq2SeqLM.from_config(family.config(**family.sizes["tiny"], vocab_size=70))
        TaskLoss(model, ["labels"], 0.3)
        assert model.config.label_smoothing == 0.3, "the head applies label smoothing"
        for options, message in (
            ({"target_options": ["share=1"]}, r"(?s)Unknown option 'share'.*--target_options.*max_target_length"),
            ({"target_options": ["static=maybe"]}, "(?s)maybe.*--target_options"),
            ({"target_options": ["max_target_length=3"]}, r"(?s)max_target_length is a flag.*use --max_target_length"),
            ({"target_options": ["static=true"], "plain_targets": True}, "(?s)trained on plain targets.*or --plain_t"),
        ):
            task, config, tokenizer = prepare(family, PAIRS, **options)
            with pytest.raises(CtxError, match=message):
                task.training_collator(config, tokenizer, seed=0)
        with pytest.raises(
            CtxError, match=r"(?s)common limit of 51[12] tokens.*--max_length 460 --max_target_length 64"
        ):
            prepare(family, PAIRS, max_length=460, max_target_length=64)


TEXTS = [["red cat sees one big dog", "one red cat", "red dog"], ["one dog sees"]]
TOKENS = ("mask_token", "pad_token", "sep_token", "cls_token", "eos_token")
REQUIRED_TOKENS = {
    "t5": {"pad_token", "eos_token"},
    "bart": {"mask_token", "pad_token"},
    "mass": {"mask_token", "pad_token"},
    "unilm": {"mask_token", "pad_token", "sep_token", "cls_token"},
    "ernie_gen": {"mask_token", "pad_token", "sep_token", "cls_token"},
}


def test_missing_special_tokens(subtests):
    """Objectives and fine-tuning raise if a required token is missing; other tokens are optional."""
    for name, required in REQUIRED_TOKENS.items():
        family = FAMILIES[name]
        objective_classes = [
            objective
            for name, objective in family.objectives.items()
            if objective.auto_class != "AutoModelForMaskedLM" and name != "back-translation"  # of two languages
        ]
        assert objective_classes or name in TARGET_OPTIONS
        for token in TOKENS:
            with subtests.test(family=name, token=token):
                tokenizer = build_translation_tokenizer(family)
                if getattr(tokenizer, token) is None:
                    assert token not in required
                    continue
                setattr(tokenizer, token, None)
                options = {"min_length": 3} if name == "mass" else {}
                for objective_class in objective_classes:
                    translations = [TranslatedText([pair.source, pair.target]) for pair in PAIRS]
                    documents = translations if objective_class.requires_translations else TEXTS
                    with pytest.raises(CtxError, match=token) if token in required else nullcontext():
                        objective = objective_class(tokenizer, max_length=30, seed=0, **options)
                        examples = EpochIndexed(list(objective.examples(documents)))
                        assert objective.config_fields
                        objective.collate([examples[0, 0], examples[0, 1]])
        if name in TARGET_OPTIONS:
            for token in required - {"pad_token"}:
                tokenizer = build_translation_tokenizer(family)
                setattr(tokenizer, token, None)
                with pytest.raises(CtxError, match=token.replace("_", "[_ ]")):
                    prepare(family, PAIRS)[0].training_collator(family.config(), tokenizer, seed=0)


def test_invalid_targets(subtests):
    """Reserved tokens in targets, empty sides, and data without any usable example."""
    for family in (FAMILIES[name] for name in REQUIRED_TOKENS):
        with subtests.test(family=family.name):
            task, _, tokenizer = prepare(family, PAIRS)
            end = tokenizer.convert_ids_to_tokens(min(task._ends))
            for target, message in (
                (f"rot {end} katze", f"reserved token {re.escape(end)}"),
                ("", "The target has no tokens"),
                (20 * "rot ", "1 of 1 targets have more than 10 tokens"),
            ):
                with pytest.raises(CtxError, match=f"(?s){message}.*a:1"):
                    task.encode([SourceTarget("red cat", target, "a:1")], tokenizer)
    for family, query in ((FAMILIES["unilm"], "[MASK]"), (FAMILIES["ernie_gen"], "[ATTN]")):
        task, _, tokenizer = prepare(family, PAIRS)
        objective = family.seq2seq_finetuning.objective(tokenizer, max_length=30, seed=0)
        with pytest.raises(CtxError, match=rf"reserved token {re.escape(query)}"):
            task.encode([SourceTarget("red cat", f"rot {query}", "a:1")], tokenizer)
        for reserved_token in (query, "[SEP]"):
            with pytest.raises(CtxError, match=rf"A target contains {re.escape(reserved_token)}, .*'rot "):
                list(objective.examples([TranslatedText(["red cat", f"rot {reserved_token} katze"])]))
        with pytest.raises(CtxError, match=r"(?s)No pair is left.*empty side.*--translations"):
            list(objective.examples([TranslatedText(["red cat", " "])]))
    tokenizer = build_translation_tokenizer(FAMILIES["mass"])
    masked, translation = (
        FAMILIES["mass"].objectives[name](tokenizer, max_length=9, seed=0)
        for name in ("masked-segment", "masked-translation")
    )
    for objective, documents in ((masked, [["red"]]), (translation, [TranslatedText(["red cat", 9 * "rot "])])):
        with pytest.raises(CtxError, match=r"all 1 .* too short.*\n.*raise max_length=9"):
            list(objective.examples(documents))
    with pytest.raises(CtxError, match="max_length=3 is below min_length=5"):
        type(masked)(tokenizer, max_length=3, seed=0)


def test_target_may_begin_with_start_token():
    """A target may begin with the decoder's start token (T5's padding); MASS's tokenizer adds one."""
    for family, texts in (("t5", ("<pad> rot", "<pad>", "rot <pad>", "rot")), ("mass", ("rot", "<pad> rot"))):
        task, config, tokenizer = prepare(FAMILIES[family], PAIRS)
        config.decoder_start_token_id = tokenizer.pad_token_id if family == "t5" else tokenizer.eos_token_id
        task.configure(config, PAIRS, PAIRS)
        features = task.encode([SourceTarget("red cat", text, "a:1") for text in texts], tokenizer).features
        for text, feature in zip(texts, features, strict=True):
            token_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            assert list(feature["labels"]) == [*token_ids, tokenizer.eos_token_id], text
            assert (token_ids[0] == tokenizer.pad_token_id) == text.startswith("<pad>")


CASED_WORDS = WORDS | {"cat": "Katze", "big": "groß", "dog": "Hund"}
QUICK = {"metrics": "exact_match,bleu", "max_length": 8, "max_target_length": 6, "save_steps": 0}
QUICK |= {"learning_rate": "1e-2"}


@pytest.fixture
def files(tmp_path) -> dict[str, Any]:
    columns = {"text_columns": "text", "label_column": "german"}
    return write_pairs(tmp_path, CASED_WORDS, *columns.values()) | columns


def save_cove_tokenizer(folder: Path, **options: Any) -> dict[str, Any]:
    """Save a CoVe tokenizer; returns the flags of a new model."""
    pairs = [f"{source}\t{target}" for source, target in CASED_WORDS.items()]
    FAMILIES["cove"].tokenizer.train(pairs, 60, min_count=1, min_target_count=1, **options).save_pretrained(folder)
    sizes = ["embedding_size=16", "hidden_size=32", "num_hidden_layers=1", "hidden_dropout_prob=0"]
    return {"family": f"cove:tokenizer={folder}", "config_options": sizes}


def save_t5(folder: Path) -> dict[str, Any]:
    """A tiny T5 of transformers, with a tokenizer of the words of both languages."""
    vocabulary = ["<pad>", "</s>", "<unk>", *CASED_WORDS, *CASED_WORDS.values()]
    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(vocabulary)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=backend, **special).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_decoder_layers": 1, "num_heads": 2}
    config = T5Config(vocab_size=len(vocabulary), dropout_rate=0.0, decoder_start_token_id=0, **sizes)
    AutoModelForSeq2SeqLM.from_config(config).save_pretrained(folder)
    return {"model": folder}


@pytest.mark.slow
def test_t5_of_transformers(files, tmp_path, capsys):
    """T5 of transformers learns to translate; `generate` reproduces its predictions."""
    out, predictions_file, output_file = tmp_path / "out", tmp_path / "predictions.jsonl", tmp_path / "generated.txt"
    flags = {**save_t5(tmp_path / "model"), **files, **QUICK, "label_smoothing": 0.1, "max_steps": 160, "num_beams": 2}
    assert finetune("seq2seq", **flags, predictions_file=predictions_file, output_dir=out) == 0
    printed = capsys.readouterr().out
    summary = TrainingSummary.load(out)
    assert summary.metrics["eval_exact_match"] > 0.5
    assert f"{summary.metrics['eval_exact_match']:.4f}" in printed
    assert "baseline: the source itself" in printed
    assert summary.metrics["baseline_exact_match"] == 0
    rows = [json.loads(line) for line in predictions_file.read_text().splitlines()]
    translations = [" ".join(map(CASED_WORDS.get, row["source"].split())) for row in rows]
    correct = [row["prediction"] == row["target"] == text for row, text in zip(rows, translations, strict=True)]
    assert sum(correct) / len(correct) == pytest.approx(summary.metrics["eval_exact_match"])
    flags = {"model": out, "input": tmp_path / "dev.txt", "decoding": "beam:num_beams=2", "max_new_tokens": 6}
    assert run_command("generate", **flags, batch_size=7, output_file=output_file) == 0
    assert output_file.read_text().splitlines() == [row["prediction"] for row in rows]
    assert type(AutoModelForSeq2SeqLM.from_pretrained(out)).__name__ == summary.model_class
    assert AutoTokenizer.from_pretrained(out)("red cat").input_ids


def test_upper_bound_of_lower_cased_targets(files, tmp_path, capsys):
    """Both commands and the summary report the bound, and metrics against normalized references."""
    out, flags = tmp_path / "out", save_cove_tokenizer(tmp_path / "model", target_lower_case=True)
    assert finetune("seq2seq", **flags, **files, **QUICK, max_steps=80, output_dir=out) == 0
    printed, metrics = capsys.readouterr().out, TrainingSummary.load(out).metrics
    targets = [json.loads(line)["german"] for line in (tmp_path / "dev.jsonl").read_text().splitlines()]
    upper_bound = sum(target == target.lower() for target in targets) / len(targets)
    assert metrics["upper_bound_exact_match"] == upper_bound < 0.5
    assert metrics["eval_exact_match"] <= upper_bound < metrics["eval_exact_match_normalized"]
    assert f"{metrics['eval_exact_match']:.4f}       0.0000{upper_bound:13.4f}  0 to 1\n" in printed
    assert "\nupper bound: score of references" in printed
    (tmp_path / "dev.de").write_text("".join(f"{target}\n" for target in targets))
    flags = {"model": out, "input": tmp_path / "dev.txt", "references": tmp_path / "dev.de", "metrics": "exact_match"}
    assert run_command("generate", **flags) == 0
    normalized = f"{metrics['eval_exact_match_normalized']:.4f}"
    expected = f"\nupper bound: exact_match {upper_bound:.4f}\nexact_match_normalized {normalized}\nupper bound: score"
    assert expected in capsys.readouterr().out
    assert run_command("generate", "--lower_case", **flags) == 0
    assert capsys.readouterr().out.endswith(f"exact_match {normalized}  (0 to 1)\n"), "only the case differs"


def test_family_without_seq2seq_head_raises(files, tmp_path, capsys):
    save_cove_tokenizer(tmp_path / "model")
    flags = {**files, **QUICK, "family": f"bert:tokenizer={tmp_path / 'model'}", "output_dir": tmp_path / "out"}
    assert finetune("seq2seq", **flags, max_steps=1) == 2
    assert "CtxBert has no head for seq2seq" in capsys.readouterr().err


def test_two_processes_match_one(files, tmp_path):
    flags = {**save_t5(tmp_path / "model"), **files, **QUICK, "label_smoothing": 0.1, "max_steps": 2}
    flags |= {"logging_steps": 1, "gradient_accumulation_steps": 2, "learning_rate": 1e-3, "batch_size": 8}
    check_two_processes("seq2seq", tmp_path, "loss", "grad_norm", "eval_loss", "eval_exact_match", **flags)
