"""The files of a model's repository on the Hub: those of one directory that `from_pretrained` reads, each checked."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from huggingface_hub import ModelCard
from transformers import PreTrainedConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from yaml import YAMLError

from hf_ctxmodels.core.adapter_files import ADAPTERS_FOLDER
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.output_files import check_output_directory, wrap_write_errors
from hf_ctxmodels.downstream.multitask import get_spec
from hf_ctxmodels.hub.card import CURVE_FILE, auto_class_of, loss_curve_png, model_card
from hf_ctxmodels.hub.local_paths import published_summary
from hf_ctxmodels.hub.stub import stub_files
from hf_ctxmodels.spec import FamilySpec
from hf_ctxmodels.tokenizers.base import check_tokenizer_matches_model
from hf_ctxmodels.training.metrics.summary import SUMMARY_FILE, TrainingSummary
from hf_ctxmodels.training.model_loading import load_config, load_model, load_tokenizer

CARD_FILE = "README.md"
_PICKLES = {".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt"}
_TRAINER_ARGUMENTS = "training_args.bin"  # transformers' Trainer leaves it beside the weights; it is never pushed
_OPTIONAL = ("generation_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.json")


def describe_files(files: Mapping[str, str | bytes]) -> str:
    """One line per file of `repository_files`: its size in bytes, its path in the repository, and its source."""
    lines = []
    for name, content in sorted(files.items()):
        size = len(content) if isinstance(content, bytes) else Path(content).stat().st_size
        lines.append(f"{size:>14,}  {name:<32}  {'generated' if isinstance(content, bytes) else content}")
    return "\n".join(lines)


def write_files(files: Mapping[str, str | bytes], output_dir: str, model: str, *, overwrite: bool = False) -> None:
    """Write what `repository_files` gave for `model` to a directory.

    Raises:
        CtxError: The directory is that of the model, holds some of the files, or cannot be written.
    """
    directory = Path(output_dir)
    if directory.resolve() == Path(model).resolve():
        raise CtxError(
            "The output directory is the model's own.", location=f"--output_dir {output_dir}", hint="give another one."
        )
    check_output_directory(directory, files, flag="--output_dir", overwrite=overwrite)
    with wrap_write_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, bytes):
                (directory / name).write_bytes(content)
            else:
                shutil.copyfile(content, directory / name)


def repository_files(directory: Path, repo_id: str) -> dict[str, str | bytes]:
    """The repository's files: path in the repository -> path of a local file, or content of a generated file.

    The weights are those that `from_pretrained` reads. No file lies outside `directory`; links are followed.

    Raises:
        CtxError: `directory` does not hold one complete model in safetensors with its tokenizer.
    """
    _refuse_incomplete(directory)
    _refuse_pickles(directory)
    for name in ("config.json", "tokenizer_config.json", SUMMARY_FILE, CARD_FILE):
        if (directory / name).exists():
            _inside(directory, name)
    weights = _weights(directory)
    config = load_config(directory)
    family = get_spec(config)
    _open_all(directory, family, config)
    optional = [
        name for name in (*_OPTIONAL, *family.tokenizer.vocab_files_names.values()) if (directory / name).exists()
    ]
    named = (*weights, *optional, *_adapters(directory))
    files: dict[str, str | bytes] = {name: str(_inside(directory, name)) for name in named}
    files |= stub_files(directory, family)
    summary = published_summary(TrainingSummary.load(directory)) if (directory / SUMMARY_FILE).exists() else None
    if summary is not None:
        files[SUMMARY_FILE] = summary.as_json().encode()
    if (directory / CARD_FILE).exists():
        card = _own_card(directory / CARD_FILE)
    else:
        curve = loss_curve_png(summary) if summary is not None else None
        if curve is not None:
            files[CURVE_FILE] = curve
        card = model_card(directory, repo_id, summary, curve_image=CURVE_FILE if curve else None)
    files[CARD_FILE] = str(card).encode()
    return files


def _adapters(directory: Path) -> list[str]:
    """The files of the adapters that lie in folders beside the model."""
    found = [
        path for kind in ("*.json", "*/*.json", "*/*.safetensors") for path in (directory / ADAPTERS_FOLDER).glob(kind)
    ]
    return sorted(path.relative_to(directory).as_posix() for path in found)


def _refuse_incomplete(directory: Path) -> None:
    for name, call in (("config.json", "model"), ("tokenizer_config.json", "tokenizer")):
        if not (directory / name).is_file():
            raise CtxError(
                f"{name} is missing, so this is no saved {call}.",
                location=str(directory),
                hint=f"write it with {call}.save_pretrained({str(directory)!r}).",
            )


def _refuse_pickles(directory: Path) -> None:
    pickles = [path.name for path in directory.iterdir() if path.suffix in _PICKLES and path.name != _TRAINER_ARGUMENTS]
    if pickles:
        raise CtxError(
            f"Pickles are never published, since opening one runs its code: {', '.join(sorted(pickles))}.",
            location=str(directory),
            hint="save the weights as safetensors (model.save_pretrained does) and remove these files.",
        )


def _open_all(directory: Path, family: FamilySpec, config: PreTrainedConfig) -> None:
    """Open tokenizer and model once, so that nothing damaged is pushed."""
    check_tokenizer_matches_model(load_tokenizer(directory), config, location=str(directory))
    load_model(directory, auto_class_of(family, config)[1], config)


def _weights(directory: Path) -> list[str]:
    """Names of the weight files that `from_pretrained` reads: one file, or an index and its shards."""
    if (directory / SAFE_WEIGHTS_NAME).exists():
        return [SAFE_WEIGHTS_NAME]
    index = directory / SAFE_WEIGHTS_INDEX_NAME
    if not index.exists():
        raise CtxError(
            f"Neither {SAFE_WEIGHTS_NAME} nor {SAFE_WEIGHTS_INDEX_NAME} is there, so this is no saved model.",
            location=str(directory),
            hint=f"write it with model.save_pretrained({str(directory)!r}).",
        )
    try:
        named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        strange = [name for name in named if Path(name).name != name or not name.endswith(".safetensors")]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CtxError(
            f"Not an index of weights: {error}.", location=str(index), hint="write the model again by save_pretrained."
        ) from error
    missing = [name for name in named if name not in strange and not (directory / name).is_file()]
    if strange or missing or not named:
        what = (
            f"{strange[0]!r}, which is no safetensors file beside it" if strange else f"{missing}, which is not there"
        )
        raise CtxError(
            f"The index names {what if named else 'no file'}.",
            location=str(index),
            hint="write the model again by save_pretrained; only files of its directory are published.",
        )
    return [*sorted(named), SAFE_WEIGHTS_INDEX_NAME]


def _inside(directory: Path, name: str) -> Path:
    """A file of the directory, or one that the Hub's cache keeps for it.

    Raises:
        CtxError: The file is a link to another place.
    """
    real, here = (directory / name).resolve(), directory.resolve()
    blobs = here.parent.parent / "blobs"  # <cache>/models--org--name/snapshots/<commit>/ links there
    if not real.is_file() or not (real.is_relative_to(here) or real.parent == blobs):
        raise CtxError(
            f"{name} is a link out of the directory, or no file.",
            location=f"{directory / name} -> {real}",
            hint="copy the file into the directory if it is to be published.",
        )
    return directory / name


def _own_card(path: Path) -> ModelCard:
    """The card that somebody has written.

    Raises:
        CtxError: it is not UTF-8, or its metadata are no YAML.
    """
    try:
        return ModelCard.load(path)
    except (ValueError, YAMLError) as error:
        raise CtxError(
            f"The card cannot be read: {error}.",
            location=str(path),
            hint="save it in UTF-8, with YAML between two lines of three dashes, or remove it: a card is then made.",
        ) from error
