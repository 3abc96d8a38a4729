"""Contextual word features of task networks, and the command `embed words`."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from commands import command_output, run_command
from safetensors.torch import load_file
from torch.nn import functional as F
from zoo import tiny_config

from hf_ctxmodels import CtxError
from hf_ctxmodels.architectures.word_encoder import WordEncoder
from hf_ctxmodels.cli import embed_words as embed_command
from hf_ctxmodels.data import files as data_files
from hf_ctxmodels.downstream.networks.feature_stack import FeatureModel, FeatureStack
from hf_ctxmodels.downstream.networks.features import ContextualFeatures, embed_words, open_models, saved_layer_mix
from hf_ctxmodels.registry import FAMILIES

TEXTS = ["the cat saw a small garden", "nobody", "a dog carried seven letters over the bridge", "the old sailor"]
SENTENCES = [*TEXTS, ["The", "sailor", "don't", "mend", ",", "\x00", "!"], "the cat"]
CLOSE = {"atol": 1e-5, "rtol": 1e-4}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of tiny models; `tagger` is a BERT tagger with a layer mix."""
    folders = {}
    for name in ("bert", "glove", "ulmfit", "tagger"):
        family = FAMILIES["bert" if name == "tagger" else name]
        tokenizer = family.tokenizer.train(TEXTS * 5, vocab_size=120)
        torch.manual_seed(len(name))
        options = {"layer_mix": True} if name == "tagger" else {}
        auto_class = "AutoModelForTokenClassification" if name == "tagger" else "AutoModel"
        model = family.models[auto_class](tiny_config(family, vocab_size=len(tokenizer), **options))
        if name == "tagger":
            model.layer_mix.weights.data = torch.tensor([2.0, 0.0, -1.0, 1.0])
            model.layer_mix.gamma.data.fill_(3)
        folders[name] = str(tmp_path_factory.mktemp(name))
        for component in (model, tokenizer):
            component.save_pretrained(folders[name])
    return folders


def pad(vectors: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(vectors, batch_first=True)


def test_embed_words(folders: dict[str, str]) -> None:
    """One layer, all layers, their learned mix, and the concatenation of two models."""
    all_layers = embed_words(SENTENCES, folders["tagger"], layers="all", device="cpu")
    assert saved_layer_mix(folders["bert"]) is None
    weights = torch.tensor([2.0, 0.0, -1.0, 1.0]).softmax(0)
    expectations: dict[Any, Any] = {
        "last": lambda layers: layers[:, -1],
        1: lambda layers: layers[:, 1],
        "mix": lambda layers: 3 * torch.einsum("wlh,l->wh", layers, weights),
    }
    for layers, expected in expectations.items():
        for result, full in zip(embed_words(SENTENCES, folders["tagger"], layers=layers), all_layers, strict=True):
            torch.testing.assert_close(result.vectors, expected(full.vectors), **CLOSE)
    concatenated = embed_words(iter(SENTENCES), [folders["ulmfit"], folders["glove"]])
    singles = [embed_words(SENTENCES, folders[name]) for name in ("ulmfit", "glove")]
    for result, first, second in zip(concatenated, *singles, strict=True):
        torch.testing.assert_close(result.vectors, torch.cat([first.vectors, second.vectors], 1))
        assert torch.equal(result.has_tokens, first.has_tokens & second.has_tokens)
    [sentence] = embed_words("the cat", folders["glove"])
    assert sentence.words == ["the", "cat"]
    with pytest.raises(CtxError, match="several models cannot be concatenated"):
        embed_words(SENTENCES, [folders["bert"], folders["glove"]], layers="all")


def test_stacks_of_the_same_models_are_independent(folders: dict[str, str]) -> None:
    ((name, model, tokenizer),) = open_models([folders["bert"]])
    models = [FeatureModel(name, model, WordEncoder(model, tokenizer).widths)]
    stacks = [FeatureStack(models), FeatureStack(models)]
    with torch.no_grad():
        stacks[1].mixes[0].gamma.fill_(3)
    for stack in stacks:
        stack.set_tokenizers({name: tokenizer})
    first, second = (stack(TEXTS)[0] for stack in stacks)
    torch.testing.assert_close(second, 3 * first)


@pytest.mark.parametrize("layers", ["mix", "last", 1])
def test_features_equal_embedded_words(folders: dict[str, str], layers: Any) -> None:
    names = ["bert", "ulmfit"] if layers == 1 else ["bert", "glove", "ulmfit"]
    features = ContextualFeatures([folders[name] for name in names], layers=layers, dropout=0.5).eval()
    vectors, is_word = features(SENTENCES)
    expected = embed_words(SENTENCES, [folders[name] for name in names], layers=layers, device="cpu")
    torch.testing.assert_close(vectors, pad([sentence.vectors for sentence in expected]), **CLOSE)
    assert is_word.sum(1).tolist() == [len(sentence.words) for sentence in expected]
    assert vectors.shape[2] == features.width
    assert features.train()(SENTENCES)[0].eq(0).sum() > vectors.eq(0).sum(), "dropout"


def test_gradients_reach_trainable_encoder_and_mixes(folders: dict[str, str]) -> None:
    """Frozen encoders have no gradients and stay in evaluation mode."""
    features = ContextualFeatures([folders["bert"], folders["ulmfit"]], trainable=[True, False], layer_norm=True)
    assert [encoder.training for encoder in features.encoders] == [True, False]
    optimizer = torch.optim.SGD([parameter for parameter in features.parameters() if parameter.requires_grad], 0.1)
    (features(TEXTS)[0].square().mean() + features.penalty()).backward()
    optimizer.step()
    trained, frozen = features.encoders
    assert trained.embeddings.word_embeddings.weight.grad.any()
    assert all(parameter.grad is None for parameter in frozen.parameters())
    shares = features.layer_shares()
    assert {name: len(values) for name, values in shares.items()} == {folders["bert"]: 4, folders["ulmfit"]: 4}
    assert sum(shares[folders["bert"]]) == pytest.approx(1)
    assert features.penalty() > 0


def test_example_network_learns(folders: dict[str, str]) -> None:
    """The tagger of the docstring learns whether a word has more than four letters."""

    class Tagger(torch.nn.Module):
        def __init__(self, models: list[str], num_tags: int) -> None:
            super().__init__()
            self.features = ContextualFeatures(models, dropout=0.1)
            self.lstm = torch.nn.LSTM(self.features.width, 20, bidirectional=True, batch_first=True)
            self.output = torch.nn.Linear(40, num_tags)

        def forward(self, sentences: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
            vectors, is_word = self.features(sentences)
            return self.output(self.lstm(vectors)[0]), is_word

    torch.manual_seed(0)
    tagger = Tagger([folders["bert"], folders["glove"]], 2)
    tagger.features.cache(TEXTS)
    labels = torch.tensor([len(word) > 4 for text in TEXTS for word in text.split()]).long()
    optimizer = torch.optim.Adam([parameter for parameter in tagger.parameters() if parameter.requires_grad], 0.01)
    for _ in range(40):
        logits, is_word = tagger(TEXTS)
        loss = F.cross_entropy(logits[is_word], labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.1
    restored = Tagger([folders["bert"], folders["glove"]], 2)
    restored.load_state_dict(tagger.state_dict())
    torch.testing.assert_close(restored.eval()(TEXTS)[0], tagger.eval()(TEXTS)[0])


def test_cached_features(folders: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    features = ContextualFeatures([folders["bert"], folders["glove"]]).eval()
    expected, _ = features(SENTENCES)
    features = ContextualFeatures([folders["bert"], folders["glove"]]).eval()
    features.cache(iter(SENTENCES), tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    with monkeypatch.context() as patch:
        patch.setattr(WordEncoder, "hidden_states", lambda *args: pytest.fail("not cached"))
        features.load_state_dict(features.state_dict())
        vectors, _ = features(SENTENCES)
    torch.testing.assert_close(vectors, expected, **CLOSE)
    features.load_state_dict({name: weight * 1.1 for name, weight in features.state_dict().items()})
    assert not torch.allclose(features(SENTENCES)[0], vectors, **CLOSE)
    assert features(["a sentence that is not in the cache"])[0].any()


def test_invalid_features_raise(folders: dict[str, str]) -> None:
    for arguments, message in (
        ({"layers": "all"}, "layers 0 to 3, not 'all'"),
        ({"layers": ["last", 1, 2]}, "3 values for 2 models"),
        ({"layers": 9}, "layers 0 to 3, not 9"),
    ):
        with pytest.raises(CtxError, match=message):
            ContextualFeatures([folders["bert"], folders["ulmfit"]], **arguments)
    with pytest.raises(CtxError, match="No model is given"):
        ContextualFeatures([])


@pytest.mark.parametrize("layers", ["mix", "all"])
def test_embed_command(folders: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layers: str) -> None:
    """All formats contain the same vectors, and an interrupted run continues."""
    source = tmp_path / "sentences.txt"
    source.write_text("\n\n".join(TEXTS * 3))
    monkeypatch.setattr(embed_command, "_PART_SENTENCES", 5)
    models = [folders["tagger"]] if layers == "all" else [folders["tagger"], folders["glove"]]
    flags = ["--model", *models, "--layers", layers, "--input", str(source)]
    expected = embed_words(TEXTS * 3, models, layers=layers)
    vectors = torch.cat([sentence.vectors for sentence in expected])
    words = [word for sentence in expected for word in sentence.words]

    file = tmp_path / "vectors.safetensors"
    save_part = embed_command.EmbeddedPart.save
    parts = []

    def interrupt(self: Any, part: Path) -> None:
        if len(parts) == 2:
            raise KeyboardInterrupt
        parts.append(part)
        save_part(self, part)

    with monkeypatch.context() as patch:
        patch.setattr(embed_command.EmbeddedPart, "save", interrupt)
        assert run_command("embed", "words", *flags, "--output", file) not in (0, 2)
    assert not file.exists()
    assert len(parts) == 2
    with monkeypatch.context() as patch:
        patch.setattr(
            embed_command.EmbeddedPart, "save", lambda self, part: (parts.append(part), save_part(self, part))
        )
        assert run_command("embed", "words", *flags, "--output", file) == 0
    assert len(parts) == len(set(parts)) == 3
    tensors = load_file(file)
    torch.testing.assert_close(tensors["vectors"], vectors, **CLOSE)
    assert embed_command.decode_lines(tensors["words"]) == words
    assert tensors["starts"].diff().tolist() == [len(sentence.words) for sentence in expected]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sentences.txt", "vectors.safetensors"]

    command_output("embed", "words", *flags, "--output", tmp_path / "vectors.npz", "--vector_dtype", "float16")
    arrays = np.load(tmp_path / "vectors.npz")
    assert arrays["words"].tolist() == words
    np.testing.assert_array_equal(arrays["vectors"], tensors["vectors"].half().numpy())
    np.testing.assert_array_equal(arrays["starts"], tensors["starts"].numpy())

    output = command_output("embed", "words", *flags, "--output", tmp_path / "vectors.parquet")
    assert f"{len(words)} words with vectors of width {vectors.shape[-1]} in " in output
    rows = pq.read_table(tmp_path / "vectors.parquet").to_pydict()
    assert rows["word"] == words
    torch.testing.assert_close(torch.tensor(rows["vector"]), vectors, **CLOSE)
    assert np.bincount(rows["sentence"]).tolist() == [len(sentence.words) for sentence in expected]


def test_embed_command_errors(folders: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n \n")
    flags = ["--model", folders["bert"], "--input", str(tmp_path / "empty.txt"), "--output"]
    assert "format of the output" in command_output("embed", "words", *flags, tmp_path / "vectors.npy", fails=True)
    output = tmp_path / "vectors.npz"
    for layers in ("first", "--5", "1-"):
        assert "--layers" in command_output("embed", "words", *flags, output, f"--layers={layers}", fails=True)
    assert "no words" in command_output("embed", "words", *flags, output, fails=True)


def test_parts_of_an_input_that_differs_in_its_middle_are_not_reused(
    folders: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_files, "_DIGESTED_BYTES", 8)
    monkeypatch.setattr(embed_command, "_PART_SENTENCES", 1)
    source, output = tmp_path / "sentences.txt", tmp_path / "vectors.safetensors"
    flags = ["--model", folders["glove"], "--input", source, "--output", output]
    source.write_text("a small garden\nthe cat\na small garden\n")

    def interrupt(files: list[Path]) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(embed_command.OutputLayout, "of", interrupt)
        assert run_command("embed", "words", *flags) != 0
    source.write_text("a small garden\nthe dog\na small garden\n")
    assert run_command("embed", "words", *flags) == 0
    assert "dog" in embed_command.decode_lines(load_file(output)["words"])
