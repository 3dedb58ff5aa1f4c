"""What a user chose in the WebUI for the next picture."""

from __future__ import annotations

from dataclasses import dataclass

from ...runtime.settings.model_settings import BackendChoice, BuildPolicy, Settings
from ...sampling.presets import HISTORICAL, PRESETS, Preset

NO_PRESET = "off"
BACKENDS = tuple(choice.value for choice in BackendChoice)
POLICIES = tuple(policy.value for policy in BuildPolicy)


def preset_names() -> list[str]:
    """What there is to choose from, `NO_PRESET` first. `HISTORICAL` is taken by its name too, but not offered."""
    return [NO_PRESET, *(name for name in PRESETS if name != HISTORICAL)]


@dataclass(frozen=True)
class Choices:
    """
    Attributes:
        preset: of step skipping; None computes every step.
    """

    settings: Settings
    preset: Preset | None = None

    @classmethod
    def of_text(
        cls,
        backend: str = BackendChoice.OFF.value,
        build: str = BuildPolicy.BACKGROUND.value,
        preset: str = NO_PRESET,
        resolutions: str = "auto",
    ) -> Choices:
        """In the words of the page; without any, as the page begins: other extensions make pictures of their own.

        Raises:
            ValueError: a word that is not offered, or a resolution that cannot be read.
        """
        if preset != NO_PRESET and preset not in PRESETS:
            raise ValueError(f"There is no preset {preset!r}. Choose one of {', '.join(preset_names())}.")
        return cls(Settings.of_text(backend=backend, build=build, resolutions=resolutions), PRESETS.get(preset))

    @property
    def is_idle(self) -> bool:
        """Whether nothing at all was chosen."""
        return self.settings.is_off and self.preset is None
