"""Write the results of analyses as one HTML page, which works offline and can be mailed.

    hf-ctxmodels analyze report analyses --output report.html

The directory holds the JSON files of `hf-ctxmodels analyze` commands, which may share it: their --output_dir.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from hf_ctxmodels.analysis.report.page import load_results, render_report
from hf_ctxmodels.core.command_line import parse_arguments, with_first_flag
from hf_ctxmodels.core.console import format_number
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import REQUIRED, flag
from hf_ctxmodels.core.output_files import check_output_file, write_text_file


@dataclass
class ReportArguments:
    """Results and output."""

    input_dir: str = flag(REQUIRED, "Directory of results; the flag can be left out if it comes first.")
    output: str = flag(REQUIRED, "File of the page, .html.")
    title: str = flag("Analysis report", "Title of the page.")
    overwrite: bool = flag(False, "Replace --output if it exists.")

    def __post_init__(self) -> None:
        if not self.output.endswith((".html", ".htm")):
            raise CtxError("The output is an HTML file.", location=f"--output {self.output}", hint="end it in .html.")
        if not Path(self.input_dir).is_dir():
            raise CtxError(
                "There is no such directory.",
                location=f"--input_dir {self.input_dir}",
                hint="use the --output_dir of `hf-ctxmodels analyze` commands.",
            )


def main() -> None:
    """Read the results and write the page."""
    argv = with_first_flag(sys.argv[1:], "input_dir")
    (arguments,) = parse_arguments(ReportArguments, description=__doc__, argv=argv, essential=("input_dir", "output"))
    check_output_file(arguments.output, flag="--output", overwrite=arguments.overwrite)
    results = load_results(arguments.input_dir)
    page = render_report(results, title=arguments.title)
    write_text_file(arguments.output, page)
    print(f"{len(results)} results in {arguments.output}, {format_number(len(page.encode()))}B")
