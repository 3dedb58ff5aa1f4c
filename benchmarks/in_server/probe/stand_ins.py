"""In the place of libraries that other packs import, so that these packs load where the libraries are not.

Those that find and describe faces find one in every picture, and describe it at random.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy
import torch

_PULID_WIDTH = 3072
"""Of its attention, as wide as Flux.1's blocks."""


class Face(dict[str, Any]):
    """As insightface describes one: by key and by attribute."""

    def __init__(self) -> None:
        generator = numpy.random.default_rng(1)
        embedding = generator.standard_normal(512).astype(numpy.float32)
        super().__init__(
            bbox=numpy.array([40.0, 40.0, 180.0, 180.0]),
            kps=numpy.array([[80.0, 90.0], [140.0, 90.0], [110.0, 120.0], [85.0, 150.0], [135.0, 150.0]]),
            embedding=embedding,
            normed_embedding=embedding / numpy.linalg.norm(embedding),
        )

    def __getattr__(self, name: str) -> Any:
        return self[name]


class FaceAnalysis:
    """Of insightface."""

    def __init__(self, **_: Any) -> None:
        self.det_model = SimpleNamespace(input_size=(640, 640))

    def get(self, picture: Any) -> list[Face]:
        """All faces of a picture."""
        return [Face()]


class FaceRestoreHelper:
    """Of facexlib: cuts faces out."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.face_parse: Any = None
        self.cropped_faces: list[Any] = []

    def clean_all(self) -> None:
        """Forget the picture."""

    def read_image(self, picture: Any) -> None:
        """Take a picture."""
        self.cropped_faces = [picture]

    def get_face_landmarks_5(self, **_: Any) -> None:
        """Find the face."""

    def align_warp_face(self) -> None:
        """Cut it out."""


class EvaClip(torch.nn.Module):
    """The image encoder that PuLID-Flux asks."""

    image_size = 336
    image_mean = image_std = (0.5, 0.5, 0.5)

    def forward(self, picture: torch.Tensor, **_: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """One description of the picture and five of its parts."""
        generator = torch.Generator().manual_seed(2)
        parts = [torch.randn(1, 577, 1024, generator=generator) for _ in range(5)]
        return torch.randn(1, 768, generator=generator), parts


def _parsing_model(*_: Any, **__: Any) -> Any:
    def parse(picture: torch.Tensor) -> list[torch.Tensor]:
        return [torch.rand(1, 19, *picture.shape[2:], generator=torch.Generator().manual_seed(3)).to(picture)]

    return parse


def random_pulid(width: int) -> Any:
    """PuLID-Flux's weights, by the code of the pack that is loaded; its attention is as wide as a Flux."""
    import nodes

    code: Any = sys.modules[nodes.NODE_CLASS_MAPPINGS["ApplyPulidFlux"].__module__]
    torch.manual_seed(1)
    model = code.PulidFluxModel()
    if width != _PULID_WIDTH:
        model.pulid_ca = torch.nn.ModuleList(
            code.PerceiverAttentionCA(dim=width, dim_head=width // 4, heads=4) for _ in model.pulid_ca
        )
    return model.eval().requires_grad_(False)


def lend(name: str) -> None:
    """Put an empty class where a name is missing, in an empty module where that is missing."""
    place, _, wanted = name.rpartition(".")
    try:
        module: Any = importlib.import_module(place)
    except ImportError:
        module = sys.modules[place] = ModuleType(place)
        outer, _, last = place.rpartition(".")
        if outer:
            lend(f"{outer}.__path__")
            setattr(sys.modules[outer], last, module)
    if getattr(module, wanted, None) is None:
        setattr(module, wanted, [] if wanted == "__path__" else type(wanted, (), {}))


def lend_faces() -> None:
    """Put the libraries of faces in place, before a pack that imports them is loaded."""
    parts: dict[str, dict[str, Any]] = {
        "insightface": {},
        "insightface.app": {"FaceAnalysis": FaceAnalysis},
        "insightface.app.common": {"Face": Face},
        "insightface.utils": {},
        "insightface.utils.face_align": {"estimate_norm": lambda *_, **__: numpy.eye(2, 3)},
        "insightface.utils.download": {"download_file": None},
        "insightface.utils.storage": {"BASE_REPO_URL": ""},
        "facexlib": {},
        "facexlib.parsing": {"init_parsing_model": _parsing_model},
        "facexlib.detection": {"init_detection_model": lambda *_, **__: None},
        "facexlib.utils": {},
        "facexlib.utils.misc": {"img2tensor": None, "imwrite": None},
        "facexlib.utils.face_restoration_helper": {"FaceRestoreHelper": FaceRestoreHelper},
    }
    for place, names in parts.items():
        module = sys.modules[place] = ModuleType(place)
        vars(module).update(names)
        outer, _, last = place.rpartition(".")
        if outer:
            setattr(sys.modules[outer], last, module)
