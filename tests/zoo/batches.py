"""Random batches of a case."""

from collections.abc import Sequence

import torch

from zoo.cases import CHOICES, CLS, FIRST_WORD, PAD, SEP, TINY, Batch, Case

LENGTHS = (12, 7, 1, 9)
STEPS = 6  # length of the target sequences; differs from LENGTHS


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

    The tokens depend only on the seed and the index of the sequence, not on `width` and `side`. Left-padded batches
    have `position_ids` if the family has position ids, because default positions are column indices.

    Args:
        case: The case.
        lengths: Number of tokens of each sequence.
        width: Number of columns; by default the largest length.
        side: Padding side; by default the tokenizer's.
        seed: Seed of the tokens.
        masked: Include the `attention_mask`.
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
        if hasattr(config, "num_languages"):
            batch["target_languages"] = torch.arange(len(lengths)) % config.num_languages
    if not masked:
        del batch["attention_mask"]
    if case.has_choices:
        batch = {name: tensor.unflatten(0, (-1, CHOICES)).clone() for name, tensor in batch.items()}
    return batch
