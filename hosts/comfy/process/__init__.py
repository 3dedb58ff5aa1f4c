"""The ComfyUI process: its device memory, the weights in it, its server and its prompts."""
