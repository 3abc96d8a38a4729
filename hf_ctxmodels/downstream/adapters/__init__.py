"""Bottleneck adapters in the Transformers of every family: Houlsby, Pfeiffer, parallel, MAD-X, AdapterFusion.

Files are those of the library adapters (AdapterHub). LoRA and its like are PEFT's.
"""

from hf_ctxmodels.downstream.adapters.configuration import ADAPTER_CONFIGS
from hf_ctxmodels.downstream.adapters.loading import (
    load_adapter,
    load_fusion,
    load_saved_adapters,
    save_adapter,
    save_fusion,
)
from hf_ctxmodels.downstream.adapters.merging import merge_adapter
from hf_ctxmodels.downstream.adapters.model import (
    add_adapter,
    add_fusion,
    delete_adapter,
    get_active_adapters,
    set_active_adapters,
    train_adapter,
    train_fusion,
)
from hf_ctxmodels.layers.adapters import BottleneckConfig, FusionConfig

__all__ = [
    "ADAPTER_CONFIGS",
    "BottleneckConfig",
    "FusionConfig",
    "add_adapter",
    "add_fusion",
    "delete_adapter",
    "get_active_adapters",
    "load_adapter",
    "load_fusion",
    "load_saved_adapters",
    "merge_adapter",
    "save_adapter",
    "save_fusion",
    "set_active_adapters",
    "train_adapter",
    "train_fusion",
]
