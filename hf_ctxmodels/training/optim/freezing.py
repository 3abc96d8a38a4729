"""Feature-based use of an encoder: its weights stay as they are, and the heads learn from its states (Peters et al.
2018, section 3.3; Devlin et al. 2019, section 5.3)."""

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.model import CtxPreTrainedModel


def freeze_encoder(model: CtxPreTrainedModel) -> None:
    """Freeze the encoder; its pooler, if it has one, is trained with the heads.

    The encoder has no dropout from now on (`model.encoder_frozen`), so that an example has the same states in every
    epoch. Tied weights are frozen with the embeddings.

    Raises:
        CtxError: The model has nothing above its layers.

    Example:
        >>> model = AutoModelForTokenClassification.from_pretrained("runs/bert", num_labels=9)  # doctest: +SKIP
        >>> freeze_encoder(model)  # doctest: +SKIP
        >>> Trainer(model, arguments, train_dataset=data).train()  # doctest: +SKIP
    """
    encoder = model.base_model
    frozen = [each for name, each in encoder.named_parameters() if not name.startswith("pooler.")]
    if encoder is model or not frozen:
        raise CtxError(
            f"{type(model).__name__} has nothing to train beside its encoder.",
            hint="freeze the encoder of a model with a head.",
        )
    for parameter in frozen:
        parameter.requires_grad_(False)
    model.encoder_frozen = True
    model.train(model.training)
