"""Orthogonal alignment maps and translation retrieval between models of two synthetic languages."""

import pytest
import torch
from commands import command_output, save, tiny_pair
from scipy.linalg import orthogonal_procrustes
from torch.nn import functional as F
from zoo import tiny_config

from hf_ctxmodels.analysis.alignment import align_languages, orthogonal_map
from hf_ctxmodels.analysis.results import AnalysisResult
from hf_ctxmodels.architectures.word_encoder import EncodedSentence
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.registry import FAMILIES


def test_orthogonal_map_solves_procrustes():
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 50, 6, generator=generator, dtype=torch.float64)
    expected, _ = orthogonal_procrustes(x.numpy(), y.numpy())
    torch.testing.assert_close(orthogonal_map(x, y), torch.from_numpy(expected))
    rotated_y = F.pad(y, (0, 3)) @ torch.linalg.qr(torch.randn(9, 9, generator=generator, dtype=torch.float64))[0]
    torch.testing.assert_close(y @ orthogonal_map(y, rotated_y), rotated_y)


class RotatingEncoder:
    """Words are numbers: layer 0 is noise, layer 1 a vector of the number, rotated differently in each language."""

    layers, hidden_size = (0, 1), 12

    def __init__(self, language: int) -> None:
        generator = torch.Generator().manual_seed(language)
        self.rotation = torch.linalg.qr(torch.randn(12, 12, generator=generator))[0]
        self.noise_seed = language

    def encode(self, sentences):
        for sentence in sentences:
            words = sentence.split()
            meanings = [torch.randn(12, generator=torch.Generator().manual_seed(int(word))) for word in words]
            noise = [torch.randn(12, generator=torch.Generator().manual_seed(int(word) + 99 * self.noise_seed))
                     for word in words]  # fmt: skip
            vectors = torch.stack([torch.stack(noise), torch.stack(meanings) @ self.rotation], 1)
            yield EncodedSentence(words, vectors, torch.ones(len(words), dtype=torch.bool))


def test_rotation_is_recovered_from_word_pairs():
    """The rotated layer is aligned, the noise layer is not."""
    pairs = [(f"{word} {word % 7}", f"{word} {word % 7}") for word in range(90)]
    alignment = align_languages(RotatingEncoder(1), RotatingEncoder(2), pairs, seeds=(0, 1))
    assert (alignment.train_pairs, alignment.test_pairs) == (60, 30)
    custom_split = align_languages(RotatingEncoder(1), RotatingEncoder(2), pairs, test_pairs=20)
    assert (custom_split.train_pairs, custom_split.test_pairs) == (70, 20)
    small_training = align_languages(RotatingEncoder(1), RotatingEncoder(2), pairs, train_pairs=40, test_pairs=100)
    assert (small_training.train_pairs, small_training.test_pairs) == (40, 30)
    assert alignment.layers == [(0, 0), (1, 1)]
    assert alignment.accuracy_mapped[:, 1].tolist() == pytest.approx([1, 1])
    assert alignment.accuracy_unmapped[:, 1].max() < 0.3
    assert alignment.accuracy_mapped[:, 0].max() < 0.5
    torch.testing.assert_close(alignment.cka[:, 1], torch.ones(2))
    with pytest.raises(CtxError, match="5 pairs do not suffice"):
        align_languages(RotatingEncoder(1), RotatingEncoder(2), pairs[:5])
    with pytest.raises(CtxError, match="0 pairs do not suffice"):
        align_languages(RotatingEncoder(1), RotatingEncoder(2), [])


def test_multilingual_model_with_separate_vocabularies(tmp_path):
    """Each text is tokenized with the vocabulary of its language."""
    english = [f"{subject} {verb} {noun}" for subject in ("cats", "dogs") for verb in ("see", "like")
               for noun in ("rivers", "houses", "songs", "boats")]  # fmt: skip
    lines = [f"<{language}> {text}" for text in english for language in ("en", "de")]
    family = FAMILIES["xlm"]
    tokenizer = family.tokenizer.train(lines, vocab_size=200, separate_vocabularies=True)
    config_fields = {"n_langs": 2, "lang2id": tokenizer.lang2id, "use_lang_emb": False}
    torch.manual_seed(0)
    model = family.models["AutoModel"](tiny_config(family, vocab_size=len(tokenizer), **config_fields))
    save(tmp_path / "xlm", model, tokenizer)
    (tmp_path / "pairs.tsv").write_text("".join(f"{text}\t{text}\n" for text in english))
    flags = {"model": tmp_path / "xlm", "text": tmp_path / "pairs.tsv", "output_dir": tmp_path / "out"}
    command_output("analyze alignment", languages=["en", "de"], **flags)
    result = AnalysisResult.load(tmp_path / "out" / "alignment.json")
    layer_0 = dict(zip(result.tables[0].columns, result.tables[0].cells[0], strict=True))
    assert layer_0["CKA"] < 0.9, "the same words have different embeddings in each language"
    flags = {**flags, "output_dir": tmp_path / "same"}
    command_output("analyze alignment", languages=["en", "en"], **flags)
    assert AnalysisResult.load(tmp_path / "same" / "alignment.json").tables[0].cells[0][1] == pytest.approx(1)
    for codes, message in ((["en", "fr"], "'fr'"), (["en"], "Expected one multilingual model and two languages")):
        assert message in command_output("analyze alignment", languages=codes, fails=True, overwrite=True, **flags)


def test_alignment_command(tmp_path):
    english = [f"{subject} {verb} {noun}" for subject in ("cats", "dogs") for verb in ("see", "like", "hear")
               for noun in ("rivers", "houses", "songs", "boats")]  # fmt: skip
    german = [f"die {text[::-1]}" for text in english]
    save(tmp_path / "en", *tiny_pair("bert", "AutoModel", english))
    save(tmp_path / "de", *tiny_pair("gpt2", "AutoModel", german, num_hidden_layers=2, hidden_size=16))
    (tmp_path / "en.txt").write_text("\n".join(english) + "\n\n")
    (tmp_path / "de.txt").write_text("\n".join(german) + "\n\n")
    flags = {"model": [tmp_path / "en", tmp_path / "de"], "output_dir": tmp_path / "out", "seeds": [0, 1]}
    command_output("analyze alignment", text=[tmp_path / "en.txt", tmp_path / "de.txt"], **flags)
    result = AnalysisResult.load(tmp_path / "out" / "alignment.json")
    assert result.values["layers"] == [[0, 0], [1, 1], [2, 1], [3, 2]]
    assert "16 pairs fit the map, 8 test it" in result.tables[0].note
    assert result.tables[0].cells[0][1] is None
    assert 0 < result.tables[0].cells[0][0] <= 1
    rows = [f"{source}\t{target}" for source, target in zip(english, german, strict=True)]
    (tmp_path / "pairs.tsv").write_text("\n".join(rows) + "\n")
    pairs_output = tmp_path / "table"
    command_output("analyze alignment", text=tmp_path / "pairs.tsv", **{**flags, "output_dir": pairs_output})
    assert AnalysisResult.load(pairs_output / "alignment.json").values == result.values
    (tmp_path / "de.txt").write_text("a\n")
    assert "differ in the number of lines" in command_output(
        "analyze alignment", text=[tmp_path / "en.txt", tmp_path / "de.txt"], overwrite=True, fails=True, **flags
    )
