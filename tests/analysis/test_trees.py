"""Tree spaces of structural probes, on Pythagorean embeddings of random trees."""

import random
from functools import partial

import pytest
import torch
from commands import command_output, save, tiny_pair

from hf_ctxmodels.analysis.probing.training import ProbeTraining
from hf_ctxmodels.analysis.results import AnalysisResult
from hf_ctxmodels.analysis.trees import TreeSpace, fit_tree_spaces
from hf_ctxmodels.architectures.word_encoder import EncodedCorpus
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.treebanks import TreebankSentence, read_treebank

RELATIONS = ["nsubj", "obj", "det"]


def random_tree(seed: int, size: int = 7) -> str:
    """Lines of a CoNLL-U sentence whose last word is punctuation."""
    generator = random.Random(seed)
    heads = [0, *(generator.randrange(1, word + 1) for word in range(1, size))]
    rows = [
        f"{word + 1}\tw{word}\t_\t{'PUNCT' if word == size - 1 else 'NOUN'}\t_\t_\t{head}\t"
        f"{RELATIONS[word % 3] if head else 'root'}{':sub' if word % 2 else ''}\t_\t_"
        for word, head in enumerate(heads)
    ]
    return "\n".join(rows)


@pytest.fixture(scope="module")
def sentences(tmp_path_factory) -> list[TreebankSentence]:
    file = tmp_path_factory.mktemp("trees") / "trees.conllu"
    file.write_text("\n\n".join(map(random_tree, range(60))) + "\n")
    return read_treebank(file)


class PythagoreanEncoder:
    """f(root) = 0, f(word) = f(head) + e_word, followed by as many noise dimensions that the probe must remove."""

    layers, hidden_size = (2,), 14

    def __init__(self, sentences: list[TreebankSentence]) -> None:
        self.heads = {id(sentence.words): sentence.heads for sentence in sentences}

    def encode_corpus(self, word_lists, progress=True):
        generator = torch.Generator().manual_seed(0)
        vectors = []
        for words in word_lists:
            points = torch.zeros(len(words), 7)
            for word, head in enumerate(self.heads[id(words)]):
                if head >= 0:
                    points[word] = points[head] + torch.eye(7)[word]
            vectors.append(torch.cat([points, torch.randn(len(words), 7, generator=generator)], 1))
        starts = torch.tensor([0, *map(len, word_lists)]).cumsum(0)
        table = torch.cat(vectors)[:, None]
        return EncodedCorpus(list(word_lists), table, torch.ones(len(table), dtype=torch.bool), starts)


def test_pythagorean_embedding_is_recovered(sentences):
    training = ProbeTraining(learning_rate=2e-2, min_steps=150)
    encoder = PythagoreanEncoder(sentences)
    spaces = fit_tree_spaces(encoder, sentences[:50], sentences[50:], rank=14, seeds=(0, 1), training=training)
    for space in spaces:
        assert space.layer == 2
        assert space.uuas > 0.9
        for lengths in space.edge_lengths().values():
            assert float(lengths.mean()) == pytest.approx(1, abs=0.3)
    assert not torch.allclose(spaces[0].points[0], spaces[1].points[0])
    with pytest.raises(CtxError, match="5 training sentences"):
        fit_tree_spaces(encoder, sentences[:5], sentences[50:])


def test_vectors_are_standardized(sentences):

    class ScaledEncoder(PythagoreanEncoder):
        def encode_corpus(self, word_lists, progress=True):
            corpus = super().encode_corpus(word_lists, progress)
            corpus.vectors = corpus.vectors * 2.0 ** torch.arange(-3, 4).repeat(2)
            return corpus

    spaces = [
        fit_tree_spaces(encoder(sentences), sentences[:20], sentences[50:52], training=ProbeTraining(min_steps=5))[0]
        for encoder in (PythagoreanEncoder, ScaledEncoder)
    ]
    distances = [torch.cdist(space.points[0], space.points[0]) for space in spaces]
    torch.testing.assert_close(distances[0], distances[1], rtol=0.01, atol=1e-4)


def test_edge_lengths_and_tree_map(sentences):
    """Lengths exclude punctuation and merge relation subtypes; dotted edges connect words without an arc."""
    heads = sentences[0].heads
    points = torch.eye(7)
    points[1] = points[0]
    space = TreeSpace(0, 0.0, sentences[:1], [points])
    lengths = space.edge_lengths()
    assert set(lengths) <= set(RELATIONS)
    assert sum(map(len, lengths.values())) == 5
    expected = [0.0 if word == 1 else 2.0 for word in range(1, 6)]
    assert sorted(torch.cat(list(lengths.values())).tolist()) == pytest.approx(sorted(expected))
    coordinates, edges = space.tree_map(0)
    assert coordinates.shape == (7, 2)
    arcs = {(min(word, head), max(word, head)) for word, head in enumerate(heads) if head >= 0}
    assert {edge[:2] for edge in edges if edge[2] == "solid"} == arcs
    dotted = {edge[:2] for edge in edges if edge[2] == "dotted"}
    assert not dotted & arcs
    assert all(6 not in edge for edge in dotted)


def test_trees_command(tmp_path, monkeypatch):
    training = partial(ProbeTraining, min_steps=20)
    monkeypatch.setattr("hf_ctxmodels.cli.analyze_trees.ProbeTraining", training)
    for name, seeds in (("train", range(20)), ("test", range(20, 26))):
        (tmp_path / f"{name}.conllu").write_text("\n\n".join(map(random_tree, seeds)) + "\n")
    text = [" ".join(f"w{word}" for word in range(7))]
    save(tmp_path / "bert", *tiny_pair("bert", "AutoModel", text))
    save(tmp_path / "glove", *tiny_pair("glove", "AutoModel", text))
    save(tmp_path / "bart", *tiny_pair("bart", "AutoModel", text))
    command_output(
        "analyze trees", model=[tmp_path / "bert", tmp_path / "glove", tmp_path / "bart"],
        train_file=tmp_path / "train.conllu", test_file=tmp_path / "test.conllu", rank=8, epochs=1, min_arcs=2,
        max_figures=1, seeds=[0, 1], output_dir=tmp_path / "out",
    )  # fmt: skip
    result = AnalysisResult.load(tmp_path / "out" / "trees.json")
    assert set(result.tables[0].rows) == set(RELATIONS)
    assert [figure.name for figure in result.figures] == ["lengths", "tree-0-0", "tree-1-0", "tree-2-0"]
    depths = [int(group.removeprefix("depth ")) for group in result.figures[1].groups]
    assert depths == sorted(depths)  # the order of the legend
    arcs = [(first, second) for first, second, style in result.figures[1].edges if style == "solid"]
    assert len(arcs) == len(depths) - 1
    assert all(abs(depths[first] - depths[second]) == 1 for first, second in arcs)
    assert result.values["bert"]["layer"] == 2
    assert result.values["bert"]["uuas"]["spread"] is not None
    assert result.tables[0].spreads[0][1] > 0
    assert result.values["glove"]["layer"] == 0
    assert result.values["bart"]["layer"] == 2
