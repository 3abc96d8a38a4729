"""Bottleneck adapters for all Transformer families: Houlsby, Pfeiffer, parallel, MAD-X, AdapterFusion.

Files have AdapterHub's format. Use PEFT for LoRA and related methods.
"""

from hf_ctxmodels.downstream.adapters.adapter_checkpoints import (
    load_adapter,
    load_fusion,
    load_saved_adapters,
    save_adapter,
    save_fusion,
)
from hf_ctxmodels.downstream.adapters.configuration import ADAPTER_CONFIGS, BottleneckConfig, FusionConfig
from hf_ctxmodels.downstream.adapters.management import (
    add_adapter,
    add_fusion,
    delete_adapter,
    get_active_adapters,
    merge_adapter,
    set_active_adapters,
    train_adapter,
    train_fusion,
)
