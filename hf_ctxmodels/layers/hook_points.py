"""Hook points: modules without parameters, whose output forward hooks may replace.

No layer knows what is hooked to it. `hf_ctxmodels.downstream.adapters` registers such hooks here and on
`hf_ctxmodels.layers.transformer.ResidualSum`.
"""

from torch import nn


class HookPoint(nn.Identity):
    """The identity, named for forward hooks: the output of the embeddings, or the input of an output layer."""
