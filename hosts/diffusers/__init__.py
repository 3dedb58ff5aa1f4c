"""diffusers: an accelerated UNet that takes the place of a pipeline's own, and steps that are skipped.

Such as:

    store = EngineStore(store_home())
    pipe.unet = accelerate_unet(pipe.unet, EngineProvider(store), Settings(policy=BuildPolicy.FIRST_USE))
    with pipe.unet.run(), skip_steps(pipe, PRESETS["balanced"]):
        image = pipe("a red fox").images[0]
"""

from ...sampling.run import Skipped
from .accelerate import AcceleratedUNet, accelerate_unet
from .step_skip import skip_steps

__all__ = ["AcceleratedUNet", "Skipped", "accelerate_unet", "skip_steps"]
