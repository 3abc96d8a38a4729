r"""Convert a released MASS to a model and its tokenizer, from BPE codes (translation) or a vocabulary (summaries).

hf-ctxmodels convert mass --checkpoint mass_ft_enfr_1024.pth --codes codes_enfr --language fr \
    --output runs/mass
hf-ctxmodels convert mass --checkpoint mass-base-uncased.pt --vocabulary dict.txt --output runs/mass
"""

import re
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from hf_ctxmodels.conversion.released_files import (
    Conversion,
    check_missing,
    check_unknown,
    load_weights,
    read_codes,
    read_torch_file,
)
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import REQUIRED, flag, non_default_fields
from hf_ctxmodels.data.text_files import read_lines
from hf_ctxmodels.models.bert.tokenization_bert import CtxBertTokenizer
from hf_ctxmodels.models.mass.configuration_mass import CtxMassConfig
from hf_ctxmodels.models.mass.modeling_mass import CtxMassForConditionalGeneration
from hf_ctxmodels.models.mass.tokenization_mass import CtxMassTokenizer
from hf_ctxmodels.tokenizers.bpe import to_native_subword

_HEAD_DIM = 64  # in the released summarization models

# modules of this package, of the translation code (XLM) and of fairseq; `#` is a layer, `*` one of q, k and v, whose
# weights are concatenated here
_MODULES = (
    ("word_embeddings", "embeddings", "embed_tokens"),
    ("position_embeddings", "position_embeddings", "embed_positions"),
    ("language_embeddings", "lang_embeddings", None),
    ("embedding_norm", "layer_norm_emb", "emb_layer_norm"),
    ("layers.#.attention.qkv_proj", "attentions.#.*_lin", "layers.#.self_attn.*_proj"),
    ("layers.#.attention.out_proj", "attentions.#.out_lin", "layers.#.self_attn.out_proj"),
    ("layers.#.attention_norm", "layer_norm1.#", "layers.#.self_attn_layer_norm"),
    ("layers.#.cross_attention.q_proj", "encoder_attn.#.q_lin", "layers.#.encoder_attn.q_proj"),
    ("layers.#.cross_attention.kv_proj", "encoder_attn.#.*_lin", "layers.#.encoder_attn.*_proj"),
    ("layers.#.cross_attention.out_proj", "encoder_attn.#.out_lin", "layers.#.encoder_attn.out_proj"),
    ("layers.#.cross_attention_norm", "layer_norm15.#", "layers.#.encoder_attn_layer_norm"),
    ("layers.#.feed_forward.up_proj", "ffns.#.lin1", "layers.#.fc1"),
    ("layers.#.feed_forward.down_proj", "ffns.#.lin2", "layers.#.fc2"),
    ("layers.#.feed_forward_norm", "layer_norm2.#", "layers.#.final_layer_norm"),
    ("lm_head", "pred_layer.proj", "embed_out"),
)
# cross-attention with separate projections for each target language
_LANGUAGE_PROJECTION = re.compile(
    r"(encoder_attn\.\d+)\.(?:(out_lin)\.(\d+)|(\d+)\.([qkv]_lin|out_lin))\.(weight|bias)"
)
_CHECKPOINT_HINT = "use a checkpoint of github.com/microsoft/MASS."


def read_checkpoint(file: str | Path) -> dict[str, Any]:
    """Read a released file; a state dict alone (a pretrained summarization model) is returned as {"model": state
    dict}."""
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
    """Build a translation model from `read_checkpoint`.

    The decoder may have separate cross-attention projections for each target language, of which the model keeps the
    `language`. The encoder's output layer is unused.

    Raises:
        CtxError: A weight is missing or unknown, or the language is unknown.
    """
    params = checkpoint.get("params")
    if not isinstance(params, Mapping) or not isinstance(checkpoint.get("decoder"), Mapping):
        raise CtxError("The checkpoint lacks params or decoder.", location=location, hint=_CHECKPOINT_HINT)
    if params.get("asm"):
        raise CtxError("An adaptive softmax is not supported.", location=location, hint="use a checkpoint without it.")
    if missing := [name for name in ("n_heads", "pad_index", "bos_index", "eos_index") if name not in params]:
        raise CtxError(f"The checkpoint's params lack {', '.join(missing)}.", location=location, hint=_CHECKPOINT_HINT)
    lang2id = dict(params.get("lang2id") or {})
    state_dict: dict[str, Tensor] = {}
    for side in ("encoder", "decoder"):
        weights = {name.removeprefix("module."): value for name, value in checkpoint[side].items()}
        weights = _select_language(weights, lang2id, language, location)
        if side == "encoder":
            weights = {name: value for name, value in weights.items() if not name.startswith("pred_layer.")}
        state_dict |= _rename_weights(weights, side, {xlm: native for native, xlm, _ in _MODULES}, location)
    embeds_languages = "mass.encoder.language_embeddings.weight" in state_dict
    return _build_model(
        state_dict,
        location,
        num_attention_heads=int(params["n_heads"]),
        decoder_attention_heads=int(params["n_heads"]),
        n_langs=len(lang2id) if embeds_languages else 1,
        use_lang_emb=embeds_languages,
        lang2id=lang2id if embeds_languages else None,
        hidden_act="gelu" if params.get("gelu_activation") else "relu",
        hidden_dropout_prob=params.get("dropout", 0.1),
        attention_probs_dropout_prob=params.get("attention_dropout", 0.1),
        layer_norm_eps=1e-12,
        output_bias="lm_head.bias" in state_dict,
        scale_embedding=False,
        pad_token_id=int(params["pad_index"]),
        bos_token_id=int(params["bos_index"]),
        eos_token_id=int(params["eos_index"]),
        decoder_start_token_id=int(params["eos_index"]),
    )


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


def build_summarization_model(
    checkpoint: Mapping[str, Any], location: str, pad_id: int = 0, cls_id: int = 101, sep_id: int = 102
) -> CtxMassForConditionalGeneration:
    """Build a summarization model, pretrained or fine-tuned, from `read_checkpoint`.

    Texts end with the separator, which is also the decoder's first input. Heads have a width of 64 unless the
    checkpoint specifies their number. As in fairseq, positions start at the padding id + 1; the ids are BERT's by
    default.

    Raises:
        CtxError: A weight is missing or unknown.
    """
    weights: Mapping[str, Tensor] = checkpoint["model"]
    check_unknown(sorted(name for name in weights if not name.startswith(("encoder.", "decoder."))), location)
    state_dict: dict[str, Tensor] = {}
    for side in ("encoder", "decoder"):
        side_weights: dict[str, Tensor] = {}
        for name, value in weights.items():
            module, is_fused, suffix = name.removeprefix(f"{side}.").partition(".in_proj_")
            if name == f"{side}.version" or not name.startswith(f"{side}."):
                continue
            if is_fused and not len(value) % 3:  # old releases of fairseq fuse the projections
                for letter, chunk in zip("qkv", value.chunk(3), strict=True):
                    side_weights[f"{module}.{letter}_proj.{suffix}"] = chunk
            else:
                side_weights[f"{module}.weight" if module == "embed_out" else name.removeprefix(f"{side}.")] = value
        modules = {fairseq: native for native, _, fairseq in _MODULES if fairseq is not None}
        state_dict |= _rename_weights(side_weights, side, modules, location)
        positions = f"mass.{side}.position_embeddings.weight"
        if positions in state_dict:
            state_dict[positions] = state_dict[positions][pad_id + 1 :]
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
        pad_token_id=pad_id,
        bos_token_id=cls_id,
        eos_token_id=sep_id,
        decoder_start_token_id=sep_id,
    )


def _rename_weights(
    weights: Mapping[str, Tensor], side: str, modules: Mapping[str, str], location: str
) -> dict[str, Tensor]:
    """Native name -> weight of a side, "encoder" or "decoder", by released module -> native module, of which the first
    match counts; raises CtxError for an unknown name."""
    patterns = [
        (re.compile(re.escape(released).replace(r"\#", r"(?P<layer>\d+)").replace(r"\*", "(?P<letter>[qkv])")), native)
        for released, native in modules.items()
    ]
    chunks: dict[str, dict[str, Tensor]] = {}
    unknown = []
    for name, value in weights.items():
        module, _, suffix = name.rpartition(".")
        matches = ((pattern.fullmatch(module), native) for pattern, native in patterns)
        match, native = next(((match, native) for match, native in matches if match), (None, ""))
        if match is None or suffix not in ("weight", "bias"):
            unknown.append(f"{side}.{name}")
            continue
        groups = match.groupdict()
        native_name = f"{native.replace('#', groups.get('layer', ''))}.{suffix}"
        if not native_name.startswith("lm_head."):
            native_name = f"mass.{side}.{native_name}"
        chunks.setdefault(native_name, {})[groups.get("letter", "q")] = value.float()
    check_unknown(unknown, location)
    return {
        name: torch.cat([letters[letter] for letter in "qkv" if letter in letters]) for name, letters in chunks.items()
    }


def _build_model(state_dict: dict[str, Tensor], location: str, **fields: Any) -> CtxMassForConditionalGeneration:
    """A model with these weights; the sizes of its configuration follow from them."""
    words, positions, feed_forward = (
        [f"mass.{side}.{module}.weight" for side in ("encoder", "decoder")]
        for module in ("word_embeddings", "position_embeddings", "layers.0.feed_forward.up_proj")
    )
    check_missing([name for name in (*words, *positions, *feed_forward) if name not in state_dict], location)
    vocab_size, width = state_dict[words[0]].shape
    num_positions = min(len(state_dict[name]) for name in positions)
    for name in positions:
        state_dict[name] = state_dict[name][:num_positions]
    output_weight = state_dict.setdefault("lm_head.weight", state_dict[words[1]])
    is_shared = torch.equal(state_dict[words[0]], state_dict[words[1]])
    num_layers = [
        len({name.split(".")[3] for name in state_dict if name.startswith(f"mass.{side}.layers.")})
        for side in ("encoder", "decoder")
    ]
    config = CtxMassConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        num_hidden_layers=num_layers[0],
        decoder_layers=num_layers[1],
        intermediate_size=len(state_dict[feed_forward[0]]),
        decoder_ffn_dim=len(state_dict[feed_forward[1]]),
        max_position_embeddings=num_positions,
        tie_word_embeddings=is_shared and torch.equal(output_weight, state_dict[words[0]]),
        share_word_embeddings=is_shared,
        **fields,
    )
    if is_shared:
        del state_dict[words[1]]
    return load_weights(CtxMassForConditionalGeneration(config), state_dict, location)


def build_translation_tokenizer(
    checkpoint: Mapping[str, Any], merges: Sequence[tuple[str, str]], location: str, word_splitting: str = "moses"
) -> CtxMassTokenizer:
    """Build the cased tokenizer of a translation model from `read_checkpoint` and `read_codes`; raises CtxError if
    there is no dictionary, or its ids are not 0, 1, 2, ..."""
    words = checkpoint.get("dico_id2word")
    if not isinstance(words, Mapping) or sorted(words) != list(range(len(words))):
        raise CtxError(
            "dico_id2word is not a mapping of consecutive ids from 0.", location=location, hint=_CHECKPOINT_HINT
        )
    special_tokens = set(CtxMassTokenizer.first_tokens)
    vocab = {word if word in special_tokens else to_native_subword(word): index for index, word in words.items()}
    lang2id = dict(checkpoint["params"].get("lang2id") or {})
    return CtxMassTokenizer(
        vocab=vocab, merges=list(merges), do_lower_case=False, word_splitting=word_splitting, lang2id=lang2id or None
    )


def read_vocabulary(file: str) -> CtxBertTokenizer:
    """Create BERT's tokenizer from the first word of each line of a file. As in the release, it adds no `[CLS]`."""
    lines = [line.split() for line in read_lines(file)]
    if not all(lines):
        raise CtxError("A line has no token.", location=f"{file}, line {1 + lines.index([])}")
    vocabulary = {fields[0]: number for number, fields in enumerate(lines)}
    return CtxBertTokenizer(vocab=vocabulary, cls_token=None, model_max_length=512)


@dataclass(kw_only=True)
class MassConversion(Conversion):
    """Arguments of the conversion."""

    checkpoint: str = flag(REQUIRED, "Released file: .pth for translation, .pt for summaries.")
    codes: str | None = flag(None, "Translation: BPE codes, two tokens and a count per line.")
    vocabulary: str | None = flag(None, "Summaries: dict.txt with a token and a count per line, or BERT's vocab.txt.")
    language: str | None = flag(None, "Translation: target language, if the decoder has separate layers for each.")
    word_splitting: Literal["moses", "punctuation", "whitespace"] = flag(
        "moses", "Translation: word splitting of the tokenizer; `whitespace` for tokenized text."
    )

    def convert(self) -> tuple[CtxMassForConditionalGeneration, CtxMassTokenizer | CtxBertTokenizer, str]:
        """The model, its tokenizer and the file of the weights."""
        file, checkpoint = self.checkpoint, read_checkpoint(self.checkpoint)
        if "encoder" in checkpoint:
            if self.codes is None:
                raise CtxError("The checkpoint is a translation model.", location=file, hint="pass --codes.")
            self._check_unused("translation", "vocabulary")
            model = build_translation_model(checkpoint, file, self.language)
            merges = read_codes(self.codes)
            return model, build_translation_tokenizer(checkpoint, merges, file, self.word_splitting), file
        if self.vocabulary is None:
            raise CtxError("The checkpoint is a summarization model.", location=file, hint="pass --vocabulary.")
        self._check_unused("summarization", "codes", "language", "word_splitting")
        tokenizer = read_vocabulary(self.vocabulary)
        ids = (tokenizer.pad_token_id, tokenizer.convert_tokens_to_ids("[CLS]"), tokenizer.sep_token_id)
        return build_summarization_model(checkpoint, file, *ids), tokenizer, file

    def _check_unused(self, kind: str, *names: str) -> None:
        """Raise CtxError if one of the flags is set."""
        if unused := sorted(non_default_fields(self) & {*names}):
            raise CtxError(f"The checkpoint is a {kind} model.", location=f"--{unused[0]}", hint="remove the flag.")
