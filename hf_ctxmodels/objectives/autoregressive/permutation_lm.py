"""Permutation language modelling (Yang et al. 2019, "XLNet", sections 2.2 to 2.5)."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from transformers import PreTrainedTokenizerBase

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import flag
from hf_ctxmodels.data.examples import Example
from hf_ctxmodels.data.training_set import SamplingPolicy
from hf_ctxmodels.objectives.autoregressive.contiguous_rows import ContiguousRows
from hf_ctxmodels.objectives.autoregressive.permutation_order import DataCollatorForPermutationLM
from hf_ctxmodels.objectives.base import Objective, collator_options
from hf_ctxmodels.objectives.components.tokenized_documents import DOCUMENTS_PER_BATCH, RowTemplate, tokenized_batches


@dataclass(frozen=True)
class PermutationOptions:
    """Options of `PermutationLM`; see the collator."""

    partial_prediction: float = flag(6.0, "One in this many tokens is predicted (the paper's K).")
    max_span: int = flag(5, "Longest span of predicted words.")
    num_predictions: int | None = flag(None, "Exact number of predictions in a row instead of one token in K.")
    whole_word: bool = flag(True, "Spans are of whole words instead of tokens.")
    memory_length: int = flag(0, "Number of earlier hidden states that a row attends to; 0: no memory.")
    reuse_length: int | None = flag(None, "Tokens of a row in the next one's memory; by default half of the row.")
    document_end: str = flag("<eod>", "Token after every document; `none` for none.")
    static: bool = flag(False, "The same targets and order in every epoch instead of new ones.")
    pad_to_multiple_of: int | None = flag(None, "Round the width of every batch up to a multiple of this.")


class PermutationLM(Objective):
    """XLNet's objective: predict one token in six, in a random order, from the tokens before it in that order.

    `ContiguousRows` cuts the rows from the text. With `memory_length` the first `reuse_length` tokens of a row are the
    memory of the next row, and the sampling is contiguous.

    | document | row | targets |
    |---|---|---|
    | running text | `A <sep> B <sep> <cls>` | about 1/6 of the tokens, in spans of 1 to 5 words |

    References: Yang et al. 2019, sections 2.3 (partial prediction), 2.4 (memory), 2.5 (segments), 3.1 (spans).
    Related: `MaskedLM` predicts all targets at once and puts mask tokens into the input; `CausalLM` has one fixed
    order.

    Example:
        >>> PermutationLM(tokenizer, max_length=512, seed=0, memory_length=384, reuse_length=256, num_predictions=85)
    """

    auto_class = "AutoModelForPreTraining"
    Options: ClassVar[type] = PermutationOptions
    collate: DataCollatorForPermutationLM

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, max_length: int, seed: int, **options: Any) -> None:
        super().__init__(tokenizer, max_length=max_length, seed=seed, **options)
        self.template = RowTemplate(tokenizer, segments=2)
        reuse_length = self._reuse_length(self.template.room(max_length))
        self.sampling = SamplingPolicy(contiguous=reuse_length > 0)
        self.rows = ContiguousRows(self.template, max_length, reuse_length, self._document_end(), seed)
        options = collator_options(DataCollatorForPermutationLM, self.options)
        options |= {"reuse_length": reuse_length or None, "seed": seed}
        self.collate = DataCollatorForPermutationLM(tokenizer, **options)

    @property
    def config_fields(self) -> dict[str, Any]:
        """The lengths of the memory and of the reused part of a row."""
        if not self.sampling.contiguous:
            return {}
        return {"mem_len": self.options.memory_length, "reuse_len": self.rows.reuse_length, "use_mems_train": True}

    def examples(self, documents: Iterable[list[str]], pass_index: int = 0) -> Iterator[Example]:
        """Rows with input_ids, token_type_ids and, with `whole_word`, word_ids.

        Raises:
            CtxError: With a memory, the text does not fill one row.
        """
        batches = tokenized_batches(self.tokenizer, documents, DOCUMENTS_PER_BATCH, self.options.whole_word)
        empty = True
        for row in self.rows.cut(batches, pass_index, self.statistics):
            empty = False
            yield row
        if empty and self.sampling.contiguous and self.statistics["tokens"]:
            raise CtxError(
                f"The text has {self.statistics['tokens']} tokens, but with a memory all rows have {self.max_length}.",
                hint="give more text, or use a smaller max_length, or memory_length=0.",
            )

    def _reuse_length(self, room: int) -> int:
        """Number of tokens that a row shares with the next one; 0 without memory."""
        memory, reuse = self.options.memory_length, self.options.reuse_length
        if memory < 0:
            raise CtxError(f"memory_length={memory} is negative.", hint="use 0 for no memory.")
        if not memory:
            if reuse is not None:
                raise CtxError(f"reuse_length={reuse} needs a memory.", hint="give memory_length, too.")
            return 0
        if self.template.leading:
            raise CtxError(
                f"{type(self.tokenizer).__name__} begins rows with special tokens, so a row cannot continue another.",
                hint="use a tokenizer that puts them at the end (A <sep> B <sep> <cls>), or memory_length=0.",
            )
        reuse = self.max_length // 2 if reuse is None else reuse
        if not 0 < reuse <= room - 2:
            raise CtxError(
                f"reuse_length={reuse} is out of range for rows of {self.max_length} tokens.",
                hint=f"use 1 to {room - 2}, so that two segments fit after it.",
            )
        return reuse

    def _document_end(self) -> int | None:
        token = self.options.document_end
        if token == "none":
            return None
        if token not in self.tokenizer.get_vocab():
            raise CtxError(
                f"{type(self.tokenizer).__name__} has no token {token!r} for the end of a document.",
                hint="name another special token, or use document_end=none.",
            )
        return self.tokenizer.convert_tokens_to_ids(token)

    def count(self, batch: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """See `Objective.count`."""
        return self.collate.count(batch)

    def rates(self, counts: Mapping[str, int]) -> dict[str, float]:
        """See `Objective.rates`."""
        targets = counts["targets"]
        return {
            "selected_share": targets / max(1, counts["non_special_tokens"]),
            "predictions_per_row": targets / max(1, counts["rows"]),
            "tokens_per_span": targets / max(1, counts["spans"]),
        }
