"""Nodes that patch a model, each as one places it between Accelerate Model and the sampler.

Inputs that are not named here have the node's own default. What is used most is measured first, but what calls the
model with shapes that no other does comes late, since engines are built for them. What leaves something of its own in
the model that ComfyUI does not take away comes last.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ADAPTER, MOTION_MODULE = "ipadapter", "animatediff_models"
"""ComfyUI's folders of such files, and the only ones that these nodes load."""

EMBEDDING = "SlipstreamBenchmarkEmbedding"
"""The probe's node that stands for a picture's embedding."""

KSAMPLER, APPLY_CONTROLNET = "KSampler", "ControlNetApplyAdvanced"
"""ComfyUI's nodes in whose place some of these stand."""

UNETS = ("sd15", "sdxl", "tiny", "tiny-deep")
FLUXES, WANS = ("flux", "flux-third", "tiny-flux"), ("wan", "tiny-wan")
"""Families of models; those of UNets are what most of these nodes are for."""


@dataclass(frozen=True)
class Given:
    """What a workflow of the benchmark has for a node's input.

    Attributes:
        name: of an input of the node in whose place the patch stands, KSampler's where it is another; or "clip", "vae",
            "half_of_steps", or a folder, for the name of the family's file there.
    """

    name: str


FILES = (Given(ADAPTER), Given(MOTION_MODULE))
"""Those that are names of files."""


@dataclass(frozen=True)
class Node:
    """A node, of which one output is taken.

    Attributes:
        class_type: as the pack names it.
        inputs: plain values, nodes, or what is `Given`.
        output: the place of that output.
    """

    class_type: str
    inputs: Mapping[str, Any] = field(default_factory=dict)
    output: int = 0

    @property
    def classes(self) -> tuple[str, ...]:
        """Of this node and of those among its inputs."""
        others = (value for value in self.inputs.values() if isinstance(value, Node))
        return (self.class_type, *(name for other in others for name in other.classes))

    @property
    def folders(self) -> tuple[str, ...]:
        """ComfyUI's folders of the files that are loaded."""
        others = (value for value in self.inputs.values() if isinstance(value, Node))
        own = (value.name for value in self.inputs.values() if value in FILES)
        return (*own, *(name for other in others for name in other.folders))


@dataclass(frozen=True)
class Patch:
    """One node that is given a model, as `model`, and gives a patched one; or one in the place of another.

    Attributes:
        name: on the command line and in rows.
        title: as the pack names the node.
        pack: the folder of `custom_nodes` that has it; empty: ComfyUI itself.
        families: of the models that it is for, keys of `FAMILIES`.
        stands_for: the class of the node in whose place it stands; empty: it stands between model and sampler.
    """

    name: str
    title: str
    pack: str
    node: Node
    families: tuple[str, ...] = UNETS
    stands_for: str = ""

    def is_for(self, family: str, has_control: bool) -> bool:
        """Whether workflows with a family's model, and with a ControlNet or without, have a place for it."""
        return family in self.families and (has_control or self.stands_for != APPLY_CONTROLNET)


_GUIDANCE, _BLEH, _PATCHES_LL = "sd-perturbed-attention", "ComfyUI-bleh", "ComfyUI_Patches_ll"
_TEACACHE, _MAGCACHE, _KJ, _PPM = "ComfyUI-TeaCache", "ComfyUI-MagCache", "ComfyUI-KJNodes", "ComfyUI-ppm"
_IMPACT, _PULID = "ComfyUI-Impact-Pack", "ComfyUI_PuLID_Flux_ll"
LENT = {
    **dict.fromkeys((_TEACACHE, _MAGCACHE), ("comfy.ldm.lightricks.model.precompute_freqs_cis",)),
    _PPM: ("comfy.ldm.cosmos.predict2.apply_rotary_pos_emb",),
    _IMPACT: (
        "ultralytics.YOLO", "piexif.dump", "skimage.measure.label", "skimage.measure.regionprops",
        "segment_anything.SamPredictor", "segment_anything.sam_model_registry",
    ),
    _PULID: ("ftfy.fix_text",),
}  # fmt: skip
"""By pack, what it imports and these nodes never call: names that newer ComfyUIs lack, and those of libraries."""

FACES = (_PULID,)
"""Packs that import libraries which find and describe faces."""

_MODEL, _POSITIVE, _NEGATIVE = map(Given, ("model", "positive", "negative"))


def _given(names: str) -> dict[str, Given]:
    """Inputs that are called as what is given for them."""
    return {name: Given(name) for name in names.split()}


_SAMPLED = _given("model positive negative latent_image seed steps cfg sampler_name scheduler denoise")
_CONTROLLED = _given("positive negative control_net image strength start_percent end_percent")


def _impact_sampler(positive: Given, negative: Given) -> Node:
    pipe = Node("ToBasicPipe", {**_given("model clip vae"), "positive": positive, "negative": negative})
    return Node("KSamplerAdvancedProvider", {**_given("cfg sampler_name scheduler"), "basic_pipe": pipe})


_REGIONAL = {
    **_given("seed steps denoise"), "samples": Given("latent_image"), "base_only_steps": Given("half_of_steps"),
    "base_sampler": _impact_sampler(_POSITIVE, _NEGATIVE), "additional_mode": "DISABLE",
    "regional_prompts": Node("RegionalPrompt", {
        "mask": Node("SolidMask"), "advanced_sampler": _impact_sampler(_NEGATIVE, _POSITIVE)}),
}  # fmt: skip
"""One region with the prompts the other way round; in half of the steps it is sampled after all else."""

_FACE = {
    "model": Node("SlipstreamBenchmarkTextLength", {"model": _MODEL, "text": _POSITIVE}),
    "pulid_flux": Node("SlipstreamBenchmarkPulid", {"model": _MODEL}),
    "eva_clip": Node("SlipstreamBenchmarkEvaClip"),
    "face_analysis": Node("SlipstreamBenchmarkFaces"),
    "image": Node("SlipstreamBenchmarkEdges", {"size": 512}),
}
"""The probe's nodes stand for PuLID's weights, and for the libraries that find and describe a face."""

_IP_ADAPTER = {
    "ipadapter": Node("IPAdapterModelLoader", {"ipadapter_file": Given(ADAPTER)}),
    "pos_embed": Node(EMBEDDING, {"seed": 1}),
    "neg_embed": Node(EMBEDDING, {"seed": 2}),
}

_OVERRIDDEN = {"model": Node("DitForwardOverrider", {"model": _MODEL})}

PATCHES = {
    patch.name: patch
    for patch in (
        Patch("ip-adapter", "IPAdapter Embeds", "ComfyUI_IPAdapter_plus", Node("IPAdapterEmbeds", _IP_ADAPTER)),
        Patch("hypertile", "HyperTile", "", Node("HyperTile", {"max_depth": 2})),
        Patch("pag", "PerturbedAttentionGuidance", "", Node("PerturbedAttentionGuidance")),
        Patch("first-block-cache", "Apply First Block Cache", "Comfy-WaveSpeed", Node(
            "ApplyFBCacheOnModel", {"residual_diff_threshold": 0.2})),
        Patch("seg", "Smoothed Energy Guidance", _GUIDANCE, Node("SmoothedEnergyGuidanceAdvanced", {"blur_sigma": 1})),
        Patch("freeu-v2", "FreeU_V2", "", Node("FreeU_V2")),
        Patch("token-merging", "TomePatchModel", "", Node("TomePatchModel")),
        Patch("nag", "Normalized Attention Guidance", _GUIDANCE, Node(
            "NormalizedAttentionGuidance", {"negative": _NEGATIVE})),
        Patch("easycache", "EasyCache", "", Node("EasyCache")),
        Patch("sag", "SelfAttentionGuidance", "", Node("SelfAttentionGuidance")),
        Patch("freeu-advanced", "FreeU (Advanced)", "FreeU_Advanced", Node("WAS_FreeU", {
            "target_block": "all", "b1_mode": "inject", "b2_mode": "inject", "threshold": 1})),
        Patch("freeu-ppm", "FreeU V2 (PPM)", _PPM, Node("FreeU2PPM", {"output_block": True})),
        Patch("core-nag", "NAGuidance", "", Node("NAGuidance")),
        Patch("deep-shrink", "PatchModelAddDownscale", "", Node("PatchModelAddDownscale")),
        Patch("pladis", "PLADIS", _GUIDANCE, Node("PLADIS")),
        Patch("rescale-cfg", "RescaleCFG", "", Node("RescaleCFG")),
        Patch("rescale-ppm", "RescaleCFGPost", _PPM, Node("RescaleCFGPost")),
        Patch("cfg-zero", "CFG Zero Star/Init", _KJ, Node("CFGZeroStarAndInit"), (*UNETS, *WANS)),
        Patch("regional-cfg", "Regional CFG (Inspire)", "ComfyUI-Inspire-Pack", Node(
            "RegionalCFG //Inspire", {"mask": Node("SolidMask", {"value": 0.5})}), (*UNETS, *WANS)),
        Patch("efficient-sampler", "KSampler (Efficient)", "efficiency-nodes-comfyui", Node(
            "KSampler (Efficient)", {**_SAMPLED, "preview_method": "none", "vae_decode": "false"}, output=3),
            stands_for=KSAMPLER),
        Patch("regional-sampler", "RegionalSampler (Impact)", _IMPACT, Node(
            "RegionalSampler", _REGIONAL), stands_for=KSAMPLER),
        Patch("advanced-controlnet", "Apply Advanced ControlNet", "ComfyUI-Advanced-ControlNet", Node(
            "ACN_AdvancedControlNetApply_v2", {**_CONTROLLED, "mask_optional": Node("SolidMask", {"value": 0.5})}),
            stands_for=APPLY_CONTROLNET),
        Patch("bleh-hypertile", "HyperTile", _BLEH, Node("BlehHyperTile")),
        Patch("pag-advanced", "Perturbed-Attention Guidance", _GUIDANCE, Node("PerturbedAttention")),
        Patch("lazycache", "LazyCache", "", Node("LazyCache")),
        Patch("bleh-deep-shrink", "Deep Shrink", _BLEH, Node("BlehDeepShrink")),
        Patch("deepcache", "DeepCache", "ComfyUI-deepcache", Node("DeepCache")),
        Patch("block-cfg", "Block CFG", _BLEH, Node("BlehBlockCFG")),
        Patch("multigpu", "MultiGPU CFG Split", "", Node("MultiGPU_WorkUnits")),
        Patch("second-gpu", "Select Model Device", "", Node("SelectModelDevice", {"device": "gpu:1"})),
        Patch("slg", "SkipLayerGuidanceDiT", "", Node("SkipLayerGuidanceDiT", {
            "double_layers": "3, 4", "start_percent": 0.0, "end_percent": 1.0}), (*FLUXES, *WANS, "qwen-image")),
        Patch("teacache", "TeaCache", _TEACACHE, Node("TeaCache", {
            "model_type": "wan2.1_t2v_1.3B", "rel_l1_thresh": 0.08}), WANS),
        Patch("magcache", "MagCache", _MAGCACHE, Node("MagCache", {"model_type": "wan2.1_t2v_1.3B"}), WANS),
        Patch("wan-nag", "WanVideo NAG", _KJ, Node("WanVideoNAG", {"conditioning": _NEGATIVE}), WANS),
        Patch("wan-chunk", "Wan Chunk FeedForward", _KJ, Node("WanChunkFeedForward"), WANS),
        Patch("block-swap", "native WanvideoBlockswap", "ComfyUI_NativeBlockSwap", Node(
            "nativeWanVideoBlockSwap", {"blocks_to_swap": 14}), WANS),
        Patch("block-swap-jit", "Block Swap (RAM Offload)", "ComfyUI-JITBlockSwap", Node(
            "BlockSwap", {"blocks_to_swap": 14}), WANS),
        Patch("block-swap-uni", "UniBlockSwap", "ComfyUI_UniBlockSwap", Node(
            "UniBlockSwap", {"num_blocks": 14}), WANS),
        Patch("teacache-ll", "Apply TeaCache Patch", _PATCHES_LL, Node(
            "ApplyTeaCachePatch", {**_OVERRIDDEN, "rel_l1_thresh": 0.4}), FLUXES),
        Patch("first-block-cache-ll", "Apply First Block Cache Patch", _PATCHES_LL, Node(
            "ApplyFirstBlockCachePatch", {**_OVERRIDDEN, "residual_diff_threshold": 0.2}), FLUXES),
        Patch("pulid", "Apply PuLID Flux", _PULID, Node("ApplyPulidFlux", _FACE), FLUXES),
        Patch("animatediff", "AnimateDiff Loader (Gen1)", "ComfyUI-AnimateDiff-Evolved", Node(
            "ADE_AnimateDiffLoaderGen1", {
                "model_name": Given(MOTION_MODULE), "beta_schedule": "use existing"}), ("sd15",)),
        Patch("tgate", "TGate Apply", "ComfyUI_TGate", Node("TGateApplySimple", {"start_at": 0.4})),
    )
}  # fmt: skip
