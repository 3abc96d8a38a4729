"""BPE tokenizer of GPT (Radford et al. 2018, section 4.1), and its task inputs (section 3.3)."""

from typing import Any, ClassVar

from hf_ctxmodels.tokenizers.bpe import WordBPETokenizer

# the special tokens _start_, _delimiter_ and _classify_ of the released code
TASK_TOKENS = {"bos_token": "_start_", "sep_token": "_delimiter_", "cls_token": "_classify_"}


class CtxGptTokenizer(WordBPETokenizer):
    """Tokenizer of GPT: BPE of lower-cased words; the last subword of a word ends with "</w>".

    Produces the same ids as `transformers.OpenAIGPTTokenizer` on the same files (`vocab.json` with `merges.txt`, or
    `tokenizer.json`). In contrast to it, <unk> (id 0) is also the padding token, as in the released code. A newly
    trained tokenizer has the `eos_token` "</s>", which separates documents in pretraining; the released one has none.

    No special tokens are added to a text until `prepare_for_tasks` is called; then the inputs are
    `_start_ text _classify_` and, for pairs, `_start_ text _delimiter_ text _classify_`. See `WordBPETokenizer` for
    arguments, training and errors.

    Example:
        >>> tokenizer = CtxGptTokenizer.train(["A cat sat on a mat.", "A cat ran."], vocab_size=60)
        >>> tokenizer.decode(tokenizer("A cat sat.").input_ids)
        'a cat sat .'
    """

    first_tokens = ("<unk>", "</s>")
    trained_defaults: ClassVar[dict[str, Any]] = {"eos_token": "</s>"}
    defaults: ClassVar[dict[str, Any]] = {"unk_token": "<unk>", "pad_token": "<unk>"}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._set_task_template()

    def prepare_for_tasks(self) -> None:
        """Append the task tokens to the vocabulary and add them to all texts from now on."""
        self.add_special_tokens({name: token for name, token in TASK_TOKENS.items() if getattr(self, name) is None})
        self._set_task_template()

    def _set_task_template(self) -> None:
        if all(getattr(self, name) is not None for name in TASK_TOKENS):
            self.set_template("{bos}:0 $A:0 {cls}:0", "{bos}:0 $A:0 {sep}:0 $B:0 {cls}:0")
