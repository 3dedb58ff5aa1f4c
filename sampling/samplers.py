"""What kinds of samplers there are, for which a skipped step means different things."""

from __future__ import annotations

from enum import Enum

from .reuse import Reuse


class SamplerKind(str, Enum):
    """
    ONE_STEP: deterministic, from this step's denoised latent alone.
    MULTISTEP: deterministic, from several steps' denoised latents.
    STOCHASTIC: adds fresh noise; one call of the model a step.
    SEVERAL_CALLS: calls the model several times a step, or chooses its steps as it goes.
    UNKNOWN: of another extension.
    """

    ONE_STEP = "one step"
    MULTISTEP = "multistep"
    STOCHASTIC = "stochastic"
    SEVERAL_CALLS = "several calls a step"
    UNKNOWN = "unknown"


_KINDS = {
    SamplerKind.ONE_STEP: "euler ddim",
    SamplerKind.MULTISTEP: "dpmpp_2m uni_pc unipc uni_pc_bh2 unipc_bh2 deis ipndm ipndm_v lms res_multistep "
    "gradient_estimation",
    SamplerKind.STOCHASTIC: "euler_ancestral dpmpp_2m_sde dpmpp_2m_sde_heun dpmpp_3m_sde ddpm "
    "res_multistep_ancestral er_sde sa_solver",
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


def rule_for(kind: SamplerKind) -> Reuse:
    """The rule that a preset uses.

    Fresh noise makes the way between two steps of a stochastic sampler a matter of chance, which no line continues.
    """
    return Reuse.BENT if kind in (SamplerKind.ONE_STEP, SamplerKind.MULTISTEP) else Reuse.HOLD
