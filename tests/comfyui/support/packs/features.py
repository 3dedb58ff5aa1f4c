"""What the nodes of known packs do to tiny models; where a pack loads weights, random ones of the right shapes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch

from slipstream.benchmarks.in_server.probe.stand_ins import EvaClip, FaceAnalysis, lend_faces, random_pulid
from slipstream.benchmarks.patching import patches
from slipstream.hosts.comfy.accelerate import accelerated_module
from slipstream.hosts.comfy.accelerate_controlnet import accelerate_controlnet
from slipstream.runtime.module import AcceleratedModule
from slipstream.tests.comfyui.support.models import tiny
from slipstream.tests.comfyui.support.models.architectures import TINY_SD15, TINY_SDXL

from .loading import CORE, TOGETHER, call, call_all
from .measuring import STEPS, Feature, Patcher

LENT: dict[str, tuple[str, ...]] = {
    **patches.LENT,
    "ComfyUI-NAG": ("comfy.ldm.chroma.layers.DoubleStreamBlock", "comfy.ldm.chroma.layers.SingleStreamBlock"),
}
"""Names that packs import and these features never reach, put where this ComfyUI or this machine lacks them."""

DEEP = "sd15 deep"
"""With as many blocks as SD1.5 has, for packs that count them; a tenth of the channels."""
DEEP_XL = "sdxl deep"
"""The same of SDXL."""
WIDE = "sd15 wide"
"""With layers of 640 channels, which some packs look for."""

_LEVELS = {
    "channel_mult": [1, 2, 4, 4],
    "num_res_blocks": [2, 2, 2, 2],
    "transformer_depth": [1, 1, 1, 1, 1, 1, 0, 0],
    "transformer_depth_output": [1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0],
}
_XL_LEVELS = {
    "channel_mult": [1, 2, 4],
    "num_res_blocks": [2, 2, 2],
    "transformer_depth": [0, 0, 1, 1, 1, 1],
    "transformer_depth_output": [0, 0, 0, 1, 1, 1, 1, 1, 1],
}
tiny.FAMILIES[DEEP] = replace(TINY_SD15, name=DEEP, unet={**TINY_SD15.unet, **_LEVELS})
tiny.FAMILIES[WIDE] = replace(TINY_SD15, name=WIDE, unet={**TINY_SD15.unet, "model_channels": 320})
tiny.FAMILIES[DEEP_XL] = replace(TINY_SDXL, name=DEEP_XL, unet={**TINY_SDXL.unet, **_XL_LEVELS})
for _name, _family in {DEEP: "sd15", WIDE: "sd15", DEEP_XL: "sdxl"}.items():
    tiny.CONFIGS[_name] = tiny.CONFIGS[_family]

COMPANIONS = {"ComfyUI-Inspire-Pack": ("ComfyUI-Impact-Pack",)}
"""Packs that a pack asks for."""

PREPARED: dict[str, Callable[[], None]] = dict.fromkeys(
    ("ComfyUI_InstantID", "ComfyUI-PuLID-Flux", *patches.FACES), lend_faces
)
"""What is done before a pack is loaded."""

_FEATURES: dict[str, Callable[[], Iterable[Feature]]] = {}


def features_of(pack: str) -> list[Feature]:
    """What is measured of a pack; nothing where it is not known."""
    return list(_FEATURES[pack]()) if pack in _FEATURES else []


def _of(pack: str) -> Callable[[Callable[[], Iterable[Feature]]], Callable[[], Iterable[Feature]]]:
    def keep(features: Callable[[], Iterable[Feature]]) -> Callable[[], Iterable[Feature]]:
        _FEATURES[pack] = features
        return features

    return keep


def known_packs() -> list[str]:
    """The packs that have features here."""
    return sorted(_FEATURES)


def _node(node: str, **given: Any) -> Callable[[Patcher], Patcher]:
    """A node that takes a model and gives one; functions among its inputs are called when it runs."""

    def apply(patcher: Patcher) -> Patcher:
        return call(node, model=patcher, **_made(given))

    return apply


def _made(given: dict[str, Any]) -> dict[str, Any]:
    return {name: value() if isinstance(value, FunctionType) else value for name, value in given.items()}


def _random(*shape: int, seed: int = 1, scale: float | None = None) -> torch.Tensor:
    noise = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return noise * (scale if scale is not None else shape[-1] ** -0.5)


def _image(size: int = 224, seed: int = 4) -> torch.Tensor:
    return torch.rand(1, size, size, 3, generator=torch.Generator().manual_seed(seed))


@_of("ComfyUI-seamless-tiling")
def _seamless_tiling() -> Iterable[Feature]:
    for copied in ("Make a copy", "Modify in place"):
        yield Feature(f"SeamlessTile, {copied.lower()}", _node("SeamlessTile", tiling="enable", copy_model=copied))
    yield Feature(
        "SeamlessTile, x_only, SDXL", _node("SeamlessTile", tiling="x_only", copy_model="Make a copy"), "sdxl"
    )


@_of("FreeU_Advanced")
def _free_u() -> Iterable[Feature]:
    yield Feature("FreeU (Advanced)", _node("WAS_FreeU", target_block="all"), WIDE)
    yield Feature("FreeU V2 (Advanced)", _node("WAS_FreeU_V2", output_block=True), WIDE)
    yield Feature("Post CFG shift", _node("WAS_PostCFGShift"))


@_of("ComfyUI_TGate")
def _tgate() -> Iterable[Feature]:
    yield Feature("TGate Apply", _node("TGateApplySimple", start_at=0.3))
    yield Feature("TGate Apply, self-attention", _node(
        "TGateApplyAdvanced", start_at=0.5, self_attn_start_at=0.3, only_cross_attention=False))  # fmt: skip
    yield Feature("TGate Apply (Deprecated)", _node("TGateApply", start_at=0.3))


@_of("ComfyUI-deepcache")
def _deepcache() -> Iterable[Feature]:
    yield Feature("DeepCache", _node("DeepCache", cache_interval=3, cache_depth=1))


CFG_ONE: Callable[[], dict[str, Any]] = lambda: {"cfg": 1.0}  # noqa: E731


@_of("ComfyUI-TeaCache")
def _teacache() -> Iterable[Feature]:
    yield Feature("TeaCache, Flux", _node("TeaCache", model_type="flux", rel_l1_thresh=5.0), "flux", CFG_ONE)
    yield Feature("TeaCache, Wan", _node("TeaCache", model_type="wan2.1_t2v_1.3B_ret_mode", rel_l1_thresh=10.0), "wan")


@_of("ComfyUI-MagCache")
def _magcache() -> Iterable[Feature]:
    given = {"magcache_thresh": 0.3, "magcache_K": 4}
    yield Feature("MagCache, Flux", _node("MagCache", model_type="flux", **given), "flux", CFG_ONE)
    yield Feature("MagCache, Wan", _node("MagCache", model_type="wan2.1_t2v_1.3B", **given), "wan")
    yield Feature("MagCache, Qwen-Image", _node("MagCache", model_type="qwen_image", **given), "qwen")


@_of("Comfy-WaveSpeed")
def _wavespeed() -> Iterable[Feature]:
    for family in ("sd15", "sdxl", "flux"):
        yield Feature(f"Apply First Block Cache, {family}", _node(
            "ApplyFBCacheOnModel", residual_diff_threshold=0.9), family)  # fmt: skip


@_of("ComfyUI_IPAdapter_plus")
def _ip_adapter() -> Iterable[Feature]:
    given = {"ipadapter": _ip_adapter_weights, "image": _image, "clip_vision": _clip_vision}
    yield Feature("IPAdapter Advanced", _node("IPAdapterAdvanced", **given))
    yield Feature("IPAdapter Advanced, half of the steps", _node("IPAdapterAdvanced", end_at=0.5, **given))
    yield Feature("IPAdapter Advanced, masked", _node(
        "IPAdapterAdvanced", attn_mask=lambda: torch.ones(1, 64, 64).tril(), **given))  # fmt: skip
    yield Feature("IPAdapter Tiled, style transfer", _node("IPAdapterTiled", weight_type="style transfer", **given))


def _ip_adapter_weights() -> dict[str, Any]:
    """Of the tiny UNet: 16 places for attention as in SD1.5, of which three are there."""
    layers = {}
    for number in range(16):
        width = 64 if number == 15 else 32  # the middle
        for name in ("to_k_ip", "to_v_ip"):
            layers[f"{2 * number + 1}.{name}.weight"] = _random(width, 64, seed=number)
    projection = {"proj.weight": _random(4 * 64, 64), "proj.bias": _random(4 * 64, scale=0.1)}
    return {
        "image_proj": {**projection, "norm.weight": torch.ones(64), "norm.bias": torch.zeros(64)},
        "ip_adapter": layers,
    }


def _clip_vision() -> Any:
    from comfy.clip_vision import ClipVisionModel

    from slipstream.tests.comfyui.support.models.weights import randomise

    model = ClipVisionModel({
        "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 64, "patch_size": 14,
        "image_size": 224, "projection_dim": 64, "num_channels": 3, "hidden_act": "gelu", "layer_norm_eps": 1e-5,
        "model_type": "clip_vision_model",
    })  # fmt: skip
    randomise(model.model, 1)
    return model


@_of("ComfyUI-KJNodes")
def _kj_nodes() -> Iterable[Feature]:
    negative = {"conditioning": lambda: tiny.conditioning("wan", 3)}
    yield Feature("Patch Sage Attention KJ", _sage_attention, changes=False)
    yield Feature("WanVideo NAG", _node("WanVideoNAG", **negative), "wan", CFG_ONE)
    yield Feature("CFG Zero Star/Init", _node("CFGZeroStarAndInit"))
    yield Feature("Model Patch Torch Settings", _node("ModelPatchTorchSettings"), changes=False)
    yield Feature("Wan Chunk FeedForward", _node("WanChunkFeedForward"), "wan", changes=False)


def _sage_attention(patcher: Patcher) -> Patcher:
    """The library's kernels need a GPU: their place is taken by torch's attention in the pack's half precision."""

    def sageattn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given: Any) -> torch.Tensor:
        q, k, v = (part.transpose(1, 2) if given.get("tensor_layout") == "NHD" else part for part in (q, k, v))
        found = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=given.get("attn_mask"))
        return found.transpose(1, 2) if given.get("tensor_layout") == "NHD" else found

    library: Any = ModuleType("sageattention")
    library.sageattn = sageattn
    sys.modules["sageattention"] = library
    return call("PathchSageAttentionKJ", model=patcher, sage_attention="auto")


@_of("ComfyUI_Patches_ll")
def _patches_ll() -> Iterable[Feature]:
    def with_override(node: str, **given: Any) -> Callable[[Patcher], Patcher]:
        return lambda patcher: call(node, model=call("DitForwardOverrider", model=patcher), **given)

    yield Feature("DitForwardOverrider", _node("DitForwardOverrider"), "flux", CFG_ONE, changes=False)
    yield Feature("Apply TeaCache Patch", with_override("ApplyTeaCachePatch", rel_l1_thresh=5.0), "flux", CFG_ONE)
    yield Feature("Apply First Block Cache Patch", with_override(
        "ApplyFirstBlockCachePatch", residual_diff_threshold=0.9), "flux", CFG_ONE)  # fmt: skip


@_of("sd-perturbed-attention")
def _perturbed_attention() -> Iterable[Feature]:
    yield Feature("Perturbed-Attention Guidance", _node("PerturbedAttention"))
    yield Feature("Smoothed Energy Guidance", _node("SmoothedEnergyGuidanceAdvanced", blur_sigma=1.0))
    yield Feature("Normalized Attention Guidance", _node(
        "NormalizedAttentionGuidance", negative=lambda: tiny.conditioning(seed=3)))  # fmt: skip
    yield Feature("PLADIS", _node("PLADIS"))
    yield Feature("Token Perturbation Guidance", _node("TokenPerturbationGuidance", unet_block_list="m0"))
    yield Feature("Frequency-Decoupled Guidance", _node("FrequencyDecoupledGuidance"))
    yield Feature("Momentum Guidance", _node("MomentumGuidance"))
    yield Feature("Sliding Mode Control CFG", _node("SlidingModeControlCFG"))


@_of("ComfyUI-bleh")
def _bleh() -> Iterable[Feature]:
    yield Feature("HyperTile", _node("BlehHyperTile", tile_size=32), options=LARGER)
    yield Feature("Deep Shrink", _node("BlehDeepShrink", commasep_block_numbers="1"), options=LARGER)
    yield Feature("Block CFG", _node("BlehBlockCFG", commasep_block_numbers="i1,m0,o1"))


LARGER: Callable[[], dict[str, Any]] = lambda: {"size": 128}  # noqa: E731


@_of("ComfyUI-TiledDiffusion")
def _tiled_diffusion() -> Iterable[Feature]:
    tiles = {"tile_width": 64, "tile_height": 64, "tile_overlap": 32}
    for method in ("MultiDiffusion", "Mixture of Diffusers", "SpotDiffusion"):
        yield Feature(f"Tiled Diffusion, {method}", _node("TiledDiffusion", method=method, **tiles), options=LARGER)


@_of("ComfyUI_TiledKSampler")
def _tiled_sampler() -> Iterable[Feature]:
    """Its smallest tiles are 256 pixels."""
    for strategy in ("padded", "simple"):
        yield Feature(
            f"Tiled KSampler, {strategy}",
            sample=lambda patcher, strategy=strategy: call(
                "BNK_TiledKSampler",
                model=patcher,
                tile_width=256,
                tile_height=256,
                tiling_strategy=strategy,
                **_sampling(320),
            )["samples"],  # fmt: skip
            options=lambda: {"size": 320},
        )


def _sampling(size: int = 64, **changes: Any) -> dict[str, Any]:
    """The inputs that KSampler nodes share."""
    return {
        "seed": 7, "steps": STEPS, "cfg": 7.0, "sampler_name": "euler", "scheduler": "normal", "denoise": 1.0,
        "positive": tiny.conditioning(seed=1), "negative": tiny.conditioning(seed=2),
        "latent_image": tiny.latent(size), **changes,
    }  # fmt: skip


@_of("attention-couple-ComfyUI")
def _attention_couple() -> Iterable[Feature]:
    def masked(seed: int, left: bool) -> list[Any]:
        mask = torch.zeros(1, 64, 64)
        mask[..., :32] = float(left)
        mask[..., 32:] = float(not left)
        return tiny.conditioning(seed=seed, mask=mask, mask_strength=1.0)

    def couple(patcher: Patcher) -> Patcher:
        return call(
            "Attention couple", model=patcher, positive=masked(1, True) + masked(5, False),
            negative=tiny.conditioning(seed=2), mode="Attention",
        )  # fmt: skip

    yield Feature("Attention couple", couple, DEEP)


@_of("ControlNet-LLLite-ComfyUI")
def _lllite() -> Iterable[Feature]:
    def load(patcher: Patcher) -> Patcher:
        from safetensors.torch import save_file

        import nodes

        folder = Path(sys.modules[nodes.NODE_CLASS_MAPPINGS["LLLiteLoader"].__module__].__file__ or "").parent
        shapes = {
            "conditioning1.0": (8, 3, 4, 4), "conditioning1.2": (16, 8, 2, 2), "down.0": (8, 32), "mid.0": (8, 24),
            "up.0": (32, 8),
        }  # fmt: skip
        weights = {}
        for name, shape in shapes.items():
            place = f"lllite_unet_input_blocks_1_1_transformer_blocks_0_attn1_to_q.{name}"
            weights |= {f"{place}.weight": _random(*shape, scale=0.3), f"{place}.bias": torch.zeros(shape[0])}
        (folder / "models").mkdir(exist_ok=True)
        save_file(weights, folder / "models" / "random.safetensors")
        return call("LLLiteLoader", model=patcher, model_name="random.safetensors", cond_image=_image(64))

    yield Feature("Load LLLite", load)


@_of("ComfyUI-NAG")
def _nag() -> Iterable[Feature]:
    for family in ("sd15", "sdxl", "flux", "sd3", "wan"):
        prompts = {name: tiny.conditioning(family, seed) for name, seed in NAG_PROMPTS.items()}
        yield Feature(
            f"KSampler With NAG, {family}",
            family=family,
            sample=lambda patcher, family=family, prompts=prompts: call(
                "KSamplerWithNAG", model=patcher, **_sampling(**prompts, latent_image=tiny.latent(64, 1, family))
            )["samples"],  # fmt: skip
        )


NAG_PROMPTS = {"positive": 1, "negative": 2, "nag_negative": 3}


def _controlnet_for(patcher: Patcher) -> Any:
    """One that is accelerated where the model is."""
    control, module = tiny.controlnet(), accelerated_module(patcher)
    if module is None:
        return control
    return accelerate_controlnet(control, AcceleratedModule(module.provider, module.settings))


@_of("ComfyUI-Advanced-ControlNet")
def _advanced_controlnet() -> Iterable[Feature]:
    def sample(family: str = "sd15", **given: Any) -> Callable[[Patcher], torch.Tensor]:
        def run(patcher: Patcher) -> torch.Tensor:
            inputs = _made({"control_net": lambda: _controlnet_for(patcher), "image": lambda: _image(64), **given})
            positive, negative = call_all(
                "ACN_AdvancedControlNetApply_v2", positive=tiny.conditioning(seed=1),
                negative=tiny.conditioning(seed=2), **inputs,
            )  # fmt: skip
            return tiny.sample(patcher, family, steps=STEPS, positive=positive, negative=negative)

        return run

    yield Feature("Apply Advanced ControlNet", sample=sample())
    yield Feature("Apply Advanced ControlNet, part of the steps", sample=sample(start_percent=0.3, end_percent=0.7))
    yield Feature("Apply Advanced ControlNet, mask", sample=sample(mask_optional=lambda: torch.ones(1, 64, 64).tril()))
    yield Feature("Apply Advanced ControlNet, soft weights", sample=sample(
        weights_override=lambda: call("ACN_ScaledSoftControlNetWeights")))  # fmt: skip
    yield Feature("Reference ControlNet", family=DEEP, sample=sample(
        DEEP, control_net=lambda: call("ACN_ReferenceControlNet"),
        image=lambda: call("ACN_ReferencePreprocessor", image=_image(64), vae=tiny.vae(),
                           latent_size=tiny.latent())))  # fmt: skip


@_of("efficiency-nodes-comfyui")
def _efficiency() -> Iterable[Feature]:
    def sample(**given: Any) -> Callable[[Patcher], torch.Tensor]:
        def run(patcher: Patcher) -> torch.Tensor:
            return call_all(
                "KSampler (Efficient)", model=patcher, preview_method="none", vae_decode="false", my_unique_id="1",
                prompt={"1": {"inputs": {}}}, **_sampling(), **_made(given))[3]["samples"]  # fmt: skip

        return run

    yield Feature("KSampler (Efficient)", sample=sample(), changes=False)
    yield Feature("KSampler (Efficient) with Noise Control Script", sample=sample(
        script=lambda: call("Noise Control Script", rng_source="cpu", add_seed_noise=True, weight=0.2)))  # fmt: skip


@_of("ComfyUI-Inspire-Pack")
def _inspire() -> Iterable[Feature]:
    yield Feature("KSampler (inspire), variation seed", sample=lambda patcher: call(
        "KSampler //Inspire", model=patcher, noise_mode="CPU", variation_seed=3, variation_strength=0.3,
        **_sampling())["samples"])  # fmt: skip
    yield Feature("HyperTile (Inspire)", _node("HyperTile //Inspire", tile_size=32), options=LARGER)
    yield Feature("Regional CFG (Inspire)", _node("RegionalCFG //Inspire", mask=lambda: torch.ones(1, 64, 64).tril()))


@_of("ComfyUI-GGUF")
def _gguf() -> Iterable[Feature]:
    """Compared with the same weights unquantised, by ComfyUI's own loader."""

    def unquantised() -> torch.Tensor:
        import comfy.sd

        model = comfy.sd.load_diffusion_model(str(_unquantised_file()))
        return tiny.sample(model, steps=STEPS, **_prompts_of(768))

    yield Feature("Unet Loader (GGUF), SD1.5 in Q8_0", make=lambda: call("UnetLoaderGGUF", unet_name=_gguf_file()),
                  options=lambda: _prompts_of(768), baseline=unquantised)  # fmt: skip


def _prompts_of(dim: int) -> dict[str, Any]:
    def prompt(seed: int) -> list[Any]:
        return [[_random(1, 77, dim, seed=seed, scale=1.0), {}]]

    return {"positive": prompt(1), "negative": prompt(2)}


def _unquantised_file() -> Path:
    """The small SD1.5 UNet that ComfyUI's detection knows."""
    import folder_paths

    from slipstream.tests.comfyui.support.models.model_files import ModelFiles

    files = ModelFiles(Path(folder_paths.models_dir) / "made")
    return files.folder / "diffusion_models" / files.unet("sd15", 1)


def _gguf_file() -> str:
    import folder_paths
    import gguf
    from safetensors.torch import load_file

    folder = Path(folder_paths.models_dir) / "unet"
    file = folder / "random.gguf"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        weights = load_file(_unquantised_file())
        writer = gguf.GGUFWriter(str(file), "sd1")
        for name, weight in weights.items():
            value = weight.float().numpy()
            kind = gguf.GGMLQuantizationType.Q8_0
            if weight.ndim < 2 or weight.shape[-1] % 32:
                writer.add_tensor(name, value)
            else:
                writer.add_tensor(name, gguf.quants.quantize(value, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return file.name


@_of("ComfyUI-AnimateDiff-Evolved")
def _animatediff() -> Iterable[Feature]:
    frames = lambda: {"batch": 4}  # noqa: E731
    loaded = {"model_name": lambda: _motion_module()}
    yield Feature("AnimateDiff Loader (Gen1)", _node("ADE_AnimateDiffLoaderGen1", **loaded), DEEP, frames)
    yield Feature("AnimateDiff Loader (Gen1), context of two frames", _node(
        "ADE_AnimateDiffLoaderGen1", **loaded, context_options=lambda: call(
            "ADE_StandardUniformContextOptions", context_length=2, context_overlap=1)), DEEP, frames)  # fmt: skip
    yield Feature("Use Evolved Sampling, no motion module", _node("ADE_UseEvolvedSampling"), DEEP, frames,
                  changes=False)  # fmt: skip


def _motion_module() -> str:
    """Random weights with a tenth of the channels; the pack's widths are divided accordingly."""
    import folder_paths
    from safetensors.torch import save_file

    code = next(module for name, module in sys.modules.items() if name.endswith("animatediff.motion_module_ad"))
    whole = code.MotionModule
    if not hasattr(whole, "tenth"):

        def tenth(channels: int, *args: Any, **kwargs: Any) -> Any:
            return whole(channels // 10, *args, **kwargs)

        tenth.tenth = True  # type: ignore[attr-defined]
        code.MotionModule = tenth
    folder = Path(folder_paths.get_folder_paths("animatediff_models")[0])
    file = folder / "random.safetensors"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        weights = {}
        for side, per_block in (("down_blocks", 2), ("up_blocks", 3)):
            widths = (32, 64, 128, 128) if side == "down_blocks" else (128, 128, 64, 32)
            for block, width in enumerate(widths):
                for module in range(per_block):
                    place = f"{side}.{block}.motion_modules.{module}.temporal_transformer"
                    weights |= {f"{place}.{name}": value for name, value in _temporal_transformer(width)}
        save_file(weights, file)
    return file.name


def _temporal_transformer(width: int) -> Iterable[tuple[str, torch.Tensor]]:
    def layer(name: str, *shape: int, bias: bool = True) -> Iterable[tuple[str, torch.Tensor]]:
        yield f"{name}.weight", _random(*shape) if len(shape) > 1 else torch.ones(*shape)
        if bias:
            yield f"{name}.bias", torch.zeros(shape[0])

    yield from layer("norm", width)
    yield from layer("proj_in", width, width)
    yield from layer("proj_out", width, width)
    block = "transformer_blocks.0"
    for index in range(2):
        attention = f"{block}.attention_blocks.{index}"
        for name in ("to_q", "to_k", "to_v"):
            yield from layer(f"{attention}.{name}", width, width, bias=False)
        yield from layer(f"{attention}.to_out.0", width, width)
        yield f"{attention}.pos_encoder.pe", _random(1, 32, width, scale=0.5)
        yield from layer(f"{block}.norms.{index}", width)
    yield from layer(f"{block}.ff.net.0.proj", 8 * width, width)
    yield from layer(f"{block}.ff.net.2", width, 4 * width)
    yield from layer(f"{block}.ff_norm", width)


def _module_of(node: str, name: str) -> Any:
    """A module of the pack that has this node; "" for the one that the node is in."""
    import nodes

    place = nodes.NODE_CLASS_MAPPINGS[node].__module__
    return sys.modules[f"{place.rpartition('.')[0]}.{name}" if name else place]


@_of("ComfyUI_InstantID")
def _instant_id() -> Iterable[Feature]:
    """The model goes through one node with the prompts and their ControlNet."""

    def sample(patcher: Patcher) -> torch.Tensor:
        model, positive, negative = call_all(
            "ApplyInstantID", model=patcher, instantid=_instant_id_weights(), insightface=FaceAnalysis(),
            control_net=tiny.controlnet(DEEP_XL), image=_image(), positive=tiny.conditioning(DEEP_XL, 1),
            negative=tiny.conditioning(DEEP_XL, 2),
        )  # fmt: skip
        return tiny.sample(model, DEEP_XL, steps=STEPS, positive=positive, negative=negative)

    yield Feature("Apply InstantID", sample=sample, family=DEEP_XL)


def _instant_id_weights() -> Any:
    code = _module_of("ApplyInstantID", "")
    widths = [64] * 4 + [128] * 20 + [128] * 30 + [64] * 6 + [128] * 10  # of SDXL's blocks, by the pack's numbers
    layers = {
        f"{2 * number + 1}.{name}.weight": _random(width, 64, seed=number)
        for number, width in enumerate(widths)
        for name in ("to_k_ip", "to_v_ip")
    }
    torch.manual_seed(1)
    projection = code.Resampler(
        dim=1280, depth=4, dim_head=64, heads=20, num_queries=16, embedding_dim=512, output_dim=64, ff_mult=4
    )
    return code.InstantID(
        {"image_proj": projection.state_dict(), "ip_adapter": layers}, cross_attention_dim=1280,
        output_cross_attention_dim=64, clip_embeddings_dim=512, clip_extra_context_tokens=16,
    )  # fmt: skip


@_of("ComfyUI-PuLID-Flux")
def _pulid_flux() -> Iterable[Feature]:
    yield Feature("Apply PuLID Flux", _node(
        "ApplyPulidFlux", pulid_flux=lambda: random_pulid(64), eva_clip=EvaClip(),
        face_analysis=FaceAnalysis(), image=_image, unique_id=lambda: "1"), "flux", CFG_ONE)  # fmt: skip


@_of("ComfyUI_PuLID_Flux_ll")
def _pulid_flux_ll() -> Iterable[Feature]:
    """It counts on Flux's 19 double blocks."""

    def patcher_of(model: Any) -> Any:
        import comfy.model_management
        import comfy.model_patcher

        device = comfy.model_management.get_torch_device()
        return comfy.model_patcher.ModelPatcher(model, load_device=device, offload_device=device)

    yield Feature("Apply PuLID Flux", _node(
        "ApplyPulidFlux", pulid_flux=lambda: patcher_of(random_pulid(64)), eva_clip=EvaClip(),
        face_analysis=FaceAnalysis(), image=_image, unique_id=lambda: "1"), "flux", CFG_ONE,
        make=lambda: tiny.transformer("flux", depth=19))  # fmt: skip


@_of("ComfyUI-Impact-Pack")
def _impact() -> Iterable[Feature]:
    """The detailer samples a part of a picture again."""

    def detail(patcher: Patcher) -> torch.Tensor:
        mask = torch.zeros(1, 128, 128)
        mask[:, 32:96, 32:96] = 1
        sampling = _sampling(denoise=0.7)
        del sampling["latent_image"]
        return call(
            "DetailerForEach", image=_image(128), segs=call("MaskToSEGS", mask=mask, crop_factor=1.5), model=patcher,
            clip=None, vae=tiny.vae(), guide_size=64, wildcard="", noise_mask_feather=0,
            **sampling,
        )  # fmt: skip

    yield Feature("Detailer (SEGS)", sample=detail, baseline=lambda: _image(128))


@_of("ComfyUI-ppm")
def _ppm() -> Iterable[Feature]:
    yield Feature("CADS", _node("CADSPPM"))
    yield Feature("Epsilon Scaling", _node("EpsilonScalingPPM"))
    yield Feature("Model Attention Selector", _node("ModelAttentionSelector"), changes=False)


@_of(CORE)
def _core() -> Iterable[Feature]:
    """Those of ComfyUI's own nodes that reach into the model."""

    def with_controlnet(patcher: Patcher) -> torch.Tensor:
        positive, negative = call_all(
            "ControlNetApplyAdvanced", positive=tiny.conditioning(seed=1), negative=tiny.conditioning(seed=2),
            control_net=tiny.controlnet(), image=_image(64),
        )  # fmt: skip
        return tiny.sample(patcher, steps=STEPS, positive=positive, negative=negative)

    layers = {"start_percent": 0.0, "end_percent": 1.0}
    yield Feature("PerturbedAttentionGuidance", _node("PerturbedAttentionGuidance"), options=LARGER)
    yield Feature("SelfAttentionGuidance", _node("SelfAttentionGuidance"), options=LARGER)
    yield Feature("SkipLayerGuidanceSD3", _node("SkipLayerGuidanceSD3", layers="0", **layers), "sd3")
    yield Feature("SkipLayerGuidanceDiT", _node(
        "SkipLayerGuidanceDiT", double_layers="0", single_layers="0", **layers), "flux", _CFG_TWO)  # fmt: skip
    yield Feature("HyperTile", _node("HyperTile", tile_size=32), options=LARGER)
    yield Feature("TomePatchModel", _node("TomePatchModel", ratio=0.5), options=LARGER)
    yield Feature("PatchModelAddDownscale", _node("PatchModelAddDownscale"), options=LARGER)
    yield Feature("EasyCache, SD1.5", _node("EasyCache", reuse_threshold=3.0))
    yield Feature("EasyCache, Flux", _node("EasyCache", reuse_threshold=3.0), "flux", CFG_ONE)
    yield Feature("LazyCache", _node("LazyCache", reuse_threshold=3.0))
    yield Feature("NAGuidance, SD1.5", _node("NAGuidance"))
    yield Feature("NAGuidance, Flux", _node("NAGuidance"), "flux", _CFG_TWO)
    yield Feature("RescaleCFG", _node("RescaleCFG"))
    yield Feature("FreeU", _node("FreeU"), options=LARGER)
    yield Feature("FreeU_V2", _node("FreeU_V2"), options=LARGER)
    yield Feature("ControlNetApplyAdvanced", sample=with_controlnet)


_CFG_TWO: Callable[[], dict[str, Any]] = lambda: {"cfg": 2.0}  # noqa: E731


@_of(TOGETHER)
def _together() -> Iterable[Feature]:
    """One node that an engine honours, one that it cannot, and both."""
    shift, tiled = _node("WAS_PostCFGShift"), _node("SeamlessTile", tiling="enable", copy_model="Make a copy")
    yield Feature("Post CFG shift", shift)
    yield Feature("Post CFG shift and SeamlessTile", lambda patcher: tiled(shift(patcher)))
    adapter = _node("IPAdapterAdvanced", ipadapter=_ip_adapter_weights, image=_image, clip_vision=_clip_vision)
    yield Feature("IPAdapter Advanced and Post CFG shift", lambda patcher: shift(adapter(patcher)))
