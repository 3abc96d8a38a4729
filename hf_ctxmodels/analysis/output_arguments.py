"""Flags for the output of an analysis."""

from dataclasses import dataclass

from hf_ctxmodels.core.flags import REQUIRED, flag
from hf_ctxmodels.core.output_files import check_output_directory


@dataclass(kw_only=True)
class OutputArguments:
    """Output directory, which several analyses may share."""

    output_dir: str = flag(REQUIRED, "Directory for results and figures; several analyses may share it.")
    overwrite: bool = flag(False, "Replace the results of this analysis in --output_dir.")

    def check_output(self, analysis: str) -> None:
        """Raise CtxError if the output directory has results of this analysis, unless they may be replaced."""
        check_output_directory(self.output_dir, [f"{analysis}.json"], flag="--output_dir", overwrite=self.overwrite)
