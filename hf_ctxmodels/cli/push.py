"""Publish a trained model: `hf-ctxmodels push --model runs/bert --repo_id org/name`.

The files are listed before they are pushed; with --dry_run they are only listed, and with --output_dir they are written
to a directory, which the Auto classes open like the repository.
"""

from dataclasses import dataclass
from pathlib import Path

from hf_ctxmodels.core.command_line import parse_arguments
from hf_ctxmodels.core.console import format_count
from hf_ctxmodels.core.flags import REQUIRED, flag
from hf_ctxmodels.core.output_files import check_output_directory
from hf_ctxmodels.hub.repository import (
    CARD_FILE,
    describe_files,
    push_files,
    repository_files,
    write_files,
)


@dataclass
class PushArguments:
    """Model and repository."""

    model: str = flag(REQUIRED, "Directory with the saved model and its tokenizer.")
    repo_id: str = flag(REQUIRED, "Repository on the Hub, organization/name; created if missing.")
    private: bool = flag(False, "Create the repository private.")
    revision: str | None = flag(None, "Branch, created if missing; by default main.")
    commit_message: str | None = flag(None, "First line of the commit.")
    token: str | None = flag(None, "Token with write access; by default HF_TOKEN or the token of `hf auth login`.")
    dry_run: bool = flag(False, "Only list the files.")
    output_dir: str | None = flag(None, "Write the files to this directory instead of pushing them.")
    overwrite: bool = flag(False, "Replace files of the same names in --output_dir.")


def main() -> None:
    """List the files, push them, and print the URL of the commit."""
    (arguments,) = parse_arguments(PushArguments, description=__doc__)
    if arguments.output_dir is not None:  # before the model is opened
        names = ("config.json", CARD_FILE)
        directory, overwrite = arguments.output_dir, arguments.overwrite
        check_output_directory(directory, names, flag="--output_dir", overwrite=overwrite, model=arguments.model)
    files = repository_files(Path(arguments.model), arguments.repo_id)
    print(describe_files(files))
    if arguments.dry_run:
        print(f"{format_count(len(files), 'file')}; nothing was pushed (--dry_run)")
        return
    if arguments.output_dir is not None:
        write_files(files, arguments.output_dir, arguments.model, overwrite=arguments.overwrite)
        number = format_count(len(files), "file")
        print(f"{number} written to {arguments.output_dir}; nothing was pushed (--output_dir)")
        return
    options = {name: getattr(arguments, name) for name in ("private", "revision", "commit_message", "token")}
    commit = push_files(files, arguments.repo_id, **options)
    print(f"published {arguments.model} as {arguments.repo_id}: {commit.commit_url}")
