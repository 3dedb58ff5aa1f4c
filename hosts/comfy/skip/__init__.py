"""Step skipping in ComfyUI, and its calibration."""
