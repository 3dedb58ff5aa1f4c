"""ComfyUI: how a model is read, hooked and supplied there."""
