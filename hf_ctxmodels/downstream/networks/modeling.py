"""Task networks on the word vectors of one or several models (Peters et al. 2018, section 3.3)."""

import dataclasses
import inspect
from collections.abc import Iterable, Mapping, Set
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_outputs import (
    BaseModelOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.utils.generic import can_return_tuple

from hf_ctxmodels import heads
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.host_copies import host_copy, on_host
from hf_ctxmodels.core.loading import load_pretrained
from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.core.output_files import TOKENIZER_FILES, TOKENIZERS_FOLDER
from hf_ctxmodels.downstream.networks.configuration import CtxTaskNetworkConfig
from hf_ctxmodels.downstream.networks.feature_stack import FeatureStack
from hf_ctxmodels.downstream.networks.pairs import (
    BiattentiveNetwork,
    BiattentiveOptions,
    DecomposableAttention,
    DecomposableAttentionOptions,
    Esim,
    EsimOptions,
    SentenceNetwork,
    SentenceOptions,
)
from hf_ctxmodels.downstream.networks.questions import AnswerSpanNetwork, AnswerSpanOptions, answer_span_loss
from hf_ctxmodels.downstream.networks.tagging import TaggingNetwork, TaggingOptions
from hf_ctxmodels.downstream.networks.tokenization import decode_words
from hf_ctxmodels.heads.base import ItemCounts
from hf_ctxmodels.heads.downstream import sequence_loss
from hf_ctxmodels.layers.pooling import build_token_mask

_HUB_ARGUMENTS = ("revision", "token", "cache_dir", "local_files_only", "force_download")


class CtxTaskNetworkPreTrainedModel(CtxPreTrainedModel):
    """Base class of the task networks."""

    config: CtxTaskNetworkConfig
    base_model_prefix = "features"
    token_id_axes = ("characters",)
    id_limit_field = "num_characters"
    supports_gradient_checkpointing = False

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """Load as in transformers, with the tokenizers of the models."""
        model, report = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        source = args[0] if args else kwargs.get("pretrained_model_name_or_path")
        base_model: CtxTaskNetworkModel = model.base_model
        if source is not None and not base_model.stack.tokenizers:
            folder = "/".join(filter(None, (kwargs.get("subfolder"), TOKENIZERS_FOLDER)))
            locations = {name: (source, f"{folder}/{name}") for name in base_model.stack.names}
            base_model.load_tokenizers(locations, **{key: kwargs[key] for key in _HUB_ARGUMENTS if key in kwargs})
        return (model, report) if output_loading_info else model

    def load_pretrained_components(self, missing: Set[str] | None = None) -> None:  # type: ignore[override]
        """Load the models and tokenizers that the configuration names, of a new network or one without their weights;
        raises CtxError if they cannot be loaded."""
        base_model: CtxTaskNetworkModel = self.base_model
        prefix = "" if base_model is self else f"{self.base_model_prefix}."
        entries = self.config.encoders or {}
        for index, (name, encoder) in enumerate(zip(base_model.stack.names, base_model.stack.encoders, strict=True)):
            if missing is not None and not any(key.startswith(f"{prefix}stack.encoders.{index}.") for key in missing):
                continue
            source = load_pretrained(AutoModel, entries[name]["source"], f"the model {name}")
            encoder.load_state_dict(source.state_dict())
        if not base_model.stack.tokenizers:
            base_model.load_tokenizers({name: (entry["source"], "") for name, entry in entries.items()})


class CtxTaskNetworkModel(CtxTaskNetworkPreTrainedModel):
    """The word vectors of the models, without a network.

    The words are restored from their bytes, see `CtxTaskNetworkTokenizer`; the two texts of a pair are encoded apart.
    """

    def __init__(self, config: CtxTaskNetworkConfig, add_pooling_layer: bool = False) -> None:
        super().__init__(config)
        models = {name: AutoModel.from_config(entry["config"]) for name, entry in (config.encoders or {}).items()}
        self.stack = FeatureStack(
            config.feature_models(models),
            pooling=config.word_pooling,  # type: ignore[arg-type]
            layer_norm=config.mix_layer_norm,
            dropout=config.feature_dropout,
        )
        self.save_hooks = {TOKENIZERS_FOLDER: _save_tokenizers}
        self.post_init()

    def load_tokenizers(self, locations: Mapping[str, tuple[str | Path, str]], **options: Any) -> None:
        """Load the tokenizer of each model from a folder of a directory or Hub id, with options of `from_pretrained`;
        raises CtxError if one is missing."""
        tokenizers: dict[str, PreTrainedTokenizerBase] = {
            name: load_pretrained(
                AutoTokenizer, source, f"the tokenizer of the model {name}", subfolder=folder, **options
            )
            for name, (source, folder) in locations.items()
        }
        self.stack.set_tokenizers(tokenizers)

    def get_input_embeddings(self) -> None:  # type: ignore[override]
        """None: words are embedded by the models."""

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutput:
        """Embed the words of a batch.

        Args:
            input_ids: (batch, words, characters) bytes of words, see `CtxTaskNetworkTokenizer`.
            attention_mask: (batch, words), 0 at padding.
            token_type_ids: (batch, words), 1 in the second text of a pair.
            inputs_embeds: (batch, words, width) word vectors, instead of `input_ids`.
            kwargs: Ignored arguments of other families' models.

        Returns:
            `last_hidden_state`, (batch, words, width), 0 at padding.

        Raises:
            CtxError: The inputs are invalid, or the tokenizers are missing.
        """
        words = self.check_input_of_any_length(
            input_ids, inputs_embeds, attention_mask, self.config.feature_size, token_type_ids=token_type_ids
        )
        if inputs_embeds is not None:
            return BaseModelOutput(last_hidden_state=self.stack.dropout(words))
        sentences, index = self._sentences(words, attention_mask, token_type_ids)
        vectors, is_vector = self.stack(sentences)
        states = vectors.new_zeros(*words.shape[:2], vectors.shape[-1])
        rows, columns = (positions.to(states.device) for positions in index)
        states = states.index_put((rows, columns), vectors[is_vector])
        return BaseModelOutput(last_hidden_state=states.to(self.dtype))

    def cache_vectors(self, batches: Iterable[Mapping[str, Tensor]], *, show_progress: bool = True) -> None:
        """Compute the vectors of frozen models for batches of inputs before training, many sentences at a time; see
        `FeatureStack.cache`."""
        sentences = (
            self._sentences(batch["input_ids"], batch.get("attention_mask"), batch.get("token_type_ids"))[0]
            for batch in batches
        )
        self.stack.cache(chain.from_iterable(sentences), show_progress=show_progress)

    @staticmethod
    def _sentences(
        words: Tensor, attention_mask: Tensor | None, token_type_ids: Tensor | None
    ) -> tuple[list[list[str]], tuple[Tensor, Tensor]]:
        """The words of all texts of a batch, and the rows and columns of these words."""
        is_word = host_copy(build_token_mask(words, attention_mask))
        types = torch.zeros_like(is_word, dtype=torch.long) if token_type_ids is None else host_copy(token_type_ids)
        characters = host_copy(words)
        sentences, rows, columns = [], [], []
        for row, row_words in enumerate(is_word):
            for text in (0, 1):
                positions = (row_words & ((types[row] != 0) == bool(text))).nonzero()[:, 0]
                if len(positions):
                    sentences.append(decode_words(characters[row, positions]))
                    rows.append(torch.full_like(positions, row))
                    columns.append(positions)
        return sentences, (torch.cat(rows), torch.cat(columns))


class CtxTaskNetworkHeadModel(heads.HeadModel, CtxTaskNetworkPreTrainedModel):
    """Base class of the heads.

    Attributes:
        networks: Name of a network -> its class and the class of its options; the first is the default.
        has_labels: Whether the number of labels is an argument of the networks.
    """

    encoder_class = CtxTaskNetworkModel
    networks: ClassVar[Mapping[str, tuple[type[nn.Module], type]]]
    has_labels: ClassVar[bool] = True

    def build_head(self, config: CtxTaskNetworkConfig) -> None:
        """Create the network."""
        name = config.network or next(iter(self.networks))
        if name not in self.networks:
            raise CtxError(
                f"{type(self).__name__} has no network {name!r}.",
                location="network",
                hint=f"use one of: {', '.join(self.networks)}.",
            )
        network_class, options_class = self.networks[name]
        values = config.network_options or {}
        fields = [field.name for field in dataclasses.fields(options_class)]
        if unknown := sorted(set(values) - set(fields)):
            raise CtxError(
                f"The network {name!r} has no option {unknown[0]!r}.",
                location="network_options",
                hint=f"use one of: {', '.join(fields)}.",
            )
        options, sizes = options_class(**values), {}
        if config.output_features:
            if "output_size" not in inspect.signature(network_class).parameters:
                raise CtxError(
                    f"{network_class.__name__} does not read vectors before its output: it has no states that output "
                    "vectors could extend.",
                    location="output_features",
                    hint="set output_features=False.",
                )
            sizes["output_size"] = config.feature_size
        self.network = self.make_network(network_class, options, **sizes)

    def make_network(self, network_class: Any, options: Any, **sizes: int) -> nn.Module:
        """Create a network with its options; with `config.output_features`, `sizes` is the `output_size`."""
        num_labels = (self.config.num_labels,) if self.has_labels else ()
        return network_class(self.config.feature_size, *num_labels, options, **sizes)

    def embed_words(self, attention_mask: Tensor | None, **inputs: Any) -> tuple[BaseModelOutput, Tensor, Tensor]:
        """The output of the encoder, its (batch, words, width) vectors, and a (batch, words) bool mask of the words."""
        outputs = self.encode(attention_mask=attention_mask, **inputs)
        vectors = outputs.last_hidden_state
        return outputs, vectors, build_token_mask(vectors, attention_mask)

    def penalty(self) -> Tensor | None:
        """The weighted L2 penalty of the layer mixes, `config.mix_decay`, and other regularization terms."""
        penalty = super().penalty()
        if not self.config.mix_decay:
            return penalty
        mix_penalty = self.config.mix_decay * self.base_model.stack.penalty()
        return mix_penalty if penalty is None else penalty + mix_penalty

    def finish_loss(self, loss: Tensor, outputs: Any, targets: Tensor, name: str, num_items: ItemCounts) -> Tensor:
        """Add the regularization terms, as `add_regularization`, and, for DDP, parameters of trained models that do not
        contribute to the loss, such as a pooler."""
        loss = self.add_regularization(loss, outputs, targets, name, num_items)
        return self.with_unused_parameters(loss) if self.config.trainable_encoders else loss  # type: ignore[return-value]

    def output_vectors(self, vectors: Tensor) -> dict[str, Tensor]:
        """The argument `output_vectors` of the network, with `config.output_features`."""
        return {"output_vectors": vectors} if self.config.output_features else {}


class CtxTaskNetworkForSequenceClassification(CtxTaskNetworkHeadModel):
    """Classifier or regressor of texts and pairs."""

    networks = {
        "biattentive": (BiattentiveNetwork, BiattentiveOptions),
        "esim": (Esim, EsimOptions),
        "decomposable_attention": (DecomposableAttention, DecomposableAttentionOptions),
        "sentence": (SentenceNetwork, SentenceOptions),
    }
    loss_targets = ("labels",)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: ItemCounts = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput:
        """Compute logits (batch, num_labels), and the loss with `labels`. Other arguments as in the base model.

        Args:
            labels: As in `heads.ForSequenceClassification`.
        """
        inputs = {"input_ids": input_ids, "token_type_ids": token_type_ids, "inputs_embeds": inputs_embeds}
        outputs, vectors, is_word = self.embed_words(attention_mask, **inputs, **kwargs)
        is_second = None if token_type_ids is None else _second_text(is_word, token_type_ids)
        logits = self.network(vectors, is_word, is_second, **self.output_vectors(vectors))
        loss = None
        if labels is not None:
            loss = sequence_loss(self.config, logits, labels, num_items_in_batch)
            loss = self.finish_loss(loss, outputs, labels, "labels", num_items_in_batch)
        return SequenceClassifierOutput(loss=loss, logits=logits)


class CtxTaskNetworkForTokenClassification(CtxTaskNetworkHeadModel):
    """Tagger of words: entities, parts of speech, semantic roles."""

    networks = {"lstm_crf": (TaggingNetwork, TaggingOptions)}
    loss_targets = ("labels",)
    network: TaggingNetwork

    def make_network(self, network_class: Any, options: Any, **sizes: int) -> nn.Module:
        """Create the network with the names of the labels, which determine the constraints of BIO labels."""
        names = [str(self.config.id2label[index]) for index in range(self.config.num_labels)]
        return network_class(self.config.feature_size, len(names), options, labels=names, **sizes)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: ItemCounts = None,
        **kwargs: Any,
    ) -> TokenClassifierOutput:
        """Compute logits (batch, words, num_labels), and the loss with `labels`. Other arguments as in the base model.

        Args:
            token_type_ids: (batch, words), 1 at the predicate, if the network has embeddings of it.
            labels: (batch, words) class indices; -100 is ignored.

        Returns:
            In evaluation `argmax` of the logits is the best valid sequence of labels, see `TaggingNetwork.forward`.
        """
        is_predicate = None
        if self.network.predicate_embeddings is not None:
            is_predicate, token_type_ids = token_type_ids, None
        inputs = {"input_ids": input_ids, "token_type_ids": token_type_ids, "inputs_embeds": inputs_embeds}
        outputs, vectors, is_word = self.embed_words(attention_mask, **inputs, **kwargs)
        loss, logits = self.network(
            vectors,
            is_word,
            labels,
            num_items=num_items_in_batch,
            is_predicate=is_predicate,
            **self.output_vectors(vectors),
        )
        if loss is not None and labels is not None:
            loss = self.finish_loss(loss, outputs, labels, "labels", num_items_in_batch)
        return TokenClassifierOutput(loss=loss, logits=logits)


class CtxTaskNetworkForQuestionAnswering(CtxTaskNetworkHeadModel):
    """Start and end of the answer to a question in a context.

    Without an answer both positions are the first word of the row, whose logits are half of the network's logit of no
    answer.
    """

    networks = {"bidaf": (AnswerSpanNetwork, AnswerSpanOptions)}
    has_labels = False
    loss_targets = ("start_positions", "end_positions")
    accepts_loss_kwargs = False

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        num_items_in_batch: ItemCounts = None,
        **kwargs: Any,
    ) -> QuestionAnsweringModelOutput:
        """Compute start and end logits (batch, words), and `answer_span_loss` with both positions. Other arguments as
        in the base model.

        Args:
            token_type_ids: (batch, words), 0 in the question and 1 in the context.
            start_positions, end_positions: (batch,) columns of the answer's first and last word, or, if there is no
                answer, of the first word of the row, which networks without `no_answer` ignore; positions outside the
                row are ignored.

        Raises:
            CtxError: There are no `token_type_ids`.
        """
        if token_type_ids is None:
            raise CtxError(
                "Question answering needs token_type_ids: 0 in the question and 1 in the context.",
                hint="pass token_type_ids.",
            )
        inputs = {"input_ids": input_ids, "token_type_ids": token_type_ids, "inputs_embeds": inputs_embeds}
        outputs, vectors, is_word = self.embed_words(attention_mask, **inputs, **kwargs)
        is_context = _second_text(is_word, token_type_ids)
        scores = self.network(vectors, is_word, is_context, **self.output_vectors(vectors))
        logits = [scores.start_logits, scores.end_logits]
        if scores.no_answer_logits is not None:
            first_word = is_word.long().argmax(1, keepdim=True)
            half_logits = scores.no_answer_logits[:, None] / 2
            logits = [
                position_logits.scatter(1, first_word, half_logits.to(position_logits.dtype))
                for position_logits in logits
            ]
        loss = None
        if start_positions is not None and end_positions is not None:
            loss = answer_span_loss(scores, is_context, start_positions, end_positions, num_items_in_batch)
            loss = self.finish_loss(loss, outputs, start_positions, "start_positions", num_items_in_batch)
        return QuestionAnsweringModelOutput(loss=loss, start_logits=logits[0], end_logits=logits[1])


def _second_text(is_word: Tensor, token_type_ids: Tensor) -> Tensor:
    """(batch, words) bool, the words with a type above 0."""
    return on_host(lambda words, types: words & (types != 0), is_word, token_type_ids)


def saved_tokenizer_files(directory: Path, config: PreTrainedConfig) -> list[str]:
    """The tokenizers' files of a saved network, relative to its directory; empty for other models."""
    if not isinstance(config, CtxTaskNetworkConfig):
        return []
    folders = [f"{TOKENIZERS_FOLDER}/{name}" for name in config.encoders or {}]
    files = TOKENIZER_FILES
    return [f"{folder}/{file}" for folder in folders for file in files if (directory / folder / file).is_file()]


def _save_tokenizers(
    model: PreTrainedModel, directory: Path, state_dict: dict[str, Tensor] | None, is_main_process: bool
) -> dict[str, Tensor]:
    """Save the tokenizers of the models; a save hook."""
    if is_main_process:
        for name, tokenizer in model.base_model.stack.tokenizers.items():
            tokenizer.save_pretrained(directory / TOKENIZERS_FOLDER / name)
    return model.state_dict() if state_dict is None else state_dict
