"""Builds engines outside of sampling, with ComfyUI's server and without."""
