"""Publishing to a Hub: what is pushed (`publish`), the model card (`card`) and the stub for remote code (`stub`)."""

from hf_ctxmodels.hub.card import loss_curve_png, model_card
from hf_ctxmodels.hub.publish import publish
from hf_ctxmodels.hub.stub import stub_files

__all__ = ["loss_curve_png", "model_card", "publish", "stub_files"]
