"""The blocks of ComfyUI's models on engines of their own, while the model's own forward runs as ever."""
