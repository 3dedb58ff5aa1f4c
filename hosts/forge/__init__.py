"""The Forge family of WebUIs: Neo and Forge on their `backend`, reForge and Classic on `ldm_patched`."""
