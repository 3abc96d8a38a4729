"""Random batches and targets of a case, and tasks that a tiny model learns in a few dozen steps."""

import inspect
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from hf_ctxmodels.spec import Target
from zoo.cases import CHOICES, CLS, FIRST_WORD, MASK, PAD, SEP, TINY, Batch, Case

# Type of target -> number of classes, and share of tokens with a target
_TOKEN_CLASSES = {
    Target.NEXT_WORD: (TINY["vocab_size"], 0.4),
    Target.TOKEN_CLASS: (TINY["num_labels"], 0.8),
    Target.TOKEN_PAIR_CLASS: (2, 0.5),
    Target.REPLACED: (2, 1.0),
}
LENGTHS = (12, 7, 1, 9)
STEPS = 6  # length of the target sequences; differs from LENGTHS
_LENGTH, _NUM_WORDS, _MARKER = 8, 4, FIRST_WORD + 4  # of training batches


def make_batch(
    case: Case,
    lengths: Sequence[int] = LENGTHS,
    *,
    width: int | None = None,
    side: str | None = None,
    seed: int = 0,
    masked: bool = True,
) -> Batch:
    """Random sequences of the given lengths, padded to `width` columns.

    The tokens depend only on the seed and the index of the sequence. By default, `width` is the largest length and
    `side` is the padding side of the tokenizer. Left-padded batches have `position_ids` if the family has position ids,
    because default positions are column indices. Without `masked`, there is no `attention_mask`.
    """
    side = side or case.padding_side
    repeat = CHOICES if case.has_choices else 1
    lengths = [max(1, length - choice) for length in lengths for choice in range(repeat)]
    width = max(lengths) if width is None else width
    config = case.config()
    shape = (len(lengths), width)
    batch = {"input_ids": torch.full(shape, PAD), "attention_mask": torch.zeros(shape, dtype=torch.long)}
    if "token_type_ids" in case.family.tokenizer.model_input_names:
        batch["token_type_ids"] = torch.zeros(shape, dtype=torch.long)
    if side == "left" and case.has_position_limit:
        batch["position_ids"] = torch.zeros(shape, dtype=torch.long)
    for row, length in enumerate(lengths):
        generator = torch.Generator().manual_seed(1000 * seed + row)
        words = torch.randint(FIRST_WORD, config.vocab_size, (length,), generator=generator)
        words[0] = CLS
        if config.is_encoder_decoder and config.eos_token_id == SEP:
            words[-1] = SEP  # the sequence classifier uses its state
        columns = slice(width - length, width) if side == "left" else slice(length)
        batch["input_ids"][row, columns] = words
        batch["attention_mask"][row, columns] = 1
        if "token_type_ids" in batch:
            batch["token_type_ids"][row, columns] = (torch.arange(length) >= (length + 1) // 2).long()
        if "position_ids" in batch:
            batch["position_ids"][row, columns] = case.first_position + torch.arange(length)
    batch["input_ids"] = case.to_input_ids(batch["input_ids"])
    if case.is_seq2seq:
        generators = [torch.Generator().manual_seed(1000 * seed + row) for row in range(len(lengths))]
        batch["decoder_input_ids"] = torch.stack(
            [torch.randint(FIRST_WORD, TINY["target_vocab_size"], (STEPS,), generator=rng) for rng in generators]
        )
        if getattr(case.model_class, "has_target_languages", False):
            batch["target_languages"] = torch.arange(len(lengths)) % config.num_languages
    if not masked:
        del batch["attention_mask"]
    if case.has_choices:
        batch = {name: tensor.unflatten(0, (-1, CHOICES)).clone() for name, tensor in batch.items()}
    return batch


def make_targets(case: Case, batch: Batch, *, seed: int = 0, ignore_some: bool = False) -> Batch:
    """Random targets, one tensor for each of the head's `loss_targets`; with `ignore_some`, some targets are -100 also
    where there is one target per sequence."""
    generator = torch.Generator().manual_seed(seed)
    batch_size = batch["input_ids"].shape[0]
    targets: Batch = {}
    for name, target_type in case.targets.items():
        targets[name] = _random_target(target_type, case, batch | targets, generator)
        if ignore_some and targets[name].dim() == 1 and batch_size > 1:
            targets[name][torch.randint(batch_size, (1,), generator=generator)] = -100
    return targets


def labeled_batch(case: Case, *args: Any, seed: int = 0, ignore_some: bool = False, **options: Any) -> Batch:
    """`make_batch` with the targets of `make_targets`; without targets for a base model."""
    batch = make_batch(case, *args, seed=seed, **options)
    return batch | make_targets(case, batch, seed=seed, ignore_some=ignore_some)


def _random_target(target_type: Target, case: Case, batch: Batch, generator: torch.Generator) -> Tensor:
    """Random targets of a type; `batch` includes the targets that were created before."""
    token_mask = batch.get("attention_mask", torch.ones_like(case.first_token_ids(batch))).bool()
    vocabulary, num_labels = TINY["vocab_size"], TINY["num_labels"]
    match target_type:
        case Target.POSITION:
            return torch.multinomial(token_mask.float(), 1, generator=generator).squeeze(1)
        case Target.TOKEN_ID:
            ids = [_random_token_targets(token_mask, vocabulary, 0.4, generator) for _ in range(case.num_directions)]
            return torch.stack(ids, -1) if case.num_directions > 1 else case.shift_targets(ids[0])
        case Target.SPAN_TOKEN:
            return _span_targets(token_mask, batch["labels"], case.config().max_pair_targets)
        case Target.DECODER_TOKEN:
            steps = torch.ones_like(batch["decoder_input_ids"], dtype=torch.bool)
            return _random_token_targets(steps, TINY["target_vocab_size"], 0.6, generator)
        case Target.ORIGINAL:
            originals = batch["input_ids"].where(batch["labels"] == -100, batch["labels"])
            return originals.masked_fill(~token_mask, -100)
        case Target.CONSISTENCY:  # at labeled and unlabeled positions
            shape = batch["labels"].shape[:1] if case.is_seq2seq else batch["labels"].shape
            positions = torch.where(torch.rand(shape, generator=generator) < 0.5, 1, -100)
            return positions.masked_fill(~token_mask, -100) if len(shape) > 1 else positions
        case Target.SEQUENCE_CLASS | Target.PAIR_CLASS:
            classes = 2 if target_type is Target.PAIR_CLASS else CHOICES if case.has_choices else num_labels
            return torch.randint(classes, (len(token_mask),), generator=generator)
        case _:
            return _random_token_targets(token_mask, *_TOKEN_CLASSES[target_type], generator)


def _random_token_targets(token_mask: Tensor, classes: int, share: float, generator: torch.Generator) -> Tensor:
    """(batch, length) targets at about `share` of the tokens, at least one; -100 elsewhere."""
    targets = torch.randint(classes, token_mask.shape, generator=generator)
    is_target = (torch.rand(token_mask.shape, generator=generator) < share) & token_mask
    longest = int(token_mask.sum(1).argmax())
    is_target[longest, int(token_mask[longest].long().argmax())] = True
    return targets.masked_fill(~is_target, -100)


def _span_targets(token_mask: Tensor, labels: Tensor, max_targets: int) -> Tensor:
    """The first `max_targets` labels of each span of labels between two tokens; -100 elsewhere."""
    targets = torch.full_like(labels, -100)
    for row, row_labels in enumerate(labels.tolist()):
        boundaries = [-1, *(column for column, label in enumerate(row_labels) if label == -100), len(row_labels)]
        for before, after in pairwise(boundaries):
            if before >= 0 and after < len(row_labels) and token_mask[row, before] and token_mask[row, after]:
                span = slice(before + 1, min(after, before + 1 + max_targets))
                targets[row, span] = labels[row, span]
    return targets


def make_training_batch(case: Case, rows: int, seed: int) -> tuple[Batch, float]:
    """A batch of a task that a tiny model learns in a few dozen steps.

    Each sequence repeats one of four words, which determines its target and the masked tokens. For token labels, the
    words of a sequence differ. For spans and choices, a marker word indicates the answer. For the detection of
    replaced tokens, the marker word replaces them.

    Returns:
        The batch with its targets, and the loss in nats of the best prediction that ignores the input: the sum, over
        the losses, of the entropy of the targets.
    """
    generator = torch.Generator().manual_seed(seed)
    word_numbers = torch.randint(_NUM_WORDS, (rows,), generator=generator)
    words = FIRST_WORD + word_numbers[:, None].expand(rows, _LENGTH).clone()
    target_types, baseline = set(case.targets.values()), 0.0
    if Target.TOKEN_CLASS in target_types:
        words = FIRST_WORD + torch.randint(_NUM_WORDS, (rows, _LENGTH), generator=generator)
        batch = {"input_ids": words, "labels": (words - FIRST_WORD) % TINY["num_labels"]}
        shares = torch.bincount(torch.arange(_NUM_WORDS) % TINY["num_labels"]) / _NUM_WORDS
        baseline = float(torch.special.entr(shares).sum())
    elif Target.REPLACED in target_types:
        is_replaced = torch.rand(words.shape, generator=generator) < 0.25
        batch = {"input_ids": words.masked_fill(is_replaced, _MARKER), "labels": is_replaced.long()}
        baseline = _binary_entropy(0.25)
    elif Target.POSITION in target_types:
        columns = torch.randint(_LENGTH, (rows,), generator=generator)
        words[torch.arange(rows), columns] = _MARKER
        batch, baseline = {"input_ids": words, "start_positions": columns, "end_positions": columns}, math.log(_LENGTH)
    elif case.has_choices:
        words = words[:, None].repeat(1, CHOICES, 1)
        correct_choices = torch.randint(CHOICES, (rows,), generator=generator)
        words[torch.arange(rows), correct_choices, _LENGTH // 2] = _MARKER
        batch, baseline = {"input_ids": words, "labels": correct_choices}, math.log(CHOICES)
    elif case.trains_static_embeddings:
        batch, baseline = _neighbors(case, words, generator)
    else:
        batch = {"input_ids": words}
        for name in case.compared_targets:
            baseline += _add_target(case, name, batch, word_numbers, generator)
    return batch | {"input_ids": case.to_input_ids(batch["input_ids"])}, baseline


def follow_labels(case: Case, batch: Batch) -> None:
    """Set the span targets of an unpadded batch, which repeat `labels`."""
    for name, target_type in case.targets.items():
        if target_type is Target.SPAN_TOKEN:
            labels = batch["labels"]
            token_mask = torch.ones_like(labels, dtype=torch.bool)
            batch[name] = _span_targets(token_mask, labels, case.config().max_pair_targets)


def _neighbors(case: Case, words: Tensor, generator: torch.Generator) -> tuple[Batch, float]:
    """Pairs of neighboring words for static embeddings, and the loss of embeddings of zero."""
    batch = {"input_ids": words, "labels": words}
    if "cooccurrences" in inspect.signature(case.model_class.forward).parameters:
        context_words = FIRST_WORD + torch.randint(_NUM_WORDS, words.shape, generator=generator)
        counts = 1.0 + 50 * (words == context_words)
        batch = {"input_ids": words, "labels": context_words, "cooccurrences": counts}
    zero_model = case.model()
    for parameter in zero_model.parameters():
        parameter.data.zero_()
    return batch, float(zero_model(**batch).loss)


def _add_target(case: Case, name: str, batch: Batch, word_numbers: Tensor, generator: torch.Generator) -> float:
    """Add the target `name` to the batch; returns the loss of the best prediction that ignores the input."""
    words = batch["input_ids"]
    match case.targets[name]:
        case Target.TOKEN_ID if case.num_directions > 1:  # all words of a sequence are equal
            batch[name] = words[..., None].expand(-1, -1, case.num_directions)
        case Target.TOKEN_ID:
            is_masked = torch.rand(words.shape, generator=generator) < 0.3
            is_masked[:, 1] = True
            is_masked[:, 0] = False
            batch[name] = case.shift_targets(words.masked_fill(~is_masked, -100))
            batch["input_ids"] = words.masked_fill(is_masked, MASK)
        case Target.NEXT_WORD:
            batch[name] = torch.nn.functional.pad(words[:, 1:], (0, 1), value=-100)
        case Target.DECODER_TOKEN if name != "labels":  # no targets, because the target sequence has one token
            batch[name] = torch.full((len(words), 1), -100)
            return 0.0
        case Target.DECODER_TOKEN:  # one token, because it would reveal the tokens after it
            batch[name] = words[:, :1].clone()
        case Target.ORIGINAL:
            replaced = (batch["labels"] != -100).float().mean().item()  # or fewer: a sample may equal the original
            batch[name] = words.where(batch["labels"] == -100, batch["labels"])
            return sum(map(case.loss_weight, case.family.traits.loss_weights)) * _binary_entropy(replaced)
        case Target.TOKEN_PAIR_CLASS:
            batch[name] = (word_numbers % 2)[:, None].expand(words.shape)
            return math.log(2)
        case _:
            batch[name] = word_numbers % 2
            return math.log(2)
    return math.log(_NUM_WORDS)


def _binary_entropy(share: float) -> float:
    return -share * math.log(share) - (1 - share) * math.log(1 - share)
