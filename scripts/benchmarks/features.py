"""Suite `features`: vectors of words from a BERT by `WordEncoder`, compared with a loop over transformers' BERT."""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import BertModel

from benchmarks.measure import Measurement, Step, measure
from benchmarks.recurrent_references import demo_sentences
from benchmarks.settings import Settings
from hf_ctxmodels.architectures.word_encoder import WordEncoder
from hf_ctxmodels.models.bert import CtxBertConfig, CtxBertModel, CtxBertTokenizer

NUM_SENTENCES, BATCH_SIZE = 2000, 32
SHAPE = {"num_hidden_layers": 6, "hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 1536}
SETTING = (
    f"vectors of the words of {NUM_SENTENCES:,} sentences of the demo text, 22 words on average, by a BERT of 6 layers "
    f"of width 384 with random weights. The reference sorts the sentences by length, encodes {BATCH_SIZE} at a time "
    "with padding by transformers' BertModel, and averages the states of the tokens of each word, found by `word_ids`."
)
_HEADER = (
    "| layers | transformers | hf_ctxmodels | speed | peak memory, transformers | hf_ctxmodels |\n"
    "|---|---|---|---|---|---|"
)


@dataclass(frozen=True)
class Result:
    """One row of the table.

    Attributes:
        layers: "last" or "all".
        reference, encoder: Measurements of the loop and of `WordEncoder`.
    """

    layers: str
    reference: Measurement
    encoder: Measurement


def run(settings: Settings) -> Iterator[Result]:
    """Encode with the last layer and with all layers; the names of the rows are "last" and "all"."""
    sentences = list(demo_sentences())
    tokenizer = CtxBertTokenizer.train(sentences, vocab_size=8000)
    words = [sentence.split() for sentence in sentences[:NUM_SENTENCES]]
    torch.manual_seed(0)
    model = CtxBertModel(CtxBertConfig(vocab_size=len(tokenizer), **SHAPE)).to(settings.device).prepare_for_inference()
    with tempfile.TemporaryDirectory() as folder:
        model.export_reference(folder)
        reference = BertModel.from_pretrained(folder, attn_implementation=settings.reference_attention)
        reference.to(settings.device).eval()
    for layers in ("last", "all"):
        if not settings.select_row(layers):
            continue
        encoder = WordEncoder(model, tokenizer, layers="all" if layers == "all" else [-1])

        def encode(encoder: WordEncoder = encoder) -> Tensor:
            with settings.autocast():
                return encoder.encode_corpus(words, progress=False).vectors

        def encode_by_reference(layers: str = layers) -> Tensor:
            with settings.autocast():
                return reference_vectors(reference, tokenizer, words, layers == "all")

        steps: dict[str, Step] = {"reference": encode_by_reference, "encoder": encode}
        if settings.dtype == "float32":
            torch.testing.assert_close(encode(), encode_by_reference(), atol=1e-4, rtol=1e-3)
        measurements = measure(steps, settings)
        yield Result(layers, measurements["reference"], measurements["encoder"])


@torch.no_grad()
def reference_vectors(model: BertModel, tokenizer: CtxBertTokenizer, sentences: Sequence, all_layers: bool) -> Tensor:
    """(words, layers, hidden) vectors of the words of all sentences, as a user of transformers computes them."""
    order = sorted(range(len(sentences)), key=lambda index: len(sentences[index]))
    vectors: dict[int, Tensor] = {}
    for start in range(0, len(order), BATCH_SIZE):
        indices = order[start : start + BATCH_SIZE]
        batch = tokenizer(
            [sentences[index] for index in indices],
            is_split_into_words=True, padding=True, truncation=True, max_length=512, return_tensors="pt",
        )  # fmt: skip
        outputs = model(**batch.to(model.device), output_hidden_states=all_layers)
        states = torch.stack(outputs.hidden_states if all_layers else (outputs.last_hidden_state,), 2)
        for row, index in enumerate(indices):
            word_ids = batch.word_ids(row)
            rows = []
            for word in range(len(sentences[index])):
                positions = [position for position, number in enumerate(word_ids) if number == word]
                rows.append(states[row, positions].mean(0))
            vectors[index] = torch.stack(rows)
    return torch.cat([vectors[index] for index in range(len(sentences))]).cpu()


def table(results: Sequence[Result]) -> str:
    """Format results as Markdown."""
    return "\n".join([_HEADER, *(_row(result) for result in results)])


def _row(result: Result) -> str:
    reference, encoder = result.reference, result.encoder
    cells = [
        result.layers,
        *(f"{item.seconds:.1f} s ± {item.spread / 2:.0%}" for item in (reference, encoder)),
        f"{reference.seconds / encoder.seconds:.2f}x",
        *(f"{item.peak_bytes / 1e6:,.0f} MB" for item in (reference, encoder)),
    ]
    return f"| {' | '.join(cells)} |"
