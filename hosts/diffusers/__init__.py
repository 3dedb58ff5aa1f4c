"""diffusers: an accelerated UNet that takes the place of a pipeline's own.

Such as:

    store = EngineStore(store_home())
    pipe.unet = accelerate_unet(pipe.unet, EngineProvider(store), Settings(policy=BuildPolicy.FIRST_USE))
    with pipe.unet.run():
        image = pipe("a red fox").images[0]
"""

from .accelerate import AcceleratedUNet, accelerate_unet

__all__ = ["AcceleratedUNet", "accelerate_unet"]
