"""Prepared examples equal those in memory for every objective; damaged files raise."""

import json
import shutil
from dataclasses import replace
from itertools import islice
from pathlib import Path

import datasets
import forked
import fsspec
import numpy as np
import pytest

from hf_ctxmodels import CtxError
from hf_ctxmodels.data import (
    DocumentStream,
    EpochBatchSampler,
    ExampleSet,
    ShardedStream,
    ShuffledStream,
    document_sources,
    load_documents,
)
from hf_ctxmodels.data import documents as documents_module
from hf_ctxmodels.data import training_set as training_set_module
from hf_ctxmodels.data.folders import RemoteFolder
from hf_ctxmodels.data.preparation import Preparation, TextPart, examples_of, text_parts
from hf_ctxmodels.data.prepared import (
    IDENTITY_FILE,
    TRAIN,
    VALIDATION,
    PreparedCorpus,
    is_prepared,
    part_name,
    record_name,
)
from hf_ctxmodels.data.seeding import permute
from hf_ctxmodels.objectives import MaskedLM, MaskedLMWithNextSentence, Objective
from hf_ctxmodels.registry import FAMILIES
from hf_ctxmodels.training.corpora import CorpusArguments, make_preparation

OBJECTIVES = {objective: family for family in FAMILIES.values() for objective in family.objectives.values()}
OPTIONS = {
    "SentenceTasks": {"tasks": "skip-thought"},
    "ContinualTasks": {"schedule": "knowledge_masking, sentence_distance"},
}


@pytest.fixture
def text(documents, tmp_path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text("\n\n".join("\n".join(document) for document in documents), encoding="utf-8")
    return file


@pytest.fixture
def small_parts(monkeypatch):
    """Parts of about ten documents."""
    for module in (documents_module, document_sources):
        monkeypatch.setattr(module, "PART_BYTES", 1500)


def assert_same_examples(actual: ExampleSet, expected: ExampleSet) -> None:
    assert len(actual) == len(expected)
    for index in range(len(actual)):
        example, expected_example = actual[1, index], expected[1, index]
        assert example.keys() == expected_example.keys()
        for name, value in example.items():
            assert np.asarray(value).dtype == np.asarray(expected_example[name]).dtype
            assert np.array_equal(value, expected_example[name]), name


def prepare(objective: Objective, documents, folder: Path, fraction: float = 0.0) -> Preparation:
    parts = text_parts(documents, objective)
    identity = {"objective": type(objective).__name__, "parts": len(parts)}
    return Preparation(parts, objective, objective.tokenizer, fraction, folder, identity)


def write_articles(documents, file: Path) -> Path:
    rows = [
        {"domain": "a.org", "date": None, "authors": [], "title": lines[0], "summary": None, "article": " ".join(lines)}
        for lines in documents
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


@pytest.mark.parametrize("objective_class", OBJECTIVES, ids=lambda entry: entry.__name__)
def test_prepared_examples_equal_in_memory_examples(objective_class, text, documents, tmp_path, small_parts) -> None:
    family, options = OBJECTIVES[objective_class], OPTIONS.get(objective_class.__name__, {})
    sources, flags = [str(text)], {}
    if objective_class.requires_translations:
        lines = [" ".join(sentence.split()[::-1]) for document in documents for sentence in document]
        text.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        flags = {"translations": sources}
        if objective_class.requires_language_tags:
            flags |= {"language_tags": ["<xx>"]}
    elif objective_class.__name__ == "NewsFieldsLM":
        sources, flags = [str(write_articles(documents, tmp_path / "news.jsonl"))], {"news_articles": True}
    elif objective_class.__name__ == "BackTranslation":
        sources, flags = [str(text), str(text)], {"language_tags": ["<de>", "<en>"]}
    corpus = load_documents(*sources, **flags)
    tokenizer = family.tokenizer.train(corpus.texts(), vocab_size=350)
    objective = objective_class(tokenizer, max_length=48, seed=5, **options)
    in_memory = ExampleSet.build(examples_of(text_parts(corpus, objective), objective))
    preparation = prepare(objective, corpus, tmp_path / "prepared")
    is_divided = objective_class.is_divisible and not objective_class.requires_translations
    assert (len(preparation.parts) > 2) == is_divided
    preparation.run()
    (prepared,) = preparation.merge().examples(TRAIN)
    assert_same_examples(in_memory, prepared)
    reopened = datasets.load_from_disk(str(tmp_path / "prepared"))[TRAIN]
    assert len(reopened) == len(prepared)
    for index in (0, len(prepared) - 1):
        for name, value in reopened[index].items():
            assert np.array_equal(value, prepared[index][name])


def test_random_numbers_depend_on_part_number(tokenizer, text, small_parts, monkeypatch) -> None:
    objective = MaskedLMWithNextSentence(tokenizer, max_length=32, seed=1)
    parts = text_parts(load_documents(str(text)), objective)
    copies = [list(TextPart(0, number, parts[0].documents).examples(objective)) for number in (0, 1, 0)]
    labels = [[example["next_sentence_label"] for example in copy] for copy in copies]
    assert labels[0] == labels[2] != labels[1]
    monkeypatch.undo()
    (part,) = text_parts(load_documents(str(text)), objective)
    single_part = ExampleSet.build(part.examples(objective))
    assert_same_examples(single_part, ExampleSet.build(objective.examples(load_documents(str(text)))))


def test_missing_parts_are_rerun_and_merge_validates(tokenizer, text, tmp_path, small_parts, monkeypatch) -> None:
    monkeypatch.setattr("hf_ctxmodels.data.processes.get_context", lambda _: forked.CONTEXT)  # starts sooner than spawn
    objective = MaskedLMWithNextSentence(tokenizer, max_length=32, seed=1)
    folder = tmp_path / "prepared"
    training, held_out = load_documents(str(text)).split(0.2)
    preparation = prepare(objective, load_documents(str(text)), folder, fraction=0.2)
    count = len(preparation.parts)
    preparation.run(range(0, count, 2))
    with pytest.raises(CtxError, match=f"{count // 2} of {count} parts are missing"):
        preparation.merge()
    with pytest.raises(CtxError, match="no complete set"):
        PreparedCorpus.open(folder)
    times = {file.name: file.stat().st_mtime_ns for file in (folder / TRAIN).iterdir()}
    preparation.run(range(1, count, 2), num_proc=2)
    corpus = preparation.merge()
    assert all((folder / TRAIN / name).stat().st_mtime_ns == time for name, time in times.items())
    assert_same_examples(
        corpus.examples(TRAIN)[0], ExampleSet.build(examples_of(text_parts(training, objective), objective))
    )
    assert_same_examples(
        corpus.examples(VALIDATION)[0], ExampleSet.build(examples_of(text_parts(held_out, objective), objective))
    )

    file = folder / part_name(TRAIN, 1)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(CtxError, match=r"part-00001\.arrow was changed after it was written"):
        preparation.merge()
    file.write_bytes(content[:-8])
    with pytest.raises(CtxError, match=r"part-00001\.arrow has .* bytes instead of"):
        PreparedCorpus.open(folder)
    preparation.run()
    assert len(PreparedCorpus.open(folder).examples(TRAIN)[0]) == len(corpus.examples(TRAIN)[0])
    file.unlink()
    with pytest.raises(CtxError, match=r"part-00001\.arrow is missing"):
        PreparedCorpus.open(folder)
    renewed = prepare(MaskedLMWithNextSentence(tokenizer, max_length=32, seed=1), load_documents(str(text)), folder)
    with pytest.raises(CtxError, match="contains other examples: objective is Other"):
        Preparation(renewed.parts, objective, tokenizer, 0.0, folder, renewed.identity | {"objective": "Other"}).run()
    with pytest.raises(CtxError, match="contains other examples: objective is Other"):
        Preparation(renewed.parts, objective, tokenizer, 0.0, folder, renewed.identity | {"objective": "Other"}).merge()
    (folder / IDENTITY_FILE).unlink()  # as after an interrupted deletion: records of another identity are ignored
    with pytest.raises(CtxError, match=f"{count} of {count} parts are missing"):
        Preparation(renewed.parts, objective, tokenizer, 0.0, folder, renewed.identity | {"objective": "Other"}).merge()
    shutil.copy(folder / part_name(TRAIN, 0), file)  # a part with different text
    with pytest.raises(CtxError, match=r"part-00001\.arrow has|missing or damaged: 1"):
        preparation.merge()
    shutil.copy(folder / record_name(0), folder / record_name(1))  # and with its record
    with pytest.raises(CtxError, match=r"missing or damaged: 1\."):
        preparation.merge()


def test_upload_creates_no_bucket(tmp_path, monkeypatch) -> None:
    """Folders are created, which file servers need, but not the bucket of an object store."""
    store, created = type(fsspec.filesystem("memory")), []
    monkeypatch.setattr(store, "store", {})
    monkeypatch.setattr(store, "makedirs", lambda filesystem, path, **options: created.append(path))
    monkeypatch.setattr(store, "put_file", lambda filesystem, source, target: filesystem.pipe_file(target, b""))
    folder = RemoteFolder(tmp_path, "memory://new-bucket/prepared")
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
        folder.upload([name])
    assert created == ["/new-bucket/prepared"]  # of the second file, when the bucket exists


def test_failed_upload_leaves_an_incomplete_part(tokenizer, text, tmp_path, small_parts, monkeypatch) -> None:
    """A part is complete with its record, and the examples with the index; only incomplete parts are repeated."""
    store = fsspec.filesystem("memory")
    monkeypatch.setattr(type(store), "store", {})
    objective = MaskedLMWithNextSentence(tokenizer, max_length=32, seed=1)
    local = prepare(objective, load_documents(str(text)), tmp_path / "prepared")
    local.run()
    local.merge()
    remote = replace(local, directory=tmp_path / "staged", url="memory://prepared")
    count, uploads, failing_names, put_file = len(remote.parts), [], set(), type(store).put_file

    def failing_put_file(filesystem, source, target, **options) -> None:
        uploads.append(target.removeprefix("/prepared/"))
        if uploads[-1] in failing_names:
            raise RuntimeError("Unable to locate credentials")
        put_file(filesystem, source, target, **options)

    monkeypatch.setattr(type(store), "put_file", failing_put_file)
    for name in ("parts/identity.json", "train/part-00000.arrow", "parts/part-00001.json"):
        failing_names = {name}
        with pytest.raises(CtxError, match=r"Unable to locate credentials.*\n.*memory://prepared/.*\n.*credentials"):
            remote.run()
    assert "train/part-00001.arrow" in uploads
    with pytest.raises(CtxError, match=f"{count - 1} of {count} parts are missing or damaged: 1,"):
        remote.merge()
    failing_names = set()
    remote.run()
    assert [uploads.count(f"train/part-0000{number}.arrow") for number in range(3)] == [2, 2, 1]
    assert not list(remote.directory.rglob("*.arrow"))

    # files that were truncated or changed are found
    path = "/prepared/train/part-00002.arrow"
    content = store.cat_file(path)
    store.pipe_file(path, content[:-8])
    with pytest.raises(CtxError, match=f"1 of {count} parts are missing or damaged: 2"):
        remote.merge()
    uploads.clear()
    remote.run()
    assert [name for name in uploads if "part-" in name] == ["train/part-00002.arrow", "parts/part-00002.json"]
    store.pipe_file(path, content[:-8] + bytes(8) if content[-8:] != bytes(8) else content[:-8] + b"changed.")
    with pytest.raises(CtxError, match=r"part-00002\.arrow was changed after it was written"):
        remote.merge()
    store.pipe_file(path, content)
    failing_names = {"prepared.json"}
    with pytest.raises(CtxError, match="upload failed"):
        remote.merge()
    assert not store.exists("/prepared/prepared.json")
    failing_names = set()
    remote.merge()
    assert uploads[-1] == "prepared.json"
    files = [file for file in (tmp_path / "prepared").rglob("*") if file.is_file()]
    expected = {f"/prepared/{file.relative_to(tmp_path / 'prepared')}": file.read_bytes() for file in files}
    assert {name: store.cat_file(name) for name in store.find("/prepared")} == expected
    remote.delete()
    assert not store.find("/prepared")


def test_prepared_directory_with_symbolic_link(tokenizer, text, tmp_path) -> None:
    preparation = prepare(MaskedLM(tokenizer, max_length=32), load_documents(str(text)), tmp_path / "prepared")
    preparation.run()
    preparation.merge()
    (tmp_path / "prepared" / TRAIN).rename(tmp_path / "moved")
    (tmp_path / "prepared" / TRAIN).symlink_to(tmp_path / "moved")
    assert PreparedCorpus.open(tmp_path / "prepared").examples(TRAIN)
    preparation.merge()


@pytest.mark.parametrize("protocol", ["", "file://", "local://"])
def test_file_of_text_is_not_prepared(tmp_path, protocol: str) -> None:
    (tmp_path / "text.en").write_text("a b\n")
    assert not is_prepared(f"{protocol}{tmp_path}/text.en")
    assert not is_prepared(f"{protocol}{tmp_path}")


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 1000, 4097])
def test_computed_order_is_a_permutation(size, monkeypatch) -> None:
    images = permute(np.arange(size), size, seed=3, epoch=1)
    assert sorted(images.tolist()) == list(range(size))
    if size > 10:
        assert images.tolist() != permute(np.arange(size), size, seed=3, epoch=2).tolist()
    monkeypatch.setattr(training_set_module, "LONGEST_STORED_ORDER", 0)
    monkeypatch.setattr(training_set_module, "_ORDER_BLOCK", 100)
    batches = iter(EpochBatchSampler(size, 5, seed=3))
    samples = [sample for _ in range(2 * size // 5 + 1) for sample in next(batches)]
    assert sorted(index for epoch, index in samples if epoch == 0) == list(range(size))
    assert next(iter(EpochBatchSampler(size, 5, seed=3, start_batch=2))) == samples[10:15] or size < 8


def test_positions_of_small_permutations_are_uniform() -> None:
    """Chi-squared statistic of the 24 orders of four numbers in 4,800 epochs; above 50 with probability 0.001."""
    orders = [tuple(permute(np.arange(4), 4, seed=0, epoch=epoch).tolist()) for epoch in range(4800)]
    counts = np.unique(orders, axis=0, return_counts=True)[1]
    assert len(counts) == 24
    assert ((counts - 200) ** 2 / 200).sum() < 50


def test_sources_share_one_held_out_split(tokenizer, documents, tmp_path, monkeypatch) -> None:
    """Two small files form one part and share its document numbers."""
    files = [str(tmp_path / name) for name in ("a.txt", "b.txt")]
    for file, half in zip(files, (documents[:20], documents[20:])):
        Path(file).write_text("\n\n".join("\n".join(document) for document in half), encoding="utf-8")
    corpus = load_documents(*files)
    arguments = CorpusArguments(dataset=files, sampling_alpha=0.5, validation_fraction=0.2, max_length=32)
    objective, (training, _) = MaskedLM(tokenizer, max_length=32), arguments.load()
    preparation = make_preparation(training, arguments, objective, tmp_path)
    assert [part.source for part in preparation.parts] == [0, 1]
    for split, expected in enumerate(corpus.split(0.2)):
        parts = [part.documents.split(0.2)[split] for part in preparation.parts]
        assert [document for part in parts for document in part] == list(expected)
    monkeypatch.setattr(MaskedLM, "has_heldout_loss", False)  # then held-out documents are left out
    preparation = make_preparation(training, arguments, objective, tmp_path)
    assert preparation.validation_fraction == 0
    assert [document for part in preparation.parts for document in part.documents] == list(corpus.split(0.2)[0])


def test_part_with_a_single_document(tmp_path: Path, small_parts, monkeypatch) -> None:
    """Objectives that need two documents leave it out; a text of a single document raises."""
    documents = [
        [f"Sentence {number} of document {index} has some words." for number in range(6)] for index in range(9)
    ]
    documents += [["A long sentence of a document."] * 40, documents[0]]
    (tmp_path / "text.txt").write_text("\n\n".join("\n".join(lines) for lines in documents))
    (tmp_path / "one.txt").write_text("\n".join(documents[0]))
    tokenizer = FAMILIES["bert"].tokenizer.train([(tmp_path / "text.txt").read_text()], vocab_size=80)
    objective = MaskedLMWithNextSentence(tokenizer, max_length=32, seed=0)
    text = load_documents(str(tmp_path / "text.txt"))
    parts = text_parts(text, objective)
    sizes = [len(list(part.documents)) for part in parts]
    assert 1 in sizes
    assert max(sizes) > 1
    counts = [len(list(part.examples(objective))) for part in parts]
    assert [count > 0 for count in counts] == [size > 1 for size in sizes]
    with pytest.raises(CtxError, match=r"only one document with text\."):
        list(text_parts(load_documents(str(tmp_path / "one.txt")), objective)[0].examples(objective))
    single = replace(text, layout=tuple(part for part, size in zip(text.layout, sizes, strict=True) if size == 1) * 2)
    preparation = prepare(objective, single, tmp_path / "single")
    preparation.run()
    stream, single_stream = (
        ShardedStream(ShuffledStream(DocumentStream(documents, objective), 2, seed=0)) for documents in (text, single)
    )
    assert len(list(islice(stream, 3 * sum(counts)))) == 3 * sum(counts)
    makers = (preparation.merge, lambda: list(examples_of(text_parts(single, objective), objective)))
    for make_examples in (*makers, lambda: next(iter(single_stream))):
        with pytest.raises(CtxError, match=r"only one document with text in each part of the dataset\."):
            make_examples()
    preparation = prepare(objective, text, tmp_path / "out", fraction=0.1)
    assert [len(list(part.documents.split(0.1)[1])) for part in preparation.parts] == [1, 0, 0]
    preparation.run()
    with pytest.raises(CtxError, match="the objective needs two in a part"):
        preparation.merge()
    monkeypatch.undo()  # one part
    text = load_documents(str(tmp_path / "text.txt"))
    with pytest.raises(CtxError, match=r"only one document(.|\n)*the held-out documents(.|\n)*--valid"):
        prepare(objective, text, tmp_path / "other", fraction=0.1).run()
