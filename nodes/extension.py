"""The list of nodes that ComfyUI asks for."""

from __future__ import annotations

from comfy_api.latest import ComfyExtension, io

from ..hosts.comfy.process.early_workers import prepare
from ..hosts.comfy.process.saved_pictures import add_record
from ..hosts.comfy.process.server_events import watch_prompts
from .accelerate import AccelerateModel
from .accelerate_controlnet import AccelerateControlNet
from .accelerate_text_encoder import AccelerateTextEncoder
from .accelerate_vae import AccelerateVAE
from .build_engine import BuildEngine
from .compare_images import CompareImages
from .demo import SlipstreamDemoLoader, SlipstreamDemoLora, SlipstreamDemoPrompt
from .dry_run import SlipstreamDryRunEnd, SlipstreamOneStep
from .engine_info import EngineInfo
from .ksampler_step_skip import KSamplerStepSkip
from .routes import add_routes
from .skip_calibrate import SkipCalibrate
from .step_skip import SkipSigmas, StepSkip, StepSkipSampler


class SlipstreamExtension(ComfyExtension):
    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        for handler in (add_record, prepare):
            watch_prompts(handler)  # here, since older ComfyUIs never call on_load
        add_routes()
        return [
            AccelerateModel,
            AccelerateControlNet,
            AccelerateVAE,
            AccelerateTextEncoder,
            BuildEngine,
            EngineInfo,
            StepSkip,
            StepSkipSampler,
            KSamplerStepSkip,
            SkipSigmas,
            SkipCalibrate,
            CompareImages,
            SlipstreamDemoLoader,
            SlipstreamDemoLora,
            SlipstreamDemoPrompt,
            SlipstreamOneStep,
            SlipstreamDryRunEnd,
        ]
