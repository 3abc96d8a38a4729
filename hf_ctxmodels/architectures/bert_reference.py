"""Families with BERT's network and weight names, which the reference classes of BERT open."""

import re
from pathlib import Path
from typing import Any, ClassVar

import torch

from hf_ctxmodels.core.model import CtxPreTrainedModel


class ReferenceIsBert(CtxPreTrainedModel):
    """The part of a family's model base; the encoder is the attribute `bert`."""

    def reference_config(self) -> dict[str, Any]:
        """As of every model; the reference's classes are BERT's."""
        name = re.sub(r"^Ctx\w*?(?=For|Model$)", "Bert", type(self).__name__)
        return super().reference_config() | {"architectures": [name]}


class ExportsMaskedLM(CtxPreTrainedModel):
    """A pretraining head that transformers lacks, on the encoder `bert` and the masked-LM head `mlm_head`.

    Attributes:
        masked_lm_class: The family's masked-LM model.
    """

    reference_model_type: ClassVar[str | None] = None
    masked_lm_class: ClassVar[type[CtxPreTrainedModel]]

    def export_reference(self, save_directory: str | Path) -> None:
        """Write weights and a config.json that `transformers.BertForMaskedLM` opens, bit for bit: without the heads
        that transformers lacks.

        Args:
            save_directory: Folder to write config.json and model.safetensors to; created if needed.
        """
        with torch.device("meta"):
            part = self.masked_lm_class(self.config)
        part.bert, part.mlm_head = self.bert, self.mlm_head
        part.export_reference(save_directory)
