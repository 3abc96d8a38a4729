"""word2vec (Mikolov et al. 2013a, arXiv 1301.3781; 2013b, arXiv 1310.4546): words predicted from their neighbours.

Its own here: what is predicted from what. The table is `hf_ctxmodels.models._shared.static`, the arithmetic
`hf_ctxmodels.models.word2vec.window_prediction`.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.utils import ModelOutput
from transformers.utils.generic import can_return_tuple

from hf_ctxmodels import heads
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.inputs import check_ids
from hf_ctxmodels.heads import IGNORED, ItemCounts, mean_over_targets
from hf_ctxmodels.models._shared.static import StaticEncoder, StaticPreTrainedModel, WordTable, in_threads, is_compiled
from hf_ctxmodels.models.word2vec import window_prediction
from hf_ctxmodels.models.word2vec.configuration_word2vec import CtxWord2VecConfig
from hf_ctxmodels.models.word2vec.window_prediction import Blocks


class CtxWord2VecPreTrainedModel(StaticPreTrainedModel):
    """word2vec's part of the model base."""

    config: CtxWord2VecConfig
    base_model_prefix = "word2vec"
    _keys_to_ignore_on_load_unexpected = [r"^outputs\."]


class CtxWord2VecModel(StaticEncoder, CtxWord2VecPreTrainedModel):
    """Word vectors.

    Args:
        config: Their number and width.
        add_pooling_layer: Whether to compute `pooler_output`.
    """

    def __init__(self, config: CtxWord2VecConfig, add_pooling_layer: bool = True) -> None:
        super().__init__(config)
        self.build_encoder(config, add_pooling_layer)
        self.post_init()


class CtxWord2VecHeadModel(heads.HeadModel, CtxWord2VecPreTrainedModel):
    """Binds the generic heads to the word vectors."""

    encoder_class = CtxWord2VecModel


@dataclass
class CtxWord2VecForPreTrainingOutput(ModelOutput):
    """Output of `CtxWord2VecForPreTraining`.

    Attributes:
        loss: In nats, the sum over the predictions of a word, mean over the words to be predicted. Skip-gram predicts a
            word once from each of its neighbours.
        logits: (batch, length, vocabulary), how well each word fits between the neighbours; None with `labels`, and
            with hierarchical softmax.
        hidden_states: As asked for.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None


class CtxWord2VecForPreTraining(CtxWord2VecHeadModel):
    """Skip-gram or continuous bag of words, with negative sampling or hierarchical softmax.

    The loss is differentiable as any other, which any optimizer may follow. Given a `learning_rate`, the vectors follow
    it by themselves instead: plain SGD in many small steps over the batch, in place, of the rows concerned alone.
    """

    loss_targets: ClassVar[tuple[str, ...]] = ("labels",)

    def build_head(self, config: CtxWord2VecConfig) -> None:
        """The vectors that words have as a prediction; with hierarchical softmax, those of the tree's inner nodes."""
        self.outputs = WordTable(config.vocab_size, config.hidden_size, None)

    def has_inplace_optimizer(self, optimizer: torch.optim.Optimizer) -> bool:
        """Plain SGD."""
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
    ) -> CtxWord2VecForPreTrainingOutput:
        """The loss where `labels` are given, else logits.

        Args:
            input_ids: (batch, length).
            labels: (batch, length) the word to be predicted at a position from its neighbours in `input_ids`, -100
                where none is.
            windows: (batch, length) neighbours on either side, 1 to `config.window`; None for `config.window`.
            negatives: (batch, blocks, k) words drawn from the noise distribution; the row is cut into as many blocks of
                neighbouring words, each of which shares its own. None stands for the whole vocabulary, uniformly.
            paths, codes: (batch, blocks, size, depth) for hierarchical softmax: inner nodes on the way to the word to
                be predicted, -1 behind its end, and which way it goes from each, 0 or 1; the row is cut into blocks.
            learning_rate: of one prediction; update the vectors in place, and give a loss without gradient.

        Raises:
            CtxError: input that does not fit together or the model.
        """
        output_mask = None if labels is None else labels != IGNORED
        if labels is not None and learning_rate is not None:
            self.base_model.check_encoder_input(input_ids, inputs_embeds, attention_mask, None, output_mask=output_mask)
            if input_ids is None:
                raise CtxError("Vectors cannot be updated from inputs_embeds.", hint="give input_ids.")
            loss = self._descend(learning_rate, input_ids, attention_mask, labels, windows, negatives, paths, codes)
            return CtxWord2VecForPreTrainingOutput(loss=mean_over_targets(loss, labels, "labels", num_items_in_batch))
        given = self.base_model.check_encoder_input(
            input_ids, inputs_embeds, attention_mask, None, output_mask=output_mask
        )
        encoded = self.encode(input_ids=input_ids, attention_mask=attention_mask, inputs_embeds=inputs_embeds, **kwargs)
        states = encoded.last_hidden_state
        if labels is None:
            logits = self._logits(states, attention_mask)
            return CtxWord2VecForPreTrainingOutput(logits=logits, hidden_states=encoded.hidden_states)
        places = torch.arange(given.shape[0] * given.shape[1], device=given.device).view(given.shape[:2])
        blocks = self.blocks(places, attention_mask, labels, windows, negatives, paths, codes)
        loss = window_prediction.summed_loss(blocks, states.flatten(0, 1), self.outputs.weight)
        loss = mean_over_targets(loss, labels, "labels", num_items_in_batch)
        return CtxWord2VecForPreTrainingOutput(loss=loss, hidden_states=encoded.hidden_states)

    def blocks(
        self,
        words: Tensor,
        attention_mask: Tensor | None,
        labels: Tensor,
        windows: Tensor | None = None,
        negatives: Tensor | None = None,
        paths: Tensor | None = None,
        codes: Tensor | None = None,
    ) -> Blocks:
        """What is to be told from what, see `layers.window_prediction`; the arguments are those of `forward`."""
        config, average = self.config, self.config.architecture == "cbow"
        given = self.check_prediction(words, labels, windows, negatives, paths, codes)
        centres = window_prediction.cut(
            words, attention_mask, labels, windows, config.window, given, self.outputs.weight.dtype
        )
        if config.output == "hierarchical-softmax":
            return window_prediction.hierarchical_grid(centres, average)
        return window_prediction.negative_sampling_grid(centres, config.negative, average)

    def check_prediction(
        self,
        words: Tensor,
        labels: Tensor,
        windows: Tensor | None,
        negatives: Tensor | None,
        paths: Tensor | None,
        codes: Tensor | None,
    ) -> list[Tensor]:
        """What the words are predicted against: [negatives] or [paths, codes]; the arguments are those of `forward`.

        Raises:
            CtxError: input that does not fit together or the model.
        """
        config = self.config
        check_ids("labels", labels.masked_fill(labels == IGNORED, 0), config.vocab_size, "vocab_size")
        if windows is not None and windows.shape != words.shape:
            raise CtxError(f"windows is {tuple(windows.shape)}, but the input is {tuple(words.shape)}.")
        if config.output == "hierarchical-softmax":
            if paths is None or codes is None or paths.shape != codes.shape or paths.dim() != 4:
                raise CtxError("Hierarchical softmax needs `paths` and `codes`.", hint="use the objective's collator.")
            check_ids("paths", paths.clamp(min=0).flatten(1), config.vocab_size, "vocab_size")
            return [paths, codes]
        if negatives is None:
            negatives = torch.arange(config.vocab_size, device=words.device).expand(len(words), 1, -1)
        elif negatives.dim() != 3 or len(negatives) != len(words):
            raise CtxError(f"negatives is {tuple(negatives.shape)}, expected ({len(words)}, blocks, k).")
        check_ids("negatives", negatives.flatten(1), config.vocab_size, "vocab_size")
        return [negatives]

    def loss_by_scores(self, scores: Tensor, **batch: Tensor) -> Tensor:
        """Summed loss on a batch of a model that ignores the input: its logits are `scores`, (vocabulary,)."""
        blocks = self.blocks(batch.pop("input_ids"), batch.pop("attention_mask", None), batch.pop("labels"), **batch)
        ones = torch.ones(self.config.vocab_size, 1, device=scores.device)
        return window_prediction.summed_loss(blocks, ones, scores[:, None])

    @torch.no_grad()
    def _descend(self, learning_rate: float, *batch: Tensor | None) -> Tensor:
        """Follow the gradient of a batch, given as to `blocks`, in small updates; its summed loss.

        Each thread takes a part of the rows: compiled, word by word; else a few blocks at a time, where an operation is
        too short to be worth more than one thread.
        """
        words, outputs, config = self.get_input_embeddings().weight, self.outputs.weight, self.config

        def by_blocks(*rows: Tensor | None) -> Tensor:
            blocks = self.blocks(*rows)  # type: ignore[arg-type]
            size = config.update_blocks
            losses = [
                window_prediction.descend(blocks.part(start, start + size), words.data, outputs.data, learning_rate)
                for start in range(0, len(blocks), size)
            ]
            return torch.stack([words.new_zeros((), dtype=torch.float32), *losses]).sum()

        def by_words(ids: Tensor, mask: Tensor | None, labels: Tensor, windows: Tensor | None, *given: Any) -> Tensor:
            text = window_prediction.Text(
                ids, mask, labels, windows, self.check_prediction(ids, labels, windows, *given)
            )
            loss = window_prediction.descend_by_words(
                text,
                words.data,
                outputs.data,
                learning_rate,
                config.window,
                config.negative,
                config.architecture == "cbow",
            )
            return torch.tensor(loss, dtype=torch.float32)

        if words.device.type != "cpu":
            return by_blocks(*batch)
        update = by_words if is_compiled(words) else by_blocks
        return in_threads(config.update_threads, update, *batch)

    def _logits(self, states: Tensor, attention_mask: Tensor | None) -> Tensor | None:
        if self.config.output == "hierarchical-softmax":
            return None
        places = torch.arange(states.shape[1], device=states.device)
        distance = (places[:, None] - places).abs()
        near = ((distance > 0) & (distance <= self.config.window)).expand(len(states), -1, -1)
        if attention_mask is not None:
            near = near & (attention_mask != 0)[:, None]
        near = near.to(states.dtype)
        if self.config.architecture == "cbow":
            near = near / near.sum(-1, keepdim=True).clamp(min=1)
        return near @ states @ self.outputs.weight.T


class CtxWord2VecForSequenceClassification(heads.ForSequenceClassification, CtxWord2VecHeadModel):
    """Word vectors with a classifier or regressor on a row's pooled ones."""


class CtxWord2VecForTokenClassification(heads.ForTokenClassification, CtxWord2VecHeadModel):
    """Word vectors with a linear classifier on each."""
