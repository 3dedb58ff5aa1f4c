"""ComfyUI's models as the runtime asks for them, and why an engine cannot stand for one."""
