"""Feature-based use of an encoder: its weights stay as they are, and the heads learn from its states (Peters et al.
2018, section 3.3; Devlin et al. 2019, section 5.3)."""

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import reject_flag_conflicts
from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.training.arguments import LoopArguments


def freeze_encoder(model: CtxPreTrainedModel) -> None:
    """Freeze the encoder; its pooler, if it has one, is trained with the heads.

    The encoder has no dropout from now on (`model.is_encoder_frozen`), so that an example has the same states in every
    epoch. Tied weights are frozen with the embeddings.

    Raises:
        CtxError: The model has nothing above its layers that is not tied to them.

    Example:
        >>> model = AutoModelForTokenClassification.from_pretrained("runs/bert", num_labels=9)  # doctest: +SKIP
        >>> freeze_encoder(model)  # doctest: +SKIP
        >>> Trainer(model, arguments, train_dataset=data).train()  # doctest: +SKIP
    """
    encoder = model.base_model
    frozen = [each for name, each in encoder.named_parameters() if not name.startswith("pooler.")]
    kept = {id(each) for each in frozen}
    if encoder is model or not frozen or all(id(each) in kept for each in model.parameters()):
        raise CtxError(
            f"{type(model).__name__} has nothing to train beside its encoder.",
            hint="freeze the encoder of a model with a head.",
        )
    for parameter in frozen:
        parameter.requires_grad_(False)
    model.is_encoder_frozen = True
    model.train(model.training)


def refuse_layerwise_flags(loop: LoopArguments) -> None:
    """Raise CtxError for flags that treat each layer in its own way, where all of them are frozen."""
    rules = (
        (
            loop.layerwise_lr_decay != 1,
            "--layerwise_lr_decay",
            "The layers of a frozen encoder have no learning rates.",
        ),
        (loop.unfreeze_steps, "--unfreeze_steps", "The layers of a frozen encoder are never unfrozen."),
    )
    told = [(broken, f"--freeze encoder {flag} {getattr(loop, flag[2:]):g}", what) for broken, flag, what in rules]
    reject_flag_conflicts(told, "give --layerwise_lr_decay 1 --unfreeze_steps 0, also where a recipe has other values.")
