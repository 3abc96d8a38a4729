"""Random targets of a head, and tasks that a tiny model learns in a few dozen steps."""

import inspect
import math
from itertools import pairwise

import torch
from torch import Tensor

from hf_ctxmodels.spec import Target
from zoo.cases import CHOICES, FIRST_WORD, MASK, TINY, Batch, Case


def make_targets(case: Case, batch: Batch, *, seed: int = 0, ignore_some: bool = False) -> Batch:
    """Random targets, one tensor per entry of the head's `loss_targets`.

    Args:
        ignore_some: Ignore (-100) some targets of the heads that have one per row as well.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = batch["input_ids"].shape[0]
    targets: Batch = {}
    for name, kind in case.targets.items():
        targets[name] = _random_target(kind, case, batch | targets, generator)
        if ignore_some and targets[name].dim() == 1 and rows > 1:
            targets[name][torch.randint(rows, (1,), generator=generator)] = -100
    return targets


def _random_target(kind: Target, case: Case, batch: Batch, generator: torch.Generator) -> Tensor:
    """Random targets of a kind; `batch` holds those of the head that were made before, too."""
    tokens = batch.get("attention_mask", torch.ones_like(case.first_token_ids(batch))).bool()
    vocabulary = TINY["vocab_size"]
    match kind:
        case Target.POSITION:
            return torch.multinomial(tokens.float(), 1, generator=generator).squeeze(1)
        case Target.TOKEN_ID:
            ids = [_random_token_targets(tokens, vocabulary, 0.4, generator) for _ in range(case.num_directions)]
            return torch.stack(ids, -1) if case.num_directions > 1 else case.shift_targets(ids[0])
        case Target.SPAN_TOKEN:
            return _span_targets(tokens, batch["labels"], case.config().max_pair_targets)
        case Target.NEXT_WORD:
            return _random_token_targets(tokens, vocabulary, 0.4, generator)
        case Target.DECODER_TOKEN:
            steps = torch.ones_like(batch["decoder_input_ids"], dtype=torch.bool)
            return _random_token_targets(steps, TINY["target_vocab_size"], 0.6, generator)
        case Target.ORIGINAL:
            originals = batch["input_ids"].where(batch["labels"] == -100, batch["labels"])
            return originals.masked_fill(~tokens, -100)
        case Target.TOKEN_CLASS:
            return _random_token_targets(tokens, TINY["num_labels"], 0.8, generator)
        case Target.TOKEN_PAIR_CLASS:
            return _random_token_targets(tokens, 2, 0.5, generator)
        case Target.REPLACED:
            return _random_token_targets(tokens, 2, 1.0, generator)
        case Target.CONSISTENCY:  # of some of what has labels, and of some of what has none
            shape = batch["labels"].shape
            places = torch.where(torch.rand(shape, generator=generator) < 0.5, 1, -100)
            return places.masked_fill(~tokens, -100) if len(shape) > 1 else places
        case Target.SEQUENCE_CLASS:
            classes = CHOICES if case.has_choices else TINY["num_labels"]
            return torch.randint(classes, (len(tokens),), generator=generator)
        case Target.PAIR_CLASS:
            return torch.randint(2, (len(tokens),), generator=generator)


def _random_token_targets(tokens: Tensor, classes: int, share: float, generator: torch.Generator) -> Tensor:
    """(batch, length) targets at about `share` of the tokens, one at least; -100 elsewhere."""
    targets = torch.randint(classes, tokens.shape, generator=generator)
    kept = (torch.rand(tokens.shape, generator=generator) < share) & tokens
    row = int(tokens.sum(1).argmax())
    kept[row, int(tokens[row].long().argmax())] = True
    return targets.masked_fill(~kept, -100)


def _span_targets(tokens: Tensor, labels: Tensor, longest: int) -> Tensor:
    """Of each run of `labels` between two tokens the first `longest`; -100 elsewhere."""
    targets = torch.full_like(labels, -100)
    for row, given in enumerate(labels.tolist()):
        ends = [-1, *(place for place, label in enumerate(given) if label == -100), len(given)]
        for before, after in pairwise(ends):
            if before >= 0 and after < len(given) and tokens[row, before] and tokens[row, after]:
                span = slice(before + 1, min(after, before + 1 + longest))
                targets[row, span] = labels[row, span]
    return targets


_LENGTH, _KINDS, _MARKER = 8, 4, FIRST_WORD + 4


def learnable_batch(case: Case, rows: int, seed: int) -> tuple[Batch, float]:
    """A batch of a task a tiny model learns in a few dozen steps.

    Each row repeats one word of four (which word decides the row's target, and is what stands behind every [MASK]);
    for token labels the words of a row differ; for spans and choices one marker word says where the answer is;
    for wrong tokens the markers are those.

    Returns:
        The batch with its targets, and the loss in nats of the best guess that ignores the input: the sum, over the
        terms, of the logarithm of the number of equally likely answers.
    """
    generator = torch.Generator().manual_seed(seed)
    kind = torch.randint(_KINDS, (rows,), generator=generator)
    words = FIRST_WORD + kind[:, None].expand(rows, _LENGTH).clone()
    kinds = set(case.targets.values())
    if Target.TOKEN_CLASS in kinds:
        batch, baseline = _tagging(rows, generator)
    elif Target.REPLACED in kinds:
        batch, baseline = _detection(words, generator)
    elif Target.POSITION in kinds:
        place = _mark(words, generator)
        batch, baseline = {"input_ids": words, "start_positions": place, "end_positions": place}, math.log(_LENGTH)
    elif case.has_choices:
        batch, baseline = _choice(words, generator)
    elif case.trains_static_embeddings:
        batch, baseline = _neighbours(case, words, generator)
    else:
        batch, baseline = {"input_ids": words}, 0.0
        for name in case.compared_targets:
            baseline += _add_term(case, name, batch, kind, generator)
    return batch | {"input_ids": case.to_input_ids(batch["input_ids"])}, baseline


def follow_labels(case: Case, batch: Batch) -> None:
    """Set the targets of spans, which are those of `labels`."""
    for name, kind in case.targets.items():
        if kind is Target.SPAN_TOKEN:
            labels = batch["labels"]
            everywhere = torch.ones_like(labels, dtype=torch.bool)
            batch[name] = _span_targets(everywhere, labels, case.config().max_pair_targets)


def _tagging(rows: int, generator: torch.Generator) -> tuple[Batch, float]:
    words = FIRST_WORD + torch.randint(_KINDS, (rows, _LENGTH), generator=generator)
    labels = (words - FIRST_WORD) % TINY["num_labels"]
    counts = torch.bincount(torch.arange(_KINDS) % TINY["num_labels"]).float() / _KINDS
    return {"input_ids": words, "labels": labels}, float(-(counts * counts.log()).sum())


def _detection(words: Tensor, generator: torch.Generator) -> tuple[Batch, float]:
    wrong = torch.rand(words.shape, generator=generator) < 0.25
    return {"input_ids": words.masked_fill(wrong, _MARKER), "labels": wrong.long()}, _binary_entropy(0.25)


def _mark(words: Tensor, generator: torch.Generator) -> Tensor:
    """(rows,) where the marker word is put, in place."""
    place = torch.randint(_LENGTH, (len(words),), generator=generator)
    words[torch.arange(len(words)), place] = _MARKER
    return place


def _choice(words: Tensor, generator: torch.Generator) -> tuple[Batch, float]:
    words = words[:, None].repeat(1, CHOICES, 1)
    right = torch.randint(CHOICES, (len(words),), generator=generator)
    words[torch.arange(len(words)), right, _LENGTH // 2] = _MARKER
    return {"input_ids": words, "labels": right}, math.log(CHOICES)


def _neighbours(case: Case, words: Tensor, generator: torch.Generator) -> tuple[Batch, float]:
    """For vectors of words: which stand near each other, and the loss of vectors of zero."""
    batch = {"input_ids": words, "labels": words}
    if "cooccurrences" in inspect.signature(case.model_class.forward).parameters:
        other = FIRST_WORD + torch.randint(_KINDS, words.shape, generator=generator)
        batch = {"input_ids": words, "labels": other, "cooccurrences": 1.0 + 50 * (words == other)}
    ignorant = case.model()
    for parameter in ignorant.parameters():
        parameter.data.zero_()
    return batch, float(ignorant(**batch).loss)


def _add_term(case: Case, name: str, batch: Batch, row_kinds: Tensor, generator: torch.Generator) -> float:
    """Add the target `name` to the batch; gives the loss of a guess."""
    words = batch["input_ids"]
    match case.targets[name]:
        case Target.TOKEN_ID if case.num_directions > 1:  # a row's words are all alike: each says which are next to it
            batch[name] = words[..., None].expand(-1, -1, case.num_directions)
        case Target.TOKEN_ID:
            hidden = torch.rand(words.shape, generator=generator) < 0.3
            hidden[:, 1] = True
            hidden[:, 0] = False
            batch[name] = case.shift_targets(words.masked_fill(~hidden, -100))
            batch["input_ids"] = words.masked_fill(hidden, MASK)
        case Target.NEXT_WORD:
            batch[name] = torch.nn.functional.pad(words[:, 1:], (0, 1), value=-100)
        case Target.DECODER_TOKEN if name != "labels":  # none, since a written text is of one word
            batch[name] = torch.full((len(words), 1), -100)
            return 0.0
        case Target.DECODER_TOKEN:  # one word, since each but the first would tell what comes after it
            batch[name] = words[:, :1].clone()
        case Target.ORIGINAL:
            replaced = (batch["labels"] != -100).float().mean().item()  # at most: a draw may be right
            batch[name] = words.where(batch["labels"] == -100, batch["labels"])
            return sum(map(case.loss_weight, case.family.traits.loss_weights)) * _binary_entropy(replaced)
        case Target.TOKEN_PAIR_CLASS:
            batch[name] = (row_kinds % 2)[:, None].expand(words.shape)
            return math.log(2)
        case _:
            batch[name] = row_kinds % 2
            return math.log(2)
    return math.log(_KINDS)


def _binary_entropy(share: float) -> float:
    return -share * math.log(share) - (1 - share) * math.log(1 - share)
