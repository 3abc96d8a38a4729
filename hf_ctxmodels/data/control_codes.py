"""Control codes: one token of the vocabulary for each source or label (Keskar et al. 2019, section 3)."""

from collections.abc import Sequence

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerBase

from hf_ctxmodels.core.errors import CtxError


def control_code_ids(tokenizer: PreTrainedTokenizerBase, names: Sequence[str]) -> dict[str, int]:
    """Name -> token id of control codes: of the special token `<|NAME|>` if there is one, else of the word NAME, as in
    CTRL; raises CtxError for a name that is not one token, or two names with the same token."""
    ids: dict[str, int] = {}
    for name in names:
        token_id = _token_id(tokenizer, name)
        if token_id is None or token_id in ids.values():
            same = [code for code, code_id in ids.items() if code_id == token_id]
            raise CtxError(
                f"The control code {name!r} has the token of {same[0]!r}."
                if same
                else f"The control code {name!r} is not one token of the vocabulary.",
                hint="use words of the vocabulary as codes, or train a new model, for which pretrain adds the tokens.",
            )
        ids[name] = token_id
    return ids


def add_control_codes(tokenizer: PreTrainedTokenizerBase, names: Sequence[str]) -> None:
    """Add the special token `<|NAME|>` for each code that is not a single token, or shares it with another code."""
    used: set[int] = set()
    for name in names:
        token_id = _token_id(tokenizer, name)
        if token_id is None or token_id in used:
            tokenizer.add_tokens([AddedToken(f"<|{name}|>", special=True, normalized=False)], special_tokens=True)
            token_id = tokenizer.convert_tokens_to_ids(f"<|{name}|>")
        used.add(int(token_id))


def _token_id(tokenizer: PreTrainedTokenizerBase, name: str) -> int | None:
    """The id of a control code, or None if it is not a single token."""
    special_id = tokenizer.get_vocab().get(f"<|{name}|>")
    if special_id is not None:
        return special_id
    ids = tokenizer(name, add_special_tokens=False)["input_ids"]
    return ids[0] if len(ids) == 1 and ids[0] != tokenizer.unk_token_id else None
