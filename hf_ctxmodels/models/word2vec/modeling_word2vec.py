"""word2vec (Mikolov et al. 2013a, arXiv 1301.3781; 2013b, arXiv 1310.4546): words predicted from their contexts."""

from typing import Any, ClassVar

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
from hf_ctxmodels.core.host_copies import is_traced, on_host, to_device
from hf_ctxmodels.core.inputs import check_ids, check_tensors
from hf_ctxmodels.core.weights import require_loaded
from hf_ctxmodels.heads import ItemCounts, mean_over_targets
from hf_ctxmodels.heads.base import mask_of_targets
from hf_ctxmodels.layers.pooling import build_token_mask
from hf_ctxmodels.models.word2vec.configuration_word2vec import CtxWord2VecConfig
from hf_ctxmodels.models.word2vec.window_prediction import (
    SOFTMAX_BLOCK,
    Blocks,
    TextBatch,
    build_blocks,
    sgd_step,
    sgd_step_by_words,
    summed_loss,
)


class CtxWord2VecPreTrainedModel(StaticPreTrainedModel):
    """Base class of the word2vec models."""

    config: CtxWord2VecConfig
    base_model_prefix = "word2vec"
    _keys_to_ignore_on_load_unexpected = [r"^outputs\."]


class CtxWord2VecModel(StaticEmbeddingModel, CtxWord2VecPreTrainedModel):
    """The word2vec vectors, without the output vectors of pretraining."""


class CtxWord2VecHeadModel(heads.HeadModel, CtxWord2VecPreTrainedModel):
    """Base class of the heads on word vectors."""

    encoder_class = CtxWord2VecModel


class CtxWord2VecForPreTraining(CtxWord2VecHeadModel):
    """Skip-gram or continuous bag of words, with negative sampling, hierarchical softmax or the full softmax.

    The loss is differentiable, for any optimizer. With a `learning_rate`, `forward` instead updates the vectors in
    place: plain SGD in many small steps over the batch.
    """

    loss_targets: ClassVar[tuple[str, ...]] = ("labels",)

    def build_head(self, config: CtxWord2VecConfig) -> None:
        """Create the output vectors of the words, or, with hierarchical softmax, of the inner nodes of the tree."""
        self.outputs = StaticEmbedding(config.vocab_size, config.hidden_size, None)

    @property
    def supports_label_smoothing(self) -> bool:
        """False: the loss is a sum over the words of a window, with most outputs from a sample of the vocabulary."""
        return False

    def supports_inplace_optimizer(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer is plain SGD."""
        return type(optimizer) is torch.optim.SGD

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        windows: Tensor | None = None,
        negatives: Tensor | None = None,
        paths: Tensor | None = None,
        codes: Tensor | None = None,
        learning_rate: float | None = None,
        num_items_in_batch: ItemCounts = None,
        **kwargs: Any,
    ) -> MaskedLMOutput:
        """Compute the loss with `labels`, otherwise logits.

        Args:
            labels: (batch, length) target of each position, predicted from its context in `input_ids`; -100 is
                ignored.
            windows: (batch, length) number of context words on either side, 1 to `config.window`; None for
                `config.window`.
            negatives: (batch, blocks, k) words of the noise distribution; a row is split into this number of blocks of
                adjacent words that share negatives. None for the whole vocabulary with equal weights.
            paths, codes: (batch, blocks, size, depth) for hierarchical softmax: inner nodes on the path to the target,
                -1 after its end, and the branch at each, 0 or 1.
            learning_rate: Update the vectors in place with this learning rate per prediction, and return a loss without
                gradient.

        Returns:
            The loss is the cross-entropy in nats, summed over the predictions of a target, mean over the targets.
            Skip-gram predicts a target once from each context word. Logits, (batch, length, vocabulary), are scores of
            each word given the context; None with hierarchical softmax.
        """
        if kwargs.get("sequence_ids") is not None:
            raise CtxError("A window of words may extend over several sequences.", hint="pass one sequence per row.")
        labels = self.validate_token_targets(labels, "labels", input_ids, inputs_embeds)
        check_tensors(windows=windows, negatives=negatives, paths=paths, codes=codes)
        output_mask = None if labels is None else mask_of_targets(labels)
        words = self.base_model.check_encoder_input(
            input_ids, inputs_embeds, attention_mask, None, output_mask=output_mask
        )
        if labels is not None and learning_rate is not None:
            if input_ids is None:
                raise CtxError("Vectors cannot be updated from inputs_embeds.", hint="pass input_ids.")
            text = self.text_batch(input_ids, attention_mask, labels, windows, negatives, paths, codes)
            loss = mean_over_targets(self._sgd_step(learning_rate, text), labels, "labels", num_items_in_batch)
            return MaskedLMOutput(loss=loss)
        encoded = self.encode(input_ids=input_ids, attention_mask=attention_mask, inputs_embeds=inputs_embeds, **kwargs)
        states = encoded.last_hidden_state
        require_loaded(self.outputs.weight, states, "`outputs`", hint="keep it in memory: pass another device_map.")
        if labels is None:
            logits = self._logits(states, attention_mask)
            return MaskedLMOutput(logits=logits, hidden_states=encoded.hidden_states)
        batch, length = words.shape[:2]
        indices = torch.arange(batch * length, device=words.device).view(batch, length)  # of the flattened states
        text = self.text_batch(indices, attention_mask, labels, windows, negatives, paths, codes)
        loss = summed_loss(self._blocks(text), states.flatten(0, 1), self.outputs.weight)
        loss = mean_over_targets(loss, labels, "labels", num_items_in_batch)
        return MaskedLMOutput(loss=loss, hidden_states=encoded.hidden_states)

    def text_batch(
        self,
        words: Tensor,
        attention_mask: Tensor | None,
        labels: Tensor,
        windows: Tensor | None = None,
        negatives: Tensor | None = None,
        paths: Tensor | None = None,
        codes: Tensor | None = None,
    ) -> TextBatch:
        """Check the arguments of `forward`; `words` are ids, or indices of embeddings. Raises CtxError."""
        config = self.config
        heads.check_classes(labels, config.vocab_size, "labels", "vocab_size")
        if windows is None:
            windows = torch.full_like(words, config.window)
        elif windows.shape != words.shape:
            raise CtxError(f"windows is {tuple(windows.shape)}, but the input is {tuple(words.shape)}.")
        elif (  # a device is not read for it
            windows.device.type == "cpu"
            and not is_traced(windows)
            and bool(((windows < 0) | (windows > config.window)).any())
        ):
            raise CtxError(f"windows has values outside 0 to config.window={config.window}.")
        if config.output == "hierarchical-softmax":
            if paths is None or codes is None or paths.shape != codes.shape or paths.dim() != 4:
                raise CtxError("Hierarchical softmax needs `paths` and `codes`.", hint="use the objective's collator.")
            if paths.shape[0] != len(words) or paths.shape[1] * paths.shape[2] != words.shape[1]:
                raise CtxError(
                    f"paths is {tuple(paths.shape)}, expected ({len(words)}, blocks, size, depth) with blocks * size = "
                    f"{words.shape[1]}."
                )
            nodes = on_host(lambda tensor: tensor.clamp(min=0).flatten(1), paths)
            check_ids("paths", nodes, config.vocab_size, "vocab_size")
            output_arguments = {"paths": paths, "codes": codes}
        elif config.output == "softmax":
            output_arguments = {}
        else:
            if negatives is None:
                negatives = to_device(torch.arange(config.vocab_size).expand(len(words), 1, -1), words.device)
            elif negatives.dim() != 3 or len(negatives) != len(words) or 0 in negatives.shape[1:]:
                raise CtxError(f"negatives is {tuple(negatives.shape)}, expected ({len(words)}, blocks, k), not empty.")
            check_ids(
                "negatives", on_host(lambda tensor: tensor.flatten(1), negatives), config.vocab_size, "vocab_size"
            )
            output_arguments = {"negatives": negatives}
        return TextBatch(words, build_token_mask(words, attention_mask), labels, windows, output_arguments)

    def loss_by_scores(self, scores: Tensor, **batch: Tensor) -> Tensor:
        """Summed loss of a model that always predicts the logits `scores`, (vocabulary,)."""
        text = self.text_batch(batch.pop("input_ids"), batch.pop("attention_mask", None), **batch)
        ones = torch.ones(self.config.vocab_size, 1, device=scores.device)
        return summed_loss(self._blocks(text), ones, scores[:, None])

    def _blocks(self, text: TextBatch) -> Blocks:
        config = self.config
        average = config.architecture == "cbow"
        return build_blocks(text, config.window, config.negative, average, self.outputs.weight.dtype)

    @torch.compiler.disable  # it cannot trace numba and threads
    @torch.no_grad()
    def _sgd_step(self, rate: float, text: TextBatch) -> Tensor:
        """SGD in small steps on a batch; returns the summed loss.

        Each thread processes some of the rows, word by word with numba, otherwise a few blocks at a time. With the full
        softmax, every step updates the output vectors of all words.
        """
        words, outputs, config = self.get_input_embeddings().weight, self.outputs.weight, self.config
        is_softmax, names = config.output == "softmax", tuple(text.output_arguments)
        is_compiled = supports_compiled_updates(words) and not is_softmax

        def update(ids: Tensor, is_token: Tensor, labels: Tensor, windows: Tensor, *output_arguments: Tensor) -> Tensor:
            chunk = TextBatch(ids, is_token, labels, windows, dict(zip(names, output_arguments, strict=True)))
            if is_compiled:
                average = config.architecture == "cbow"
                loss = sgd_step_by_words(chunk, words.data, outputs.data, rate, config.negative, average)
                return torch.tensor(loss, dtype=torch.float32)
            blocks, size = self._blocks(chunk), config.update_blocks
            if is_softmax:  # as many center words per update: the blocks are longer
                size = max(1, size // SOFTMAX_BLOCK)
            losses = [
                sgd_step(blocks.select(start, start + size), words.data, outputs.data, rate)
                for start in range(0, len(blocks), size)
            ]
            return torch.stack([words.new_zeros((), dtype=torch.float32), *losses]).sum()

        rows = (text.ids, text.is_token, text.labels, text.windows, *text.output_arguments.values())
        return update(*rows) if words.device.type != "cpu" else run_in_threads(config.update_threads, update, *rows)

    def _logits(self, states: Tensor, attention_mask: Tensor | None) -> Tensor | None:
        if self.config.output == "hierarchical-softmax":
            return None
        positions = torch.arange(states.shape[1], device=states.device)
        distance = (positions[:, None] - positions).abs()
        context = (distance > 0) & (distance <= self.config.window) & build_token_mask(states, attention_mask)[:, None]
        context = context.to(states.dtype)
        if self.config.architecture == "cbow":
            context = context / context.sum(-1, keepdim=True).clamp(min=1)
        return context @ states @ self.outputs.weight.T


class CtxWord2VecForSequenceClassification(heads.ForSequenceClassification, CtxWord2VecHeadModel):
    """Word vectors with a classifier or regressor on the pooled vectors."""


class CtxWord2VecForTokenClassification(heads.ForTokenClassification, CtxWord2VecHeadModel):
    """Word vectors with a linear classifier for each word."""
