"""What the step skipping nodes ask for, and the preset that it makes."""

from __future__ import annotations

import json

from comfy_api.latest import io

from ...sampling.block_caching import parse_caching
from ...sampling.closeness import CFG, closeness
from ...sampling.presets import CUSTOM, DEFAULT, PRESETS, Preset, Selection, custom
from ...sampling.reuse import Reuse
from ...sampling.schedule import parse_steps
from .inputs import advanced

CATEGORY = "Slipstream/step skipping"
AUTO_RULE = "auto"
SHOWN = (20, 30, 50)
"""Numbers of steps that the presets' table is for."""


def preset_names() -> list[str]:
    """What there is to choose from; what users saved comes last."""
    return [*PRESETS, CUSTOM, *_saved()]


def known_presets() -> dict[str, Preset]:
    """All but `custom`, by name."""
    return PRESETS | _saved()


def _saved() -> dict[str, Preset]:
    from ...hosts.comfy.skip.saved_presets import saved_presets

    return saved_presets()


def preset_of(
    preset: str,
    share: float = 0.6,
    computed_steps: int = 0,
    power: float = 2.0,
    step_list: str = "",
    rule: str = AUTO_RULE,
    block_cache: str = "",
) -> Preset:
    """What a node's inputs choose.

    Raises:
        ValueError: no such preset, or a list of steps or a block cache that is none.
    """
    if preset == CUSTOM:
        if step_list.strip():
            parse_steps(step_list)
        selection = Selection(share, computed_steps, power, step_list)
        return custom(selection, None if rule == AUTO_RULE else Reuse(rule), parse_caching(block_cache))
    known = known_presets()
    if preset not in known:
        raise ValueError(f"There is no preset {preset!r} here. Choose one of {', '.join(preset_names())}.")
    return known[preset]


def fingerprint_of(preset: str | None) -> str:
    """Differs when a saved preset was calibrated anew under its name, so that ComfyUI runs the node again.

    Args:
        preset: None where it comes by a link, and may be any of the saved ones.
    """
    from ...hosts.comfy.skip.saved_presets import records

    return json.dumps({name: record for name, record in records().items() if preset in (None, name)})


def preset_table() -> str:
    """How many steps each preset computes, a line each."""
    lines = [
        f"{name}: {_counts(preset)} ({preset.note}); {closeness(preset, SHOWN[0])} dB"
        for name, preset in PRESETS.items()
    ]
    numbers = ", ".join(map(str, SHOWN))
    return "\n".join(
        [
            f"How much of the model is computed. Steps computed of {numbers}; closeness to the picture of all "
            f"{SHOWN[0]} steps, PSNR from sampler to sampler, demo model, CFG {CFG:g}:",
            *lines,
            f"{CUSTOM}: what the inputs below say",
            *(f"{name}: {preset.note}" for name, preset in _saved().items()),
        ]
    )


def _counts(preset: Preset) -> str:
    return ", ".join(str(len(preset.selection.computed(steps))) for steps in SHOWN)


def selection_inputs() -> list[io.Input]:
    """The preset, and which steps `custom` computes."""
    preset = io.Combo.Input("preset", options=preset_names(), default=DEFAULT, tooltip=preset_table())
    custom_ones = _share_input(), _computed_steps_input(), _power_input(), _step_list_input()
    return [preset, *map(advanced, custom_ones)]


def reuse_inputs() -> list[io.Input]:
    """What skipped steps of `custom` reuse, and what its computed ones do."""
    return [advanced(_rule_input()), advanced(_block_cache_input())]


def _rule_input() -> io.Combo.Input:
    return io.Combo.Input(
        "rule",
        options=[AUTO_RULE, *(rule.value for rule in Reuse)],
        default=AUTO_RULE,
        optional=True,
        tooltip="For custom: what stands in for a skipped step. auto: by the sampler, measured with bend for "
        "deterministic ones and measured for those that add noise. hold: the last computed picture. hold noise: the "
        "last computed noise. linear: on along the line through the last two. measured: as linear, by as much as the "
        "model itself went last time. measured with bend: and by how the line's slope changed.",
    )


def _block_cache_input() -> io.String.Input:
    return io.String.Input(
        "block_cache",
        default="",
        optional=True,
        tooltip="For custom: what computed steps reuse inside of the model; not measured yet. block cache 0.08, for "
        "transformers (Flux, SD3, Wan, Qwen-Image, …): all but the first block, while that changes by less than 8 %. "
        "deep cache 3, for UNets (SD1.x, SDXL): all below the top level, but in one step of three. Empty: nothing.",
    )


def _share_input() -> io.Float.Input:
    return io.Float.Input(
        "share",
        default=0.6,
        min=0.05,
        max=1.0,
        step=0.05,
        optional=True,
        tooltip="For custom: how much of the steps is computed. 1 computes all.",
    )


def _computed_steps_input() -> io.Int.Input:
    return io.Int.Input(
        "computed_steps",
        default=0,
        min=0,
        max=10000,
        optional=True,
        tooltip="For custom: how many steps are computed, in place of share. 0 leaves it to share.",
    )


def _power_input() -> io.Float.Input:
    return io.Float.Input(
        "power",
        default=2.0,
        min=0.2,
        max=5.0,
        step=0.1,
        optional=True,
        tooltip="For custom: 1 spreads the computed steps evenly; above 1 there are more of them early, where the "
        "picture is decided.",
    )


def _step_list_input() -> io.String.Input:
    return io.String.Input(
        "step_list",
        default="",
        optional=True,
        tooltip="For custom: exactly these steps are computed, in place of share, computed_steps and power. Either "
        "counted up from 0, the first: 0 1 2 4 8 15 19. Or counted down to 0, the last: 19,18,17,15,11,4 of 20.",
    )
