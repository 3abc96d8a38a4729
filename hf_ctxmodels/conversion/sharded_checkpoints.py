r"""Merge a checkpoint whose weights are sharded over the processes of FSDP to a model that `from_pretrained` opens.

hf-ctxmodels convert checkpoint --checkpoint runs/gpt/checkpoint-1000 --output runs/gpt-1000

One process reads the shards, and holds one file of the output in memory. Checkpoints of other runs need no conversion.
"""

from dataclasses import dataclass
from pathlib import Path

from hf_ctxmodels.conversion.released_files import Conversion
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import REQUIRED, flag
from hf_ctxmodels.training.checkpoint_files import damaged_files, replacing_model
from hf_ctxmodels.training.sharded_checkpoints import is_sharded, merge_checkpoint


@dataclass(kw_only=True)
class CheckpointConversion(Conversion):
    """Arguments of the conversion."""

    checkpoint: str = flag(REQUIRED, "Checkpoint directory of a run with FSDP.")

    def run(self) -> None:
        """Merge, and print a summary.

        Raises:
            CtxError: The output contains a model, or the checkpoint is damaged or not sharded.
        """
        checkpoint, output = Path(self.checkpoint), Path(self.output)
        location = f"--checkpoint {checkpoint}"
        self.check_output()
        if not is_sharded(checkpoint):
            raise CtxError(
                "The directory is not a sharded checkpoint.",
                location=location,
                hint="pass a directory checkpoint-N of a run with FSDP; pass other checkpoints as --model directly.",
            )
        if damages := damaged_files(checkpoint):
            raise CtxError(
                f"The checkpoint is damaged: {'; '.join(damages)}.",
                location=location,
                hint="use an earlier checkpoint.",
            )
        with replacing_model(output) as temporary:
            merge_checkpoint(checkpoint, temporary)
        size = sum(path.stat().st_size for path in output.glob("model*.safetensors"))
        print(f"{size / 1e6:,.1f} MB of weights: {checkpoint} -> {output}")
