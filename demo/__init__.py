"""A tiny text-to-picture diffusion model with SD1.x's architecture, trained by this project on drawn scenes.

It exists so that every part of Slipstream can be shown and tested on pictures that mean something, with
nothing to download. See `README.md` in this folder. Nothing heavy is imported here.
"""
