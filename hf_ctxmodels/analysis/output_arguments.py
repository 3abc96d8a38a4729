"""Flags for the output of an analysis."""

from dataclasses import asdict, dataclass
from typing import Any

from hf_ctxmodels.analysis.results import AnalysisResult
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

    def options(self) -> dict[str, Any]:
        """The flags, without the flags of the output."""
        return {name: value for name, value in asdict(self).items() if name not in ("output_dir", "overwrite")}

    def save(
        self, result: AnalysisResult, *, num_printed: int | None = None, summary: str = "results and figures"
    ) -> None:
        """Save a result, and print the output directory and the first tables with their titles, by default all."""
        result.save(self.output_dir)
        for table in result.tables[:num_printed]:
            print(f"{table.title}\n\n{table.markdown()}\n")
        print(f"{summary} in {self.output_dir}")
