"""The released checkpoints -> a model: translation (XLM's code base) and summaries (fairseq's)."""

import re
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_ctxmodels.architectures.fastbpe_files import to_native_subword
from hf_ctxmodels.architectures.torch_lstm_conversion import read_torch_file
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.models.mass.configuration_mass import CtxMassConfig
from hf_ctxmodels.models.mass.modeling_mass import CtxMassForConditionalGeneration
from hf_ctxmodels.models.mass.tokenization_mass import CtxMassTokenizer

_HEAD_SIZE = 64  # of the released models for summaries

Rules = Sequence[tuple[str, str, int | None]]
"""Pattern of a released name, native name, and the place of the weight where several make one map."""

_KIND = r"\.(weight|bias)"
_XLM: Rules = (
    (r"embeddings\.weight", "word_embeddings.weight", None),
    (r"position_embeddings\.weight", "position_embeddings.weight", None),
    (r"lang_embeddings\.weight", "language_embeddings.weight", None),
    (rf"layer_norm_emb{_KIND}", r"embedding_norm.\1", None),
    *((rf"attentions\.(\d+)\.{x}_lin{_KIND}", r"layers.\1.attention.qkv_proj.\2", i) for i, x in enumerate("qkv")),
    (rf"attentions\.(\d+)\.out_lin{_KIND}", r"layers.\1.attention.out_proj.\2", None),
    (rf"layer_norm1\.(\d+){_KIND}", r"layers.\1.attention_norm.\2", None),
    (rf"encoder_attn\.(\d+)\.q_lin{_KIND}", r"layers.\1.cross_attention.q_proj.\2", None),
    *(
        (rf"encoder_attn\.(\d+)\.{x}_lin{_KIND}", r"layers.\1.cross_attention.kv_proj.\2", i)
        for i, x in enumerate("kv")
    ),
    (rf"encoder_attn\.(\d+)\.out_lin{_KIND}", r"layers.\1.cross_attention.out_proj.\2", None),
    (rf"layer_norm15\.(\d+){_KIND}", r"layers.\1.cross_attention_norm.\2", None),
    (rf"ffns\.(\d+)\.lin1{_KIND}", r"layers.\1.feed_forward.up_proj.\2", None),
    (rf"ffns\.(\d+)\.lin2{_KIND}", r"layers.\1.feed_forward.down_proj.\2", None),
    (rf"layer_norm2\.(\d+){_KIND}", r"layers.\1.feed_forward_norm.\2", None),
    (rf"pred_layer\.proj{_KIND}", r"lm_head.\1", None),
)
_LAYER = r"layers\.(\d+)\."
_FAIRSEQ: Rules = (
    (r"embed_tokens\.weight", "word_embeddings.weight", None),
    (r"embed_positions\.weight", "position_embeddings.weight", None),
    (rf"emb_layer_norm{_KIND}", r"embedding_norm.\1", None),
    (rf"{_LAYER}self_attn\.in_proj_(weight|bias)", r"layers.\1.attention.qkv_proj.\2", None),
    *((rf"{_LAYER}self_attn\.{x}_proj{_KIND}", r"layers.\1.attention.qkv_proj.\2", i) for i, x in enumerate("qkv")),
    (rf"{_LAYER}self_attn\.out_proj{_KIND}", r"layers.\1.attention.out_proj.\2", None),
    (rf"{_LAYER}self_attn_layer_norm{_KIND}", r"layers.\1.attention_norm.\2", None),
    (rf"{_LAYER}encoder_attn\.q_proj{_KIND}", r"layers.\1.cross_attention.q_proj.\2", None),
    *(
        (rf"{_LAYER}encoder_attn\.{x}_proj{_KIND}", r"layers.\1.cross_attention.kv_proj.\2", i)
        for i, x in enumerate("kv")
    ),
    (rf"{_LAYER}encoder_attn\.out_proj{_KIND}", r"layers.\1.cross_attention.out_proj.\2", None),
    (rf"{_LAYER}encoder_attn_layer_norm{_KIND}", r"layers.\1.cross_attention_norm.\2", None),
    (rf"{_LAYER}fc1{_KIND}", r"layers.\1.feed_forward.up_proj.\2", None),
    (rf"{_LAYER}fc2{_KIND}", r"layers.\1.feed_forward.down_proj.\2", None),
    (rf"{_LAYER}final_layer_norm{_KIND}", r"layers.\1.feed_forward_norm.\2", None),
    (r"embed_out", "lm_head.weight", None),
)
_OF_A_LANGUAGE = re.compile(r"(encoder_attn\.\d+)\.(?:(out_lin)\.(\d+)|(\d+)\.([qkv]_lin|out_lin))\.(weight|bias)")
_CHECKPOINT = "give a checkpoint of github.com/microsoft/MASS."


class SpecialTokenIds(NamedTuple):
    """Ids of special tokens in the vocabulary of the model for summaries; the defaults are BERT's."""

    pad: int = 0
    cls: int = 101
    sep: int = 102


BERT_IDS = SpecialTokenIds()


def read_checkpoint(file: str | Path) -> dict[str, Any]:
    """The content of a released file; a state dict alone, as the pretrained models for summaries are, as its "model".

    Raises:
        CtxError: It cannot be read, or is no MASS.
    """
    found = read_torch_file(file, (Namespace,))
    if isinstance(found, Mapping):
        if isinstance(found.get("model"), Mapping) or isinstance(found.get("encoder"), Mapping):
            return dict(found)
        if "encoder.embed_tokens.weight" in found:
            return {"model": found}
    raise CtxError("The file holds no MASS.", location=str(file), hint=_CHECKPOINT)


def build_translation_model(
    checkpoint: Mapping[str, Any], location: str, language: str | None = None
) -> CtxMassForConditionalGeneration:
    """The model for translation.

    Its decoder may attend to the source by maps of its own for each language. Of these the model has one language's: it
    is exact where it writes that one. The encoder's output layer has no use in it.

    Args:
        checkpoint: From `read_checkpoint`.
        location: The file, for errors.
        language: The language that is written, for such checkpoints.

    Raises:
        CtxError: A part or weight is missing or unknown, or the language.
    """
    params = checkpoint.get("params")
    if not isinstance(params, Mapping) or not isinstance(checkpoint.get("decoder"), Mapping):
        raise CtxError("The checkpoint lacks params or decoder.", location=location, hint=_CHECKPOINT)
    if params.get("asm"):
        raise CtxError("The model has an adaptive softmax, which is not supported.", location=location)
    numbers = dict(params.get("lang2id") or {})
    native: dict[str, Tensor] = {}
    for side in ("encoder", "decoder"):
        weights = {name.removeprefix("module."): value for name, value in checkpoint[side].items()}
        weights = _of_language(weights, numbers, language, location)
        if side == "encoder":
            weights = {name: value for name, value in weights.items() if not name.startswith("pred_layer.")}
        native |= _renamed(weights, side, _XLM, location)
    embeds = "mass.encoder.language_embeddings.weight" in native
    bias = "lm_head.bias" in native
    return _model(
        native,
        location,
        **_heads(int(_param(params, "n_heads", location))),
        n_langs=len(numbers) if embeds else 1,
        use_lang_emb=embeds,
        lang2id=numbers if embeds else None,
        hidden_act="gelu" if params.get("gelu_activation") else "relu",
        hidden_dropout_prob=params.get("dropout", 0.1),
        attention_probs_dropout_prob=params.get("attention_dropout", 0.1),
        layer_norm_eps=1e-12,
        output_bias=bias,
        scale_embedding=False,
        pad_token_id=int(_param(params, "pad_index", location)),
        bos_token_id=int(_param(params, "bos_index", location)),
        eos_token_id=int(_param(params, "eos_index", location)),
        decoder_start_token_id=int(_param(params, "eos_index", location)),
    )


def build_summarization_model(
    checkpoint: Mapping[str, Any], location: str, special: SpecialTokenIds = BERT_IDS
) -> CtxMassForConditionalGeneration:
    """The model for summaries, pretrained or fine-tuned; its heads have a width of 64 unless the checkpoint says other.

    A text ends with the separator, which a target also begins with.

    Args:
        checkpoint: From `read_checkpoint`.
        location: The file, for errors.
        special: Of the vocabulary. Positions are counted from the padding's id + 1 on, as in fairseq.

    Raises:
        CtxError: A weight is missing or unknown.
    """
    weights: Mapping[str, Tensor] = checkpoint["model"]
    native: dict[str, Tensor] = {}
    for side in ("encoder", "decoder"):
        own = {name[8:]: value for name, value in weights.items() if name.startswith(f"{side}.")}
        own.pop("version", None)
        native |= _renamed(_split_cross_attention(own), side, _FAIRSEQ, location)
        name = f"mass.{side}.position_embeddings.weight"
        if name in native:
            native[name] = native[name][special.pad + 1 :]
    if foreign := sorted(name for name in weights if not name.startswith(("encoder.", "decoder."))):
        raise _unknown(foreign, location)
    arguments = vars(checkpoint["args"]) if isinstance(checkpoint.get("args"), Namespace) else {}
    width = native.get("mass.encoder.word_embeddings.weight", torch.zeros(1, _HEAD_SIZE)).shape[1]
    heads = _heads(arguments.get("encoder_attention_heads", max(1, width // _HEAD_SIZE)))
    if "decoder_attention_heads" in arguments:
        heads["decoder_attention_heads"] = arguments["decoder_attention_heads"]
    return _model(
        native,
        location,
        **heads,
        n_langs=1,
        hidden_act=arguments.get("activation_fn", "gelu"),
        layer_norm_eps=1e-5,
        output_bias=False,
        scale_embedding=True,
        pad_token_id=special.pad,
        bos_token_id=special.cls,
        eos_token_id=special.sep,
        decoder_start_token_id=special.sep,
    )


def build_translation_tokenizer(
    checkpoint: Mapping[str, Any], merges: Sequence[tuple[str, str]], location: str, word_splitting: str = "moses"
) -> CtxMassTokenizer:
    """The tokenizer of a model for translation, which keeps case.

    Args:
        checkpoint: From `read_checkpoint`.
        merges: Of the BPE codes, see `read_codes`.
        location: The file, for errors.
        word_splitting: See the class.

    Raises:
        CtxError: The checkpoint has no dictionary, or one whose numbers are not 0, 1, 2, ...
    """
    words = checkpoint.get("dico_id2word")
    if not isinstance(words, Mapping) or sorted(words) != list(range(len(words))):
        raise CtxError("The checkpoint's dico_id2word does not number its words from 0 on.", location=location)
    special = set(CtxMassTokenizer.first_tokens)
    vocab = {word if word in special else to_native_subword(word): number for number, word in words.items()}
    numbers = dict(checkpoint["params"].get("lang2id") or {})
    return CtxMassTokenizer(
        vocab=vocab, merges=list(merges), do_lower_case=False, word_splitting=word_splitting, lang2id=numbers or None
    )


def _heads(count: int) -> dict[str, int]:
    return {"num_attention_heads": count, "decoder_attention_heads": count}


def _param(params: Mapping[str, Any], name: str, location: str) -> Any:
    if name not in params:
        raise CtxError(f"The checkpoint's params lack {name}.", location=location, hint=_CHECKPOINT)
    return params[name]


def _of_language(
    weights: Mapping[str, Tensor], numbers: Mapping[str, int], language: str | None, location: str
) -> dict[str, Tensor]:
    """Weights without those of other languages' cross-attention, and without the language in their names."""
    found = {}
    for name, value in weights.items():
        match = _OF_A_LANGUAGE.fullmatch(name)
        if match is None:
            found[name] = value
            continue
        if language is None or language not in numbers:
            raise CtxError(
                "The decoder attends to the source by maps of its own for each language, of which a model here has "
                "one: " + ("none is named." if language is None else f"there is no {language!r}."),
                location=location,
                hint=f"give the language that the model is to write: {', '.join(sorted(numbers))}.",
            )
        layer, output, first, second, part, kind = match.groups()
        if int(first or second) == numbers[language]:
            found[f"{layer}.{output or part}.{kind}"] = value
    return found


def _split_cross_attention(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights with queries, keys and values of the cross-attention apart, which old releases of fairseq join."""
    found: dict[str, Tensor] = {}
    for name, value in weights.items():
        layer, joined, kind = name.partition(".encoder_attn.in_proj_")
        if joined and not len(value) % 3:
            parts = zip("qkv", value.chunk(3), strict=True)
            found |= {f"{layer}.encoder_attn.{letter}_proj.{kind}": part for letter, part in parts}
        else:
            found[name] = value
    return found


def _renamed(weights: Mapping[str, Tensor], side: str, rules: Rules, location: str) -> dict[str, Tensor]:
    """Native name -> weight of an encoder or decoder; raises CtxError for a name that no rule knows."""
    found: dict[str, dict[int, Tensor]] = {}
    unknown = []
    for name, value in weights.items():
        for pattern, native, place in rules:
            match = re.fullmatch(pattern, name)
            if match:
                own = match.expand(native)
                own = own if own.startswith("lm_head.") else f"mass.{side}.{own}"
                found.setdefault(own, {})[place or 0] = value.float()
                break
        else:
            unknown.append(f"{side}.{name}")
    if unknown:
        raise _unknown(unknown, location)
    return {name: torch.cat([parts[place] for place in sorted(parts)]) for name, parts in found.items()}


def _unknown(names: Sequence[str], location: str) -> CtxError:
    more = ", ..." if len(names) > 4 else ""
    return CtxError(
        f"The checkpoint has {len(names)} weights that no MASS has: {', '.join(names[:4])}{more}.",
        location=location,
        hint=_CHECKPOINT,
    )


def _model(native: dict[str, Tensor], location: str, **fields: Any) -> CtxMassForConditionalGeneration:
    """A model of these weights, whose configuration's sizes are theirs."""
    needed = [
        f"mass.{side}.{part}_embeddings.weight" for side in ("encoder", "decoder") for part in ("word", "position")
    ]
    needed += [f"mass.{side}.layers.0.feed_forward.up_proj.weight" for side in ("encoder", "decoder")]
    _check_missing([name for name in needed if name not in native], location)
    words, width = native[needed[0]].shape
    sizes = {
        "vocab_size": words,
        "hidden_size": width,
        "num_hidden_layers": _layers(native, "encoder"),
        "decoder_layers": _layers(native, "decoder"),
        "intermediate_size": len(native[needed[4]]),
        "decoder_ffn_dim": len(native[needed[5]]),
        "max_position_embeddings": min(len(native[needed[1]]), len(native[needed[3]])),
    }
    for name in (needed[1], needed[3]):
        native[name] = native[name][: sizes["max_position_embeddings"]]
    output = native.setdefault("lm_head.weight", native[needed[2]])
    shared = torch.equal(native[needed[0]], native[needed[2]])
    tied = shared and torch.equal(output, native[needed[0]])
    model = CtxMassForConditionalGeneration(
        CtxMassConfig(**sizes, **fields, tie_word_embeddings=tied, share_word_embeddings=shared)
    )
    if shared:
        del native[needed[2]]
    expected = model.state_dict()
    _check_missing([name for name in expected if name not in native], location)
    if more := [name for name in native if name not in expected]:
        raise _unknown(more, location)
    for name, weight in expected.items():
        if native[name].shape != weight.shape:
            raise CtxError(
                f"{name} is {tuple(native[name].shape)}, expected {tuple(weight.shape)}.",
                location=location,
                hint="give the weights of one model, all of them.",
            )
    model.load_state_dict(native)
    return model.eval()


def _check_missing(names: Sequence[str], location: str) -> None:
    if names:
        more = ", ..." if len(names) > 4 else ""
        raise CtxError(
            f"The checkpoint lacks {len(names)} weights: {', '.join(names[:4])}{more} (by their names here).",
            location=location,
            hint=_CHECKPOINT,
        )


def _layers(native: Mapping[str, Tensor], side: str) -> int:
    """Number of layers."""
    found = re.compile(rf"mass\.{side}\.layers\.(\d+)\.")
    return 1 + max(int(match[1]) for match in map(found.match, native) if match)
