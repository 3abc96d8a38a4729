r"""Convert a released MASS to a model and its tokenizer, from BPE codes (translation) or a vocabulary (summaries).

python -m hf_ctxmodels.conversion.mass --checkpoint mass_ft_enfr_1024.pth --codes codes_enfr --language fr \
    --output runs/mass
python -m hf_ctxmodels.conversion.mass --checkpoint mass-base-uncased.pt --vocabulary dict.txt --output runs/mass
"""

import re
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from hf_ctxmodels.conversion.fastbpe import read_codes, to_native_subword
from hf_ctxmodels.conversion.saving import check_output_free, save_converted_model
from hf_ctxmodels.conversion.torch_lstm import read_torch_file
from hf_ctxmodels.core.errors import CtxError, run_script
from hf_ctxmodels.core.flags import flag
from hf_ctxmodels.data.text_files import read_lines
from hf_ctxmodels.models.bert.tokenization_bert import CtxBertTokenizer
from hf_ctxmodels.models.mass.configuration_mass import CtxMassConfig
from hf_ctxmodels.models.mass.modeling_mass import CtxMassForConditionalGeneration
from hf_ctxmodels.models.mass.tokenization_mass import CtxMassTokenizer
from hf_ctxmodels.training.recipe import parse_arguments

_HEAD_DIM = 64  # in the released summarization models

RenamingRules = Sequence[tuple[str, str, int | None]]
"""(pattern of a released name, native name, index of the weight within a fused projection or None)."""

_SUFFIX = r"\.(weight|bias)"
_XLM_RULES: RenamingRules = (
    (r"embeddings\.weight", "word_embeddings.weight", None),
    (r"position_embeddings\.weight", "position_embeddings.weight", None),
    (r"lang_embeddings\.weight", "language_embeddings.weight", None),
    (rf"layer_norm_emb{_SUFFIX}", r"embedding_norm.\1", None),
    *((rf"attentions\.(\d+)\.{x}_lin{_SUFFIX}", r"layers.\1.attention.qkv_proj.\2", i) for i, x in enumerate("qkv")),
    (rf"attentions\.(\d+)\.out_lin{_SUFFIX}", r"layers.\1.attention.out_proj.\2", None),
    (rf"layer_norm1\.(\d+){_SUFFIX}", r"layers.\1.attention_norm.\2", None),
    (rf"encoder_attn\.(\d+)\.q_lin{_SUFFIX}", r"layers.\1.cross_attention.q_proj.\2", None),
    *(
        (rf"encoder_attn\.(\d+)\.{x}_lin{_SUFFIX}", r"layers.\1.cross_attention.kv_proj.\2", i)
        for i, x in enumerate("kv")
    ),
    (rf"encoder_attn\.(\d+)\.out_lin{_SUFFIX}", r"layers.\1.cross_attention.out_proj.\2", None),
    (rf"layer_norm15\.(\d+){_SUFFIX}", r"layers.\1.cross_attention_norm.\2", None),
    (rf"ffns\.(\d+)\.lin1{_SUFFIX}", r"layers.\1.feed_forward.up_proj.\2", None),
    (rf"ffns\.(\d+)\.lin2{_SUFFIX}", r"layers.\1.feed_forward.down_proj.\2", None),
    (rf"layer_norm2\.(\d+){_SUFFIX}", r"layers.\1.feed_forward_norm.\2", None),
    (rf"pred_layer\.proj{_SUFFIX}", r"lm_head.\1", None),
)
_LAYER = r"layers\.(\d+)\."
_FAIRSEQ_RULES: RenamingRules = (
    (r"embed_tokens\.weight", "word_embeddings.weight", None),
    (r"embed_positions\.weight", "position_embeddings.weight", None),
    (rf"emb_layer_norm{_SUFFIX}", r"embedding_norm.\1", None),
    (rf"{_LAYER}self_attn\.in_proj_(weight|bias)", r"layers.\1.attention.qkv_proj.\2", None),
    *((rf"{_LAYER}self_attn\.{x}_proj{_SUFFIX}", r"layers.\1.attention.qkv_proj.\2", i) for i, x in enumerate("qkv")),
    (rf"{_LAYER}self_attn\.out_proj{_SUFFIX}", r"layers.\1.attention.out_proj.\2", None),
    (rf"{_LAYER}self_attn_layer_norm{_SUFFIX}", r"layers.\1.attention_norm.\2", None),
    (rf"{_LAYER}encoder_attn\.q_proj{_SUFFIX}", r"layers.\1.cross_attention.q_proj.\2", None),
    *(
        (rf"{_LAYER}encoder_attn\.{x}_proj{_SUFFIX}", r"layers.\1.cross_attention.kv_proj.\2", i)
        for i, x in enumerate("kv")
    ),
    (rf"{_LAYER}encoder_attn\.out_proj{_SUFFIX}", r"layers.\1.cross_attention.out_proj.\2", None),
    (rf"{_LAYER}encoder_attn_layer_norm{_SUFFIX}", r"layers.\1.cross_attention_norm.\2", None),
    (rf"{_LAYER}fc1{_SUFFIX}", r"layers.\1.feed_forward.up_proj.\2", None),
    (rf"{_LAYER}fc2{_SUFFIX}", r"layers.\1.feed_forward.down_proj.\2", None),
    (rf"{_LAYER}final_layer_norm{_SUFFIX}", r"layers.\1.feed_forward_norm.\2", None),
    (r"embed_out", "lm_head.weight", None),
)
# cross-attention with separate projections for each target language
_LANGUAGE_PROJECTION = re.compile(
    r"(encoder_attn\.\d+)\.(?:(out_lin)\.(\d+)|(\d+)\.([qkv]_lin|out_lin))\.(weight|bias)"
)
_CHECKPOINT_HINT = "use a checkpoint of github.com/microsoft/MASS."


class SpecialTokenIds(NamedTuple):
    """Ids of special tokens in the vocabulary of a summarization model; the defaults are BERT's."""

    pad: int = 0
    cls: int = 101
    sep: int = 102


BERT_IDS = SpecialTokenIds()


def read_checkpoint(file: str | Path) -> dict[str, Any]:
    """Read a released file; a state dict alone (a pretrained summarization model) is returned as {"model": state dict}.

    Raises:
        CtxError: The file cannot be read, or is not a MASS checkpoint.
    """
    content = read_torch_file(file, (Namespace,))
    if isinstance(content, Mapping):
        if isinstance(content.get("model"), Mapping) or isinstance(content.get("encoder"), Mapping):
            return dict(content)
        if "encoder.embed_tokens.weight" in content:
            return {"model": content}
    raise CtxError("The file is not a MASS checkpoint.", location=str(file), hint=_CHECKPOINT_HINT)


def build_translation_model(
    checkpoint: Mapping[str, Any], location: str, language: str | None = None
) -> CtxMassForConditionalGeneration:
    """Build a translation model.

    The decoder of a checkpoint may have separate cross-attention projections for each target language. The model keeps
    those of one language, and is exact for this target language. The encoder's output layer is unused.

    Args:
        checkpoint: From `read_checkpoint`.
        location: Path of the file, for errors.
        language: The target language, for such checkpoints.

    Raises:
        CtxError: A weight is missing or unknown, or the language is unknown.
    """
    params = checkpoint.get("params")
    if not isinstance(params, Mapping) or not isinstance(checkpoint.get("decoder"), Mapping):
        raise CtxError("The checkpoint lacks params or decoder.", location=location, hint=_CHECKPOINT_HINT)
    if params.get("asm"):
        raise CtxError(
            "The checkpoint has an adaptive softmax, which is not supported.",
            location=location,
            hint="use a checkpoint without it.",
        )
    lang2id = dict(params.get("lang2id") or {})
    state_dict: dict[str, Tensor] = {}
    for side in ("encoder", "decoder"):
        weights = {name.removeprefix("module."): value for name, value in checkpoint[side].items()}
        weights = _select_language(weights, lang2id, language, location)
        if side == "encoder":
            weights = {name: value for name, value in weights.items() if not name.startswith("pred_layer.")}
        state_dict |= _rename_weights(weights, side, _XLM_RULES, location)
    embeds_languages = "mass.encoder.language_embeddings.weight" in state_dict
    num_heads = int(_get_param(params, "n_heads", location))
    return _build_model(
        state_dict,
        location,
        num_attention_heads=num_heads,
        decoder_attention_heads=num_heads,
        n_langs=len(lang2id) if embeds_languages else 1,
        use_lang_emb=embeds_languages,
        lang2id=lang2id if embeds_languages else None,
        hidden_act="gelu" if params.get("gelu_activation") else "relu",
        hidden_dropout_prob=params.get("dropout", 0.1),
        attention_probs_dropout_prob=params.get("attention_dropout", 0.1),
        layer_norm_eps=1e-12,
        output_bias="lm_head.bias" in state_dict,
        scale_embedding=False,
        pad_token_id=int(_get_param(params, "pad_index", location)),
        bos_token_id=int(_get_param(params, "bos_index", location)),
        eos_token_id=int(_get_param(params, "eos_index", location)),
        decoder_start_token_id=int(_get_param(params, "eos_index", location)),
    )


def build_summarization_model(
    checkpoint: Mapping[str, Any], location: str, special_token_ids: SpecialTokenIds = BERT_IDS
) -> CtxMassForConditionalGeneration:
    """Build a summarization model, pretrained or fine-tuned.

    Texts end with the separator, which is also the decoder's first input. Heads have a width of 64 unless the
    checkpoint specifies their number.

    Args:
        checkpoint: From `read_checkpoint`.
        location: Path of the file, for errors.
        special_token_ids: Ids in the vocabulary. As in fairseq, positions start at the padding id + 1.

    Raises:
        CtxError: A weight is missing or unknown.
    """
    weights: Mapping[str, Tensor] = checkpoint["model"]
    state_dict: dict[str, Tensor] = {}
    for side in ("encoder", "decoder"):
        side_weights = {
            name.removeprefix(f"{side}."): value for name, value in weights.items() if name.startswith(f"{side}.")
        }
        side_weights.pop("version", None)
        state_dict |= _rename_weights(_split_cross_attention(side_weights), side, _FAIRSEQ_RULES, location)
        positions = f"mass.{side}.position_embeddings.weight"
        if positions in state_dict:
            state_dict[positions] = state_dict[positions][special_token_ids.pad + 1 :]
    if unknown := sorted(name for name in weights if not name.startswith(("encoder.", "decoder."))):
        raise _unknown_weights_error(unknown, location)
    arguments = vars(checkpoint["args"]) if isinstance(checkpoint.get("args"), Namespace) else {}
    width = state_dict.get("mass.encoder.word_embeddings.weight", torch.zeros(1, _HEAD_DIM)).shape[1]
    num_heads = arguments.get("encoder_attention_heads", max(1, width // _HEAD_DIM))
    return _build_model(
        state_dict,
        location,
        num_attention_heads=num_heads,
        decoder_attention_heads=arguments.get("decoder_attention_heads", num_heads),
        n_langs=1,
        hidden_act=arguments.get("activation_fn", "gelu"),
        layer_norm_eps=1e-5,
        output_bias=False,
        scale_embedding=True,
        pad_token_id=special_token_ids.pad,
        bos_token_id=special_token_ids.cls,
        eos_token_id=special_token_ids.sep,
        decoder_start_token_id=special_token_ids.sep,
    )


def build_translation_tokenizer(
    checkpoint: Mapping[str, Any], merges: Sequence[tuple[str, str]], location: str, word_splitting: str = "moses"
) -> CtxMassTokenizer:
    """Build the cased tokenizer of a translation model.

    Args:
        checkpoint: From `read_checkpoint`.
        merges: The merges of the BPE codes, see `read_codes`.
        location: Path of the file, for errors.
        word_splitting: See `CtxMassTokenizer`.

    Raises:
        CtxError: The checkpoint has no dictionary, or its ids are not 0, 1, 2, ...
    """
    words = checkpoint.get("dico_id2word")
    if not isinstance(words, Mapping) or sorted(words) != list(range(len(words))):
        raise CtxError(
            "dico_id2word of the checkpoint is not a mapping of consecutive ids from 0.",
            location=location,
            hint=_CHECKPOINT_HINT,
        )
    special_tokens = set(CtxMassTokenizer.first_tokens)
    vocab = {word if word in special_tokens else to_native_subword(word): index for index, word in words.items()}
    lang2id = dict(checkpoint["params"].get("lang2id") or {})
    return CtxMassTokenizer(
        vocab=vocab, merges=list(merges), do_lower_case=False, word_splitting=word_splitting, lang2id=lang2id or None
    )


def _get_param(params: Mapping[str, Any], name: str, location: str) -> Any:
    if name not in params:
        raise CtxError(f"The checkpoint's params lack {name}.", location=location, hint=_CHECKPOINT_HINT)
    return params[name]


def _select_language(
    weights: Mapping[str, Tensor], lang2id: Mapping[str, int], language: str | None, location: str
) -> dict[str, Tensor]:
    """Keep the cross-attention projections of one language and remove the language from their names."""
    selected = {}
    for name, value in weights.items():
        match = _LANGUAGE_PROJECTION.fullmatch(name)
        if match is None:
            selected[name] = value
            continue
        if language is None or language not in lang2id:
            problem = "no language is given" if language is None else f"there is no {language!r}"
            raise CtxError(
                f"The decoder has separate cross-attention projections for each target language, but {problem}.",
                location=location,
                hint=f"use the target language: {', '.join(sorted(lang2id))}.",
            )
        layer, output_projection, output_language, input_language, projection, suffix = match.groups()
        if int(output_language or input_language) == lang2id[language]:
            selected[f"{layer}.{output_projection or projection}.{suffix}"] = value
    return selected


def _split_cross_attention(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Split the cross-attention projections that old releases of fairseq fuse."""
    split: dict[str, Tensor] = {}
    for name, value in weights.items():
        layer, is_fused, suffix = name.partition(".encoder_attn.in_proj_")
        if is_fused and not len(value) % 3:
            for letter, chunk in zip("qkv", value.chunk(3), strict=True):
                split[f"{layer}.encoder_attn.{letter}_proj.{suffix}"] = chunk
        else:
            split[name] = value
    return split


def _rename_weights(weights: Mapping[str, Tensor], side: str, rules: RenamingRules, location: str) -> dict[str, Tensor]:
    """Native name -> weight of an encoder or decoder; raises CtxError for an unknown name."""
    chunks: dict[str, dict[int, Tensor]] = {}
    unknown = []
    for name, value in weights.items():
        for pattern, native_pattern, index in rules:
            if match := re.fullmatch(pattern, name):
                native_name = match.expand(native_pattern)
                if not native_name.startswith("lm_head."):
                    native_name = f"mass.{side}.{native_name}"
                chunks.setdefault(native_name, {})[index or 0] = value.float()
                break
        else:
            unknown.append(f"{side}.{name}")
    if unknown:
        raise _unknown_weights_error(unknown, location)
    return {name: torch.cat([fused[index] for index in sorted(fused)]) for name, fused in chunks.items()}


def _unknown_weights_error(names: Sequence[str], location: str) -> CtxError:
    ellipsis = ", ..." if len(names) > 4 else ""
    return CtxError(
        f"The checkpoint has {len(names)} unknown weights: {', '.join(names[:4])}{ellipsis}.",
        location=location,
        hint=_CHECKPOINT_HINT,
    )


def _build_model(state_dict: dict[str, Tensor], location: str, **fields: Any) -> CtxMassForConditionalGeneration:
    """A model with these weights; the sizes of its configuration follow from them."""
    encoder_words, decoder_words = (f"mass.{side}.word_embeddings.weight" for side in ("encoder", "decoder"))
    encoder_positions, decoder_positions = (
        f"mass.{side}.position_embeddings.weight" for side in ("encoder", "decoder")
    )
    encoder_feed_forward, decoder_feed_forward = (
        f"mass.{side}.layers.0.feed_forward.up_proj.weight" for side in ("encoder", "decoder")
    )
    required = (
        encoder_words,
        encoder_positions,
        encoder_feed_forward,
        decoder_words,
        decoder_positions,
        decoder_feed_forward,
    )
    _check_missing([name for name in required if name not in state_dict], location)
    vocab_size, width = state_dict[encoder_words].shape
    num_positions = min(len(state_dict[encoder_positions]), len(state_dict[decoder_positions]))
    for name in (encoder_positions, decoder_positions):
        state_dict[name] = state_dict[name][:num_positions]
    output_weight = state_dict.setdefault("lm_head.weight", state_dict[decoder_words])
    is_shared = torch.equal(state_dict[encoder_words], state_dict[decoder_words])
    config = CtxMassConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        num_hidden_layers=_number_of_layers(state_dict, "encoder"),
        decoder_layers=_number_of_layers(state_dict, "decoder"),
        intermediate_size=len(state_dict[encoder_feed_forward]),
        decoder_ffn_dim=len(state_dict[decoder_feed_forward]),
        max_position_embeddings=num_positions,
        tie_word_embeddings=is_shared and torch.equal(output_weight, state_dict[encoder_words]),
        share_word_embeddings=is_shared,
        **fields,
    )
    model = CtxMassForConditionalGeneration(config)
    if is_shared:
        del state_dict[decoder_words]
    expected = model.state_dict()
    _check_missing([name for name in expected if name not in state_dict], location)
    if unknown := [name for name in state_dict if name not in expected]:
        raise _unknown_weights_error(unknown, location)
    for name, weight in expected.items():
        if state_dict[name].shape != weight.shape:
            raise CtxError(
                f"{name} is {tuple(state_dict[name].shape)}, expected {tuple(weight.shape)}.",
                location=location,
                hint="use all weights of one model.",
            )
    model.load_state_dict(state_dict)
    return model.eval()


def _check_missing(names: Sequence[str], location: str) -> None:
    if names:
        ellipsis = ", ..." if len(names) > 4 else ""
        raise CtxError(
            f"The checkpoint lacks {len(names)} weights (native names): {', '.join(names[:4])}{ellipsis}.",
            location=location,
            hint=_CHECKPOINT_HINT,
        )


def _number_of_layers(state_dict: Mapping[str, Tensor], side: str) -> int:
    pattern = re.compile(rf"mass\.{side}\.layers\.(\d+)\.")
    return 1 + max(int(match[1]) for match in map(pattern.match, state_dict) if match)


@dataclass
class ConversionArguments:
    """Arguments of the conversion."""

    checkpoint: str = field(metadata={"help": "Released file: .pth for translation, .pt for summaries."})
    output: str = field(metadata={"help": "Directory for the model and its tokenizer."})
    codes: str | None = flag(None, "Translation: BPE codes, two tokens and a count per line.")
    vocabulary: str | None = flag(None, "Summaries: dict.txt with a token and a count per line, or BERT's vocab.txt.")
    language: str | None = flag(None, "Translation: target language, if the decoder has separate layers for each.")
    word_splitting: Literal["moses", "punctuation", "whitespace"] = flag(
        "moses", "Translation: word splitting of the tokenizer; `whitespace` for tokenized text."
    )
    overwrite: bool = flag(False, "Replace an existing model in --output.")


def read_vocabulary(file: str) -> CtxBertTokenizer:
    """Create BERT's tokenizer from the first word of each line of a file. As in the release, it adds no `[CLS]`."""
    lines = [line.split() for line in read_lines(Path(file))]
    if not all(lines):
        raise CtxError("A line has no token.", location=f"{file}, line {1 + lines.index([])}")
    vocabulary = {fields[0]: number for number, fields in enumerate(lines)}
    return CtxBertTokenizer(vocab=vocabulary, cls_token=None, model_max_length=512)


def main() -> None:
    """Convert, and print a summary."""
    (arguments,) = parse_arguments(ConversionArguments, description=__doc__)
    check_output_free(arguments.output, arguments.overwrite)
    file = arguments.checkpoint
    checkpoint = read_checkpoint(file)
    if "encoder" in checkpoint:
        if arguments.codes is None:
            raise CtxError("The checkpoint is a translation model.", location=file, hint="pass --codes.")
        model = build_translation_model(checkpoint, file, arguments.language)
        codes = read_codes(arguments.codes)
        tokenizer = build_translation_tokenizer(checkpoint, codes, file, arguments.word_splitting)
    else:
        if arguments.vocabulary is None:
            raise CtxError("The checkpoint is a summarization model.", location=file, hint="pass --vocabulary.")
        tokenizer = read_vocabulary(arguments.vocabulary)
        start_id = tokenizer.convert_tokens_to_ids("[CLS]")
        special = SpecialTokenIds(tokenizer.pad_token_id, start_id, tokenizer.sep_token_id)
        model = build_summarization_model(checkpoint, file, special)
    if len(tokenizer) != model.config.vocab_size:
        raise CtxError(
            f"{len(tokenizer)} tokens for {model.config.vocab_size} embeddings.",
            location=arguments.codes or arguments.vocabulary,
            hint="use the files of the same model.",
        )
    save_converted_model(model, tokenizer, arguments.output)
    print(f"{model.num_parameters():,} parameters: {file} -> {arguments.output}")


if __name__ == "__main__":
    run_script(main)
