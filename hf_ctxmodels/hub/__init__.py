"""Publishing: what belongs into a repository (`files`), the push (`publish`), the card (`card`), the stub (`stub`)."""

from hf_ctxmodels.hub.card import loss_curve_png, model_card
from hf_ctxmodels.hub.publish import publish
from hf_ctxmodels.hub.stub import stub_files

__all__ = ["loss_curve_png", "model_card", "publish", "stub_files"]
