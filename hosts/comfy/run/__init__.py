"""What surrounds a sampling run of ComfyUI, and the calls of its models in it."""
