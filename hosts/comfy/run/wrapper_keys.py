"""The keys of our wrappers and attachments on ComfyUI's models."""

ACCELERATE = "slipstream"
"""Of the wrapper that leads a run's calls to engines, and of the `AcceleratedModule` that is attached to the model."""

STEP_SKIP = "slipstream_step_skip"
BLOCK_CACHE = "slipstream_block_cache"
"""Of the wrapper that lets blocks be reused; and, of a call's `transformer_options`, what leads its blocks' calls."""

ONE_STEP = "slipstream_one_step"
STEP_TIMES = "slipstream_times"

RECORDING = "slipstream_calibrate"
"""Of wrappers that record a calibration's steps, and play them again."""

OURS = frozenset({ACCELERATE, STEP_SKIP, BLOCK_CACHE, ONE_STEP, STEP_TIMES, RECORDING})
