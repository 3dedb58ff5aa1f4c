"""Text encoders of a few thousand parameters, of ComfyUI's own classes, made in this process without files."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import comfy.clip_model
import comfy.sd
import comfy.sd1_clip
import comfy.text_encoders.llama
import comfy.text_encoders.t5
import torch

from .weights import randomise

WORDS = 1000
"""Numbers of words from 3 on, in each vocabulary."""

_CLIP = {
    "num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 128,
    "hidden_act": "quick_gelu", "max_position_embeddings": 77, "eos_token_id": 2,
}  # fmt: skip
_T5 = {
    "num_layers": 3, "d_model": 64, "d_kv": 16, "d_ff": 96, "dense_act_fn": "gelu_pytorch_tanh", "is_gated_act": True,
    "num_heads": 4, "model_type": "t5", "vocab_size": WORDS,
}  # fmt: skip
_LLAMA = {
    "vocab_size": WORDS, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
_LENGTHS = {"l": 77, "g": 77, "t5xxl": 99, "qwen": 99, "gemma": 99}
KINDS = ("clip", "t5", "umt5", "qwen", "gemma")


def text_encoder(kind: str = "clip", seed: int = 1, dtype: torch.dtype = torch.float32) -> Any:
    """Return a `comfy.sd.CLIP`: "clip" is CLIP-L beside CLIP-G, as SDXL has them; the others are of one part each."""
    target = SimpleNamespace(params={}, clip=_MODELS[kind], tokenizer=_no_tokenizer)
    made = comfy.sd.CLIP(target, model_options={"dtype": dtype})
    randomise(made.cond_stage_model, seed)
    return made


def _no_tokenizer(**_: Any) -> None:
    """Texts are given as `tokens`."""


def tokens(kind: str = "clip", words: int = 7, seed: int = 1, weight: float = 1.0) -> dict[str, Any]:
    """Return a text as ComfyUI's tokenizers give it: CLIP's are filled up to 77, those of others are as long as asked.

    Args:
        weight: of its second word.
    """
    generator = torch.Generator().manual_seed(seed)
    found = [(int(word), 1.0) for word in torch.randint(3, WORDS, (words,), generator=generator)]
    found[1] = found[1][0], weight
    if kind != "clip":
        return {_PARTS[kind]: [[*found, (1, 1.0)]]}
    chunks = [found[begin : begin + 75] for begin in range(0, words, 75)]
    filled = [[(0, 1.0), *chunk, *[(2, 1.0)] * (76 - len(chunk))] for chunk in chunks]
    return {"l": filled, "g": filled}


_PARTS = {"t5": "t5xxl", "umt5": "t5xxl", "qwen": "qwen", "gemma": "gemma"}


class ClipPart(comfy.sd1_clip.SDClipModel):  # type: ignore[misc]
    def __init__(self, activation: str = "quick_gelu", **options: Any) -> None:
        special = {"start": 0, "end": 2, "pad": 2}
        config = {**_CLIP, "hidden_act": activation}
        super().__init__(textmodel_json_config=config, special_tokens=special, **options)


class _OfSdxl(torch.nn.Module):
    """As `comfy.sdxl_clip.SDXLClipModel`, whose parts have their real sizes."""

    def __init__(self, device: Any = "cpu", dtype: Any = None, model_options: Any = None) -> None:
        super().__init__()
        options = {"device": device, "dtype": dtype, "model_options": model_options or {}, "layer": "hidden"}
        self.clip_l = ClipPart(layer_idx=-2, layer_norm_hidden_state=False, **options)
        self.clip_g = ClipPart(layer_idx=-2, layer_norm_hidden_state=False, **options)
        self.dtypes = {dtype}

    def set_clip_options(self, options: Any) -> None:
        self.clip_l.set_clip_options(options)
        self.clip_g.set_clip_options(options)

    def reset_clip_options(self) -> None:
        self.clip_l.reset_clip_options()
        self.clip_g.reset_clip_options()

    def encode_token_weights(self, token_weight_pairs: Any) -> Any:
        left, _ = self.clip_l.encode_token_weights(token_weight_pairs["l"])
        right, pooled = self.clip_g.encode_token_weights(token_weight_pairs["g"])
        return torch.cat([left, right], dim=-1), pooled


def _of_one(name: str, model_class: Any, config: Any, special: Any, **settings: Any) -> Any:
    """As ComfyUI's own text encoders of one part."""

    def part(**options: Any) -> Any:
        return comfy.sd1_clip.SDClipModel(
            textmodel_json_config=dict(config), model_class=model_class, special_tokens=special,
            max_length=_LENGTHS[name], **settings, **options,
        )  # fmt: skip

    return functools.partial(comfy.sd1_clip.SD1ClipModel, name=name, clip_model=part)


def _t5(kind: str, **settings: Any) -> Any:
    config = {**_T5, "model_type": kind}
    return _of_one("t5xxl", comfy.text_encoders.t5.T5, config, {"end": 1, "pad": 0}, layer="last", **settings)


def _llama(name: str, kind: str, **settings: Any) -> Any:
    return _of_one(
        name, getattr(comfy.text_encoders.llama, kind), _LLAMA, {"pad": 2}, layer="hidden", layer_idx=-2,
        layer_norm_hidden_state=False, enable_attention_masks=True, **settings,
    )  # fmt: skip


_MODELS = {
    "clip": _OfSdxl,
    "t5": _t5("t5"),
    "umt5": _t5("umt5", enable_attention_masks=True),
    "qwen": _llama("qwen", "Qwen25_3B"),
    "gemma": _llama("gemma", "Gemma2_2B"),
}
