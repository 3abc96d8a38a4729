"""The word vectors of another model, for ELMo's task heads (Peters et al. 2018, section 3.3)."""

import numpy as np
import torch
from transformers import AutoModel, AutoTokenizer

from hf_ctxmodels.errors import CtxError
from hf_ctxmodels.layers.spelled_vectors import SpelledVectors
from hf_ctxmodels.models.elmo.configuration_elmo import CtxElmoConfig
from hf_ctxmodels.models.elmo.tokenization_elmo import characters_of


def fill_from_model(module: SpelledVectors, config: CtxElmoConfig) -> None:
    """Give a head the words and vectors of `config.static_model`.

    Raises:
        CtxError: it is not given, or has no fixed vector for each word.
    """
    from hf_ctxmodels.word_vectors import WordVectors  # it imports the registry, and that all families

    source = config.static_model
    if source is None:
        raise CtxError(
            f"static_size={config.static_size}, but static_model is not given.", mend="name the model of the vectors."
        )
    found = WordVectors.of_model(AutoModel.from_pretrained(source), AutoTokenizer.from_pretrained(source))
    width = config.max_characters_per_token
    spelled = np.array([characters_of(word, width) for word in found.words], dtype=np.int64)
    module.fill(torch.from_numpy(spelled), torch.from_numpy(found.matrix))
