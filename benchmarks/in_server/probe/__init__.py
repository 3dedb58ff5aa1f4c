"""A node pack for the benchmark's server: it times sampler, decoder and encoder from inside, and makes random inputs.

The benchmark copies this folder into the server's `custom_nodes`. It imports nothing of Slipstream.
"""

from __future__ import annotations

from comfy_api.latest import ComfyExtension, io

from .pulid import RandomEvaClip, RandomFaces, RandomPulid, TextLength
from .random_inputs import Blank, Edges, RandomEmbedding, RandomLatent, RandomPrompt, RandomText


class ProbeExtension(ComfyExtension):  # type: ignore[misc]
    """The nodes, and the probe, which begins when ComfyUI asks for the nodes."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        """Return the nodes for ComfyUI."""
        from .install import install

        install()
        inputs = [RandomPrompt, RandomText, RandomLatent, RandomEmbedding, Edges, Blank]
        return [*inputs, RandomPulid, RandomEvaClip, RandomFaces, TextLength]


async def comfy_entrypoint() -> ProbeExtension:
    """Return what ComfyUI loads."""
    return ProbeExtension()
