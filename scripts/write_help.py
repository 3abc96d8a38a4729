"""Write the help texts of all commands to hf_ctxmodels/cli/help, after a change of flags.

    python scripts/write_help.py

`hf-ctxmodels COMMAND --help` prints these files without importing the package; tests/test_cli.py compares them with the
parsers.
"""

import sys
from contextlib import redirect_stdout, suppress
from io import StringIO

from hf_ctxmodels.core.output_files import write_text_file
from hf_ctxmodels_cli import HELP_FOLDER, PROGRAM, help_file, leaf_commands, run


def help_of_parser(words: str) -> str:
    """The help text that the parser of a command prints."""
    sys.argv = [PROGRAM, *words.split(), "--help"]
    with redirect_stdout(StringIO()) as output, suppress(SystemExit):
        run()
    return output.getvalue()


def main() -> None:
    """Write the file of each command, and remove the files of removed commands."""
    texts = {help_file(words): help_of_parser(words) for words in leaf_commands()}
    for file in set(HELP_FOLDER.glob("*.txt")) - set(texts):
        file.unlink()
    for file, text in texts.items():
        write_text_file(file, text)
    print(f"{len(texts)} help texts in {HELP_FOLDER}")


if __name__ == "__main__":
    main()
