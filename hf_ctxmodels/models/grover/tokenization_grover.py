"""Byte-level BPE tokenizer of Grover: GPT-2's tokens with begin and end tokens for the fields of a news article."""

from collections.abc import Mapping
from typing import Any, ClassVar

from tokenizers import processors

from hf_ctxmodels.core.constants import NEWS_FIELDS
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.tokenizers.bpe import CtxByteBPETokenizer

PADDING, RESET = "<|padding|>", "<|resetcontext|>"
_GPT2_END = "<|endoftext|>"
FIELD_TOKENS = {field: (f"<|begin{field}|>", f"<|endof{field}|>") for field in NEWS_FIELDS}
_SPECIAL = (*(token for pair in FIELD_TOKENS.values() for token in pair), RESET)


class CtxGroverTokenizer(CtxByteBPETokenizer):
    """Tokenizer of Grover: <|padding|> has id 0, followed by GPT-2's tokens without <|endoftext|> (GPT-2's ids plus 1),
    <|begin...|> and <|endof...|> for each field of `NEWS_FIELDS`, and <|resetcontext|>.

    Loads GPT-2's files (`encoder.json` with `vocab.bpe`), whose ids it shifts, and files that it saved. See
    `CtxByteBPETokenizer` for the other arguments.

    Args:
        add_begin_summary: Append <|beginsummary|> to each text, whose state is the classifier's input;
            `prepare_for_tasks` sets it.

    Example:
        >>> tokenizer = CtxGroverTokenizer.train(["A cat sat on a mat.", "A cat ran."], vocab_size=280)
        >>> tokenizer.decode(tokenizer.encode_fields({"title": "A cat"}, target="article"))
        '<|begintitle|>A cat<|endoftitle|><|beginarticle|>'
    """

    first_tokens = (PADDING,)
    last_tokens = _SPECIAL

    defaults: ClassVar[dict[str, Any]] = {
        "pad_token": PADDING,
        "unk_token": PADDING,
        "bos_token": FIELD_TOKENS["article"][0],
        "eos_token": FIELD_TOKENS["article"][1],
        "extra_special_tokens": list(_SPECIAL),
    }

    def __init__(self, *args: Any, add_begin_summary: bool = False, **kwargs: Any) -> None:
        self.add_begin_summary = add_begin_summary
        super().__init__(*args, add_begin_summary=add_begin_summary, **kwargs)

    def prepare_for_tasks(self) -> None:
        """Append <|beginsummary|> to all texts from now on."""
        self.add_begin_summary = self.init_kwargs["add_begin_summary"] = True
        self._tokenizer.post_processor = self.build_post_processor(self.add_prefix_space)

    def build_post_processor(self, add_prefix_space: bool) -> processors.PostProcessor:
        """The post-processor that trims offsets and, with `add_begin_summary`, appends <|beginsummary|>."""
        trim = super().build_post_processor(add_prefix_space)
        if not self.add_begin_summary:
            return trim
        begin = FIELD_TOKENS["summary"][0]
        template = processors.TemplateProcessing(
            single=f"$A:0 {begin}:0",
            pair=f"$A:0 $B:0 {begin}:0",
            special_tokens=[(begin, self._tokenizer.token_to_id(begin))],
        )
        return processors.Sequence([trim, template])

    @classmethod
    def remap_vocabulary(
        cls, vocab: dict[str, int], pairs: list[tuple[str, str]], kwargs: dict[str, Any]
    ) -> dict[str, int]:
        """Convert the vocabulary of a file, which may be GPT-2's, to the ids of this tokenizer."""
        if PADDING in vocab or _GPT2_END not in vocab:
            return vocab
        ordered = sorted((index, token) for token, index in vocab.items() if token != _GPT2_END)
        return {token: index for index, token in enumerate([PADDING, *(token for _, token in ordered), *_SPECIAL])}

    def field_ids(self, field: str) -> tuple[int, int]:
        """Ids of the begin and end tokens of a field; raises CtxError for an unknown field."""
        if field not in FIELD_TOKENS:
            raise CtxError(f"There is no field {field!r}.", hint=f"use one of: {', '.join(NEWS_FIELDS)}.")
        begin, end = self.convert_tokens_to_ids(list(FIELD_TOKENS[field]))
        return begin, end

    def encode_text(self, text: str) -> list[int]:
        """Ids of a text; special tokens in it are encoded as text."""
        return self(text, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]

    def encode_fields(self, fields: Mapping[str, str], target: str | None = None) -> list[int]:
        """Ids of the non-empty fields in the order of `NEWS_FIELDS`, each between its begin and end token.

        The text of the `target`, the field to generate (or "summary" for classification), is omitted and its begin
        token appended. Raises CtxError for an unknown field.
        """
        for field in (*fields, *([] if target is None else [target])):
            self.field_ids(field)
        ids: list[int] = []
        for field in NEWS_FIELDS:
            if field != target and fields.get(field):
                begin, end = self.field_ids(field)
                ids += [begin, *self.encode_text(fields[field]), end]
        return ids if target is None else [*ids, self.field_ids(target)[0]]
