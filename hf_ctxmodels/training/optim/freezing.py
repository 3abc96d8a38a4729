"""Feature-based use of an encoder: its weights are frozen and the heads are trained on its hidden states (Peters et al.
2018, section 3.3; Devlin et al. 2019, section 5.3)."""

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.training.arguments import LoopArguments


def freeze_encoder(model: CtxPreTrainedModel) -> None:
    """Freeze the encoder; its pooler, if it has one, is trained with the heads.

    This disables the encoder's dropout (`model.is_encoder_frozen`), so that an example has the same hidden states in
    each epoch. Tied weights are frozen with the embeddings.

    Raises:
        CtxError: The model has no weights outside the encoder that are not tied to it.

    Example:
        >>> model = AutoModelForTokenClassification.from_pretrained("runs/bert", num_labels=9)  # doctest: +SKIP
        >>> freeze_encoder(model)  # doctest: +SKIP
        >>> Trainer(model, arguments, train_dataset=data).train()  # doctest: +SKIP
    """
    encoder = model.base_model
    frozen = [parameter for name, parameter in encoder.named_parameters() if not name.startswith("pooler.")]
    frozen_ids = {id(parameter) for parameter in frozen}
    if encoder is model or not frozen or all(id(parameter) in frozen_ids for parameter in model.parameters()):
        raise CtxError(
            f"{type(model).__name__} has no trainable weights outside its encoder.",
            hint="freeze the encoder of a model with a head.",
        )
    for parameter in frozen:
        parameter.requires_grad_(False)
    model.is_encoder_frozen = True
    model.train(model.training)


def check_layerwise_flags(loop: LoopArguments) -> None:
    """Raise CtxError for a learning rate by layer, where all layers are frozen."""
    if loop.layerwise_lr_decay != 1:
        raise CtxError(
            "The layers of a frozen encoder have no learning rates.",
            location=f"--freeze encoder --layerwise_lr_decay {loop.layerwise_lr_decay:g}",
            hint="pass --layerwise_lr_decay 1, also if a recipe has another value.",
        )
