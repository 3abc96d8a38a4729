"""GloVe (Pennington et al. 2014): weighted least squares on the logarithms of co-occurrence counts."""

import importlib
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from transformers.modeling_outputs import MaskedLMOutput
from transformers.utils.generic import can_return_tuple

from hf_ctxmodels import heads
from hf_ctxmodels.architectures.static_embeddings import (
    StaticEmbedding,
    StaticEmbeddingModel,
    StaticPreTrainedModel,
    run_in_threads,
    supports_compiled_updates,
)
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.host_copies import is_traced, select_true
from hf_ctxmodels.core.inputs import check_tensors
from hf_ctxmodels.core.weights import require_loaded
from hf_ctxmodels.heads import ItemCounts, mean_over_targets
from hf_ctxmodels.heads.base import mask_of_targets
from hf_ctxmodels.models.glove.configuration_glove import CtxGloveConfig


class CtxGlovePreTrainedModel(StaticPreTrainedModel):
    """Base class of the GloVe models."""

    config: CtxGloveConfig
    base_model_prefix = "glove"
    _keys_to_ignore_on_load_unexpected = [r"^(word|context)_bias\."]


class CtxGloveModel(StaticEmbeddingModel, CtxGlovePreTrainedModel):
    """Word vectors: the sum of a word's vector and its context vector."""

    def build_encoder(self, config: CtxGloveConfig) -> None:
        """Create the context vectors."""
        self.context_embeddings = self.build_embedding(config) if config.context_vectors else None

    def embed_ids(self, input_ids: Tensor) -> Tensor:
        """(batch, length) ids -> (batch, length, hidden)."""
        words = self.word_embeddings(input_ids)
        return words if self.context_embeddings is None else words + self.context_embeddings(input_ids)


class CtxGloveHeadModel(heads.HeadModel, CtxGlovePreTrainedModel):
    """Base class of the heads on word vectors."""

    encoder_class = CtxGloveModel


class CtxGloveForPreTraining(CtxGloveHeadModel):
    """Predicts the logarithms of co-occurrence counts (section 3).

    The loss is differentiable, for any optimizer. With a `learning_rate`, `forward` instead updates the vectors in
    place, by AdaGrad on single cells; see `adagrad_kernel` for the differences from the released code.
    """

    loss_targets: ClassVar[tuple[str, ...]] = ("labels",)

    def build_head(self, config: CtxGloveConfig) -> None:
        """Create the biases of words and contexts."""
        if not config.context_vectors:
            raise CtxError(
                "Word vectors without context vectors cannot be pretrained further: they are sums of both.",
                location="context_vectors=false in config.json",
                hint="pretrain a new model, or fine-tune this model on a task.",
            )
        self.word_bias = StaticEmbedding(config.vocab_size, 1, config.hidden_size)
        self.context_bias = StaticEmbedding(config.vocab_size, 1, config.hidden_size)

    @property
    def supports_label_smoothing(self) -> bool:
        """False: the loss is a squared error."""
        return False

    def supports_inplace_optimizer(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer is AdaGrad, and numba is available."""
        return type(optimizer) is torch.optim.Adagrad and supports_compiled_updates(self.get_input_embeddings().weight)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        cooccurrences: Tensor | None = None,
        learning_rate: float | None = None,
        squares: Mapping[str, Tensor] | None = None,
        num_items_in_batch: ItemCounts = None,
        **kwargs: Any,
    ) -> MaskedLMOutput:
        """Compute the loss with `labels`, otherwise logits.

        Args:
            input_ids: (batch, length) words of cells of the co-occurrence matrix.
            labels: (batch, length) context words of the cells; -100 is ignored.
            cooccurrences: (batch, length) counts of the cells, above 0; None for ones.
            learning_rate: Update the vectors in place, and return a loss without gradient.
            squares: With `learning_rate`, AdaGrad's sums of squared gradients by parameter name; updated.

        Returns:
            The loss is the weighted squared error of the logarithms (equation 8), halved as in the released code, mean
            over the cells. Logits, (batch, length, vocabulary), are logarithms of co-occurrence counts.
        """
        model: Any = self.base_model
        if input_ids is None:
            raise CtxError("GloVe cannot predict co-occurrences from inputs_embeds.", hint="pass input_ids.")
        labels = self.validate_token_targets(labels, "labels", input_ids)
        check_tensors(cooccurrences=cooccurrences)
        if labels is None:
            encoded = self.encode(input_ids=input_ids, attention_mask=attention_mask, **kwargs)
            words, contexts = model.word_embeddings(input_ids), model.context_embeddings.weight
            for weight, name in ((contexts, "context_embeddings"), (self.context_bias.weight, "context_bias")):
                require_loaded(weight, words, f"`{name}`", hint="keep it in memory: pass another device_map.")
            logits = words @ contexts.T
            logits = logits + self.word_bias(input_ids) + self.context_bias.weight[:, 0]
            return MaskedLMOutput(logits=logits, hidden_states=encoded.hidden_states)
        output_mask = mask_of_targets(labels)
        model.check_encoder_input(input_ids, None, attention_mask, None, output_mask=output_mask)
        heads.check_classes(labels, self.config.vocab_size, "labels", "vocab_size")
        values = torch.ones_like(input_ids, dtype=torch.float32) if cooccurrences is None else cooccurrences
        if values.shape != labels.shape:
            raise CtxError(f"cooccurrences is {tuple(values.shape)}, but the input is {tuple(labels.shape)}.")
        is_readable = values.device.type == "cpu" and not is_traced(values)  # a device is not read for it
        if is_readable and bool((output_mask & (values <= 0)).any()):
            raise CtxError(
                "cooccurrences has counts of 0 or less, which have no logarithm.", hint="use the label -100."
            )
        words, contexts, counts = (select_true(tensor, output_mask) for tensor in (input_ids, labels, values))
        cells = words, contexts, counts.float()
        if learning_rate is None:
            loss = self._weighted_squares(*cells)
        elif squares is None:
            raise CtxError("AdaGrad requires its sums of squared gradients.", hint="pass `squares`.")
        else:
            loss = self._adagrad_step(learning_rate, squares, *cells)
        return MaskedLMOutput(loss=mean_over_targets(loss, labels, "labels", num_items_in_batch))

    def _weighted_squares(self, words: Tensor, contexts: Tensor, values: Tensor) -> Tensor:
        """Half the sum of equation 8, from (cells,) words, contexts and counts."""
        model: Any = self.base_model
        products = (model.word_embeddings(words) * model.context_embeddings(contexts)).sum(-1).float()
        biases = (self.word_bias(words) + self.context_bias(contexts))[:, 0].float()
        weights = (values / self.config.x_max).clamp(max=1) ** self.config.alpha
        return 0.5 * (weights * (products + biases - values.log()) ** 2).sum()

    @torch.compiler.disable  # it cannot trace numba and threads
    @torch.no_grad()
    def _adagrad_step(self, learning_rate: float, squares: Mapping[str, Tensor], *cells: Tensor) -> Tensor:
        """AdaGrad on single cells (words, contexts, values); returns the summed loss."""
        kernels = importlib.import_module("hf_ctxmodels.models.glove.adagrad_kernel")  # numba takes a second to import
        tables = dict(self.named_parameters())
        names = [f"glove.{table}_embeddings.weight" for table in ("word", "context")]
        names += ["word_bias.weight", "context_bias.weight"]
        arrays = [tensors[name].detach().numpy() for tensors in (tables, squares) for name in names]

        def update(words: Tensor, contexts: Tensor, values: Tensor) -> Tensor:
            parameters = float(self.config.x_max), float(self.config.alpha), np.float32(learning_rate)
            loss = kernels.glove_adagrad_kernel(*arrays, words.numpy(), contexts.numpy(), values.numpy(), *parameters)
            return torch.tensor(loss, dtype=torch.float32)

        return run_in_threads(self.config.update_threads, update, *cells)


class CtxGloveForSequenceClassification(heads.ForSequenceClassification, CtxGloveHeadModel):
    """Word vectors with a classifier or regressor on the pooled vectors."""


class CtxGloveForTokenClassification(heads.ForTokenClassification, CtxGloveHeadModel):
    """Word vectors with a linear classifier for each word."""
