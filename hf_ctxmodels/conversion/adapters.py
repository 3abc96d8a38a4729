r"""Convert an AdapterHub adapter with pickled weights (pytorch_adapter.bin) to safetensors.

hf-ctxmodels convert adapter --adapter AdapterHub/bert-base-multilingual-cased-de-wiki_pfeiffer \
    --output adapters/de

Only tensors are loaded from pickles. Heads and fusions in the same folder are converted too.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

from hf_ctxmodels.conversion.released_files import read_tensors
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import REQUIRED, flag
from hf_ctxmodels.core.output_files import replacing, require_writable, wrap_write_errors, write_tensors
from hf_ctxmodels.downstream.adapters.adapter_checkpoints import resolve_folder
from hf_ctxmodels.downstream.adapters.adapter_files import (
    CONFIG_FILE,
    FUSION_CONFIG_FILE,
    HEAD_CONFIG_FILE,
    PICKLED_FILES,
    check_adapter_directory,
)

_CONFIGS = (CONFIG_FILE, HEAD_CONFIG_FILE, FUSION_CONFIG_FILE)


def convert_adapter(source: str | Path, output: str | Path) -> str:
    """Convert the adapter, head and fusion of a folder or Hub id to safetensors; returns a summary.

    Raises:
        CtxError: There is no adapter, a pickle holds more than tensors, or the output holds a model or is not writable.
    """
    folder, target = resolve_folder(source, [*_CONFIGS, *PICKLED_FILES.values()]), Path(output)
    files = {name: file for file, name in PICKLED_FILES.items() if (folder / name).is_file()}
    if not files:
        raise CtxError(
            "There is no pytorch_adapter.bin.", location=str(source), hint="use the folder or Hub id of an adapter."
        )
    check_adapter_directory(target)
    tensors_by_file = {file: read_tensors(folder / name) for name, file in files.items()}
    with wrap_write_errors(target):
        target.mkdir(parents=True, exist_ok=True)
        for file, tensors in tensors_by_file.items():
            with replacing(target / file) as temporary:
                write_tensors(temporary, {name: tensor.clone() for name, tensor in tensors.items()})
        for name in _CONFIGS:
            if (folder / name).is_file() and folder.resolve() != target.resolve():
                shutil.copyfile(folder / name, target / name)
    counts = [
        f"{file} ({sum(tensor.numel() for tensor in tensors.values()):,})" for file, tensors in tensors_by_file.items()
    ]
    return f"{', '.join(counts)} parameters: {source} -> {target}"


@dataclass
class AdapterConversion:
    """Arguments of the conversion."""

    adapter: str = flag(REQUIRED, "Folder or Hub id with pytorch_adapter.bin.")
    output: str = flag(REQUIRED, "Folder for the converted adapter.")

    def run(self) -> None:
        """Convert, and print a summary."""
        require_writable(self.output, "--output")
        print(convert_adapter(self.adapter, self.output))
