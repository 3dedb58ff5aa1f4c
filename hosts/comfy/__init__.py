"""ComfyUI: how a model is read, hooked and supplied there."""

import time

STARTED = time.time()
"""When this process loaded the pack, before any model (POSIX seconds)."""
