"""Whole pictures made by a real ComfyUI server, timed by its client and from inside its nodes."""
