"""Which part of a workflow a dry run keeps, and what it puts into it."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from slipstream.hosts.comfy.dry_run.build_prompt import MARK, DryRun, dry_run_of, is_added, is_dry_run
from slipstream.hosts.comfy.dry_run.prompt_links import NodeKind

Prompt = dict[str, dict[str, Any]]

MAKES = {
    "Loader": ("MODEL", "CLIP", "VAE"),
    "LoraLoader": ("MODEL", "CLIP"),
    "SlipstreamAccelerateModel": ("MODEL",),
    "SlipstreamAccelerateControlNet": ("CONTROL_NET",),
    "SlipstreamAccelerateVAE": ("VAE",),
    "SlipstreamAccelerateTextEncoder": ("CLIP",),
    "SlipstreamBuildEngine": ("MODEL", "STRING"),
    "SlipstreamEngineInfo": ("STRING",),
    "SlipstreamSkipCalibrate": ("MODEL", "STRING", "IMAGE"),
    "SlipstreamStepSkip": ("MODEL",),
    "ControlNetLoader": ("CONTROL_NET",),
    "Apply": ("CONDITIONING", "CONDITIONING"),
    "Inpaint": ("CONDITIONING", "CONDITIONING", "LATENT"),
    "Encode": ("CONDITIONING",),
    "Empty": ("LATENT",),
    "Upscale": ("LATENT",),
    "KSampler": ("LATENT",),
    "OddSampler": ("MODEL", "CONDITIONING", "IMAGE"),
    "Guider": ("GUIDER",),
    "BasicGuider": ("GUIDER",),
    "Scheduler": ("SIGMAS",),
    "Advanced": ("LATENT", "LATENT"),
    "ToPipe": ("BASIC_PIPE",),
    "PipeSampler": ("BASIC_PIPE", "LATENT"),
    "Switch": ("*",),
    "Decode": ("IMAGE",),
    "VaeEncode": ("LATENT",),
    "LoadImage": ("IMAGE", "MASK"),
    "Detector": ("IMAGE",),
    "Save": (),
    "SaveLatent": ("LATENT",),
    "SaveImage": ("IMAGE",),
    "SaveAny": ("*",),
    "SaveFile": ("IMAGE", "STRING"),
    "ShowComposition": ("IMAGE", "MASK"),
    "ShowSampler": ("MODEL", "LATENT"),
    "ShowPipeSampler": ("BASIC_PIPE", "LATENT"),
    "Number": ("INT",),
    "PaidUpscale": ("IMAGE",),
}
OUTPUTS = {name for name in MAKES if name.startswith(("Save", "Show", "Number"))}
OUTPUTS |= {"SlipstreamBuildEngine", "SlipstreamEngineInfo", "SlipstreamSkipCalibrate"}
KINDS = {name: NodeKind(makes, name in OUTPUTS, name.startswith("Paid")) for name, makes in MAKES.items()}


def node(kind: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": kind, "inputs": inputs, "_meta": {"title": kind}}


def text_to_image(**sampler: Any) -> Prompt:
    return {
        "1": node("Loader", name="a"),
        "2": node("Encode", clip=["1", 1], text="hello"),
        "3": node("Empty", width=512),
        "4": node("SlipstreamAccelerateModel", model=["1", 0], backend="auto", build="background", resolutions="auto"),
        "5": node(
            "KSampler",
            model=["4", 0],
            positive=["2", 0],
            negative=["2", 0],
            latent_image=["3", 0],
            steps=20,
            **{"cfg": 7.0, **sampler},
        ),
        "6": node("Decode", samples=["5", 0], vae=["1", 2]),
        "7": node("Save", images=["6", 0]),
        "8": node("SlipstreamEngineInfo", model=["4", 0], after=["5", 0]),
    }


def run(prompt: Prompt, where: str = "4") -> DryRun:
    before = copy.deepcopy(prompt)
    made = dry_run_of(prompt, where, KINDS, "m1")
    assert prompt == before, "the page's prompt was changed"
    return made


def steps(made: DryRun) -> dict[str, list[Any]]:
    """Nodes of one step, and whose model each takes."""
    return {
        name: each["inputs"]["model"] for name, each in made.prompt.items() if each["class_type"] == "SlipstreamOneStep"
    }


def ends(made: DryRun) -> list[list[Any]]:
    return [each["inputs"]["value"] for each in made.prompt.values() if each["class_type"] == "SlipstreamDryRunEnd"]


def kept(made: DryRun) -> set[str]:
    return {name for name in made.prompt if not name.startswith("slipstream-")}


# ------------------------------------------------------------------------------------------------ models


def test_what_leads_to_the_sampler_stays_and_the_rest_goes() -> None:
    made = run(text_to_image())
    assert kept(made) == {"1", "2", "3", "4", "5"}
    assert steps(made) == {"slipstream-step-1": ["4", 0]}
    assert made.prompt["5"]["inputs"]["model"] == ["slipstream-step-1", 0]
    assert ends(made) == [["5", 0]] and made.targets == ["slipstream-end-1"]
    assert is_dry_run(made.prompt) and not is_dry_run(text_to_image()) and not is_dry_run(None)


def test_accelerated_nodes_wait_for_their_engines_and_are_told_apart() -> None:
    made = run(text_to_image())
    given = made.prompt["4"]["inputs"]
    assert given["build"] == "first use" and given[MARK] == "m1" and given["model"] == ["1", 0]
    assert made.prompt["5"]["inputs"]["steps"] == 20 and made.prompt["4"]["_meta"]


def test_lora_behind_the_node_and_ids_of_subgraphs() -> None:
    prompt = text_to_image()
    prompt["12:3"] = node("LoraLoader", model=["4", 0], clip=["1", 1])
    prompt["5"]["inputs"]["model"] = ["12:3", 0]
    made = run(prompt)
    assert "12:3" in kept(made) and made.prompt["12:3"]["inputs"]["model"] == ["4", 0]
    assert steps(made) == {"slipstream-step-1": ["12:3", 0]}


def test_two_samplers_take_one_step_each() -> None:
    prompt = text_to_image()
    prompt["9"] = node("Upscale", samples=["5", 0])
    prompt["10"] = node("KSampler", model=["4", 0], positive=["2", 0], latent_image=["9", 0], cfg=7.0)
    made = run(prompt)
    assert ends(made) == [["5", 0], ["10", 0]] and len(made.targets) == 2
    assert len(steps(made)) == 1, "one for each model"
    assert made.prompt["10"]["inputs"]["model"] == made.prompt["5"]["inputs"]["model"] == ["slipstream-step-1", 0]


def test_guiders_and_schedulers_get_one_step_too() -> None:
    prompt = text_to_image()
    prompt["5"] = node("Advanced", guider=["9", 0], sigmas=["10", 0], latent_image=["3", 0])
    prompt["9"] = node("Guider", model=["4", 0], positive=["2", 0], negative=["2", 0], cfg=4.0)
    prompt["10"] = node("Scheduler", model=["4", 0], steps=20)
    made = run(prompt)
    assert kept(made) == {"1", "2", "3", "4", "5", "9", "10"}
    assert ends(made) == [["5", 0]]
    assert made.prompt["9"]["inputs"]["model"] == made.prompt["10"]["inputs"]["model"] == ["slipstream-step-1", 0]


def test_a_sampler_that_hands_the_model_on_is_a_sampler() -> None:
    prompt = text_to_image()
    prompt["5"] = node("OddSampler", model=["4", 0])
    prompt["6"] = node("KSampler", model=["5", 0], latent_image=["3", 0], cfg=1.0)
    made = run(prompt)
    assert ends(made) == [["5", 2], ["6", 0]]
    assert set(map(tuple, steps(made).values())) == {("4", 0), ("5", 0)}


def test_bundles_and_switches_lead_on() -> None:
    prompt = text_to_image()
    prompt["9"] = node("Switch", on=["4", 0], off=["1", 0], which=True)
    prompt["10"] = node("ToPipe", model=["9", 0], clip=["1", 1])
    prompt["11"] = node("PipeSampler", basic_pipe=["10", 0], latent=["3", 0])
    del prompt["5"], prompt["6"], prompt["7"], prompt["8"]
    made = run(prompt)
    assert ends(made) == [["11", 1]] and steps(made) == {"slipstream-step-1": ["9", 0]}
    assert made.prompt["10"]["inputs"]["model"] == ["slipstream-step-1", 0]


def test_calibration_is_passed_by_and_step_skip_stays() -> None:
    prompt = text_to_image()
    prompt["9"] = node("SlipstreamSkipCalibrate", model=["4", 0], positive=["2", 0])
    prompt["10"] = node("SlipstreamStepSkip", model=["9", 0])
    prompt["5"]["inputs"]["model"] = ["10", 0]
    made = run(prompt)
    assert "9" not in made.prompt and made.prompt["10"]["inputs"]["model"] == ["4", 0]
    assert ends(made) == [["5", 0]] and steps(made) == {"slipstream-step-1": ["10", 0]}


def test_two_calibrations_in_a_row_are_passed_by() -> None:
    prompt = text_to_image()
    prompt["9"] = node("SlipstreamSkipCalibrate", model=["10", 0])
    prompt["10"] = node("SlipstreamSkipCalibrate", model=["4", 0])
    prompt["5"]["inputs"]["model"] = ["9", 0]
    made = run(prompt)
    assert kept(made) == {"1", "2", "3", "4", "5"} and steps(made) == {"slipstream-step-1": ["4", 0]}
    prompt["10"]["inputs"]["model"] = ["9", 0]
    with pytest.raises(ValueError, match="Nothing samples"):
        run(prompt)


def test_what_calibration_shows_is_not_made() -> None:
    prompt = text_to_image()
    prompt["9"] = node("SlipstreamSkipCalibrate", model=["4", 0], positive=["2", 0])
    prompt["10"] = node("Save", images=["9", 2], text=["9", 1])
    prompt["5"]["inputs"]["model"] = ["9", 0]
    assert kept(run(prompt)) == {"1", "2", "3", "4", "5"}
    prompt["2"]["inputs"]["text"] = ["9", 1]
    with pytest.raises(ValueError, match="Node 9 .*disconnect its report and chart"):
        run(prompt)


def test_many_switches_take_no_time() -> None:
    prompt = text_to_image()
    for number in range(100, 160):
        before = [str(number - 1), 0] if number > 100 else ["4", 0]
        prompt[str(number)] = node("Switch", on=before, off=before)
    prompt["5"]["inputs"]["model"] = ["159", 0]
    assert steps(run(prompt)) == {"slipstream-step-1": ["159", 0]}


def test_samplers_of_a_plain_model_that_lead_there_take_one_step() -> None:
    prompt = text_to_image()
    prompt["9"] = node("KSampler", model=["1", 0], latent_image=["3", 0], cfg=7.0)
    prompt["5"]["inputs"]["latent_image"] = ["9", 0]
    made = run(prompt)
    assert set(map(tuple, steps(made).values())) == {("1", 0), ("4", 0)}
    assert ends(made) == [["5", 0]], "its result is nobody's aim"


def test_a_loop_of_links_ends() -> None:
    prompt = text_to_image()
    prompt["4"]["inputs"]["model"] = ["9", 0]
    prompt["9"] = node("LoraLoader", model=["4", 0], clip=["1", 1])
    assert ends(run(prompt)) == [["5", 0]]


# ------------------------------------------------------------------------------------ ControlNets and VAEs


def controlled() -> Prompt:
    prompt = text_to_image()
    prompt["20"] = node("ControlNetLoader")
    prompt["21"] = node("SlipstreamAccelerateControlNet", control_net=["20", 0], backend="auto", build="background")
    prompt["22"] = node("LoadImage", image="a.png")
    prompt["23"] = node(
        "Apply", positive=["2", 0], negative=["2", 0], control_net=["21", 0], image=["22", 0], strength=1.0
    )
    prompt["5"]["inputs"] |= {"positive": ["23", 0], "negative": ["23", 1]}
    return prompt


def test_a_controlnet_leads_to_the_samplers_of_its_conditioning() -> None:
    made = run(controlled(), "21")
    assert ends(made) == [["5", 0]]
    assert {"4", "20", "21", "22", "23"} <= kept(made)
    assert made.prompt["21"]["inputs"]["build"] == made.prompt["4"]["inputs"]["build"] == "first use"


def test_conditioning_passes_through_nodes_that_also_encode() -> None:
    prompt = controlled()
    prompt["24"] = node("Inpaint", positive=["23", 0], negative=["23", 1], vae=["1", 2], pixels=["22", 0])
    prompt["5"]["inputs"] |= {"positive": ["24", 0], "negative": ["24", 1], "latent_image": ["24", 2]}
    assert ends(run(prompt, "21")) == [["5", 0]]


def test_a_vae_leads_to_decoders_and_encoders() -> None:
    prompt = text_to_image()
    prompt["30"] = node("SlipstreamAccelerateVAE", vae=["1", 2], backend="auto", build="background")
    prompt["31"] = node("LoadImage", image="a.png")
    prompt["32"] = node("VaeEncode", pixels=["31", 0], vae=["30", 0])
    prompt["5"]["inputs"]["latent_image"] = ["32", 0]
    prompt["6"]["inputs"]["vae"] = ["30", 0]
    made = run(prompt, "30")
    assert sorted(ends(made)) == [["32", 0], ["6", 0]]
    assert "7" not in made.prompt and steps(made) == {"slipstream-step-1": ["4", 0]}


def test_a_text_encoder_leads_to_what_encodes_texts() -> None:
    prompt = text_to_image()
    prompt["30"] = node("SlipstreamAccelerateTextEncoder", clip=["1", 1], backend="auto", build="background")
    prompt["31"] = node("LoraLoader", model=["1", 0], clip=["30", 0])
    with pytest.raises(ValueError, match="connect it to CLIP Text Encode"):
        run(prompt, "30")
    prompt["2"]["inputs"]["clip"] = ["31", 1]
    made = run(prompt, "30")
    assert ends(made) == [["2", 0]] and not steps(made) and set(prompt) & set(made.prompt) == {"1", "2", "30", "31"}
    assert made.prompt["30"]["inputs"]["build"] == "first use"


def test_what_is_switched_off_stays_as_it_is() -> None:
    prompt = controlled()
    prompt["4"]["inputs"]["backend"] = "off"
    made = run(prompt, "21")
    assert made.prompt["4"]["inputs"]["build"] == "background"
    with pytest.raises(ValueError, match="switched off"):
        run(prompt, "4")


# --------------------------------------------------------------------------------------- Build Engine, lists


def test_build_engine_needs_only_what_leads_to_it() -> None:
    prompt = text_to_image()
    prompt["9"] = node("SlipstreamBuildEngine", model=["1", 0], resolutions="512x512")
    made = run(prompt, "9")
    assert set(made.prompt) == {"1", "9"} and made.targets == ["9"] and not is_dry_run(made.prompt)
    assert made.prompt["9"]["inputs"][MARK] == "m1", "ComfyUI's cache would serve it"


def test_build_engine_on_the_way_is_told_apart_from_the_one_that_is_added() -> None:
    prompt = text_to_image()
    prompt["9"] = node("SlipstreamBuildEngine", model=["1", 0], resolutions="512x512")
    prompt["4"]["inputs"] |= {"model": ["9", 0], "resolutions": "512x512"}
    made = run(prompt)
    assert made.prompt["9"]["inputs"][MARK] == "m1"
    assert is_added(made.prompt, "slipstream-list-1") and not is_added(made.prompt, "9")
    assert not is_added(prompt, "9") and not is_added(None, None)


@pytest.mark.parametrize(("cfg", "batch"), [(7.0, 2), (1.0, 1), (1, 1), (["2", 0], 2)])
def test_listed_sizes_get_a_build_engine(cfg: Any, batch: int) -> None:
    prompt = text_to_image(cfg=cfg)
    prompt["4"]["inputs"] |= {"resolutions": "512x512, 768x512", "precision": "fp16", "max_batch": 4, "bake": False}
    made = run(prompt)
    assert made.targets == ["slipstream-end-1", "slipstream-list-1"]
    listed = made.prompt["slipstream-list-1"]
    assert listed["class_type"] == "SlipstreamBuildEngine"
    assert listed["inputs"] == {
        "model": ["1", 0],
        "resolutions": "512x512, 768x512",
        "batch": batch,
        "tokens": 77,
        "backend": "auto",
        "precision": "fp16",
        "max_batch": 4,
        "bake": False,
        MARK: "m1",
    }


def test_a_guider_of_one_prompt_takes_batches_of_one() -> None:
    prompt = text_to_image()
    prompt["4"]["inputs"]["resolutions"] = "512x512"
    prompt["5"] = node("Advanced", guider=["9", 0], latent_image=["3", 0])
    prompt["9"] = node("BasicGuider", model=["4", 0], conditioning=["2", 0])
    assert run(prompt).prompt["slipstream-list-1"]["inputs"]["batch"] == 1


# ------------------------------------------------------------------------------------------------ complaints


@pytest.mark.parametrize(
    ("where", "complaint"),
    [
        ("99", "Node 99 is not part of the workflow"),
        ("5", "no Accelerate node"),
        ("40", "connect it to a KSampler"),
        ("41", "connect it to Apply ControlNet"),
        ("42", "connect it to VAE Decode"),
    ],
)
def test_what_cannot_be_built_is_said_in_words(where: str, complaint: str) -> None:
    prompt = text_to_image()
    prompt["40"] = node("SlipstreamAccelerateModel", model=["1", 0])
    prompt["41"] = node("SlipstreamAccelerateControlNet", control_net=["20", 0])
    prompt["42"] = node("SlipstreamAccelerateVAE", vae=["1", 2])
    prompt["43"] = node("SlipstreamEngineInfo", model=["40", 0], vae=["42", 0])
    with pytest.raises(ValueError, match=complaint):
        run(prompt, where)


def test_a_list_that_cannot_be_read_is_refused() -> None:
    prompt = text_to_image()
    prompt["4"]["inputs"]["resolutions"] = "512*5x12"
    with pytest.raises(ValueError, match="is no resolution"):
        run(prompt)
