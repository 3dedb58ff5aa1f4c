"""Which calls a block's loaded package takes: those in which everything that it computes has indices of 32 bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from slipstream.compile_backend.blocks.engine import BlockEngine
from slipstream.compile_backend.blocks.program import BlockSignature
from slipstream.compile_backend.blocks.sizes import Sizes
from slipstream.core.errors import UnsupportedModel

Shapes = tuple[tuple[int, ...], ...]
_OPEN = torch.export.Dim.AUTO(min=2, max=1 << 17)  # type: ignore[attr-defined,operator,unused-ignore]


class Joint(torch.nn.Module):
    """A block over tokens of image and text, with a table of positions and a mask, as Flux's and Qwen-Image's are."""

    width = 64

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(self.width, 4 * self.width), torch.nn.Linear(4 * self.width, self.width)

    def forward(self, image: Any, text: Any, positions: Any, mask: Any) -> Any:
        joint = torch.cat([text, image], 1)
        turned = joint.unflatten(-1, (1, self.width // 2, 2))
        turned = (positions * turned[..., None, :]).sum(-1).flatten(2)
        attended = functional.scaled_dot_product_attention(*[turned[:, None]] * 3, attn_mask=mask)[:, 0]
        return self.down(functional.gelu(self.up(attended)))


class Upsample(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Any) -> Any:
        return self.conv(functional.interpolate(x, scale_factor=2.0))


class Downsample(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(8, 8, 3, stride=2)

    def forward(self, x: Any) -> Any:
        return self.conv(functional.pad(x, (0, 1, 0, 1)))


class OverTime(torch.nn.Module):
    """Of video: a number of frames that is known when it is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv3d(8, 8, (3, 1, 1), padding=(1, 0, 0))

    def forward(self, x: Any, emb: Any) -> Any:
        return self.conv(x) + emb.transpose(1, 2)[..., None, None]


def engine_of(module: torch.nn.Module, shapes: Shapes, opened: tuple[tuple[int, ...], ...]) -> BlockEngine:
    inputs = tuple(torch.randn(shape) for shape in shapes)
    dynamic = tuple(dict.fromkeys(axes, _OPEN) for axes in opened)
    with torch.no_grad():
        program = torch.export.export(module.eval(), inputs, dynamic_shapes=dynamic, strict=False)
    found = {node.name: node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"}
    given = [found[name] for name in program.graph_signature.user_inputs]
    signature = BlockSignature(
        dtypes=(torch.float32,) * len(inputs), channels_last=(False,) * len(inputs), sizes=Sizes.of(program, given),
        weights=(), outputs=None, is_list=False, nodes=1,
    )  # fmt: skip
    return BlockEngine(signature, lambda given: given)


def accepts(engine: BlockEngine, *shapes: tuple[int, ...]) -> bool:
    return engine.accepts(tuple((torch.Size(shape), torch.float32) for shape in shapes))


def joint_shapes(image: int, text: int) -> Shapes:
    both, width = image + text, Joint.width
    return (1, image, width), (1, text, width), (1, both, 1, width // 2, 2, 2), (1, 1, both, both)


JOINT = (1,), (1,), (1,), (2, 3)
IMAGES = ((0, 2, 3),)


@pytest.mark.parametrize(("image", "text"), [(4096, 37), (4096, 512), (16384, 256)])
def test_tables_of_positions_and_masks_count_as_what_they_are(image: int, text: int) -> None:
    """Those of 1024² and 2048² pixels: their rows are many, and short."""
    assert accepts(engine_of(Joint(), joint_shapes(12, 5), JOINT), *joint_shapes(image, text))


def test_a_mask_may_be_the_largest() -> None:
    engine = engine_of(Joint(), joint_shapes(12, 5), JOINT)
    assert accepts(engine, *joint_shapes(46000, 340)) and not accepts(engine, *joint_shapes(46000, 341))


def test_what_is_enlarged_counts_as_enlarged() -> None:
    """A VAE's last features but one: 2048×2048 pixels of 8 channels become 4096×4096."""
    engine = engine_of(Upsample(), ((2, 8, 12, 16),), IMAGES)
    assert accepts(engine, (2, 8, 4096, 8190)) and not accepts(engine, (2, 8, 4096, 8192))


@pytest.mark.parametrize("order", [(False, True), (True, False)])
def test_one_of_what_is_open_is_accepted_where_that_is_asked_for(order: tuple[bool, bool]) -> None:
    engine = engine_of(Upsample(), ((2, 8, 12, 16),), IMAGES)
    one = ((torch.Size((1, 8, 12, 16)), torch.float32),)
    for ones_too in (*order, *order):
        assert engine.accepts(one, ones_too) is ones_too
    other = ((torch.Size((1, 8, 12, 16)), torch.float16),)
    assert not engine.accepts(other, ones_too=True)


def test_what_is_halved_counts_as_it_comes() -> None:
    engine = engine_of(Downsample(), ((2, 8, 12, 16),), IMAGES)
    assert accepts(engine, (2, 8, 8192, 16380)) and not accepts(engine, (2, 8, 8192, 16384))


def test_frames_and_closed_axes_count() -> None:
    engine = engine_of(OverTime(), ((2, 8, 5, 12, 16), (2, 5, 8)), ((0, 2, 3), (0, 1)))
    assert accepts(engine, (4, 8, 5, 800000 // 5, 16), (4, 5, 8)) is False, "beyond what an open axis may be"
    assert accepts(engine, (64, 8, 5, 52428, 16), (64, 5, 8)) and not accepts(engine, (64, 8, 5, 52429, 16), (64, 5, 8))


def test_one_size_has_indices_as_long_as_it_needs() -> None:
    huge = Sizes(((1 << 20, 8, 4096),), {})
    assert huge.most_elements([(1 << 20, 8, 4096)]) == 0


def test_a_size_that_depends_on_values_is_refused() -> None:
    class Chosen(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return x[x[:, 0] > 0]

    with pytest.raises(UnsupportedModel):
        engine_of(Chosen(), ((6, 4),), ((0,),))
