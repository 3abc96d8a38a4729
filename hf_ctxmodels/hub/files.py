"""Files of a model repository on the Hub: the checked files of one directory that `from_pretrained` reads."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from huggingface_hub import ModelCard
from transformers import PreTrainedConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from yaml import YAMLError

from hf_ctxmodels.core.adapter_support import ADAPTERS_FOLDER
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.output_files import check_output_directory, wrap_write_errors
from hf_ctxmodels.downstream.multitask import get_spec
from hf_ctxmodels.hub.card import CURVE_FILE, auto_class_of, loss_curve_png, model_card
from hf_ctxmodels.hub.local_paths import published_summary
from hf_ctxmodels.hub.stub import stub_files
from hf_ctxmodels.spec import FamilySpec
from hf_ctxmodels.tokenizers.base import check_tokenizer_matches_model
from hf_ctxmodels.training.model_loading import load_config, load_model, load_tokenizer
from hf_ctxmodels.training.summary import SUMMARY_FILE, TrainingSummary

CARD_FILE = "README.md"
_PICKLES = {".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt"}
_TRAINER_ARGUMENTS = "training_args.bin"  # written by transformers' Trainer; never published
_OPTIONAL = ("generation_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.json")


def describe_files(files: Mapping[str, str | bytes]) -> str:
    """List `repository_files`, one per line: size in bytes, path in the repository, and source."""
    lines = []
    for name, content in sorted(files.items()):
        size = len(content) if isinstance(content, bytes) else Path(content).stat().st_size
        lines.append(f"{size:>14,}  {name:<32}  {'generated' if isinstance(content, bytes) else content}")
    return "\n".join(lines)


def write_files(files: Mapping[str, str | bytes], output_dir: str, model: str, *, overwrite: bool = False) -> None:
    """Write `repository_files` of a model to a directory.

    Raises:
        CtxError: The directory is the model's directory, contains one of the files, or cannot be written.
    """
    directory = Path(output_dir)
    if directory.resolve() == Path(model).resolve():
        raise CtxError(
            "The output directory is the model's directory.",
            location=f"--output_dir {output_dir}",
            hint="use another directory.",
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
    """Collect the files of a repository.

    The weights are the files that `from_pretrained` reads. Files outside the directory are refused, also behind links.

    Returns:
        Path in the repository -> path of a local file, or content of a generated file.

    Raises:
        CtxError: The directory does not contain a complete model in safetensors with its tokenizer.
    """
    _refuse_incomplete(directory)
    _refuse_pickles(directory)
    for name in ("config.json", "tokenizer_config.json", SUMMARY_FILE, CARD_FILE):
        if (directory / name).exists():
            _resolve_inside(directory, name)
    weights = _weight_files(directory)
    config = load_config(directory)
    family = get_spec(config)
    _check_opens(directory, family, config)
    optional = [
        name for name in (*_OPTIONAL, *family.tokenizer.vocab_files_names.values()) if (directory / name).exists()
    ]
    names = (*weights, *optional, *_adapter_files(directory))
    files: dict[str, str | bytes] = {name: str(_resolve_inside(directory, name)) for name in names}
    files |= stub_files(directory, family)
    summary = published_summary(TrainingSummary.load(directory)) if (directory / SUMMARY_FILE).exists() else None
    if summary is not None:
        files[SUMMARY_FILE] = summary.as_json().encode()
    if (directory / CARD_FILE).exists():
        card = _load_card(directory / CARD_FILE)
    else:
        curve = loss_curve_png(summary) if summary is not None else None
        if curve is not None:
            files[CURVE_FILE] = curve
        card = model_card(directory, repo_id, summary, curve_image=CURVE_FILE if curve else None)
    files[CARD_FILE] = str(card).encode()
    return files


def _adapter_files(directory: Path) -> list[str]:
    """Files of the adapters saved with the model."""
    patterns = ("*.json", "*/*.json", "*/*.safetensors")
    paths = [path for pattern in patterns for path in (directory / ADAPTERS_FOLDER).glob(pattern)]
    return sorted(path.relative_to(directory).as_posix() for path in paths)


def _refuse_incomplete(directory: Path) -> None:
    for name, saved_object in (("config.json", "model"), ("tokenizer_config.json", "tokenizer")):
        if not (directory / name).is_file():
            raise CtxError(
                f"{name} is missing; the directory has no saved {saved_object}.",
                location=str(directory),
                hint=f"run {saved_object}.save_pretrained({str(directory)!r}).",
            )


def _refuse_pickles(directory: Path) -> None:
    pickles = [path.name for path in directory.iterdir() if path.suffix in _PICKLES and path.name != _TRAINER_ARGUMENTS]
    if pickles:
        raise CtxError(
            f"Pickle files are not published, because loading one runs its code: {', '.join(sorted(pickles))}.",
            location=str(directory),
            hint="save the weights with model.save_pretrained (safetensors) and remove these files.",
        )


def _check_opens(directory: Path, family: FamilySpec, config: PreTrainedConfig) -> None:
    """Open the tokenizer and the model, so that no damaged file is published."""
    check_tokenizer_matches_model(load_tokenizer(directory), config, location=str(directory))
    load_model(directory, auto_class_of(family, config)[1], config)


def _weight_files(directory: Path) -> list[str]:
    """Names of the weight files that `from_pretrained` reads: one file, or an index and its shards."""
    if (directory / SAFE_WEIGHTS_NAME).exists():
        return [SAFE_WEIGHTS_NAME]
    index = directory / SAFE_WEIGHTS_INDEX_NAME
    if not index.exists():
        raise CtxError(
            f"{SAFE_WEIGHTS_NAME} and {SAFE_WEIGHTS_INDEX_NAME} are missing; the directory has no saved model.",
            location=str(directory),
            hint=f"run model.save_pretrained({str(directory)!r}).",
        )
    try:
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        invalid = [name for name in shards if Path(name).name != name or not name.endswith(".safetensors")]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CtxError(
            f"Not an index of sharded weights: {error}.",
            location=str(index),
            hint="save the model again with save_pretrained.",
        ) from error
    missing = [name for name in shards if name not in invalid and not (directory / name).is_file()]
    if invalid or missing or not shards:
        problem = "names no file"
        if invalid:
            problem = f"names {invalid[0]!r}, which is not a safetensors file of its directory"
        elif missing:
            problem = f"names missing files: {', '.join(missing)}"
        raise CtxError(f"The index {problem}.", location=str(index), hint="save the model again with save_pretrained.")
    return [*sorted(shards), SAFE_WEIGHTS_INDEX_NAME]


def _resolve_inside(directory: Path, name: str) -> Path:
    """Path of a file in the directory, which may be a link into the blobs of the Hub's cache.

    Raises:
        CtxError: The file is a link out of the directory.
    """
    target, root = (directory / name).resolve(), directory.resolve()
    blobs = root.parent.parent / "blobs"  # links of <cache>/models--org--name/snapshots/<commit>/ lead there
    if not target.is_file() or not (target.is_relative_to(root) or target.parent == blobs):
        raise CtxError(
            f"{name} is not a file, or is a link out of the directory.",
            location=f"{directory / name} -> {target}",
            hint="copy the file into the directory to publish it.",
        )
    return directory / name


def _load_card(path: Path) -> ModelCard:
    """Load the README.md of the directory.

    Raises:
        CtxError: The file is not UTF-8, or its metadata is not YAML.
    """
    try:
        return ModelCard.load(path)
    except (ValueError, YAMLError) as error:
        raise CtxError(
            f"The card cannot be read: {error}.",
            location=str(path),
            hint="save it as UTF-8 with YAML metadata, or remove it to publish a generated card.",
        ) from error
