"""A cell of the test matrix: a tiny model of a family and one of its Auto classes."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from hf_ctxmodels.architectures.static_embeddings import StaticPreTrainedModel
from hf_ctxmodels.layers.recurrent.gru import GRU
from hf_ctxmodels.layers.recurrent.lstm import LSTM
from hf_ctxmodels.spec import FamilySpec, Target

PAD, CLS, SEP, MASK, UNKNOWN, FIRST_WORD = 0, 1, 2, 3, 4, 5
CHOICES = 3

# Fields a family does not have are left out; its `traits.tiny` are added. Wide initialisation makes attention far from
# uniform.
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
    "classifier_dropout": 0.0,
    "num_labels": 3,
    "cell_size": 24,
    "num_characters": 262,  # those of the tokenizer
    "max_characters_per_token": 14,  # no length of a batch below: torch.compile takes two equal sizes for one
    "character_embedding_size": 6,
    "filters": [[1, 8], [3, 8]],
    "target_vocab_size": 53,
    "classifier_size": 20,
    "num_languages": 3,
    "language_size": 5,
    "decoder_size": 28,
}

_OF_EVERY_CONFIGURATION = ("num_labels", "architectures", "problem_type", "id2label", "label2id")

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """One cell of the test matrix: a family and one of its Auto classes.

    Without `has_auto_class` it is the class that `family.reference_heads` has for the Auto class of its peer in transformers.
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
        return (self.family.models if self.has_auto_class else self.family.reference_heads)[self.auto_name]

    @property
    def has_peer(self) -> bool:
        """Whether transformers has this model, and an Auto class opens it there."""
        if self.model_class.reference_model_type is None:
            return False
        if self.has_auto_class and self.auto_name in self.family.reference_heads:
            return False
        return transformers.CONFIG_MAPPING[self.family.reference] in self.auto_class._model_mapping

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
        ) or getattr(self.model_class, "output_layer", None) == "mlm_head.decoder"

    @property
    def returns_logits_with_labels(self) -> bool:
        """Whether it computes the others as well where it is asked to."""
        return "return_logits" in inspect.signature(self.model_class.forward).parameters

    @property
    def writes(self) -> bool:
        """Whether the head predicts a text of its own, with a vocabulary of its own, from the one it reads."""
        return not self.is_base and "decoder_input_ids" in inspect.signature(self.model_class.forward).parameters

    @property
    def detects(self) -> bool:
        """Whether the head says of every token, by one logit, whether it is a wrong one."""
        return Target.REPLACED in self.targets.values()

    @property
    def generates(self) -> bool:
        """Whether the head is a pair, of which one part reads what the other wrote."""
        return Target.ORIGINAL in self.targets.values()

    @property
    def padding_side(self) -> str:
        """Where the family's tokenizer pads: there the reference finds the tokens that it pools."""
        return self.family.tokenizer.padding_side

    @property
    def counts_positions(self) -> bool:
        """Whether positions are numbers with a limit, not distances, and may be given."""
        counted = self.writes and self.has_field("query_token_id")  # by the head itself
        return self.has_field("max_position_embeddings") and not counted

    @property
    def first_position(self) -> int:
        """The number of the first token's position."""
        return getattr(self.config(), "first_position", 0)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that is tried, and of the longest there may be where positions are counted."""
        return TINY["max_position_embeddings"] - self.first_position

    @property
    def targets(self) -> dict[str, Target]:
        """What each target of the head is made of."""
        names = getattr(self.model_class, "loss_targets", ())
        return {name: self.family.traits.targets.get(name) or self._kind_of(name) for name in names}

    @property
    def compared_targets(self) -> list[str]:
        """Targets that the logits are compared with."""
        without = (Target.CONSISTENCY, Target.SPAN_TOKEN)  # there are no logits without targets
        return [name for name, kind in self.targets.items() if kind not in without]

    def _kind_of(self, name: str) -> Target:
        of_tokens = {"AutoModelForTokenClassification": Target.TOKEN_CLASS, "AutoModelForPreTraining": Target.REPLACED}
        if name in ("start_positions", "end_positions"):
            return Target.POSITION
        if name.endswith("_label") or self.auto_name == "AutoModelForNextSentencePrediction":
            return Target.PAIR_CLASS
        if name != "labels":
            raise NotImplementedError(f"{self} wants the target {name!r}: say of what in its traits.targets.")
        if self.predicts_where_labelled:
            return Target.DECODER_TOKEN if self.writes else Target.TOKEN_ID
        return of_tokens.get(self.auto_name, Target.SEQUENCE_CLASS)

    def loss_weight(self, component: str) -> float:
        """What a component of the head's loss is multiplied by."""
        name = self.family.traits.loss_weights.get(component)
        return 1.0 if name is None else getattr(self.config(), name)

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
        return Target.CONSISTENCY in self.targets.values()

    @property
    def normalises_batches(self) -> bool:
        """Whether a row's output depends, in training, on the other rows of its batch."""
        return any(isinstance(module, torch.nn.BatchNorm1d) for module in self.model().modules())

    @property
    def takes_extremes(self) -> bool:
        """Whether what passes is the largest or smallest of several, which rounding may choose otherwise."""
        return self.auto_name in self.family.traits.uses_max_pooling or getattr(self.config(), "pooling", None) == "max"

    @property
    def takes_embeddings(self) -> bool:
        """Whether vectors can be given in the place of ids."""
        return "inputs_embeds" in inspect.signature(self.model_class.forward).parameters

    @property
    def token_id_axes(self) -> tuple[str, ...]:
        """Axes of a single token's ids; none where a token is one integer."""
        return self.model_class.token_id_axes

    @property
    def directions(self) -> int:
        """Predictions at a position, each with a label of its own."""
        return 2 if getattr(self.model_class, "label_axes", ()) else 1

    @property
    def shifts_labels(self) -> bool:
        """Whether a word's label is the target of the word before it."""
        return getattr(self.model_class, "shifts_labels", False)

    @property
    def is_causal(self) -> bool:
        """Whether attention sees earlier tokens only."""
        masks = getattr(self.model().base_model, "masks", ())
        return all(mask.causal for mask in (masks if isinstance(masks, Sequence) else [masks])) and masks != ()

    def ahead(self, targets: Tensor) -> Tensor:
        """(batch, length) the target of each word -> labels as the head takes them."""
        return torch.nn.functional.pad(targets, (1, 0), value=-100) if self.shifts_labels else targets

    def spell(self, words: Tensor) -> Tensor:
        """What stands for these integers in `input_ids`: themselves, or the characters of each."""
        return _characters(words, TINY["max_characters_per_token"]) if self.token_id_axes else words

    def positions(self, batch: Batch) -> Tensor:
        """A tensor of the shape of the batch's tokens, whatever their ids are."""
        ids = batch["input_ids"]
        return ids[..., 0] if self.token_id_axes else ids

    def has_field(self, name: str) -> bool:
        """Whether the family's configuration has a field."""
        return name in self.family.config.__dataclass_fields__

    def embed(self, model: PreTrainedModel, ids: Tensor) -> Tensor:
        """What a model makes of ids before anything else."""
        encoder = model.base_model
        return encoder.embed_ids(ids) if hasattr(encoder, "embed_ids") else model.get_input_embeddings()(ids)

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

    def shared(self, values: dict[str, Any]) -> dict[str, Any]:
        """Those that the peer in transformers has under any name, too."""
        return {
            name: value
            for name, value in self.known(values).items()
            if name not in self.family.config.non_reference_fields
        }

    def config(self, **changes: Any) -> PreTrainedConfig:
        """Of the tiny model; changes to fields that the family does not have are left out."""
        if "num_hidden_layers" in changes and self.has_field("decoder_layers"):
            changes = {"decoder_layers": changes["num_hidden_layers"], **changes}
        return tiny_config(self.family, **{"num_labels": self.num_labels, **self.known(changes)})

    def model(self, seed: int = 0, attention: str = "sdpa", **changes: Any) -> PreTrainedModel:
        """A random model in evaluation mode, the same for the same seed whatever the attention or `unpad`."""
        torch.manual_seed(seed)
        model = self.model_class(self.config(**changes))
        model.set_attn_implementation(attention)
        return randomised(model, seed).eval()

    def reference_config(self, **changes: Any) -> PreTrainedConfig:
        """The configuration of the peer in transformers."""
        tiny = {**_known_fields(TINY, self.family.config), **self.family.traits.tiny}
        values = {**tiny, "num_labels": self.num_labels, **changes}
        name_of = self.config().reference_name
        reference = transformers.CONFIG_MAPPING[self.family.reference]
        known = _known_fields({name_of(name): value for name, value in values.items()}, reference)
        if self.config().is_encoder_decoder:  # a token for generation, no field of the peer's
            known["decoder_start_token_id"] = self.config().decoder_start_token_id
        return reference(**known)

    @property
    def reference_class(self) -> type[PreTrainedModel]:
        auto_class = getattr(transformers, self.auto_name)
        return auto_class._model_mapping[transformers.CONFIG_MAPPING[self.family.reference]]

    def reference_model(self, seed: int = 0, **changes: Any) -> PreTrainedModel:
        """A random model of the peer in transformers, in evaluation mode."""
        torch.manual_seed(seed)
        model = randomised(self.reference_class(self.reference_config(**changes)), seed).eval()
        return model if self.writes else decoding_its_input(model)


def decoding_its_input(reference: PreTrainedModel) -> PreTrainedModel:
    """A peer that, if it has a decoder, gives this the encoder's input, as our models do."""
    if "decoder_input_ids" in inspect.signature(type(reference).forward).parameters:
        reference.register_forward_pre_hook(_with_decoder_input, with_kwargs=True)
    return reference


def _with_decoder_input(model: PreTrainedModel, args: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The encoder's input, shifted by one token, with its padding as that of the decoder: T5's peer makes none of its
    own, and the others pass no padding on."""
    ids, mask = given["input_ids"], given.get("attention_mask")
    shifted = ids.roll(1, 1)
    first = 0 if mask is None or mask.dim() > 2 else mask.int().argmax(1)
    shifted[torch.arange(len(ids)), first] = model.config.decoder_start_token_id
    return args, {"decoder_input_ids": shifted, "decoder_attention_mask": mask, **given}


def _characters(words: Tensor, width: int) -> Tensor:
    """Two to five characters for each word, different words having different ones; none at all for padding."""
    filler = TINY["num_characters"] - 1
    spelled = torch.full((*words.shape, width), filler)
    spelled[..., 0], spelled[..., 1] = 1 + words // 8, 20 + words % 8
    for place in range(2, 5):
        spelled[..., place] = torch.where(words % 4 >= place - 1, 30 + words % 7, filler)
    return spelled * (words != PAD)[..., None]


def main_head(family: FamilySpec) -> str:
    """The Auto class of what a family is first trained as: its language model, or its first head where it has none."""
    heads = [name for name in family.models if name != "AutoModel"]
    return "AutoModelForPreTraining" if "AutoModelForPreTraining" in heads else heads[0]


def tiny_config(family: FamilySpec, **changes: Any) -> PreTrainedConfig:
    return family.config(**{**_known_fields(TINY, family.config), **family.traits.tiny, **changes})


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
