"""How fast the parts of a diffusion model run: plain, compiled by torch, and on Slipstream's engines."""
