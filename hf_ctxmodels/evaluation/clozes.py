"""Clozes: texts with a blank that a masked language model fills by one of several choices (PET)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_ctxmodels.architectures.continuations import ContinuationScore
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.model import evaluation_mode
from hf_ctxmodels.evaluation.scoring import MaskedScorer, make_masked_scorer, token_batches


class Cloze(NamedTuple):
    """A text with a blank, and the choices that may fill it.

    Attributes:
        segments: One or two segments: the segment with the blank as the texts before and after it, the other one as
            one text.
        choices: The verbalizers, one for each label.
    """

    segments: tuple[tuple[str, ...], ...]
    choices: tuple[str, ...]


@dataclass
class _Filling:
    """A cloze whose masks are filled by the tokens of a choice.

    Attributes:
        inputs: The tokenizer's outputs.
        tokens: Position -> token of the masks that are not filled yet.
        num_tokens: Number of tokens of the choice.
    """

    inputs: dict[str, Any]
    tokens: dict[int, int]
    num_tokens: int
    is_truncated: bool
    log_probability: float = 0.0
    is_greedy: bool = True


def score_clozes(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    clozes: Sequence[Cloze],
    *,
    max_length: int | None = None,
    batch_tokens: int = 2048,
) -> list[list[ContinuationScore]]:
    """Log-probabilities of the choices of clozes, in their order.

    - If all choices of a cloze are single tokens, it has one mask. The probabilities are the softmax of the logits of
      these tokens at the mask (Schick & Schuetze 2021, arXiv 2001.07676, section 3.1).
    - Otherwise a choice of k tokens has k masks. They are filled one after another, each time the one whose token has
      the highest probability; the log-probabilities of all tokens are summed (Schick & Schuetze 2021, arXiv 2009.07118,
      section 3.1). These are not normalized over the choices.

    A choice is tokenized with a space before it, as in the released code. A text that exceeds the maximum length is
    truncated at its beginning or end, always on the side of the mask that has more tokens.

    Args:
        max_length: Maximum number of tokens; None for the model's.
        batch_tokens: Maximum number of tokens of a batch, padding included; a longer sequence is a separate batch.

    Raises:
        CtxError: The model predicts no masked tokens; a choice has unknown tokens or the tokens of another one; a text
            contains the mask token, or its choice is too long.
    """
    scorer, limit = make_masked_scorer(model, tokenizer, max_length, batch_tokens)
    choice_ids = {choices: _encode_choices(tokenizer, choices) for _, choices in clozes}
    scores: list[list[ContinuationScore]] = [[] for _ in clozes]
    single_masks: list[tuple[int, dict[str, Any]]] = []
    fillings: list[tuple[int, _Filling]] = []
    for number, cloze in enumerate(clozes):
        ids = choice_ids[cloze.choices]
        if all(len(tokens) == 1 for tokens in ids):
            inputs, positions, is_truncated = _encode(tokenizer, cloze, 1, limit)
            single_masks.append((number, {**inputs, "position": positions[0], "is_truncated": is_truncated}))
            continue
        for tokens in ids:
            inputs, positions, is_truncated = _encode(tokenizer, cloze, len(tokens), limit)
            tokens_by_position = dict(zip(positions, tokens, strict=True))
            fillings.append((number, _Filling(inputs, tokens_by_position, len(tokens), is_truncated)))
    with evaluation_mode(scorer.model):
        for numbers, batch in token_batches(single_masks, batch_tokens):
            for number, sequence, logits in zip(numbers, batch, scorer.predict(batch).logits[:, 0], strict=True):
                choices = clozes[number].choices
                tokens = [token for (token,) in choice_ids[choices]]
                values = logits[tokens].float().log_softmax(-1).tolist()
                best = int(logits.argmax())
                scores[number] = [
                    ContinuationScore(value, 1, len(choice.encode()), token == best, sequence["is_truncated"])
                    for choice, token, value in zip(choices, tokens, values, strict=True)
                ]
        _fill_masks(scorer, [filling for _, filling in fillings], batch_tokens)
    for number, filling in fillings:
        size = len(clozes[number].choices[len(scores[number])].encode())
        values = filling.log_probability, filling.num_tokens, size, filling.is_greedy, filling.is_truncated
        scores[number].append(ContinuationScore(*values))
    return scores


def _fill_masks(scorer: MaskedScorer, fillings: Sequence[_Filling], batch_tokens: int) -> None:
    """Fill all masks step by step, in each filling the mask whose token is most probable."""
    while active := [filling for filling in fillings if filling.tokens]:
        sequences = [
            (number, {**filling.inputs, "position": position})
            for number, filling in enumerate(active)
            for position in filling.tokens
        ]
        candidates: list[list[tuple[float, int, bool]]] = [[] for _ in active]
        for numbers, batch in token_batches(sequences, batch_tokens):
            log_probabilities = scorer.predict(batch).logits[:, 0].float().log_softmax(-1)
            for number, sequence, row in zip(numbers, batch, log_probabilities, strict=True):
                position = sequence["position"]
                token = active[number].tokens[position]
                candidates[number].append((row[token].item(), position, int(row.argmax()) == token))
        for filling, options in zip(active, candidates, strict=True):
            log_probability, position, is_best = max(options, key=lambda option: (option[0], -option[1]))
            filling.log_probability += log_probability
            filling.is_greedy &= is_best
            ids = list(filling.inputs["input_ids"])
            ids[position] = filling.tokens.pop(position)
            filling.inputs = {**filling.inputs, "input_ids": ids}


def _encode_choices(tokenizer: PreTrainedTokenizerBase, choices: Sequence[str]) -> list[list[int]]:
    """Tokens of the choices; raises CtxError for unknown tokens and for equal choices."""
    encoded = tokenizer([f" {choice}" for choice in choices], add_special_tokens=False, verbose=False)["input_ids"]
    for index, (choice, ids) in enumerate(zip(choices, encoded, strict=True)):
        is_repeated = ids in encoded[:index]
        if is_repeated or not ids or tokenizer.unk_token_id in ids:
            problem = "has the tokens of another one" if is_repeated else "has tokens that are not in the vocabulary"
            raise CtxError(f"The choice {choice!r} {problem}.", hint="change the labels of the task.")
    return encoded


def _encode(tokenizer: Any, cloze: Cloze, num_masks: int, limit: int | None) -> tuple[dict[str, Any], list[int], bool]:
    """The tokenizer's outputs, the positions of the masks, and whether the text was truncated."""
    segments = [(tokenizer.mask_token * num_masks).join(texts).strip() for texts in cloze.segments]
    encoded = tokenizer(*segments, return_special_tokens_mask=True, verbose=False)
    ids = encoded["input_ids"]
    positions = [index for index, token in enumerate(ids) if token == tokenizer.mask_token_id]
    if len(positions) != num_masks:
        raise CtxError(
            f"The text has {len(positions)} mask tokens, expected {num_masks}.",
            location=" ".join(segments)[:80],
            hint="remove texts that contain the mask token.",
        )
    specials = [index for index, is_special in enumerate(encoded["special_tokens_mask"]) if is_special]
    before = [index for index in range(positions[0]) if index not in specials]
    after = [index for index in range(positions[-1] + 1, len(ids)) if index not in specials]
    excess = 0 if limit is None else max(0, len(ids) - limit)
    if excess > len(before) + len(after):
        raise CtxError(
            f"A choice of {num_masks} tokens exceeds the maximum length of {limit}.",
            location=" ".join(segments)[:80],
            hint="use shorter labels, or a model with more positions.",
        )
    for _ in range(excess):
        if len(before) >= len(after):
            before.pop(0)
        else:
            after.pop()
    columns = sorted({*specials, *positions, *before, *after})
    inputs = {
        name: [encoded[name][index] for index in columns] for name in tokenizer.model_input_names if name in encoded
    }
    return inputs, [columns.index(position) for position in positions], excess > 0
