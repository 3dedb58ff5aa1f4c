"""Thin ComfyUI nodes over the runtime."""
