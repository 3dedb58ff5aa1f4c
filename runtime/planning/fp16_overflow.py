"""Models that overflow in fp16 get engines in bf16, where the user leaves the precision open."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from ...core.protocols import ModelSource
from ...core.spec import EngineSpec, Precision
from ...engine_cache import OverflowMemo
from ..settings.model_settings import Settings

log = logging.getLogger(__name__)

ADVICE = "Values in this model exceed the range of fp16: set precision to bf16, or to auto, which then uses bf16"
_NOTE = "fp16 overflows in this model; built in bf16"


class Overflows:
    """What this process and earlier ones found out.

    Args:
        root: of the engine store.
    """

    def __init__(self, root: Path) -> None:
        self._memo = OverflowMemo(root)
        self._models = set(self._memo.models())

    def with_bf16(self, source: ModelSource, settings: Settings) -> Settings:
        """`settings` with bf16 instead of the host's fp16 for a model that is known to overflow; what is to be
        quantised still is."""
        if _leaves_fp16_open(source, settings) and self._knows(source):
            return replace(settings, compute=Precision.BF16)
        return settings

    def why_not(self, source: ModelSource, settings: Settings) -> str | None:
        """Why a user's own choice of fp16 is not followed for a model that is known to overflow."""
        if settings.precision is Precision.FP16 and self._knows(source):
            return f"{source.architecture.fingerprint.architecture_name} overflows in fp16. {ADVICE}"
        return None

    def note(self, source: ModelSource, spec: EngineSpec) -> None:
        """An engine of `spec` was not finite. A LoRA may be to blame: with one it is forgotten with this process.

        Of a quantised engine nobody knows whether fp16 is to blame: the model's other engines stay as they are.
        """
        model = spec.fingerprint.architecture, source.weights_digest()
        if spec.precision_name != Precision.FP16.value or model in self._models:
            return
        self._models.add(model)
        if not source.is_patched:
            self._memo.add(model)
        log.warning(
            "Slipstream: fp16 overflows in %s; with precision auto its engines compute in bf16 from now on",
            spec.fingerprint.architecture_name or "this model",
        )

    def remark(self, source: ModelSource, spec: EngineSpec) -> str:
        """Why an engine is not in the host's precision, for its record; empty where it is."""
        uses_bf16 = spec.precision is Precision.BF16 and source.precision is Precision.FP16
        return _NOTE if uses_bf16 and self._knows(source) else ""

    def _knows(self, source: ModelSource) -> bool:
        architecture = source.architecture.fingerprint.architecture
        if all(known != architecture for known, _ in self._models):
            return False  # without a digest, for which gigabytes may have to be read
        return (architecture, source.weights_digest()) in self._models


def _leaves_fp16_open(source: ModelSource, settings: Settings) -> bool:
    return not isinstance(settings.precision, Precision) and source.precision is Precision.FP16
