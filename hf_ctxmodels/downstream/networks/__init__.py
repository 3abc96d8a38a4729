"""Contextual vectors as features of task networks."""

from hf_ctxmodels.downstream.networks.features import ContextualFeatures, embed_words, encode_words
