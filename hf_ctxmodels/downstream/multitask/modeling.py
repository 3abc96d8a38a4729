"""One encoder with the heads of several tasks (Liu et al. 2019, arXiv 1901.11504, section 3)."""

from typing import Any

from torch import Tensor, nn
from transformers.utils.generic import can_return_tuple

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.core.weights import is_quantized
from hf_ctxmodels.downstream.adapters.adapter_set import has_adapters
from hf_ctxmodels.downstream.multitask.configuration import CtxMultiTaskConfig
from hf_ctxmodels.registry import get_family


class CtxMultiTaskModel(CtxPreTrainedModel):
    """An encoder of any family, and for each task the family's head on it, with the task's own labels and dropout.

    A batch is of one task, which `forward` is told. The model is opened by `AutoModel`; `task(name)` gives the plain
    model of a task.

    Attributes:
        encoder: The shared encoder, with a pooler if a head reads one.
        heads: Task -> the family's model of it, whose encoder is `encoder`; its parameters are those of the head alone.

    Raises:
        CtxError: The heads of the tasks need different encoders.

    Example:
        >>> model = AutoModel.from_pretrained("runs/mtdnn")  # doctest: +SKIP
        >>> model(**tokenizer("A cat sat.", "An animal sat.", return_tensors="pt"), task="rte").logits  # doctest: +SKIP
        >>> model.task("rte").save_pretrained("runs/rte")  # doctest: +SKIP
    """

    config: CtxMultiTaskConfig
    base_model_prefix = "encoder"
    accepts_loss_kwargs = False  # batches of different tasks have different targets

    encoder: CtxPreTrainedModel
    heads: Any  # an nn.ModuleDict, whose members have no common type

    def __init__(self, config: CtxMultiTaskConfig) -> None:
        super().__init__(config)
        heads = {name: config.head_class(name)(config.task_config(name)) for name in config.tasks or {}}
        self.encoder = _shared_encoder(heads) if heads else _bare_encoder(config)
        self.heads = nn.ModuleDict(heads)
        for head in heads.values():
            # found by the head as its own, and no part of its parameters and weights
            del head._modules[head.base_model_prefix]
            head.__dict__[head.base_model_prefix] = self.encoder
            head.all_tied_weights_keys = {}
        targets = dict.fromkeys(name for head in heads.values() for name in head.loss_targets)
        self.loss_targets = tuple(targets)  # type: ignore[misc]  # of a class everywhere else
        self.post_init()

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """Weight of a head -> that of the encoder which it is tied to, as an output layer to the word embeddings."""
        return {
            f"heads.{task}.{name}": f"encoder.{tied.removeprefix(f'{head.base_model_prefix}.')}"
            for task, head in self.heads.items()
            if getattr(head.config, "tie_word_embeddings", False)
            for name, tied in (head._tied_weights_keys or {}).items()
        }

    def head(self, task: str) -> Any:
        """The head of a task, on the shared encoder.

        Raises:
            CtxError: There is no such task.
        """
        if not isinstance(task, str) or task not in self.heads:
            raise CtxError(f"The model has no task {task!r}.", hint=f"use one of {', '.join(self.heads)}.")
        return self.heads[task]

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        task: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """The output of a task's head, or without a task that of the encoder.

        Args:
            input_ids, attention_mask: As for the task's head.
            task: The task of the whole batch.
            kwargs: Other arguments of its head: further inputs, targets, `num_items_in_batch`.

        Returns:
            The head's output. In training its loss is multiplied by the task's weight; in evaluation it is that of
            the plain model.

        Raises:
            CtxError: There is no such task, or the head refuses the arguments.
        """
        given = {**kwargs, "input_ids": input_ids, "attention_mask": attention_mask, "return_dict": True}
        if task is None:
            return self.encoder(**given)
        output = self.head(task)(**given)
        if self.training and output.get("loss") is not None:
            output.loss = output.loss * self.config.loss_weight(task)
        return output

    def task_weights(self, task: str) -> dict[str, Tensor]:
        """The weights of a task's plain model, by their names there; a pooler is among them whether it is read or not.

        Raises:
            CtxError: There is no such task.
        """
        head = self.head(task)
        encoder = {f"{head.base_model_prefix}.{name}": value for name, value in self.encoder.state_dict().items()}
        return {**encoder, **head.state_dict()}

    def task(self, name: str) -> CtxPreTrainedModel:
        """The plain model of a task: the family's class, with a copy of the weights, and the same outputs.

        Raises:
            CtxError: There is no such task, or the model is quantized or has adapters.
        """
        if is_quantized(self):
            raise CtxError(
                "The weights of a quantized model are codes, which the plain model of a task has not.",
                hint="take it of the model in single precision, and quantize it then.",
            )
        if has_adapters(self.encoder):
            raise CtxError(
                "The encoder has adapters, without which the plain model of a task would give other outputs.",
                hint="save the adapters, take the model of the task without them, and give it them by load_adapter.",
            )
        weights = self.task_weights(name)
        plain = self.config.head_class(name)(self.config.task_config(name)).to(device=self.device, dtype=self.dtype)
        plain.load_state_dict({key: weights[key] for key in plain.state_dict()})
        return plain.train(self.training)

    def copy_encoder_weights(self, model: CtxPreTrainedModel) -> None:
        """Copy the weights of another model's encoder.

        Args:
            model: A model of the encoder's family, with a pooler if this one has one.
        """
        self.encoder.load_state_dict(model.base_model.state_dict())


def _bare_encoder(config: CtxMultiTaskConfig) -> CtxPreTrainedModel:
    return get_family(config.encoder).models["AutoModel"](config.encoder)


def _shared_encoder(heads: dict[str, Any]) -> CtxPreTrainedModel:
    """The encoder of one of the heads that serves all of them.

    Raises:
        CtxError: There is none: they differ in more than a pooler that some of them do not read.
    """
    largest = max(heads, key=lambda name: (heads[name].uses_pooler, len(heads[name].base_model.state_dict())))
    parts = _parts(heads[largest], with_pooler=True)
    for name, head in heads.items():
        if not _parts(head, with_pooler=head.uses_pooler) <= parts:
            raise CtxError(
                f"The tasks {largest} and {name} cannot share an encoder: {type(heads[largest]).__name__} and "
                f"{type(head).__name__} pool or read it in different ways.",
                hint="train them apart, or with another family.",
            )
    return heads[largest].base_model


def _parts(head: Any, with_pooler: bool) -> set[tuple[str, str, tuple[Any, ...]]]:
    """The modules of a head's encoder: name, class and the shapes of their own parameters."""
    return {
        (name, type(module).__name__, tuple(each.shape for each in module.parameters(recurse=False)))
        for name, module in head.base_model.named_modules()
        if with_pooler or name.split(".")[0] != "pooler"
    }
