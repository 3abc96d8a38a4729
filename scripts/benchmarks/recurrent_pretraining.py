"""Pretraining steps of the suite `recurrent`: a family's loss, and the same equations in plain torch.

Plain means what the papers' figures show: an encoder, a decoder that reads the target's rows with their padding, and
logits at all of their places, of which the loss leaves the padding out.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from benchmarks.recurrent_cases import Case, Sides
from benchmarks.recurrent_peers import demo_lengths, pack, random_texts, torch_layers, unpack
from hf_ctxmodels.heads import IGNORE_INDEX
from hf_ctxmodels.objectives import DataCollatorForTranslationWithLanguageModels
from hf_ctxmodels.objectives.autoregressive.sequence_autoencoding import DataCollatorForSequenceAutoencoding
from hf_ctxmodels.registry import get_family


def autoencoder_sides(case: Case, device: torch.device, dtype: torch.dtype) -> Sides:
    """The loss of texts that are read and written again, by either side."""
    model, tokenizer = _pretrained(case, device, dtype)
    texts = random_texts(demo_lengths(case.rows, case.length), model.config.vocab_size)
    features = [{"input_ids": _ended(text, model)} for text in texts]
    batch = DataCollatorForSequenceAutoencoding(tokenizer)(features)
    batch = {name: value.to(device) for name, value in batch.items()}
    return lambda: model(**batch).loss, plain_autoencoder(model, texts)


def translator_sides(case: Case, device: torch.device, dtype: torch.dtype) -> Sides:
    """The loss of translations, and of both languages' language models, by either side."""
    model, tokenizer = _pretrained(case, device, dtype)
    lengths = demo_lengths(2 * case.rows, case.length).chunk(2)
    sizes = (model.config.vocab_size, model.config.target_vocab_size)
    pairs = zip(*(random_texts(*each) for each in zip(lengths, sizes, strict=True)), strict=True)
    features = [{"input_ids": _ended(text, model), "labels": _ended(target, model)} for text, target in pairs]
    batch = DataCollatorForTranslationWithLanguageModels(tokenizer)(features)
    batch = {name: value.to(device) for name, value in batch.items()}
    return lambda: model(**batch).loss, plain_translator(model, **batch)


def _pretrained(case: Case, device: torch.device, dtype: torch.dtype) -> tuple[Any, Any]:
    """A model without dropout, and a tokenizer that says how its rows are padded."""
    family = get_family(case.what)
    config, tokenizer_class = family.config(**family.sizes[case.size]), family.tokenizer
    model = family.models["AutoModelForPreTraining"](config).to(device, dtype).eval()
    return model, tokenizer_class.from_words([])  # type: ignore[attr-defined]


def _ended(text: Tensor, model: Any) -> Tensor:
    return F.pad(text, (0, 1), value=model.config.eos_token_id)


def plain_autoencoder(model: Any, texts: list[Tensor]) -> Callable[[], Tensor]:
    """The sequence auto-encoder (Dai & Le 2015, section 2): one LSTM reads a text; from there, given the end and then
    word after word, it writes words and end.

    Args:
        model: `CtxSeqaeForCausalLM`; the words' vectors and the softmax's weights are shared with it.
        texts: (words,) ids of each, without an end.

    Returns:
        What gives the mean cross-entropy in nats.
    """
    layers, look_up = torch_layers(model.base_model.layers), model.get_input_embeddings()
    lengths = torch.tensor([len(text) for text in texts])
    read = pad_sequence(texts, batch_first=True).to(model.device)
    written = F.pad(read, (1, 0), value=model.config.eos_token_id)
    targets = pad_sequence([_ended(text, model) for text in texts], batch_first=True, padding_value=IGNORE_INDEX)
    targets = targets.to(model.device)

    def loss() -> Tensor:
        _, state = layers(pack(look_up(read), lengths))
        return _loss(layers(look_up(written), state)[0], model.decoder, targets)

    return loss


def plain_translator(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor,
    labels: Tensor,
    source_labels: Tensor,
    target_labels: Tensor,
) -> Callable[[], Tensor]:
    """Translation from two language models, and these (Ramachandran et al. 2016, sections 2.2 and 2.3).

    Args:
        model: `CtxLmSeq2SeqForPreTraining`, residual and with attention to both layers; all but the LSTMs is shared
            with it.
        input_ids, attention_mask, labels, source_labels, target_labels: Of its `forward`, padded on the right.

    Returns:
        What gives the sum of the three means of cross-entropies, in nats.
    """
    config, lengths = model.config, attention_mask.sum(1).cpu()
    cut = config.pretrained_layers
    lower, upper = torch_layers(model.encoder.layers[:cut]), torch_layers(model.encoder.layers[cut:])
    lower_decoder, upper_decoder = torch_layers(model.decoder.layers[:cut]), torch_layers(model.decoder.layers[cut:])
    padding = attention_mask == 0
    before = F.pad(labels[:, :-1], (1, 0), value=config.decoder_start_token_id)
    before = before.where(before != IGNORE_INDEX, config.pad_token_id)

    def loss() -> Tensor:
        first, first_end = lower(pack(model.encoder.word_embeddings(input_ids), lengths))
        top, top_end = upper(first)
        first, top = unpack(first), unpack(top)
        words = model.decoder.word_embeddings(before)
        below, _ = lower_decoder(words, first_end)
        above, _ = upper_decoder(below, top_end)
        scores = F.linear(above, model.query.weight, model.query.bias) @ top.transpose(1, 2)
        weights = scores.masked_fill(padding[:, None], float("-inf")).softmax(-1)
        joined = torch.cat([weights @ first, weights @ top, above], -1)
        states = F.linear(joined, model.combine.weight, model.combine.bias).tanh() + below
        alone, _ = lower_decoder(words)  # which knows nothing of the source
        return (
            _loss(states, model.prediction, labels)
            + _loss(first, model.source_prediction, source_labels)
            + _loss(alone, model.prediction, target_labels)
        )

    return loss


def _loss(states: Tensor, softmax: nn.Linear, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats, of (rows, steps, hidden) states and (rows, steps) targets."""
    logits = F.linear(states, softmax.weight, softmax.bias)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX)
