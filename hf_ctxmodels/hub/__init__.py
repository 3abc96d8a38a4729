"""Publishing on the Hub: the files of a repository, the model card and the stub for `trust_remote_code=True`."""

from hf_ctxmodels.hub.card import loss_curve_png, model_card
from hf_ctxmodels.hub.repository import push_files, repository_files, stub_files
