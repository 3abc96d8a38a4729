"""Faults of transfer between languages."""

from fault import Fault

_VOCABULARY, _COMMANDS = ("tests/training/test_vocabulary.py",), ("tests/cli/test_transfer_commands.py",)

TRANSFER_FAULTS = [
    Fault(
        "special tokens of both vocabularies are drawn anew",
        "hf_ctxmodels/training/token_embeddings.py",
        "weight[places[0]] = old[name][places[1]]",
        "pass",
        _VOCABULARY,
        "special",
    ),
    Fault(
        "the body learns with the embeddings",
        "hf_ctxmodels/training/token_embeddings.py",
        "parameter.requires_grad_(name in tables)",
        "parameter.requires_grad_(True)",
        _COMMANDS,
        "alone",
    ),
    Fault(
        "a test reads the embeddings of the training language",
        "hf_ctxmodels/cli/evaluate_transfer.py",
        "        if language in self.embeddings:",
        "        if language in ():",
        _COMMANDS,
        "exchanged",
    ),
    Fault(
        "words without a tag have no mark",
        "hf_ctxmodels/tokenizers/character_level.py",
        "        if self.language is not None:",
        "        if self.language in ():",
        _COMMANDS,
        "marked",
    ),
]
