"""Pictures in a server: what is measured in which order, and by which workflows."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream.benchmarks.in_server.cases import CASES
from slipstream.benchmarks.in_server.graph import OUR_NODES, Wish, build_prompt, required_defaults
from slipstream.benchmarks.in_server.plan import Block, ServerRun, plan
from slipstream.benchmarks.in_server.variants import ServerVariant
from slipstream.benchmarks.model_files.families import FAMILIES
from slipstream.benchmarks.patching.patches import PATCHES

SD15 = "sd15-512-20"
DEFAULTS = {node: {"backend": "auto", "precision": "auto", "build": "background"} for node in OUR_NODES}
ACCELERATING = {*OUR_NODES, "TorchCompileModel"}


def variants(*names: str) -> list[ServerVariant]:
    return [ServerVariant.of(name) for name in names]


def test_variants_take_turns_in_one_server() -> None:
    (run,) = plan([()], [SD15, "vae-decode-1024"], variants("slipstream", "torch-compile", "plain"), turns=2)
    assert run.flags == ()
    assert [(block.case, block.turn, block.variant) for block in run.blocks] == [
        (SD15, 1, "plain"), (SD15, 1, "slipstream"), (SD15, 1, "torch-compile"),
        (SD15, 2, "plain"), (SD15, 2, "slipstream"), (SD15, 2, "torch-compile"),
        ("vae-decode-1024", 1, "plain"), ("vae-decode-1024", 1, "slipstream"),
        ("vae-decode-1024", 2, "plain"), ("vae-decode-1024", 2, "slipstream"),
    ]  # fmt: skip


def test_servers_of_other_flags_take_turns() -> None:
    runs = plan([("--fast",), ()], [SD15], variants("plain", "fast", "ck-attention", "slipstream"), turns=2)
    found = [(run.flags, [(block.variant, block.turn) for block in run.blocks]) for run in runs]
    for turn, part in enumerate((found[:3], found[3:]), 1):
        assert part == [
            ((), [("plain", turn), ("slipstream", turn)]),  # what the others are compared with comes first
            (("--fast",), [("plain", turn), ("slipstream", turn)]),  # the rival "fast" is this very workflow
            (("--use-ck-attention",), [("ck-attention", turn)]),
        ]


def test_references_that_are_lacking_are_made_first() -> None:
    cases = [SD15, "sdxl-1024-4"]
    first, second = plan([("--fast",)], cases, variants("slipstream"), 1, lacking=["sdxl-1024-4"])
    assert first == ServerRun((), (Block((), "sdxl-1024-4", "plain", is_reference_only=True),))
    assert second.flags == ("--fast",) and len(second.blocks) == 2
    assert [run.flags for run in plan([()], cases, variants("plain"), 1, lacking=cases)] == [()]
    first, _ = plan([("--fast",)], cases, variants("plain", "slipstream"), 1, lacking=[], patches=["pag"])
    assert [(block.case, block.patch) for block in first.blocks] == [(case, "pag") for case in cases]
    assert all(block.is_reference_only for block in first.blocks)


def test_each_patch_has_its_turn_behind_the_base() -> None:
    (run,) = plan([()], [SD15], variants("slipstream+blocks", "plain"), turns=2, patches=["pag", "hypertile"])
    of_a_turn = [(patch, name) for patch in ("", "pag", "hypertile") for name in ("plain", "slipstream+blocks")]
    assert [(block.patch, block.variant) for block in run.blocks] == of_a_turn * 2
    (usual,) = plan([()], [SD15], variants("plain"), turns=1)
    assert usual.blocks[0].patch is None


def test_a_patch_is_measured_with_the_models_that_it_is_for() -> None:
    cases = ["sdxl-1024-20", "sd15-512-20-b16", "wan-512-20", "flux-third-1024-20"]
    (run,) = plan([()], cases, variants("plain"), turns=1, patches=["pag", "animatediff", "slg", "magcache"])
    assert [(block.case, block.patch) for block in run.blocks if block.patch] == [
        ("sdxl-1024-20", "pag"), ("sd15-512-20-b16", "pag"), ("sd15-512-20-b16", "animatediff"),
        ("wan-512-20", "slg"), ("wan-512-20", "magcache"), ("flux-third-1024-20", "slg"),
    ]  # fmt: skip
    assert all(set(patch.families) <= set(FAMILIES) for patch in PATCHES.values())


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("plain+blocks", "is no variant"),
        ("plain+fp8", "is no variant"),
        ("slipstream+fp7", "'fp7' is not one of"),
        ("slipstream+fp8+int8", "one precision"),
        ("magic", "is no variant"),
        ("slipstream+blocks+fp8", "engines of blocks do not compute in 8 bits"),
    ],
)
def test_variants_that_are_none(name: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        ServerVariant.of(name)


def prompt_of(case: str, variant: str, wish: Wish | None = None) -> list[dict[str, Any]]:
    made = build_prompt(CASES[case], ServerVariant.of(variant), wish or Wish(1), DEFAULTS)
    links = [value for node in made.values() for value in node["inputs"].values() if isinstance(value, list)]
    assert all(node in made for node, _ in links)
    return list(made.values())


def by_class(prompt: list[dict[str, Any]], class_type: str) -> list[dict[str, Any]]:
    return [node["inputs"] for node in prompt if node["class_type"] == class_type]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("variant", ["torch-compile", "fast", "slipstream+fp8"])
def test_workflows_differ_in_accelerating_nodes_alone(case: str, variant: str) -> None:
    def stock(prompt: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
        plain = [node for node in prompt if node["class_type"] not in ACCELERATING]
        kept = [{k: v for k, v in node["inputs"].items() if not isinstance(v, list)} for node in plain]
        return [(node["class_type"], values) for node, values in zip(plain, kept, strict=True)]

    assert stock(prompt_of(case, variant)) == stock(prompt_of(case, "plain"))
    assert not ACCELERATING & {node["class_type"] for node in prompt_of(case, "fast")}


def test_our_nodes_are_at_their_defaults() -> None:
    prompt = prompt_of("sd15-canny-512-20", "slipstream+fp8+balanced")
    (model,), (control,), (vae,), no_text_encoder, (skip,) = (by_class(prompt, node) for node in OUR_NODES)
    assert (model["backend"], model["precision"], control["precision"]) == ("auto", "fp8", "fp8")
    assert vae["precision"] == "auto" and not no_text_encoder
    assert skip["preset"] == "balanced"
    (sampler,) = by_class(prompt, "KSampler")
    assert (sampler["cfg"], sampler["sampler_name"], sampler["scheduler"]) == (7.0, "euler", "normal")


@pytest.mark.parametrize("name", [name for name, patch in PATCHES.items() if not patch.stands_for])
def test_a_patch_stands_between_accelerate_model_and_the_sampler(name: str) -> None:
    patch = PATCHES[name]
    defaults = {**DEFAULTS, **{node: {"scale": 3.0} for node in patch.node.classes}}
    made = build_prompt(CASES["sdxl-1024-20"], ServerVariant.of("slipstream+blocks"), Wish(1), defaults, patch, False)
    (sampler,) = by_class(list(made.values()), "KSampler")
    node = made[sampler["model"][0]]
    assert node["class_type"] == patch.node.class_type and node["inputs"]["scale"] == 3.0
    accelerated = made[node["inputs"]["model"][0]]
    while accelerated["class_type"] in patch.node.classes:
        accelerated = made[accelerated["inputs"]["model"][0]]
    assert accelerated["class_type"] == "SlipstreamAccelerateModel" and accelerated["inputs"]["optimize"] == "blocks"
    assert not by_class(list(made.values()), "SlipstreamAccelerateVAE")
    values = [value for each in made.values() for value in each["inputs"].values()]
    assert all(isinstance(value, (str, int, float, list)) for value in values)
    if name == "nag":
        assert node["inputs"]["negative"] == sampler["negative"]


def test_a_node_that_applies_a_controlnet_stands_in_the_place_of_comfyuis() -> None:
    patch = PATCHES["advanced-controlnet"]
    defaults = {**DEFAULTS, patch.node.class_type: {"strength": 0.5}}
    made = build_prompt(CASES["sd15-canny-512-20"], ServerVariant.of("plain"), Wish(1), defaults, patch)
    nodes = list(made.values())
    (applied,), (sampler,) = by_class(nodes, patch.node.class_type), by_class(nodes, "KSampler")
    assert applied["strength"] == 1.0 and not by_class(nodes, "ControlNetApplyAdvanced")
    (positive, first), (negative, second) = sampler["positive"], sampler["negative"]
    assert made[positive]["inputs"] is made[negative]["inputs"] is applied and (first, second) == (0, 1)
    assert patch.is_for("sd15", has_control=True) and not patch.is_for("sd15", has_control=False)


def test_an_adapters_file_is_that_of_the_family() -> None:
    defaults = {node: {} for node in PATCHES["ip-adapter"].node.classes}
    made = build_prompt(CASES["sdxl-1024-20"], ServerVariant.of("plain"), Wish(1), defaults, PATCHES["ip-adapter"])
    (loader,) = by_class(list(made.values()), "IPAdapterModelLoader")
    assert loader == {"ipadapter_file": "slipstream-benchmark-sdxl.safetensors"}


def test_a_node_that_samples_stands_in_the_place_of_the_sampler() -> None:
    patch = PATCHES["efficient-sampler"]
    defaults = {**DEFAULTS, patch.node.class_type: {"steps": 1, "vae_decode": "true"}}
    made = build_prompt(CASES["sdxl-1024-20"], ServerVariant.of("slipstream+blocks"), Wish(1), defaults, patch, False)
    nodes = list(made.values())
    (sampler,), (decoder,) = by_class(nodes, patch.node.class_type), by_class(nodes, "VAEDecode")
    assert (sampler["steps"], sampler["vae_decode"], sampler["cfg"]) == (20, "false", 7.0)
    assert made[sampler["model"][0]]["class_type"] == "SlipstreamAccelerateModel"
    number, output = decoder["samples"]
    assert made[number]["inputs"] is sampler and output == 3 and not by_class(nodes, "KSampler")


def test_nodes_of_a_sampler_in_the_place_of_comfyuis_get_what_that_would() -> None:
    patch = PATCHES["regional-sampler"]
    made = build_prompt(CASES["sdxl-1024-20"], ServerVariant.of("slipstream+blocks"), Wish(5), DEFAULTS, patch, False)
    (sampler,) = by_class(list(made.values()), "RegionalSampler")
    assert (sampler["seed"], sampler["steps"], sampler["base_only_steps"]) == (5, 20, 10)
    assert made[sampler["samples"][0]]["class_type"] == "EmptyLatentImage"
    assert not {"model", "positive", "latent_image"} & set(sampler), "ComfyUI hands a node every link that it gets"
    base = made[sampler["base_sampler"][0]]["inputs"]
    region = made[made[sampler["regional_prompts"][0]]["inputs"]["advanced_sampler"][0]]["inputs"]
    ours, others = (made[each["basic_pipe"][0]]["inputs"] for each in (base, region))
    assert base["cfg"] == 7.0 and made[ours["model"][0]]["class_type"] == "SlipstreamAccelerateModel"
    assert others == {**ours, "positive": ours["negative"], "negative": ours["positive"]}
    assert [made[ours[name][0]]["class_type"] for name in ("clip", "vae")] == ["CheckpointLoaderSimple"] * 2


def test_a_video_is_sampled_and_not_decoded() -> None:
    prompt = prompt_of("wan-512-20", "slipstream")
    (latent,), (sampler,), (blank,) = (
        by_class(prompt, name) for name in ("EmptyHunyuanLatentVideo", "KSampler", "SlipstreamBenchmarkBlank")
    )
    assert latent == {"width": 512, "height": 512, "batch_size": 1, "length": 33} and sampler["cfg"] == 6.0
    assert list(blank) == ["behind"] and not by_class(prompt, "VAELoader") and not by_class(prompt, "VAEDecode")
    assert [file.folder for file in CASES["wan-512-20"].files] == ["diffusion_models"]


def test_hires_fix_samples_twice_and_a_lora_has_its_strength() -> None:
    first, second = by_class(prompt_of("sdxl-hires-fix", "plain"), "KSampler")
    assert (first["denoise"], second["denoise"]) == (1.0, 0.5) and first["latent_image"] != second["latent_image"]
    (lora,) = by_class(prompt_of("sdxl-1024-30-lora", "plain", Wish(1, lora_strength=0.5)), "LoraLoaderModelOnly")
    assert lora["strength_model"] == 0.5


def test_a_text_is_encoded_between_its_loader_and_a_picture_of_nothing() -> None:
    made = build_prompt(CASES["t5-xxl-encode"], ServerVariant.of("slipstream"), Wish(9, number=4, nonce=3), DEFAULTS)
    loader, accelerate, text, encoder, blank, save = made.values()
    assert loader["inputs"] == {"clip_name": "slipstream-benchmark-t5-xxl.safetensors", "type": "pixart"}
    assert accelerate["class_type"] == "SlipstreamAccelerateTextEncoder" and accelerate["inputs"]["clip"] == ["1", 0]
    assert text["inputs"] == {"seed": 9, "nonce": 3, "tokens": 77}, "the second of three lengths"
    assert encoder == {"class_type": "CLIPTextEncode", "inputs": {"clip": ["2", 0], "text": ["3", 0]}}
    assert (blank["inputs"], save["inputs"]["images"]) == ({"behind": ["4", 0]}, ["5", 0])


def test_what_means_nothing_for_a_text_encoder_is_left_out() -> None:
    names = "plain,fast,slipstream,torch-compile,slipstream+fp8,slipstream+blocks,slipstream+balanced".split(",")
    case = CASES["t5-xxl-encode"]
    assert [name for name in names if ServerVariant.of(name).why_left_out(case) is None] == names[:3]


def test_defaults_come_from_the_server() -> None:
    required = {"model": ["MODEL", {}], "backend": ["COMBO", {"options": ["a", "b"]}], "max": ["INT", {"default": 0}]}
    older = {"optimize": [["fast", "slow"]], "precision": [["x", "y"], {"default": "y"}]}
    optional = {"tokens": ["INT", {"default": 1}]}
    found = required_defaults({"input": {"required": required | older, "optional": optional}})
    assert found == {"backend": "a", "max": 0, "optimize": "fast", "precision": "y"}
