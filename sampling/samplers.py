"""What kinds of samplers there are, for which a skipped step means different things."""

from __future__ import annotations

from enum import Enum

from .reuse import Reuse


class SamplerKind(str, Enum):
    """How a sampler uses the denoised latents of its steps.

    ONE_STEP: deterministic, from this step's denoised latent alone.
    MULTISTEP: deterministic, from the denoised latents of two or three steps.
    LINEAR_MULTISTEP: deterministic, a polynomial through the noise of up to four steps.
    ANCESTRAL: from this step's denoised latent, and adds fresh noise.
    STOCHASTIC_MULTISTEP: from several steps' denoised latents, and adds fresh noise.
    SEVERAL_CALLS: calls the model several times a step, or chooses its steps as it goes.
    UNKNOWN: of another extension.
    """

    ONE_STEP = "one step"
    MULTISTEP = "multistep"
    LINEAR_MULTISTEP = "linear multistep"
    ANCESTRAL = "ancestral"
    STOCHASTIC_MULTISTEP = "stochastic multistep"
    SEVERAL_CALLS = "several calls a step"
    UNKNOWN = "unknown"


_KINDS = {
    SamplerKind.ONE_STEP: "euler ddim",
    SamplerKind.MULTISTEP: "dpmpp_2m uni_pc unipc uni_pc_bh2 unipc_bh2 res_multistep gradient_estimation",
    SamplerKind.LINEAR_MULTISTEP: "deis ipndm ipndm_v lms",
    SamplerKind.ANCESTRAL: "euler_ancestral ddpm",
    SamplerKind.STOCHASTIC_MULTISTEP: "dpmpp_2m_sde dpmpp_2m_sde_heun dpmpp_3m_sde res_multistep_ancestral er_sde "
    "sa_solver",
    SamplerKind.SEVERAL_CALLS: "heun heunpp2 dpm_2 dpm_2_ancestral dpm_fast dpm_adaptive dpmpp_2s_ancestral "
    "dpmpp_2s_ancestral_cfg_pp dpmpp_sde exp_heun_2_x0 exp_heun_2_x0_sde seeds_2 seeds_3 sa_solver_pece",
}
_KIND_OF = {name: kind for kind, names in _KINDS.items() for name in names.split()}


def kind_of(sampler: str) -> SamplerKind:
    """Of a sampler by ComfyUI's name for it, such as euler_ancestral or dpmpp_2m_sde_gpu."""
    return _KIND_OF.get(sampler.removesuffix("_gpu"), SamplerKind.UNKNOWN)


def method_of(sampler: str) -> str:
    """The name without what makes no other method of it: where noise is drawn, and DDIM, which is Euler's method."""
    name = sampler.removesuffix("_gpu").replace("unipc", "uni_pc")
    return "euler" if name == "ddim" else name


_RULES = {
    SamplerKind.ONE_STEP: Reuse.BENT,
    SamplerKind.MULTISTEP: Reuse.BENT,
    SamplerKind.LINEAR_MULTISTEP: Reuse.BENT,
    SamplerKind.ANCESTRAL: Reuse.MEASURED,
    SamplerKind.STOCHASTIC_MULTISTEP: Reuse.MEASURED,
}


def rule_for(kind: SamplerKind) -> Reuse:
    """The rule that a preset uses: of each kind the closest on the captions that presets are fitted on.

    Fresh noise leaves nothing of how a slope changes, so a stochastic sampler follows no bend.
    """
    return _RULES.get(kind, Reuse.HOLD)
