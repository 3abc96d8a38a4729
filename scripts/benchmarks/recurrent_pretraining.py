"""Pretraining steps of the suite `recurrent`, and references in plain torch.

The references follow the figures of the papers: an encoder, a decoder over padded targets, and logits at all positions;
the loss ignores padding.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from benchmarks.recurrent_cases import Case, ForwardPair
from benchmarks.recurrent_references import demo_lengths, pack, random_sequences, torch_layers, unpack
from hf_ctxmodels.heads import IGNORE_INDEX
from hf_ctxmodels.objectives import DataCollatorForTranslationWithLanguageModels
from hf_ctxmodels.objectives.sequence_autoencoding import DataCollatorForSequenceAutoencoding
from hf_ctxmodels.registry import get_family


def autoencoder_forwards(case: Case, device: torch.device, dtype: torch.dtype) -> ForwardPair:
    """Forward passes to the auto-encoding loss of the model and of the reference."""
    model, tokenizer = _build_model(case, device, dtype)
    sequences = random_sequences(demo_lengths(case.batch_size, case.length), model.config.vocab_size)
    features = [{"input_ids": _append_eos(sequence, model)} for sequence in sequences]
    batch = DataCollatorForSequenceAutoencoding(tokenizer)(features).to(device)
    return lambda: model(**batch).loss, reference_autoencoder(model, sequences)


def translator_forwards(case: Case, device: torch.device, dtype: torch.dtype) -> ForwardPair:
    """Forward passes to the loss of translation and both language models, of the model and of the reference."""
    model, tokenizer = _build_model(case, device, dtype)
    lengths = demo_lengths(2 * case.batch_size, case.length).chunk(2)
    sizes = (model.config.vocab_size, model.config.target_vocab_size)
    pairs = zip(*(random_sequences(*arguments) for arguments in zip(lengths, sizes, strict=True)), strict=True)
    features = [
        {"input_ids": _append_eos(source, model), "labels": _append_eos(target, model)} for source, target in pairs
    ]
    batch = DataCollatorForTranslationWithLanguageModels(tokenizer)(features).to(device)
    return lambda: model(**batch).loss, reference_translator(model, **batch)


def _build_model(case: Case, device: torch.device, dtype: torch.dtype) -> tuple[Any, Any]:
    """A model in evaluation mode, and a tokenizer for the collator's padding."""
    family = get_family(case.architecture)
    config, tokenizer_class = family.config(**family.sizes[case.size]), family.tokenizer
    model = family.models["AutoModelForPreTraining"](config).to(device, dtype).eval()
    return model, tokenizer_class.from_words([])  # type: ignore[attr-defined]


def _append_eos(sequence: Tensor, model: Any) -> Tensor:
    return F.pad(sequence, (0, 1), value=model.config.eos_token_id)


def reference_autoencoder(model: Any, sequences: list[Tensor]) -> Callable[[], Tensor]:
    """Build the sequence auto-encoder (Dai & Le 2015, section 2): one LSTM encodes a sequence and then generates it.

    Args:
        model: `CtxSeqaeForCausalLM`; word embeddings and output layer are shared.
        sequences: (words,) ids of each sequence, without end token.

    Returns:
        Forward pass to the mean cross-entropy (nats).
    """
    layers, embed = torch_layers(model.base_model.layers), model.get_input_embeddings()
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    source_ids = pad_sequence(sequences, batch_first=True).to(model.device)
    decoder_input_ids = F.pad(source_ids, (1, 0), value=model.config.eos_token_id)
    targets = pad_sequence(
        [_append_eos(sequence, model) for sequence in sequences], batch_first=True, padding_value=IGNORE_INDEX
    )
    targets = targets.to(model.device)

    def loss() -> Tensor:
        _, state = layers(pack(embed(source_ids), lengths))
        return _loss(layers(embed(decoder_input_ids), state)[0], model.decoder, targets)

    return loss


def reference_translator(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor,
    labels: Tensor,
    source_labels: Tensor,
    target_labels: Tensor,
) -> Callable[[], Tensor]:
    """Build translation with two language models (Ramachandran et al. 2016, sections 2.2 and 2.3).

    Args:
        model: `CtxLmSeq2SeqForPreTraining`, residual and with attention to both layers; only the LSTMs have separate
            parameters.
        input_ids, attention_mask, labels, source_labels, target_labels: Its inputs, padded on the right.

    Returns:
        Forward pass to the sum of the three mean cross-entropies (nats).
    """
    config, lengths = model.config, attention_mask.sum(1).cpu()
    num_lower = config.pretrained_layers
    lower, upper = torch_layers(model.encoder.layers[:num_lower]), torch_layers(model.encoder.layers[num_lower:])
    lower_decoder, upper_decoder = (
        torch_layers(model.decoder.layers[:num_lower]),
        torch_layers(model.decoder.layers[num_lower:]),
    )
    padding = attention_mask == 0
    decoder_input_ids = F.pad(labels[:, :-1], (1, 0), value=config.decoder_start_token_id)
    decoder_input_ids = decoder_input_ids.where(decoder_input_ids != IGNORE_INDEX, config.pad_token_id)

    def loss() -> Tensor:
        first, first_state = lower(pack(model.encoder.word_embeddings(input_ids), lengths))
        top, top_state = upper(first)
        first, top = unpack(first), unpack(top)
        words = model.decoder.word_embeddings(decoder_input_ids)
        below, _ = lower_decoder(words, first_state)
        above, _ = upper_decoder(below, top_state)
        scores = F.linear(above, model.query.weight, model.query.bias) @ top.transpose(1, 2)
        weights = scores.masked_fill(padding[:, None], float("-inf")).softmax(-1)
        joined = torch.cat([weights @ first, weights @ top, above], -1)
        states = F.linear(joined, model.combine.weight, model.combine.bias).tanh() + below
        language_model, _ = lower_decoder(words)  # unconditional
        return (
            _loss(states, model.prediction, labels)
            + _loss(first, model.source_prediction, source_labels)
            + _loss(language_model, model.prediction, target_labels)
        )

    return loss


def _loss(states: Tensor, output_layer: nn.Linear, targets: Tensor) -> Tensor:
    """Mean cross-entropy (nats) of (batch, steps, hidden) states and (batch, steps) targets."""
    logits = F.linear(states, output_layer.weight, output_layer.bias)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX)
