"""Suite `prompts`: choices of 16-shot prompts by `ContinuationScorer`, compared with lm-evaluation-harness (`hf`).

Expected before the first run. The harness computes prompt and choice together for each choice of several tokens, and
the logits of all positions:

| examples | choices | tokens computed by the harness / by the scorer | speed |
|---|---|---|---|
| drawn for each document | 2 of one token | 1: the harness joins choices of one token | 1.2x: fewer logits |
| drawn for each document | 4 of several tokens | 4 | 4x |
| the same for all documents | 2 of one token | about 13 | 8x: short batches, and keys are copied |
| the same for all documents | 4 of several tokens | about 40 | 20x |
"""

import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import GPT2LMHeadModel

from benchmarks.measure import Measurement, Step, measure
from benchmarks.settings import Settings
from hf_ctxmodels.architectures.continuations import ContinuationScorer
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.demo_corpus import demo_documents
from hf_ctxmodels.models.gpt2 import CtxGpt2Config, CtxGpt2ForCausalLM, CtxGpt2Tokenizer

NUM_SHOTS, NUM_DOCUMENTS, REFERENCE_BATCH_SIZE = 16, 24, 16
SHAPES = {"4 x 256": (4, 256), "6 x 384": (6, 384)}
CHOICES = {
    "2 of one token": (" the", " of"),
    "4 of several tokens": (" sports and games", " world politics", " business and trade", " science and technology"),
}
SETTING = (
    f"scores of the choices of {NUM_DOCUMENTS} prompts with {NUM_SHOTS} examples, sentences of 8 to 24 words of the "
    "demo text, by a GPT-2 with random weights and a vocabulary of 8,000. The reference is `HFLM.loglikelihood` of "
    f"lm-evaluation-harness on transformers' GPT-2 with the same weights, batch size {REFERENCE_BATCH_SIZE}. The "
    "numbers are equal within 1e-3 nats. Examples are the same for all prompts, or drawn for each prompt."
)
_HEADER = (
    "| model | examples | choices | harness | hf_ctxmodels | speed | peak memory, harness | hf_ctxmodels |\n"
    "|---|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True)
class Result:
    """One row of the table."""

    model: str
    examples: str
    choices: str
    reference: Measurement
    scorer: Measurement


def run(settings: Settings) -> Iterator[Result]:
    """Score the choices of prompts."""
    sentences = [sentence for document in demo_documents() for sentence in document]
    tokenizer = CtxGpt2Tokenizer.train(sentences, vocab_size=8000)
    texts = [sentence for sentence in sentences if 8 <= len(sentence.split()) <= 24]
    for name, (layers, width) in SHAPES.items():
        if not settings.select_row(name):
            continue
        torch.manual_seed(0)
        config = CtxGpt2Config(
            vocab_size=len(tokenizer), num_hidden_layers=layers, hidden_size=width, num_attention_heads=width // 64,
            intermediate_size=4 * width, initializer_range=0.05, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        model = CtxGpt2ForCausalLM(config).to(settings.device).eval()
        with tempfile.TemporaryDirectory() as folder:
            model.export_reference(folder)
            reference = GPT2LMHeadModel.from_pretrained(folder, attn_implementation=settings.reference_attention)
            reference.to(settings.device).eval()
        harness = _harness_model(reference, tokenizer)
        scorer = ContinuationScorer(model, tokenizer)
        for examples in ("the same", "drawn"):
            for choices in CHOICES:
                requests = prompts(texts, CHOICES[choices], same_examples=examples == "the same")

                def score(requests: Sequence = requests, scorer: ContinuationScorer = scorer) -> list[float]:
                    with settings.autocast():
                        return [score.log_probability for score in scorer.score(requests)]

                def score_by_harness(requests: Sequence = requests, harness: Any = harness) -> list[float]:
                    with settings.autocast():
                        return [value for value, _ in harness.loglikelihood(_instances(requests), disable_tqdm=True)]

                if settings.dtype == "float32":
                    np.testing.assert_allclose(score(), score_by_harness(), atol=1e-3)
                steps: dict[str, Step] = {"reference": score_by_harness, "scorer": score}
                measurements = measure(steps, settings)
                yield Result(name, examples, choices, measurements["reference"], measurements["scorer"])


def prompts(texts: Sequence[str], choices: Sequence[str], *, same_examples: bool) -> list[tuple[str, str]]:
    """(prompt, choice) pairs; a prompt has examples with random labels, and the text to classify."""
    draw = random.Random(0)

    def examples() -> str:
        shots = draw.sample(texts, NUM_SHOTS)
        return "".join(f"Text: {text}\nTopic:{draw.choice(choices)}\n\n" for text in shots)

    first, documents = examples(), draw.sample(texts, NUM_DOCUMENTS)
    contexts = [f"{first if same_examples else examples()}Text: {text}\nTopic:" for text in documents]
    return [(context, choice) for context in contexts for choice in choices]


def _harness_model(model: GPT2LMHeadModel, tokenizer: CtxGpt2Tokenizer) -> Any:
    try:
        from lm_eval.models.huggingface import HFLM
    except ImportError as error:
        hint = "pip install 'lm-eval[hf]'."
        raise CtxError("The suite needs lm-evaluation-harness.", location="--suite prompts", hint=hint) from error
    return HFLM(
        pretrained=model,
        tokenizer=tokenizer,
        batch_size=REFERENCE_BATCH_SIZE,
        device=str(model.device),
        backend="causal",
    )


def _instances(requests: Sequence[tuple[str, str]]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance("loglikelihood", {}, request, index) for index, request in enumerate(requests)]


def table(results: Sequence[Result]) -> str:
    """Format results as Markdown."""
    return "\n".join([_HEADER, *(_row(result) for result in results)])


def _row(result: Result) -> str:
    reference, scorer = result.reference, result.scorer
    cells = [
        *(result.model, result.examples, result.choices),
        *(f"{item.seconds:.2f} s ± {item.spread / 2:.0%}" for item in (reference, scorer)),
        f"{reference.seconds / scorer.seconds:.1f}x",
        *(f"{item.peak_bytes / 1e6:,.0f} MB" for item in (reference, scorer)),
    ]
    return f"| {' | '.join(cells)} |"
