r"""Evaluate the word vectors of a model, or print nearest neighbours and analogies.

    hf-ctxmodels evaluate words --model runs/word2vec --similarity EN-WS-353-ALL.txt EN-SIMLEX-999.txt \
        --analogies questions-words.txt.gz --most_frequent 30000
    hf-ctxmodels evaluate words --model runs/word2vec --near king --analogy man king woman
"""

from dataclasses import dataclass, field
from pathlib import Path

from transformers import AutoModel

from hf_ctxmodels.conversion.word_vectors import WordVectors
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import flag
from hf_ctxmodels.evaluation import (
    WordSpace,
    evaluate_analogies,
    evaluate_similarity,
    read_analogies,
    read_similarities,
)
from hf_ctxmodels.training.model_loading import load_config, load_model, load_tokenizer
from hf_ctxmodels.training.recipe import parse_arguments


@dataclass
class EvaluationArguments:
    """Model and tests."""

    model: str = field(metadata={"help": "Checkpoint directory or Hub id of a model of word vectors."})
    similarity: list[str] = flag((), "Files with two words and a gold score per line, separated by tabs.")
    analogies: list[str] = flag((), "Files with four words per line, in sections `: name`.")
    most_frequent: int | None = flag(
        None, "Restrict the candidate answers to the N most frequent words; by default all words."
    )
    near: list[str] = flag((), "Words whose nearest neighbours are printed.")
    analogy: list[str] = flag((), "Three words a b c: print the words that are to c as b is to a.")


def main() -> None:
    """Evaluate and print."""
    (arguments,) = parse_arguments(EvaluationArguments, description=__doc__)
    if len(arguments.analogy) not in (0, 3):
        raise CtxError(
            f"Expected three words for an analogy, got {len(arguments.analogy)}.",
            location="--analogy",
            hint="use, for example, man king woman.",
        )
    model = load_model(arguments.model, AutoModel.__name__, load_config(arguments.model))
    space = WordSpace(WordVectors.from_model(model, load_tokenizer(arguments.model)), arguments.most_frequent)
    for path in arguments.similarity:
        result = evaluate_similarity(space, read_similarities(path))
        print(f"{Path(path).name:<28} spearman {result.spearman:.4f}  {result.covered} of {result.pairs} pairs")
    for path in arguments.analogies:
        answers = evaluate_analogies(space, read_analogies(path))
        for name, (correct, covered, total) in [*answers.sections.items(), ("all", answers.total)]:
            accuracy = f"{correct / covered:.1%}" if covered else "-"
            print(f"{name:<28} accuracy {accuracy:>6}  {covered} of {total} questions")
    for word in arguments.near:
        print(f"{word}: " + ", ".join(f"{neighbour} {cosine:.3f}" for neighbour, cosine in space.most_similar(word)))
    if arguments.analogy:
        a, b, c = arguments.analogy
        print(f"{a} : {b} = {c} : " + ", ".join(f"{d} {cosine:.3f}" for d, cosine in space.analogy(a, b, c)))
