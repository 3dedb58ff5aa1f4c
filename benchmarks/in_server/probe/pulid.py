"""What PuLID's nodes are given: random weights, and faces that are found in every picture."""

from __future__ import annotations

from typing import Any

import comfy.model_management as management
import comfy.model_patcher
import torch
from comfy_api.latest import io

from .random_inputs import schema
from .stand_ins import EvaClip, FaceAnalysis, random_pulid


class RandomPulid(io.ComfyNode):  # type: ignore[misc]
    """PuLID's weights for a Flux, which may be narrower than Flux.1."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Describe the node."""
        return schema("Pulid", "Random PuLID", io.Custom("PULIDFLUX").Output(), links=[io.Model.Input("model")])

    @classmethod
    def execute(cls, model: Any) -> io.NodeOutput:
        """Return what the pack's loader would."""
        devices = {
            "load_device": management.get_torch_device(), "offload_device": management.unet_offload_device()
        }  # fmt: skip
        made = random_pulid(model.model.diffusion_model.hidden_size)
        return io.NodeOutput(comfy.model_patcher.ModelPatcher(made, **devices))


class RandomEvaClip(io.ComfyNode):  # type: ignore[misc]
    """An image encoder for PuLID that answers at random."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Describe the node."""
        return schema("EvaClip", "Random EVA CLIP", io.Custom("EVA_CLIP").Output())

    @classmethod
    def execute(cls) -> io.NodeOutput:
        """Return the encoder."""
        return io.NodeOutput(EvaClip())


class RandomFaces(io.ComfyNode):  # type: ignore[misc]
    """Finds one face in every picture."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Describe the node."""
        return schema("Faces", "Random Faces", io.Custom("FACEANALYSIS").Output())

    @classmethod
    def execute(cls) -> io.NodeOutput:
        """Return what finds the face."""
        return io.NodeOutput(FaceAnalysis())


class TextLength(io.ComfyNode):  # type: ignore[misc]
    """Tells PuLID's patch how long the text is, which it notes only in the last of Flux.1's 19 double blocks."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Describe the node."""
        links = [io.Model.Input("model"), io.Conditioning.Input("text")]
        return schema("TextLength", "Text Length", io.Model.Output(), links=links)

    @classmethod
    def execute(cls, model: Any, text: list[tuple[torch.Tensor, dict[str, Any]]]) -> io.NodeOutput:
        """Return the model with an empty text of that length, where the patch looks for one."""
        patched = model.clone()
        tokens = text[0][0].shape[1]
        options = patched.model_options.setdefault("transformer_options", {})
        options["pulid_temp_attr"] = {"double_blocks_txt": torch.empty(1, tokens, 0)}
        return io.NodeOutput(patched)
