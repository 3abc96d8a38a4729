"""Explore one or two models in a browser: predictions, probabilities, attention, neighbors in context and senses.

    hf-ctxmodels analyze explore --model runs/bert runs/gpt2 --corpus corpus.txt

The page is served on this machine only, and loads nothing from elsewhere. With --corpus, the models encode its first
sentences before the page starts.
"""

import socket
import sys
from dataclasses import dataclass

from hf_ctxmodels.analysis.sentences import read_sentences
from hf_ctxmodels.analysis.word_arguments import short_names
from hf_ctxmodels.core.command_line import join_repeated, parse_arguments
from hf_ctxmodels.core.console import print_status
from hf_ctxmodels.core.devices import DeviceArguments
from hf_ctxmodels.core.errors import CtxError, require_packages
from hf_ctxmodels.core.flags import REQUIRED, check_range, flag
from hf_ctxmodels.training.model_loading import check_sources

HOST = "127.0.0.1"


@dataclass
class ExploreArguments:
    """Models and text."""

    model: list[str] = flag(REQUIRED, "Directories or Hub ids of one or two models.")
    corpus: list[str] = flag((), "Sentences for neighbors and senses: .txt, .jsonl, .parquet or .conllu files.")
    max_sentences: int = flag(2000, "Use the first N sentences of the corpus.")
    cache_dir: str | None = flag(None, "Directory for the vectors of the corpus, which are then read again.")
    port: int = flag(8765, "Port; 0 for any free one.")

    def __post_init__(self) -> None:
        check_range(self, "max_sentences", at_least=1)
        if len(self.model) > 2:
            raise CtxError(f"Got {len(self.model)} models, expected 1 or 2.", location="--model", hint="remove some.")
        check_range(self, "port", at_least=0, at_most=65535)


def main() -> None:
    """Open the models, encode the corpus, and serve the page until the command is interrupted."""
    argv = join_repeated(sys.argv[1:], {"model"})
    arguments, placement = parse_arguments(ExploreArguments, DeviceArguments, description=__doc__, argv=argv)
    require_packages("starlette", "uvicorn", extra="explore", location="hf-ctxmodels analyze explore")
    import uvicorn

    from hf_ctxmodels.analysis.explorer.explored_model import ExploredModel
    from hf_ctxmodels.analysis.explorer.server import create_app

    check_sources(arguments.model)
    with _bind(arguments.port) as server_socket:
        sentences = read_sentences(arguments.corpus)[: arguments.max_sentences] if arguments.corpus else []
        models = []
        for name, source in zip(short_names(arguments.model), arguments.model, strict=True):
            models.append(ExploredModel.open(name, source, placement))
            if sentences:
                models[-1].encode_corpus(sentences, arguments.cache_dir)
        server = uvicorn.Server(uvicorn.Config(create_app(models), log_level="warning"))
        print_status(f"http://{HOST}:{server_socket.getsockname()[1]}  (stop with Ctrl+C)")
        server.run(sockets=[server_socket])


def _bind(port: int) -> socket.socket:
    """A socket of this machine; raises CtxError if the port is not free."""
    server_socket = socket.socket()
    server_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server_socket.bind((HOST, port))
    except OSError as error:
        server_socket.close()
        raise CtxError(
            f"The port is not available: {error.strerror}.", location=f"--port {port}", hint="use another port, or 0."
        ) from error
    return server_socket
