"""Grover: token ids, initialization, classifier pooling, generation and scoring of fields."""

import json
from pathlib import Path

import pytest
import torch
from commands import run_command, save
from tokenizer_texts import write_bpe_files
from transformers import AutoTokenizer, GPT2Tokenizer, LogitsProcessor, LogitsProcessorList

from hf_ctxmodels import (
    CtxError,
    CtxGpt2Tokenizer,
    CtxGroverConfig,
    CtxGroverForCausalLM,
    CtxGroverForSequenceClassification,
    CtxGroverTokenizer,
)
from hf_ctxmodels.core.constants import NEWS_FIELDS
from hf_ctxmodels.inference import field_loss, generate_field

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 48}
FIELDS = {"domain": "a.org", "date": "2019-04-06", "authors": ["Ann B."], "title": "", "summary": None}


@pytest.fixture(scope="module")
def tokenizer() -> CtxGroverTokenizer:
    return CtxGroverTokenizer.train(["A cat sat on a mat."], 270, model_max_length=48)


@pytest.fixture(scope="module")
def model(tokenizer: CtxGroverTokenizer) -> CtxGroverForCausalLM:
    torch.manual_seed(0)
    return CtxGroverForCausalLM(CtxGroverConfig(vocab_size=len(tokenizer), initializer_range=0.2, **SIZES)).eval()


class RecordingProcessor(LogitsProcessor):
    """Adds 99 to the logits of some tokens; records the prompt, the generated tokens and the number of steps."""

    def __init__(self, token_ids: list[int]) -> None:
        self.token_ids, self.prompt, self.steps, self.generated = token_ids, None, 0, set()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.prompt = input_ids[0].tolist() if self.prompt is None else self.prompt
        self.steps += 1
        self.generated |= set(input_ids[:, len(self.prompt) :].flatten().tolist())
        return scores.index_add(1, torch.tensor(self.token_ids), torch.full((len(scores), len(self.token_ids)), 99.0))


def test_default_special_ids_are_last_in_vocabulary(tokenizer: CtxGroverTokenizer) -> None:
    default, config = CtxGroverConfig(), CtxGroverConfig(vocab_size=len(tokenizer))
    assert (default.bos_token_id, default.eos_token_id, default.classifier_token_id) == (50265, 50266, 50267)
    assert (config.bos_token_id, config.eos_token_id) == tokenizer.field_ids("article")
    assert config.classifier_token_id == tokenizer.field_ids("summary")[0]
    assert CtxGroverConfig(eos_token_id=7).eos_token_id == 7


def test_truncated_normal_initialization() -> None:
    torch.manual_seed(0)
    model = CtxGroverForCausalLM(CtxGroverConfig(vocab_size=300, **{**SIZES, "initializer_range": 0.5}))
    for name, weight in model.named_parameters():
        if weight.ndim == 2:
            std = 0.02 if "feed_forward" in name else 0.5
            assert weight.abs().max() <= 2 * std, name
            assert weight.detach().std() == pytest.approx(0.88 * std, rel=0.05), name


def test_classifier_pooling() -> None:
    """First <|beginsummary|>, else the last token; with left and right padding, and without a mask; mean pooling."""
    torch.manual_seed(0)
    model = CtxGroverForSequenceClassification(CtxGroverConfig(vocab_size=61, initializer_range=0.2, **SIZES)).eval()
    rows = [torch.randint(1, 50, (length,)) for length in (9, 2, 1, 6)]
    rows[3][2] = rows[3][4] = model.config.classifier_token_id
    states = [model.grover(row[None]).last_hidden_state[0] for row in rows]
    expected = torch.stack([states[0][8], states[1][1], states[2][0], states[3][2]])
    for side, has_mask in (("left", True), ("right", True), ("right", False)):
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_side=side)
        inputs = {"input_ids": ids, "attention_mask": (ids != 0).long()} if has_mask else {"input_ids": ids}
        torch.testing.assert_close(model(**inputs).logits, model.classifier(expected), atol=1e-5, rtol=1e-5)
    config = CtxGroverConfig(**model.config.to_dict() | {"classifier_pooling": "mean"})
    mean_pooling_model = CtxGroverForSequenceClassification(config)
    mean_pooling_model.load_state_dict(model.state_dict())
    expected = model.classifier(torch.stack([state.mean(0) for state in states]))
    torch.testing.assert_close(mean_pooling_model.eval()(**inputs).logits, expected, atol=1e-5, rtol=1e-5)


def test_field_generation(model: CtxGroverForCausalLM, tokenizer: CtxGroverTokenizer) -> None:
    """Context fields are in canonical order; the only special token that can be generated is the target's end."""
    _, end = tokenizer.field_ids("title")
    special = [token for token in tokenizer.all_special_ids if token != end]
    processor = RecordingProcessor(special)
    options = {"logits_processor": LogitsProcessorList([processor])}
    torch.manual_seed(0)
    texts = generate_field(model, tokenizer, FIELDS, "title", num_texts=3, max_new_tokens=5, **options)
    context = {"domain": "a.org", "date": "April 6, 2019", "authors": "Ann B."}
    assert tokenizer.decode(processor.prompt) == (
        "<|begindomain|>a.org<|endofdomain|><|begindate|>April 6, 2019<|endofdate|>"
        "<|beginauthors|>Ann B.<|endofauthors|><|begintitle|>"
    )
    assert processor.prompt == tokenizer.encode_fields(context, "title")
    assert len(texts) == 3
    assert processor.generated
    assert not processor.generated & set(special), "special tokens are suppressed"
    ending_processor = RecordingProcessor([end])
    options = {"logits_processor": LogitsProcessorList([ending_processor])}
    assert generate_field(model, tokenizer, {}, "title", **options) == [""]
    assert ending_processor.steps == 1, "the end token stops generation"
    assert ending_processor.prompt == [tokenizer.field_ids("title")[0]]
    unlimited_processor = RecordingProcessor([40])
    options = {"logits_processor": LogitsProcessorList([unlimited_processor])}
    generate_field(model, tokenizer, {"title": "A cat"}, "summary", **options)
    assert unlimited_processor.steps + len(unlimited_processor.prompt) == 48, "up to the maximum length"
    greedy = [generate_field(model, tokenizer, FIELDS, "article", do_sample=False) for _ in range(2)]
    assert greedy[0] == greedy[1]


def test_invalid_fields(model: CtxGroverForCausalLM, tokenizer: CtxGroverTokenizer) -> None:
    for fields, target, message in (
        ({}, "body", "no field 'body'"),
        ({"text": "A"}, "title", "no field 'text'"),
        ({"authors": "Ann B."}, "title", "'authors' contains a str, not a list of strings"),
        ({"article": "word " * 60}, "title", r"302 tokens.*48"),
    ):
        with pytest.raises(CtxError, match=message):
            generate_field(model, tokenizer, fields, target)


def test_contexts_longer_than_model(
    model: CtxGroverForCausalLM, tokenizer: CtxGroverTokenizer, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """The error contains the line of the article; `max_length` truncates the context on the left."""
    save(tmp_path / "model", model, tokenizer)
    empty_fields = dict.fromkeys(NEWS_FIELDS)
    rows = [{**empty_fields, "title": "A cat", "article": text} for text in ("short", "word " * 60)]
    (tmp_path / "news.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = {"model": tmp_path / "model", "input": tmp_path / "news.jsonl", "max_new_tokens": 3}
    assert run_command("generate", **files, target="title") == 2
    error = capsys.readouterr().err
    assert f"{tmp_path / 'news.jsonl'}:2" in error
    assert "--max_length of at most 47" in error
    assert run_command("generate", **files, target="title", max_length=20) == 0
    assert "2 texts generated" in capsys.readouterr().out
    processor = RecordingProcessor([40])
    options = {"logits_processor": LogitsProcessorList([processor]), "max_new_tokens": 3, "max_length": 20}
    generate_field(model, tokenizer, {"article": rows[1]["article"]}, "title", **options)
    assert processor.prompt == tokenizer.encode_fields({"article": rows[1]["article"].strip()}, "title")[-20:]


def test_token_ids_are_gpt2_ids_plus_one(tmp_path: Path) -> None:
    """With vocabulary files of GPT-2, and with a vocabulary of GPT-2's size."""
    texts = ["Don't stop: 3.14% of Café Zoë's naïve résumé!", "中文 🙂  and\n\ttabs ", "the boat, the bridge"]
    bpe_model = json.loads(CtxGpt2Tokenizer.train(texts * 3, 300).backend_tokenizer.to_str())["model"]
    write_bpe_files(tmp_path, bpe_model)
    files = {"vocab": str(tmp_path / "vocab.json"), "merges": str(tmp_path / "merges.txt")}
    tokenizer, reference = CtxGroverTokenizer(**files), GPT2Tokenizer(**files)
    for text in texts:
        assert tokenizer(text).input_ids == [index + 1 for index in reference(text).input_ids]
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    tokenizer.save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path).get_vocab() == tokenizer.get_vocab()
    vocab = {**bpe_model["vocab"], "<|endoftext|>": 50256}
    vocab |= {f"more{index}": index for index in range(len(bpe_model["vocab"]) - 1, 50256)}
    released = CtxGroverTokenizer(vocab=vocab, merges=bpe_model["merges"])
    assert len(released) == CtxGroverConfig().vocab_size == 50270
    assert [released.field_ids(field)[0] for field in NEWS_FIELDS] == list(range(50257, 50269, 2))
    assert released.convert_tokens_to_ids(["<|padding|>", "<|endofsummary|>", "<|resetcontext|>"]) == [0, 50268, 50269]
    assert "<|endoftext|>" not in released.get_vocab()


def test_special_tokens_in_text_are_encoded_as_text(tokenizer: CtxGroverTokenizer) -> None:
    text = "A <|endofarticle|> <|padding|>"
    ids = tokenizer.encode_fields({"article": text})
    assert sum(token in tokenizer.all_special_ids for token in ids) == 2
    assert tokenizer.decode(ids[1:-1]) == text


@torch.no_grad()
def test_field_loss(model: CtxGroverForCausalLM, tokenizer: CtxGroverTokenizer) -> None:
    """Mean loss of all tokens of a field and its end token, given all, some or no context fields."""
    articles = [
        {"domain": "a.org", "title": "A cat", "article": "A cat sat on a mat."},
        {"article": "A mat."},
        {"title": "No article"},
        {"domain": "b.org", "article": "A cat sat. " * 9},  # longer than the model's 48 positions
    ]
    for context in (("domain", "title"), ("title",), ()):
        total, count = 0.0, 0
        for fields in articles:
            if "article" in fields:
                context_fields = {name: fields[name] for name in context if name in fields}
                prompt = tokenizer.encode_fields(context_fields, "article")
                end = tokenizer.field_ids("article")[1]
                ids = [*prompt, *tokenizer.encode_text(fields["article"]), end][:49]
                log_probs = model(torch.tensor([ids[:-1]])).logits[0].log_softmax(-1)
                total -= sum(float(log_probs[i - 1, ids[i]]) for i in range(len(prompt), len(ids)))
                count += len(ids) - len(prompt)
        for batch_size in (1, 16):
            loss = field_loss(model, tokenizer, articles, "article", context, batch_size=batch_size)
            assert loss == pytest.approx(total / count, rel=1e-5)
    with pytest.raises(CtxError, match="No article has the field 'summary'"):
        field_loss(model, tokenizer, articles, "summary")
