"""The keys of our wrappers and attachments on ComfyUI's models."""

ACCELERATE = "slipstream"
"""Of the wrapper that leads a run's calls to engines, and of the `AcceleratedModule` that is attached to the model."""

STEP_SKIP = "slipstream_step_skip"
ONE_STEP = "slipstream_one_step"
STEP_TIMES = "slipstream_times"

RECORDING = "slipstream_calibrate"
"""Of wrappers that record a calibration's steps, and play them again."""
