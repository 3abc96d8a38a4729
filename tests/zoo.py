"""Tiny models and batches for every family and head in the registry: what the common suite and the parity tests run on.

A new family needs nothing here, unless one of its heads wants a target that no head before it wanted
(`make_targets`, `learnable_batch`).
"""

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from hf_ctxmodels.layers.recurrent.gru import GRU
from hf_ctxmodels.layers.recurrent.lstm import LSTM
from hf_ctxmodels.models._shared.static import StaticPreTrainedModel
from hf_ctxmodels.registry import FAMILIES
from hf_ctxmodels.spec import FamilySpec

PAD, CLS, SEP, MASK, UNKNOWN, FIRST_WORD = 0, 1, 2, 3, 4, 5
CHOICES = 3
LENGTHS = (12, 7, 1, 9)
SOFT_TARGETS = ("views",)  # where the answer is another prediction of the model
STEPS = 6  # tokens of a text that is written; no length above

# Fields a family does not have are left out. Wide initialisation makes attention far from uniform.
TINY = {
    "vocab_size": 61,
    "pad_token_id": PAD,
    "unk_token_id": UNKNOWN,
    "embedding_size": 16,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
    "initializer_range": 0.2,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "dropout_scale": 0.0,
    "classifier_dropout": 0.0,
    "num_labels": 3,
    "discriminator_weight": 2.0,
    "cell_size": 24,
    "num_characters": 262,  # those of the tokenizer
    "max_characters_per_token": 14,  # no length of a batch below: torch.compile takes two equal sizes for one
    "character_embedding_size": 6,
    "filters": [[1, 8], [3, 8]],
    "target_vocab_size": 53,
    "biattention_size": 12,
    "classifier_size": 20,
    "num_languages": 3,
    "language_size": 5,
    "decoder_size": 28,
    "written_tasks": ["<one>", "next", "previous"],
    "relations": ["no", "yes"],
}

_OF_EVERY_CONFIGURATION = ("num_labels", "architectures", "problem_type", "id2label", "label2id")

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """One cell of the test matrix: a family and one of its Auto classes.

    Without `has_auto_class` it is the class that `family.peers` has for the Auto class of its peer in transformers.
    """

    family: FamilySpec
    auto_name: str
    has_auto_class: bool = True

    def __str__(self) -> str:
        return f"{self.family.name}-{self.name}"

    @property
    def name(self) -> str:
        """The Auto class, or the class that has none."""
        return self.auto_name if self.has_auto_class else self.model_class.__name__

    @property
    def model_class(self) -> type[PreTrainedModel]:
        return (self.family.models if self.has_auto_class else self.family.peers)[self.auto_name]

    @property
    def has_peer(self) -> bool:
        """Whether transformers has this model."""
        return self.family.reference is not None and not (self.has_auto_class and self.auto_name in self.family.peers)

    @property
    def auto_class(self) -> Any:
        return getattr(transformers, self.auto_name)

    @property
    def is_base(self) -> bool:
        return self.auto_name == "AutoModel"

    @property
    def has_choices(self) -> bool:
        return self.auto_name == "AutoModelForMultipleChoice"

    @property
    def labels_tokens(self) -> bool:
        """Whether the head's only target is one label per token, so that a row may hold several sequences."""
        return self.auto_name in ("AutoModelForMaskedLM", "AutoModelForTokenClassification")

    @property
    def predicts_where_labelled(self) -> bool:
        """Whether the head computes vocabulary logits at labelled positions alone."""
        return (
            self.auto_name
            in (
                "AutoModelForPreTraining",
                "AutoModelForMaskedLM",
                "AutoModelForCausalLM",
                "AutoModelForSeq2SeqLM",
            )
            and self.has_auto_class
        )

    @property
    def writes(self) -> bool:
        """Whether the head predicts a text of its own, with a vocabulary of its own, from the one it reads."""
        return "decoder_input_ids" in inspect.signature(self.model_class.forward).parameters

    @property
    def detects(self) -> bool:
        """Whether the head says of every token, by one logit, whether it is a wrong one."""
        return self.auto_name == "AutoModelForPreTraining" and not self.has_auto_class

    @property
    def generates(self) -> bool:
        """Whether the head is a pair, of which one part reads what the other wrote."""
        return "token_labels" in getattr(self.model_class, "loss_targets", ())

    @property
    def padding_side(self) -> str:
        """Where the family's tokenizer pads: there the reference finds the tokens that it pools."""
        return self.family.tokenizer.padding_side

    @property
    def counts_positions(self) -> bool:
        """Whether positions are numbers with a limit, not distances."""
        return self.has_field("max_position_embeddings")

    @property
    def attends(self) -> bool:
        """Whether there is attention, of which there are several implementations."""
        return self.has_field("num_attention_heads")

    @property
    def recurs(self) -> bool:
        """Whether words are read one after the other, which takes more steps to learn."""
        return any(isinstance(module, LSTM | GRU) for module in self.model().modules())

    @property
    def learns_vectors(self) -> bool:
        """Whether the head is a plain model of which words stand near each other, whose loss is no cross-entropy."""
        return issubclass(self.model_class, StaticPreTrainedModel) and self.auto_name == "AutoModelForPreTraining"

    @property
    def teaches_itself(self) -> bool:
        """Whether a term of the loss compares two predictions of the model: it is small, and rounding weighs."""
        return any(name in SOFT_TARGETS for name in getattr(self.model_class, "loss_targets", ()))

    @property
    def normalises_batches(self) -> bool:
        """Whether a row's output depends, in training, on the other rows of its batch."""
        return any(isinstance(module, torch.nn.BatchNorm1d) for module in self.model().modules())

    @property
    def takes_extremes(self) -> bool:
        """Whether what passes is the largest or smallest of several, which rounding may choose otherwise."""
        biattends = self.has_field("biattention_size") and self.auto_name == "AutoModelForSequenceClassification"
        return biattends or getattr(self.config(), "pooling", None) == "max"

    @property
    def takes_embeddings(self) -> bool:
        """Whether vectors can be given in the place of ids."""
        return "inputs_embeds" in inspect.signature(self.model_class.forward).parameters

    @property
    def id_axes(self) -> tuple[str, ...]:
        """Axes of a single token's ids; none where a token is one integer."""
        return self.model_class.id_axes

    @property
    def directions(self) -> int:
        """Predictions at a position, each with a label of its own."""
        return 2 if getattr(self.model_class, "label_axes", ()) else 1

    @property
    def looks_ahead(self) -> bool:
        """Whether a word's label is the target of the word before it."""
        return getattr(self.model_class, "looks_ahead", False)

    def ahead(self, targets: Tensor) -> Tensor:
        """(batch, length) the target of each word -> labels as the head takes them."""
        return torch.nn.functional.pad(targets, (1, 0), value=-100) if self.looks_ahead else targets

    def spell(self, words: Tensor) -> Tensor:
        """What stands for these integers in `input_ids`: themselves, or the characters of each."""
        return _characters(words, TINY["max_characters_per_token"]) if self.id_axes else words

    def positions(self, batch: Batch) -> Tensor:
        """A tensor of the shape of the batch's tokens, whatever their ids are."""
        ids = batch["input_ids"]
        return ids[..., 0] if self.id_axes else ids

    def has_field(self, name: str) -> bool:
        """Whether the family's configuration has a field."""
        return name in self.family.config.__dataclass_fields__

    def embed(self, model: PreTrainedModel, ids: Tensor) -> Tensor:
        """What a model makes of ids before anything else."""
        encoder = model.base_model
        return encoder.look_up(ids) if hasattr(encoder, "look_up") else model.get_input_embeddings()(ids)

    @property
    def has_segments(self) -> bool:
        return "token_type_ids" in self.family.tokenizer.model_input_names

    @property
    def num_labels(self) -> int:
        """Three classes; the reference's span and pair heads refuse any number but two."""
        two = ("AutoModelForQuestionAnswering", "AutoModelForPreTraining")
        return 2 if self.auto_name in two else TINY["num_labels"]

    def known(self, values: dict[str, Any]) -> dict[str, Any]:
        """Those configuration fields among `values` that the family has."""
        return _known_fields(values, self.family.config)

    def config(self, **changes: Any) -> PreTrainedConfig:
        """Of the tiny model; changes to fields that the family does not have are left out."""
        return tiny_config(self.family, **{"num_labels": self.num_labels, **self.known(changes)})

    def model(self, seed: int = 0, attention: str = "sdpa", **changes: Any) -> PreTrainedModel:
        """A random model in evaluation mode, the same for the same seed whatever the attention or `unpad`."""
        torch.manual_seed(seed)
        model = self.model_class(self.config(**changes))
        model.set_attn_implementation(attention)
        return randomised(model, seed).eval()

    def reference_config(self, **changes: Any) -> PreTrainedConfig:
        """The configuration of the peer in transformers."""
        values = {**_known_fields(TINY, self.family.config), "num_labels": self.num_labels, **changes}
        name_of = self.config().reference_name
        reference = transformers.CONFIG_MAPPING[self.family.reference]
        known = _known_fields({name_of(name): value for name, value in values.items()}, reference)
        return reference(**known)

    @property
    def reference_class(self) -> type[PreTrainedModel]:
        auto_class = getattr(transformers, self.auto_name)
        return auto_class._model_mapping[transformers.CONFIG_MAPPING[self.family.reference]]

    def reference_model(self, seed: int = 0, **changes: Any) -> PreTrainedModel:
        """A random model of the peer in transformers, in evaluation mode."""
        torch.manual_seed(seed)
        return randomised(self.reference_class(self.reference_config(**changes)), seed).eval()


def _characters(words: Tensor, width: int) -> Tensor:
    """Two to five characters for each word, different words having different ones; none at all for padding."""
    filler = TINY["num_characters"] - 1
    spelled = torch.full((*words.shape, width), filler)
    spelled[..., 0], spelled[..., 1] = 1 + words // 8, 20 + words % 8
    for place in range(2, 5):
        spelled[..., place] = torch.where(words % 4 >= place - 1, 30 + words % 7, filler)
    return spelled * (words != PAD)[..., None]


CASES = [Case(family, auto_name) for family in FAMILIES.values() for auto_name in family.models]
CASES += [Case(family, auto_name, False) for family in FAMILIES.values() for auto_name in family.peers]
PEERED = [case for case in CASES if case.has_peer]
BASES = [case for case in CASES if case.is_base]
HEADS = [case for case in CASES if not case.is_base]
TOKEN_HEADS = [case for case in CASES if case.labels_tokens]
TIED_HEADS = [case for case in CASES if case.model_class._tied_weights_keys]


def main_head(family: FamilySpec) -> str:
    """The Auto class of what a family is first trained as: its language model, or its first head where it has none."""
    heads = [name for name in family.models if name != "AutoModel"]
    return "AutoModelForPreTraining" if "AutoModelForPreTraining" in heads else heads[0]


def tiny_config(family: FamilySpec, **changes: Any) -> PreTrainedConfig:
    return family.config(**{**_known_fields(TINY, family.config), **changes})


def _known_fields(values: dict[str, Any], config_class: type[PreTrainedConfig]) -> dict[str, Any]:
    known = {*config_class.__dataclass_fields__, *config_class.attribute_map, *_OF_EVERY_CONFIGURATION}
    return {key: value for key, value in values.items() if key in known}


@torch.no_grad()
def randomised(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    """Noise on every parameter: biases of zero and gains of one would hide swapped ones."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def make_batch(
    case: Case,
    lengths: Sequence[int] = LENGTHS,
    *,
    width: int | None = None,
    side: str | None = None,
    seed: int = 0,
    masked: bool = True,
) -> Batch:
    """Random rows of the given lengths, padded to `width` columns at one side, by default the tokenizer's.

    The words depend on the seed and the row alone, not on `width` and `side`. Left padding carries `position_ids`
    where a family has such, since positions count columns unless told otherwise, as in transformers.
    """
    side = side or case.padding_side
    repeat = CHOICES if case.has_choices else 1
    lengths = [max(1, length - choice) for length in lengths for choice in range(repeat)]
    width = max(lengths) if width is None else width
    config = case.config()
    shape = (len(lengths), width)
    batch = {"input_ids": torch.full(shape, PAD), "attention_mask": torch.zeros(shape, dtype=torch.long)}
    if case.has_segments:
        batch["token_type_ids"] = torch.zeros(shape, dtype=torch.long)
    if side == "left" and case.counts_positions:
        batch["position_ids"] = torch.zeros(shape, dtype=torch.long)
    for row, length in enumerate(lengths):
        generator = torch.Generator().manual_seed(1000 * seed + row)
        words = torch.randint(FIRST_WORD, config.vocab_size, (length,), generator=generator)
        words[0] = CLS
        columns = slice(width - length, width) if side == "left" else slice(length)
        batch["input_ids"][row, columns] = words
        batch["attention_mask"][row, columns] = 1
        if "token_type_ids" in batch:
            batch["token_type_ids"][row, columns] = (torch.arange(length) >= (length + 1) // 2).long()
        if "position_ids" in batch:
            batch["position_ids"][row, columns] = config.first_position + torch.arange(length)
    batch["input_ids"] = case.spell(batch["input_ids"])
    if case.writes:
        written = [torch.Generator().manual_seed(1000 * seed + row) for row in range(len(lengths))]
        rows = [torch.randint(FIRST_WORD, TINY["target_vocab_size"], (STEPS,), generator=each) for each in written]
        batch["decoder_input_ids"] = torch.stack(rows)
        if case.has_field("written_tasks"):  # each has a decoder of its own
            batch["target_languages"] = torch.arange(len(lengths)) % config.num_languages
    if not masked:
        del batch["attention_mask"]
    if case.has_choices:
        batch = {name: tensor.unflatten(0, (-1, CHOICES)).clone() for name, tensor in batch.items()}
    return batch


def make_targets(case: Case, batch: Batch, *, seed: int = 0, ignore_some: bool = False) -> Batch:
    """Random targets, one tensor per entry of the head's `loss_targets`.

    Args:
        ignore_some: Ignore (-100) some targets of the heads that have one per row as well.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = batch["input_ids"].shape[0]
    tokens = batch.get("attention_mask", torch.ones_like(case.positions(batch))).bool()
    targets = {}
    for name in getattr(case.model_class, "loss_targets", ()):
        if name in ("start_positions", "end_positions"):
            targets[name] = _random_positions(batch, generator)
        elif name == "source_labels":  # the next word of what is read
            targets[name] = _random_token_targets(tokens, TINY["vocab_size"], 0.4, generator)
        elif name in ("labels", "target_labels") and case.writes:
            places = torch.ones_like(batch["decoder_input_ids"], dtype=torch.bool)
            targets[name] = _random_token_targets(places, TINY["target_vocab_size"], 0.6, generator)
        elif name == "labels" and case.predicts_where_labelled:
            labels = [_random_token_targets(tokens, TINY["vocab_size"], 0.4, generator) for _ in range(case.directions)]
            targets[name] = torch.stack(labels, -1) if case.directions > 1 else case.ahead(labels[0])
        elif name == "relation_labels":
            targets[name] = torch.randint(2, (rows,), generator=generator)
        elif name == "token_labels":
            originals = batch["input_ids"].where(targets["labels"] == -100, targets["labels"])
            targets[name] = originals.masked_fill(batch.get("attention_mask", torch.ones(1)) == 0, -100)
        elif name == "views":  # what is to agree: some of what has labels, and some of what has none
            shape = targets["labels"].shape
            targets[name] = torch.where(torch.rand(shape, generator=generator) < 0.5, 1, -100)
            if len(shape) > 1:
                targets[name][~tokens] = -100
        elif name == "labels" and case.detects:
            targets[name] = _random_token_targets(tokens, 2, 1.0, generator)
        elif name == "labels" and case.auto_name == "AutoModelForTokenClassification":
            targets[name] = _random_token_targets(tokens, TINY["num_labels"], 0.8, generator)
        elif name == "labels" or name.endswith("_label"):
            pairs = name.endswith("_label") or case.auto_name == "AutoModelForNextSentencePrediction"
            classes = CHOICES if case.has_choices else 2 if pairs else TINY["num_labels"]
            targets[name] = torch.randint(classes, (rows,), generator=generator)
        else:
            raise NotImplementedError(f"{case} wants the target {name!r}: teach tests/zoo.py to make it.")
        if ignore_some and targets[name].dim() == 1 and rows > 1:
            targets[name][torch.randint(rows, (1,), generator=generator)] = -100
    return targets


def _random_token_targets(tokens: Tensor, classes: int, share: float, generator: torch.Generator) -> Tensor:
    """(batch, length) targets at about `share` of the tokens, one at least; -100 elsewhere."""
    targets = torch.randint(classes, tokens.shape, generator=generator)
    kept = (torch.rand(tokens.shape, generator=generator) < share) & tokens
    row = int(tokens.sum(1).argmax())
    kept[row, int(tokens[row].long().argmax())] = True
    return targets.masked_fill(~kept, -100)


def _random_positions(batch: Batch, generator: torch.Generator) -> Tensor:
    """(batch,) columns of tokens."""
    tokens = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).float()
    return torch.multinomial(tokens, 1, generator=generator).squeeze(1)


def learnable_batch(case: Case, rows: int, seed: int) -> tuple[Batch, float]:
    """As `_learnable_words` says, with the words as the family's `input_ids` hold them."""
    batch, baseline = _learnable_words(case, rows, seed)
    return batch | {"input_ids": case.spell(batch["input_ids"])}, baseline


def _learnable_words(case: Case, rows: int, seed: int) -> tuple[Batch, float]:
    """A batch of a task a tiny model learns in a few dozen steps.

    Each row repeats one word of four (which word decides the row's target, and is what stands behind every [MASK]);
    for token labels the words of a row differ; for spans and choices one marker word says where the answer is;
    for wrong tokens the markers are those.

    Returns:
        The batch with its targets, and the loss in nats of the best guess that ignores the input: the sum, over the
        terms, of the logarithm of the number of equally likely answers.
    """
    generator = torch.Generator().manual_seed(seed)
    length, kinds, marker = 8, 4, FIRST_WORD + 4
    kind = torch.randint(kinds, (rows,), generator=generator)
    words = FIRST_WORD + kind[:, None].expand(rows, length).clone()
    if case.auto_name == "AutoModelForTokenClassification":
        words = FIRST_WORD + torch.randint(kinds, (rows, length), generator=generator)
        labels = (words - FIRST_WORD) % TINY["num_labels"]
        counts = torch.bincount(torch.arange(kinds) % TINY["num_labels"]).float() / kinds
        return {"input_ids": words, "labels": labels}, float(-(counts * counts.log()).sum())
    if case.detects:
        wrong = torch.rand(words.shape, generator=generator) < 0.25
        return {"input_ids": words.masked_fill(wrong, marker), "labels": wrong.long()}, _binary_entropy(0.25)
    if case.auto_name == "AutoModelForQuestionAnswering":
        place = torch.randint(length, (rows,), generator=generator)
        words[torch.arange(rows), place] = marker
        return {"input_ids": words, "start_positions": place, "end_positions": place}, math.log(length)
    if case.has_choices:
        words = words[:, None].repeat(1, CHOICES, 1)
        right = torch.randint(CHOICES, (rows,), generator=generator)
        words[torch.arange(rows), right, length // 2] = marker
        return {"input_ids": words, "labels": right}, math.log(CHOICES)
    if case.learns_vectors:
        ignorant = case.model()
        for parameter in ignorant.parameters():
            parameter.data.zero_()
        if "cooccurrences" in inspect.signature(case.model_class.forward).parameters:
            other = FIRST_WORD + torch.randint(kinds, (rows, length), generator=generator)
            batch = {"input_ids": words, "labels": other, "cooccurrences": 1.0 + 50 * (words == other)}
        else:
            batch = {"input_ids": words, "labels": words}
        return batch, float(ignorant(**batch).loss)
    batch, baseline = {"input_ids": words}, 0.0
    if case.directions > 1:  # a row's words are all the same, so that each says which are next to it
        return batch | {"labels": words[..., None].expand(-1, -1, case.directions)}, math.log(kinds)
    if case.writes:  # one word, since each but the first would tell what is behind it
        batch, baseline = batch | {"labels": words[:, :1].clone()}, math.log(kinds)
        if "source_labels" in case.model_class.loss_targets:  # the next word of what is read; none of what is written
            following = words.clone()
            following[:, -1] = -100
            batch |= {"source_labels": following, "target_labels": torch.full((rows, 1), -100)}
            baseline += math.log(kinds)
        if "relation_labels" in case.model_class.loss_targets:
            batch |= {"relation_labels": kind % 2}
            baseline += math.log(2)
        return batch, baseline
    for name in case.model_class.loss_targets:
        if name in SOFT_TARGETS:
            continue
        if name == "labels" and case.predicts_where_labelled:
            hidden = torch.rand(words.shape, generator=generator) < 0.3
            hidden[:, 1] = True
            hidden[:, 0] = False
            batch[name] = case.ahead(words.masked_fill(~hidden, -100))
            batch["input_ids"] = words.masked_fill(hidden, MASK)
            baseline += math.log(kinds)
        elif name == "token_labels":
            batch[name] = words
            replaced = (batch["labels"] != -100).float().mean().item()  # at most: a draw may be right
            baseline += TINY["discriminator_weight"] * _binary_entropy(replaced)
        elif name == "labels" or name.endswith("_label"):
            batch[name] = kind % 2
            baseline += math.log(2)
        else:
            raise NotImplementedError(f"{case} wants the target {name!r}: teach tests/zoo.py a task that shows it.")
    return batch, baseline


def _binary_entropy(share: float) -> float:
    return -share * math.log(share) - (1 - share) * math.log(1 - share)


def tensors_of(outputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a model output by name, without hidden states, attention weights and integer fields."""
    return {name: value for name, value in outputs.items() if torch.is_tensor(value) and value.is_floating_point()}


def at_tokens(tensor: Tensor, mask: Tensor | None) -> Tensor:
    """Per-token outputs (batch, length, ...) at tokens; other outputs as they are."""
    if mask is None or tensor.shape[: mask.dim()] != mask.shape:
        return tensor
    return tensor[mask.bool()]


def assert_same_outputs(
    got: Mapping[str, Any], expected: Mapping[str, Any], mask: Tensor | None = None, tolerance: float = 1e-5
) -> None:
    """Equal tensors under the names `expected` has, compared at tokens."""
    wanted = tensors_of(expected)
    assert wanted, "nothing to compare"
    found = tensors_of(got)
    for name, value in wanted.items():
        assert name in found, f"no {name} in the output, only {sorted(found)}"
        assert_close(at_tokens(found[name], mask), at_tokens(value, mask), name, tolerance)


def assert_close(got: Tensor, expected: Tensor, name: str = "values", tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance, msg=lambda message: f"{name}: {message}")


def objective(case: Case, model: PreTrainedModel, batch: Batch, **kwargs: Any) -> Tensor:
    """A number to differentiate: the loss, or for the base model a fixed weighting of its outputs at tokens."""
    outputs = model(**batch, **kwargs)
    if not case.is_base:
        return outputs.loss
    total = torch.zeros(())
    for name, value in tensors_of(outputs).items():
        value = at_tokens(value, batch.get("attention_mask"))
        generator = torch.Generator().manual_seed(len(name))
        total = total + (value.float() * torch.randn(value.shape, generator=generator)).mean()
    return total


def gradients(model: PreTrainedModel, number: Tensor) -> dict[str, Tensor]:
    """d number / d parameter for every parameter; zeros where nothing arrives."""
    model.zero_grad(set_to_none=True)
    number.backward()
    return {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        for name, parameter in model.named_parameters()
    }


def assert_same_gradients(got: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert_close(got[name], value, f"gradient of {name}", tolerance)
