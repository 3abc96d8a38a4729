"""A case of the test matrix: a tiny model of a family and one of its Auto classes; a LoRA layer."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from hf_ctxmodels.architectures.encoder_decoder import EncoderDecoder
from hf_ctxmodels.architectures.static_embeddings import StaticPreTrainedModel
from hf_ctxmodels.spec import FamilySpec, Target

PAD, CLS, SEP, MASK, UNKNOWN, FIRST_WORD = 0, 1, 2, 3, 4, 5
CHOICES = 3

# Fields of the tiny configurations; a family uses those it has, and its `traits.tiny` take precedence. The large
# initializer_range makes attention far from uniform.
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
    "num_characters": 262,  # as in the tokenizer
    "max_characters_per_token": 14,  # differs from the lengths of the batches: torch.compile identifies equal sizes
    "character_embedding_size": 6,
    "filters": [[1, 8], [3, 8]],
    "target_vocab_size": 53,
    "classifier_size": 20,
    "num_languages": 3,
    "language_size": 5,
    "decoder_size": 28,
}

_COMMON_FIELDS = ("num_labels", "architectures", "problem_type", "id2label", "label2id")

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A family and the name of one of its Auto classes; the model class is in `family.models` if `has_auto_class`, else
    in `family.reference_heads`, which correspond to the reference."""

    family: FamilySpec
    auto_name: str
    has_auto_class: bool = True

    def __str__(self) -> str:
        return f"{self.family.name}-{self.name}"

    @property
    def name(self) -> str:
        """Name of the Auto class; name of the model class if the Auto class does not open it."""
        return self.auto_name if self.has_auto_class else self.model_class.__name__

    @property
    def model_class(self) -> type[PreTrainedModel]:
        return (self.family.models if self.has_auto_class else self.family.reference_heads)[self.auto_name]

    @property
    def has_reference(self) -> bool:
        """Whether transformers has the model, and opens it with the Auto class."""
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
    def computes_logits_of_labels_only(self) -> bool:
        """Whether the head computes vocabulary logits only at labeled positions."""
        return self.accepts_return_logits or self.trains_static_embeddings

    @property
    def accepts_return_logits(self) -> bool:
        """Whether `return_logits` makes the head compute all logits in addition to the loss."""
        return "return_logits" in inspect.signature(self.model_class.forward).parameters

    @property
    def is_seq2seq(self) -> bool:
        """Whether the head predicts a target sequence, with a target vocabulary, from a source sequence."""
        return not self.is_base and "decoder_input_ids" in inspect.signature(self.model_class.forward).parameters

    @property
    def detects_replaced_tokens(self) -> bool:
        """Whether the head predicts, by one logit per token, whether the token was replaced."""
        return Target.REPLACED in self.targets.values()

    @property
    def has_generator(self) -> bool:
        """Whether the head has a generator, which replaces tokens, in addition to the discriminator."""
        return Target.ORIGINAL in self.targets.values()

    @property
    def padding_side(self) -> str:
        return self.family.tokenizer.padding_side

    @property
    def has_position_limit(self) -> bool:
        """Whether the model accepts `position_ids`, which are limited by `max_position_embeddings`."""
        numbered_by_head = self.is_seq2seq and self.has_field("query_token_id")
        return self.has_field("max_position_embeddings") and not numbered_by_head

    @property
    def first_position(self) -> int:
        return getattr(self.config(), "first_position", 0)

    @property
    def max_sequence_length(self) -> int:
        """Number of tokens of the longest test sequence, which is the limit of models with a position limit."""
        return TINY["max_position_embeddings"] - self.first_position

    @property
    def targets(self) -> dict[str, Target]:
        """Name of each target of the head -> its type."""
        names = getattr(self.model_class, "loss_targets", ())
        return {name: self.family.traits.targets.get(name) or self._default_target(name) for name in names}

    @property
    def compared_targets(self) -> list[str]:
        """Names of the targets with logits that do not depend on the targets."""
        without_logits = (Target.CONSISTENCY, Target.SPAN_TOKEN)
        return [name for name, target in self.targets.items() if target not in without_logits]

    def _default_target(self, name: str) -> Target:
        if name in ("start_positions", "end_positions"):
            return Target.POSITION
        if name.endswith("_label") or self.auto_name == "AutoModelForNextSentencePrediction":
            return Target.PAIR_CLASS
        if name != "labels":
            raise NotImplementedError(f"{self} has the target {name!r}: add its type to the family's traits.targets.")
        if self.computes_logits_of_labels_only:
            return Target.DECODER_TOKEN if self.is_seq2seq else Target.TOKEN_ID
        types = {"AutoModelForTokenClassification": Target.TOKEN_CLASS, "AutoModelForPreTraining": Target.REPLACED}
        return types.get(self.auto_name, Target.SEQUENCE_CLASS)

    def loss_weight(self, component: str) -> float:
        """Factor of a component of the loss."""
        field = self.family.traits.loss_weights.get(component)
        return 1.0 if field is None else getattr(self.config(), field)

    @property
    def has_attention(self) -> bool:
        """Whether the model has attention, and with it several attention implementations."""
        return self.has_field("num_attention_heads")

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether the base model is an encoder-decoder; `config.is_encoder_decoder` is also set in UniLM's encoder."""
        return issubclass(self.family.models["AutoModel"], EncoderDecoder)

    @property
    def is_recurrent(self) -> bool:
        return self.family.traits.is_recurrent

    @property
    def trains_static_embeddings(self) -> bool:
        """Whether the head trains static embeddings, by a loss other than cross-entropy over the vocabulary."""
        return issubclass(self.model_class, StaticPreTrainedModel) and self.auto_name == "AutoModelForPreTraining"

    @property
    def has_consistency_loss(self) -> bool:
        """Whether a term of the loss compares two predictions of the model; it is small, and sensitive to rounding."""
        return Target.CONSISTENCY in self.targets.values()

    @property
    def uses_batch_norm(self) -> bool:
        """Whether the head has batch normalization: in training an example depends on the others of its batch."""
        return self.auto_name in self.family.traits.uses_batch_norm

    @property
    def uses_max_pooling(self) -> bool:
        """Whether the model uses max-pooling, where rounding can select another value."""
        return self.auto_name in self.family.traits.uses_max_pooling or getattr(self.config(), "pooling", None) == "max"

    @property
    def accepts_inputs_embeds(self) -> bool:
        return "inputs_embeds" in inspect.signature(self.model_class.forward).parameters

    @property
    def token_id_axes(self) -> tuple[str, ...]:
        """Names of the additional axes of `input_ids`: for characters one, for tokens none."""
        return self.model_class.token_id_axes

    @property
    def num_directions(self) -> int:
        """Number of language-model directions, each with its own label per position."""
        return 2 if getattr(self.model_class, "label_axes", ()) else 1

    @property
    def shifts_labels(self) -> bool:
        """Whether the head shifts the labels: the label of a token is the target of the token before it."""
        return getattr(self.model_class, "shifts_labels", False)

    @property
    def is_causal(self) -> bool:
        """Whether a token attends only to itself and earlier tokens."""
        masks = getattr(self.model().base_model, "masks", ())
        return all(mask.causal for mask in (masks if isinstance(masks, Sequence) else [masks])) and masks != ()

    def shift_targets(self, targets: Tensor) -> Tensor:
        """Convert the target of each token (batch, length) to the labels of the head."""
        return torch.nn.functional.pad(targets, (1, 0), value=-100) if self.shifts_labels else targets

    def to_input_ids(self, token_ids: Tensor) -> Tensor:
        """Convert token ids (batch, length) to `input_ids`: unchanged, or the characters of each token."""
        return _characters(token_ids, TINY["max_characters_per_token"]) if self.token_id_axes else token_ids

    def first_token_ids(self, batch: Batch) -> Tensor:
        """(batch, length) ids: `input_ids`, or the first character of each token."""
        ids = batch["input_ids"]
        return ids[..., 0] if self.token_id_axes else ids

    def has_field(self, name: str) -> bool:
        return name in self.family.config.__dataclass_fields__

    def embed_ids(self, model: PreTrainedModel, ids: Tensor) -> Tensor:
        """Convert `input_ids` to `inputs_embeds`."""
        base_model = model.base_model
        return base_model.embed_ids(ids) if hasattr(base_model, "embed_ids") else model.get_input_embeddings()(ids)

    @property
    def num_labels(self) -> int:
        """Number of classes: 3, but 2 for the heads whose reference requires 2."""
        binary = ("AutoModelForQuestionAnswering", "AutoModelForPreTraining")
        return 2 if self.auto_name in binary else TINY["num_labels"]

    def family_fields(self, values: dict[str, Any]) -> dict[str, Any]:
        """The configuration fields among `values` that the family has."""
        return _known_fields(values, self.family.config)

    def reference_fields(self, values: dict[str, Any]) -> dict[str, Any]:
        """The configuration fields among `values` that the family and its reference have, under any name."""
        return {
            name: value
            for name, value in self.family_fields(values).items()
            if name not in self.family.config.non_reference_fields
        }

    def config(self, **changes: Any) -> PreTrainedConfig:
        """The configuration of the tiny model; changes to fields that the family does not have are ignored."""
        if "num_hidden_layers" in changes and self.has_field("decoder_layers"):
            changes = {"decoder_layers": changes["num_hidden_layers"], **changes}
        return tiny_config(self.family, **{"num_labels": self.num_labels, **self.family_fields(changes)})

    def model(self, seed: int = 0, attention: str = "sdpa", **changes: Any) -> PreTrainedModel:
        """A random model in evaluation mode; the weights do not depend on `attention` and `unpad`."""
        torch.manual_seed(seed)
        model = self.model_class(self.config(**changes))
        model.set_attn_implementation(attention)
        return with_random_parameters(model, seed).eval()

    def reference_config(self, **changes: Any) -> PreTrainedConfig:
        tiny = {**_known_fields(TINY, self.family.config), **self.family.traits.tiny}
        values = {**tiny, "num_labels": self.num_labels, **changes}
        config = self.config()
        config_class = transformers.CONFIG_MAPPING[self.family.reference]
        renamed = {config.reference_name(name): value for name, value in values.items()}
        fields = _known_fields(renamed, config_class)
        if config.is_encoder_decoder:  # an argument of generation, which is not a field of the reference
            fields["decoder_start_token_id"] = config.decoder_start_token_id
        return config_class(**fields)

    @property
    def reference_class(self) -> type[PreTrainedModel]:
        return self.auto_class._model_mapping[transformers.CONFIG_MAPPING[self.family.reference]]

    def reference_model(self, seed: int = 0, **changes: Any) -> PreTrainedModel:
        """A random model of the reference in transformers, in evaluation mode."""
        torch.manual_seed(seed)
        model = with_random_parameters(self.reference_class(self.reference_config(**changes)), seed).eval()
        return model if self.is_seq2seq else feed_source_to_decoder(model)


def feed_source_to_decoder(reference: PreTrainedModel) -> PreTrainedModel:
    """Make a reference model with a decoder use the source as `decoder_input_ids`, as the models of this package do."""
    if "decoder_input_ids" in inspect.signature(type(reference).forward).parameters:
        reference.register_forward_pre_hook(_add_decoder_input, with_kwargs=True)
    return reference


def _add_decoder_input(model: PreTrainedModel, args: Any, inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Add the source, shifted by one token, and its padding mask: T5 has no default, the others no default mask."""
    ids, mask = inputs["input_ids"], inputs.get("attention_mask")
    shifted = ids.roll(1, 1)
    first_columns = 0 if mask is None or mask.dim() > 2 else mask.int().argmax(1)
    shifted[torch.arange(len(ids)), first_columns] = model.config.decoder_start_token_id
    return args, {"decoder_input_ids": shifted, "decoder_attention_mask": mask, **inputs}


def _characters(token_ids: Tensor, width: int) -> Tensor:
    """(batch, length) -> (batch, length, width): two to five characters, different for each token id; 0 for padding."""
    filler = TINY["num_characters"] - 1
    characters = torch.full((*token_ids.shape, width), filler)
    characters[..., 0], characters[..., 1] = 1 + token_ids // 8, 20 + token_ids % 8
    for column in range(2, 5):
        characters[..., column] = torch.where(token_ids % 4 >= column - 1, 30 + token_ids % 7, filler)
    return characters * (token_ids != PAD)[..., None]


def pretraining_auto_class(family: FamilySpec) -> str:
    """Name of the Auto class for pretraining: AutoModelForPreTraining, or the first head of a family without it."""
    heads = [name for name in family.models if name != "AutoModel"]
    return "AutoModelForPreTraining" if "AutoModelForPreTraining" in heads else heads[0]


def tiny_config(family: FamilySpec, **changes: Any) -> PreTrainedConfig:
    """The configuration of the tiny model of a family."""
    return family.config(**{**_known_fields(TINY, family.config), **family.traits.tiny, **changes})


def _known_fields(values: dict[str, Any], config_class: type[PreTrainedConfig]) -> dict[str, Any]:
    names = {*config_class.__dataclass_fields__, *config_class.attribute_map, *_COMMON_FIELDS}
    return {name: value for name, value in values.items() if name in names}


@torch.no_grad()
def with_random_parameters(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    """Add noise to all parameters: with biases of zero and gains of one, swapped parameters would not be noticed."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


class LowRank(torch.nn.Module):
    """A linear layer plus a low-rank update (Hu et al. 2021). As in PEFT, `weight` is the weight of the base layer."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = torch.nn.Linear(base.in_features, 2, bias=False)
        self.up = torch.nn.Linear(2, base.out_features, bias=False)

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    def forward(self, states: Tensor) -> Tensor:
        return self.base(states) + self.up(self.down(states))

    def merged(self) -> torch.nn.Linear:
        """Add the update to the weight of the base layer, and return the layer."""
        with torch.no_grad():
            self.base.weight += self.up.weight @ self.down.weight
        return self.base
