"""`hf-ctxmodels predict`: all tasks against the head on one example at a time, input formats, scores, errors."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from commands import command_output, save, save_summary, tiny_pair
from datasets import ClassLabel, Dataset, Features, Value
from labeled_texts import BAD, FILLER_WORDS, GOOD, NAMES, PLACES

from hf_ctxmodels import CtxError, CtxMultiTaskConfig, CtxMultiTaskModel
from hf_ctxmodels.downstream.multitask.configuration import task_entry
from hf_ctxmodels.inference import Predictor
from hf_ctxmodels.training.summary import TrainingSummary

TEXTS = ["the film was lovely", "a story", "Anna saw the awful film in Paris yesterday", "Boris was in Rome"]
LABELS = {"id2label": {0: "neg", 1: "pos", 2: "none"}, "label2id": {"neg": 0, "pos": 1, "none": 2}}


def save_model(folder: Path, family: str, auto_class: str, **fields: Any) -> Path:
    texts = [" ".join(GOOD + BAD + PLACES + NAMES + FILLER_WORDS)]
    fields = {"initializer_range": 0.5, "max_position_embeddings": 64, **fields}
    return save(folder, *tiny_pair(family, auto_class, texts, **fields))


def predict(folder: Path, file: Path, **flags: Any) -> list[dict[str, Any]]:
    output_file = folder / "output.jsonl"
    flags = {"input": file, "output": output_file, "overwrite": True, "per_device_batch_size": 2, **flags}
    command_output("predict", model=folder, **flags)
    return [json.loads(line) for line in output_file.read_text().splitlines()]


def head_outputs(folder: Path, auto_class: str, *texts: Any, **options: Any) -> Any:
    """The outputs of the head for one example, and its encoding."""
    model = getattr(transformers, auto_class).from_pretrained(folder).eval()
    encoding = transformers.AutoTokenizer.from_pretrained(folder)(*texts, return_tensors="pt", **options)
    with torch.no_grad():
        return model(**encoding), encoding


def is_close(first: Any, second: Any) -> bool:
    if isinstance(first, dict) and first.keys() == second.keys():
        return all(is_close(first[name], second[name]) for name in first)
    return first == pytest.approx(second, abs=1e-5)


@pytest.mark.parametrize("family", ["bert", "elmo"])
def test_text_classification(family: str, tmp_path: Path) -> None:
    auto_class = "AutoModelForSequenceClassification"
    folder = save_model(tmp_path / "model", family, auto_class, **LABELS)
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS) + "\n")
    (tmp_path / "texts.csv").write_text("number,review\n" + "".join(f"1,{text}\n" for text in TEXTS))
    results = predict(folder, tmp_path / "texts.txt")
    assert [result["text"] for result in results] == TEXTS
    # a file without columns has no labels
    assert predict(folder, tmp_path / "texts.txt", label_column="stars") == results
    for text, result in zip(TEXTS, results, strict=True):
        expected = head_outputs(folder, auto_class, text)[0].logits[0].softmax(0).tolist()
        assert is_close(result["probabilities"], dict(zip(LABELS["label2id"], expected)))
        assert result["label"] == max(result["probabilities"], key=result["probabilities"].get)
    for flags in ({}, {"output": tmp_path / "out.jsonl"}):
        printed = command_output("predict", model=folder, input=tmp_path / "texts.csv", text_columns="review", **flags)
        lines = (tmp_path / "out.jsonl").read_text() if flags else printed
        digits = 6 if flags else 4
        for line, result in zip(lines.splitlines(), results, strict=True):
            printed_result = json.loads(line)
            assert printed_result["label"] == result["label"]
            for name, value in printed_result["probabilities"].items():
                assert value == float(f"{value:.{digits}g}") == pytest.approx(result["probabilities"][name], rel=1e-3)
    assert "predictions in" in printed


def test_regression_of_pairs(tmp_path: Path) -> None:
    auto_class = "AutoModelForSequenceClassification"
    folder = save_model(tmp_path / "model", "bert", auto_class)
    config = transformers.AutoConfig.from_pretrained(folder, num_labels=1)
    save(folder, transformers.AutoModelForSequenceClassification.from_config(config))
    pairs = list(zip(TEXTS, TEXTS[::-1]))
    (tmp_path / "pairs.jsonl").write_text("\n".join(json.dumps({"a": a, "b": b}) for a, b in pairs))
    results = predict(folder, tmp_path / "pairs.jsonl", text_columns="a,b")
    assert Predictor.open(str(folder)).predict([]) == []
    for pair, result in zip(pairs, results, strict=True):
        assert result["texts"] == list(pair)
        assert is_close(result["value"], head_outputs(folder, auto_class, *pair)[0].logits.item())


def test_token_classification(tmp_path: Path) -> None:
    auto_class = "AutoModelForTokenClassification"
    folder = save_model(tmp_path / "model", "bert", auto_class, **LABELS)
    (tmp_path / "plain.txt").write_text("".join(f"{text}.\n" for text in TEXTS))
    sentences = [[*text.split(), "."] for text in TEXTS]
    (tmp_path / "columns.txt").write_text("\n\n".join("\n".join(words) for words in sentences) + "\n")
    (tmp_path / "words.jsonl").write_text("\n".join(json.dumps({"tokens": words}) for words in sentences))
    (tmp_path / "spaced.txt").write_text("Anna slept late.\n\nBoris saw Paris.\n")
    words = [result["words"] for result in predict(folder, tmp_path / "spaced.txt")]
    assert words == [["Anna", "slept", "late", "."], ["Boris", "saw", "Paris", "."]]
    for name, text in {
        "short": "Anna pos\n\nParis none\n",  # sentences of one word
        "tabs": "Anna\t_\n\nParis\t_\n",
        "single": "Anna pos\nslept neg\n",  # one sentence
    }.items():
        (tmp_path / f"{name}.txt").write_text(text)
        words = [result["words"] for result in predict(folder, tmp_path / f"{name}.txt")]
        assert words == ([["Anna", "slept"]] if name == "single" else [["Anna"], ["Paris"]]), name
    for file in ("plain.txt", "columns.txt", "words.jsonl"):
        for words, result in zip(sentences, predict(folder, tmp_path / file), strict=True):
            assert result["words"] == words
            output, encoding = head_outputs(folder, auto_class, words, is_split_into_words=True)
            first_tokens = [encoding.word_ids().index(word) for word in range(len(words))]
            labels = [*LABELS["label2id"]]
            assert result["tags"] == [labels[index] for index in output.logits[0, first_tokens].argmax(-1)]


def test_question_answering(tmp_path: Path) -> None:
    auto_class = "AutoModelForQuestionAnswering"
    folder = save_model(tmp_path / "model", "bert", auto_class)
    rows = [{"question": "where", "context": text} for text in TEXTS]
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, rows)))
    paragraphs = [{"context": text, "qas": [{"id": f"{i}", "question": "where"}]} for i, text in enumerate(TEXTS, 1)]
    (tmp_path / "squad.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    results = predict(folder, tmp_path / "questions.jsonl")
    assert all(map(is_close, predict(folder, tmp_path / "squad.json"), results))
    for text, result in zip(TEXTS, results, strict=True):
        output, encoding = head_outputs(folder, auto_class, "where", text)
        positions = [i for i, sequence in enumerate(encoding.sequence_ids()) if sequence == 1]
        scores = {
            (first, last): float(output.start_logits[0, first] + output.end_logits[0, last])
            for first in positions
            for last in positions
            if first <= last
        }
        first, last = max(scores, key=scores.get)
        assert result["answer"] == text[encoding.token_to_chars(first).start : encoding.token_to_chars(last).end]
    (tmp_path / "other.csv").write_text("query,passage\nwhere,here\n")
    error = command_output("predict", model=folder, input=tmp_path / "other.csv", fails=True)
    assert "Fix: use a table with the columns question and context" in error
    for result in predict(folder, tmp_path / "questions.jsonl", may_be_unanswerable=True):
        assert (result["answer"] == "") == (result["no_answer_probability"] > 0.5)


def test_multiple_choice_and_ranking(tmp_path: Path) -> None:
    auto_class = "AutoModelForMultipleChoice"
    folder = save_model(tmp_path / "model", "bert", auto_class)
    rows = [{"text": text, "choices": GOOD[:3]} for text in TEXTS]
    (tmp_path / "choices.jsonl").write_text("\n".join(map(json.dumps, rows)))
    ranks = "".join(f"{text}\t{candidate}\n" for text, count in zip(TEXTS, (3, 1, 2, 3)) for candidate in GOOD[:count])
    (tmp_path / "ranks.tsv").write_text("query\tcandidate\n" + ranks)
    model = transformers.AutoModelForMultipleChoice.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    choices = predict(folder, tmp_path / "choices.jsonl")
    rankings = predict(folder, tmp_path / "ranks.tsv", task="ranking")
    for text, choice, ranking in zip(TEXTS, choices, rankings, strict=True):
        encoding = tokenizer([text] * 3, GOOD[:3], padding=True, return_tensors="pt")
        with torch.no_grad():
            logits = model(**{name: tensor[None] for name, tensor in encoding.items()}).logits[0]
        assert (choice["choice"], choice["choice_text"]) == (int(logits.argmax()), GOOD[int(logits.argmax())])
        assert is_close(choice["probabilities"], logits.softmax(0).tolist())
        candidates = ranking["candidates"]
        assert is_close(ranking["scores"], logits[: len(candidates)].tolist())
        assert [ranking["scores"][i] for i in ranking["ranking"]] == sorted(ranking["scores"], reverse=True)


def test_multitask_model(tmp_path: Path) -> None:
    model, tokenizer = tiny_pair("bert", "AutoModelForSequenceClassification", TEXTS, **LABELS)
    heads = {"polarity": "AutoModelForSequenceClassification", "ranks": "AutoModelForMultipleChoice"}
    tasks = {name: task_entry(auto_class, model.config) for name, auto_class in heads.items()}
    multitask = CtxMultiTaskModel(CtxMultiTaskConfig(encoder=model.config, tasks=tasks)).eval()
    folder = save(tmp_path / "model", multitask, tokenizer)
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    results = predict(folder, tmp_path / "texts.txt", task_name="polarity")
    for text, result in zip(TEXTS, results, strict=True):
        with torch.no_grad():
            logits = multitask(**tokenizer(text, return_tensors="pt"), task="polarity").logits[0]
        assert is_close([*result["probabilities"].values()], logits.softmax(0).tolist())
    fields = dict.fromkeys(("seed", "parameters", "steps", "global_batch_size"), 1) | {"max_length": 32}
    summary = TrainingSummary(
        task="polarity (sequence-classification), ranks (ranking)", model_class="", model_type="", dataset="", **fields
    )
    summary.save(folder)
    task = Predictor.open(str(folder), task_name="ranks").task
    assert (task.name, task.arguments.max_length) == ("ranking", 32)
    with pytest.raises(ValueError, match="several tasks: polarity"):
        Predictor.open(str(folder))
    with pytest.raises(CtxError, match=r"no task 'pairs'(?s:.*)use one of: polarity, ranks"):
        Predictor.open(str(folder), task_name="pairs")
    for flag in ({"label_delimiter": "|"}, {"may_be_unanswerable": True}):
        printed = command_output(
            "predict", "--all_tasks", model=folder, input=tmp_path / "texts.txt", **flag, fails=True
        )
        assert "No task of the model uses it" in printed


def test_targets_of_encoder_decoder(tmp_path: Path) -> None:
    """Predictions for a table equal `generate` for each source; targets give the metrics of fine-tuning."""
    folder = save_model(tmp_path / "model", "bart", "AutoModelForSeq2SeqLM")
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS) + "\n")
    printed = command_output("generate", model=folder, input=tmp_path / "texts.txt", max_new_tokens=8)
    options = {"max_target_length": 8}
    results = predict(folder, tmp_path / "texts.txt", **options)
    assert [result["source"] for result in results] == TEXTS
    assert [result["prediction"] for result in results] == printed.splitlines()[: len(TEXTS)]
    rows = [{"question": text, "answer": result["prediction"]} for text, result in zip(TEXTS, results, strict=True)]
    rows[0]["answer"] = "other words"
    (tmp_path / "pairs.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    columns = {"text_columns": "question", "label_column": "answer", "metrics": "exact_match"}
    labeled, scores = predict_and_score(folder, tmp_path / "pairs.jsonl", **columns, **options)
    assert labeled == results
    assert scores["exact_match"] == 0.75
    save_summary(folder, "seq2seq", max_length=64, columns={"text_columns": "question", "label_column": "answer"})
    without_columns = {"metrics": "exact_match", **options}
    assert predict_and_score(folder, tmp_path / "pairs.jsonl", **without_columns) == (labeled, scores)
    rows[1]["answer"] = ""  # an invalid target is an error only with --label_column
    (tmp_path / "pairs.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert predict_and_score(folder, tmp_path / "pairs.jsonl", **without_columns) == (results, {})
    error = command_output("predict", model=folder, input=tmp_path / "pairs.jsonl", **columns, fails=True)
    assert f"{tmp_path / 'pairs.jsonl'}:2" in error
    error = command_output("generate", model=folder, input=tmp_path / "pairs.jsonl", fails=True)
    assert "is a table" in error
    assert "hf-ctxmodels predict" in error
    error = command_output("predict", model=folder, input=tmp_path / "texts.txt", task="regression", fails=True)
    assert "the task seq2seq" in error


def test_invalid_models_and_flags(tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    file = {"input": tmp_path / "texts.txt"}
    encoder, decoder, head = (
        save_model(tmp_path / auto_class, family, auto_class)
        for family, auto_class in (
            ("bert", "AutoModel"),
            ("gpt2", "AutoModelForCausalLM"),
            ("bert", "AutoModelForSequenceClassification"),
        )
    )
    assert "hf-ctxmodels finetune" in command_output("predict", model=encoder, **file, fails=True)
    assert "hf-ctxmodels generate" in command_output("predict", model=decoder, **file, fails=True)
    assert "--choice_columns" in command_output("predict", model=head, **file, choice_columns="a,b", fails=True)
    assert "--may_be_unanswerable" in command_output("predict", "--may_be_unanswerable", model=head, **file, fails=True)
    assert "No column 'review'" in command_output("predict", model=head, **file, text_columns="review", fails=True)
    assert "--device cuda:99" in command_output("predict", model=head, **file, device="cuda:99", fails=True)
    assert "input files" in command_output(
        "predict", model=head, **file, output=file["input"], overwrite=True, fails=True
    )


def write(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(text)
    return folder / name


def write_table(folder: Path, name: str, header: str, labels: Iterable[Any]) -> Path:
    """A table of `TEXTS` and their labels; the header determines the delimiter."""
    delimiter = "\t" if "\t" in header else ","
    rows = [f"{text}{delimiter}{label}\n" for text, label in zip(TEXTS, labels, strict=True)]
    return write(folder, name, f"{header}\n" + "".join(rows))


def predict_and_score(folder: Path, file: Path, **flags: Any) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """The predictions for a file, and the printed metrics."""
    output = folder / "output.jsonl"
    printed = command_output("predict", model=folder, input=file, output=output, overwrite=True, **flags)
    first, *lines = printed.splitlines()
    results = [json.loads(line) for line in output.read_text().splitlines()]
    assert first == f"{len(results)} predictions in {output}"
    return results, {line.split()[0]: float(line.split()[1]) for line in lines}


def test_text_classification_scores(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", "bert", "AutoModelForSequenceClassification", **LABELS)
    labels = ["neg", "pos", "pos", "none"]
    tables = {
        "labeled.csv": ("text,label", labels),
        "other.csv": ("text,mood", labels),
        "empty.csv": ("text,label", [""] * 4),
        "glue.csv": ("text,label", ["-1"] * 4),
        "invalid.csv": ("text,label", ["neg", "bad", "pos", "none"]),
    }
    files = {name: write_table(tmp_path, name, *table) for name, table in tables.items()}
    results, scores = predict_and_score(folder, files["labeled.csv"])
    num_correct = sum(result["label"] == label for result, label in zip(results, labels, strict=True))
    assert scores["accuracy"] == num_correct / 4
    assert set(scores) == {"accuracy", "f1_macro", "matthews_correlation"}
    for name in ("other.csv", "empty.csv", "glue.csv", "invalid.csv"):
        assert predict_and_score(folder, files[name]) == (results, {}), name
    for name in ("empty.csv", "glue.csv"):
        assert predict_and_score(folder, files[name], label_column="label") == (results, {}), name
    assert predict_and_score(folder, files["other.csv"], label_column="mood") == (results, scores)
    error = command_output("predict", model=folder, input=files["invalid.csv"], label_column="label", fails=True)
    assert "'bad'" in error
    assert f"{files['invalid.csv']}:3" in error


def test_examples_without_a_class_have_no_score(tmp_path: Path) -> None:
    """All examples of a dataset are predicted, and those with a class number other than -1 are scored."""
    folder = save_model(tmp_path / "model", "bert", "AutoModelForSequenceClassification", **LABELS)
    features = Features({"text": Value("string"), "label": ClassLabel(names=["neg", "pos", "none"])})
    Dataset.from_dict({"text": TEXTS, "label": [0, -1, 1, -1]}, features).to_parquet(tmp_path / "a.parquet")
    results, scores = predict_and_score(folder, tmp_path / "a.parquet")
    assert [result["text"] for result in results] == TEXTS
    assert scores["accuracy"] == ((results[0]["label"] == "neg") + (results[2]["label"] == "pos")) / 2


def test_columns_of_the_training_file(tmp_path: Path) -> None:
    """Files with the columns of the training file have the predictions and scores that the flags give; files without
    these columns are read by the default columns."""
    folder = save_model(tmp_path / "model", "bert", "AutoModelForSequenceClassification", **LABELS)
    columns = {"text_columns": "review", "label_column": "mood"}
    labels = ["neg", "pos", "pos", "none"]
    tables = {
        "training.tsv": ("review\tmood", labels),
        "training.txt": ("review\tmood", labels),
        "unlabeled.tsv": ("review\tnumber", range(4)),
        "invalid.tsv": ("review\tmood", ["neg", "bad", "pos", "none"]),
        "default.tsv": ("text\tlabel", labels),
    }
    files = {name: write_table(tmp_path, name, *table) for name, table in tables.items()}
    files["plain"] = write(tmp_path, "plain.txt", "\n".join(TEXTS))
    records = [{"review": text, "mood": label} for text, label in zip(TEXTS, labels, strict=True)]
    files["json"] = write(tmp_path, "records.jsonl", "\n".join(map(json.dumps, records)))
    expected, scores = predict_and_score(folder, files["training.tsv"], **columns)
    assert scores
    save_summary(folder, "sequence-classification", max_length=64, columns=columns)
    for name in ("training.tsv", "json", "default.tsv"):
        assert predict_and_score(folder, files[name]) == (expected, scores), name
    for name in ("training.txt", "unlabeled.tsv", "invalid.tsv", "plain"):
        assert predict_and_score(folder, files[name]) == (expected, {}), name
    error = command_output("predict", model=folder, input=files["invalid.tsv"], label_column="mood", fails=True)
    assert "'bad'" in error
    table = write(tmp_path, "other.tsv", "question\tmood\nwhy\tneg\n")
    error = command_output("predict", model=folder, input=table, fails=True)
    assert "No column" in error
    assert "--text_columns" in error


def test_regression_choice_and_ranking_scores(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "number", "bert", "AutoModelForSequenceClassification")
    config = transformers.AutoConfig.from_pretrained(folder, num_labels=1)
    save(folder, transformers.AutoModelForSequenceClassification.from_config(config))
    numbers = [1.5, 0.5, 2.0, -1.0]
    labeled = write(tmp_path, "rated.tsv", "text\tlabel\n" + "".join(map("{}\t{}\n".format, TEXTS, numbers)))
    unlabeled = write(tmp_path, "plain.tsv", "text\tlabel\n" + "".join(f"{text}\t\n" for text in TEXTS))
    results, scores = predict_and_score(folder, labeled)
    errors = [(result["value"] - number) ** 2 for result, number in zip(results, numbers, strict=True)]
    assert scores["mse"] == pytest.approx(sum(errors) / 4, abs=1e-4)
    assert predict_and_score(folder, unlabeled) == (results, {})

    folder = save_model(tmp_path / "choice", "bert", "AutoModelForMultipleChoice")
    rows = [{"text": text, "choices": GOOD[:3], "label": 1} for text in TEXTS]
    labeled = write(tmp_path, "labeled.jsonl", "\n".join(map(json.dumps, rows)))
    results, scores = predict_and_score(folder, labeled)
    assert scores == {"accuracy": sum(result["choice"] == 1 for result in results) / 4}
    for label in (None, -1):
        unlabeled = write(tmp_path, "plain.jsonl", "\n".join(json.dumps({**row, "label": label}) for row in rows))
        assert predict_and_score(folder, unlabeled) == (results, {})

    lines = [f"{text}\t{word}\t{int(word == GOOD[1])}\n" for text in TEXTS for word in GOOD[:3]]
    labeled = write(tmp_path, "ranks.tsv", "query\tcandidate\tlabel\n" + "".join(lines))
    unlabeled = write(tmp_path, "plain.tsv", "query\tcandidate\n" + "".join(line[:-3] + "\n" for line in lines))
    results, scores = predict_and_score(folder, labeled, task="ranking")
    assert scores["mrr"] == pytest.approx(sum(1 / (1 + r["ranking"].index(1)) for r in results) / 4, abs=1e-4)
    assert predict_and_score(folder, unlabeled, task="ranking") == (results, {})


def test_tagging_scores(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", "bert", "AutoModelForTokenClassification", **LABELS)
    sentences = [text.split() for text in TEXTS]
    columns = {"labeled": "{} pos\n", "words": "{}\n", "empty": "{}\t\n", "underscores": "{}\t_\n"}
    files = {
        name: write(tmp_path, f"{name}.conll", "\n".join("".join(map(line.format, words)) for words in sentences))
        for name, line in columns.items()
    }
    records = [{"tokens": words, "tags": ["pos"] * len(words)} for words in sentences]
    files["json"] = write(tmp_path, "labeled.jsonl", "\n".join(map(json.dumps, records)))
    files["json_words"] = write(tmp_path, "w.jsonl", "\n".join(json.dumps({"tokens": words}) for words in sentences))
    results, scores = predict_and_score(folder, files["labeled"])
    tags = [tag for result in results for tag in result["tags"]]
    assert scores["accuracy"] == pytest.approx(tags.count("pos") / len(tags), abs=1e-4)
    assert predict_and_score(folder, files["json"]) == (results, scores)
    for name in ("words", "empty", "underscores", "json_words"):
        assert predict_and_score(folder, files[name]) == (results, {}), name
    assert predict_and_score(folder, files["labeled"], label_column=2) == (results, scores)
    assert predict_and_score(folder, files["words"], label_column=2) == (results, {})


def test_semantic_role_labeling_scores(tmp_path: Path) -> None:
    names = dict(enumerate(["O", "B-V", "B-ARG0"]))
    labels = {"id2label": names, "label2id": {name: index for index, name in names.items()}}
    folder = save_model(tmp_path / "model", "bert", "AutoModelForTokenClassification", **labels)
    lines = [["Anna", "-", "(ARG0*)"], ["saw", "see.01", "(V*)"], ["Paris", "-", "*"]]
    labeled = write(tmp_path, "labeled.txt", "\n".join(map(" ".join, lines)))
    unlabeled = write(tmp_path, "plain.txt", "\n".join(" ".join(cells[:2]) for cells in lines))
    flags = {"task": "semantic-role-labeling", "text_columns": 1, "label_column": 2}
    results, scores = predict_and_score(folder, labeled, **flags)
    assert scores["recall"] == (results[0]["tags"][0] == "B-ARG0")
    assert predict_and_score(folder, unlabeled, **flags) == (results, {})
    tagger = save_model(tmp_path / "tagger", "bert", "AutoModelForTokenClassification", **LABELS)
    assert "not BIO tags: neg, pos, none" in command_output(
        "predict", model=tagger, input=unlabeled, fails=True, **flags
    )


@pytest.mark.parametrize("export", [("export int8", {}), ("export low-rank", {"rank": 4})], ids=str)
def test_compressed_model_keeps_task_and_length(export: tuple[str, dict[str, Any]], tmp_path: Path) -> None:
    """A tagger and a model of semantic roles have the same head; the summary of a run is that of its checkpoints."""
    names = dict(enumerate(["O", "B-V", "B-ARG0"]))
    labels = {"id2label": names, "label2id": {name: index for index, name in names.items()}}
    folder = save_model(tmp_path / "model" / "checkpoint-1", "bert", "AutoModelForTokenClassification", **labels)
    TrainingSummary(
        task="semantic-role-labeling", model_class="CtxBertForTokenClassification", model_type="ctx-bert",
        dataset="a.conll", seed=1, parameters=1, steps=1, global_batch_size=1, max_length=7, metrics={"eval_f1": 0.5},
    ).save(folder.parent)  # fmt: skip
    output = tmp_path / "compressed"
    command, flags = export
    command_output(command, model=folder, output_dir=output, **flags)
    predictor = Predictor.open(str(output))
    assert (predictor.task.name, predictor.task.arguments.max_length) == ("semantic-role-labeling", 7)
    summary = TrainingSummary.load(output)
    assert summary.metrics == {}
    assert summary.parameters != 1


def test_checkpoint_of_a_finished_run_keeps_task_and_length(tmp_path: Path) -> None:
    """A tagger and a model of semantic roles have the same head."""
    names = dict(enumerate(["O", "B-V", "B-ARG0"]))
    labels = {"id2label": names, "label2id": {name: index for index, name in names.items()}}
    checkpoint = save_model(tmp_path / "run" / "checkpoint-2", "bert", "AutoModelForTokenClassification", **labels)
    assert Predictor.open(str(checkpoint)).task.name == "token-classification"
    TrainingSummary(
        task="semantic-role-labeling", model_class="CtxBertForTokenClassification", model_type="ctx-bert",
        dataset="a.conll", seed=1, parameters=1, steps=2, global_batch_size=1, max_length=7,
    ).save(tmp_path / "run")  # fmt: skip
    predictor = Predictor.open(str(checkpoint))
    assert (predictor.task.name, predictor.task.arguments.max_length) == ("semantic-role-labeling", 7)


def test_question_answering_scores(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", "bert", "AutoModelForQuestionAnswering")

    def squad(name: str, **fields: Any) -> Path:
        paragraphs = [{"context": t, "qas": [{"id": f"{i}", "question": "who", **fields}]} for i, t in enumerate(TEXTS)]
        return write(tmp_path, name, json.dumps({"data": [{"paragraphs": paragraphs}]}))

    unlabeled = [squad("plain.json"), squad("empty.json", answers=[])]
    expected, _ = predict_and_score(folder, unlabeled[0])
    paragraphs = json.loads(unlabeled[0].read_text())["data"][0]["paragraphs"]
    for paragraph, result in zip(paragraphs[:3], expected, strict=False):
        start = paragraph["context"].index(result["answer"])
        paragraph["qas"][0]["answers"] = [{"text": result["answer"], "answer_start": start}]
    paragraphs[3]["qas"][0] |= {"is_impossible": True, "answers": []}
    labeled = write(tmp_path, "labeled.json", json.dumps({"data": [{"paragraphs": paragraphs}]}))
    results, scores = predict_and_score(folder, labeled)
    assert results == expected
    assert (scores["exact"], scores["HasAns_exact"], scores["NoAns_exact"]) == (75, 100, 0)
    for file in unlabeled:
        assert predict_and_score(folder, file) == (expected, {})
