"""Flags that the analyses of the vectors of words have in common, and the models that they name."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hf_ctxmodels.analysis.output_arguments import OutputArguments
from hf_ctxmodels.analysis.probing.probing_run import untrained_model
from hf_ctxmodels.architectures.word_alignment import WordPooling
from hf_ctxmodels.architectures.word_encoder import WordEncoder
from hf_ctxmodels.core.console import print_status
from hf_ctxmodels.core.constants import MAX_SEED
from hf_ctxmodels.core.devices import DeviceArguments
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import REQUIRED, flag
from hf_ctxmodels.downstream.adapters.adapter_checkpoints import load_model_and_tokenizer
from hf_ctxmodels.downstream.tasks.languages import set_language
from hf_ctxmodels.training.model_loading import check_sources


@dataclass
class WordAnalysisArguments(OutputArguments):
    """Models and output."""

    model: list[str] = flag(REQUIRED, "Directories or Hub ids of models, with their tokenizers.")
    text: list[str] = flag(
        (), "Sentences: CoNLL-U files, or .txt, .jsonl and .parquet files with a sentence per line or record."
    )
    pooling: WordPooling = flag("mean", "Tokens that represent a word: the mean of all, the first or the last one.")
    seeds: list[int] = flag((0,), "Seeds of the samples, over which results are averaged.")

    def __post_init__(self) -> None:
        if not self.seeds or not all(0 <= seed <= MAX_SEED for seed in self.seeds):
            raise CtxError(
                f"Seeds are numbers from 0 to {MAX_SEED}.", location="--seeds", hint="use, for example, 0 1."
            )

    def require_text(self) -> None:
        """Raise CtxError without `text`."""
        if not self.text:
            raise CtxError("No text.", location="--text", hint="use files with sentences.")

    def encoders(
        self, placement: DeviceArguments, *, untrained: bool = False, languages: Sequence[str] = ()
    ) -> Iterator[tuple[str, WordEncoder]]:
        """Load the models one by one; returns their short names and encoders. With `untrained`, each is followed by a
        model of the same configuration with initial weights. `languages` are the languages of the models' inputs."""
        check_sources(self.model)
        for index, (name, source) in enumerate(zip(short_names(self.model), self.model)):
            model, tokenizer = load_model_and_tokenizer(source, "AutoModel")
            placement.place_for_inference(model)
            if languages:
                set_language(model.config, tokenizer, languages[index], "--languages")
            print_status(f"{name}: {type(model).__name__}")
            yield name, WordEncoder(model.eval(), tokenizer, pooling=self.pooling)
            if untrained:
                initial = untrained_model(model)
                yield f"{name}, untrained", WordEncoder(initial, tokenizer, pooling=self.pooling)


def short_names(sources: Sequence[str]) -> list[str]:
    """The last component of each path, or as many as make the names unique; numbered if paths are equal. A directory
    that is called `model` has the name of its parent."""
    components = [Path(source).parts or (source,) for source in sources]
    components = [path[:-1] if path[-1] == "model" and len(path) > 1 else path for path in components]
    for depth in range(1, max(map(len, components)) + 1):
        names = ["/".join(path[-depth:]).strip("/") for path in components]
        if len(set(names)) == len(names):
            return names
    return [f"{name} ({number})" for number, name in enumerate(names, 1)]
