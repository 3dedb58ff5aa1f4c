"""The blocks of ComfyUI's models that engines compute: which there are, their weights, and what others do in them."""
