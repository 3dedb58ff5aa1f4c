"""Which calls a block's loaded package takes."""

from __future__ import annotations

import pytest
import torch

from slipstream.compile_backend.blocks.engine import BlockEngine
from slipstream.compile_backend.blocks.program import BlockSignature
from slipstream.compile_backend.blocks.sizes import Size, Sizes

_WIDEST = 12288
_FLOAT = torch.bfloat16


def engine_of(*shapes: tuple[Size, ...]) -> BlockEngine:
    used = {symbol for shape in shapes for size in shape if not isinstance(size, int) for symbol in size}
    signature = BlockSignature(
        dtypes=(_FLOAT,) * len(shapes),
        channels_last=(False,) * len(shapes),
        sizes=Sizes(shapes, dict.fromkeys(used, (2, 1 << 17))),
        weights=(("mlp.weight", (_WIDEST, 3072), _FLOAT),),
        outputs=None,
        is_list=False,
        nodes=1,
    )
    return BlockEngine(signature, lambda given: given)


def accepts(engine: BlockEngine, *shapes: tuple[int, ...]) -> bool:
    return engine.accepts(tuple((torch.Size(shape), _FLOAT) for shape in shapes))


IMAGE, TEXT, BOTH = {"image": 1}, {"text": 1}, {"image": 1, "text": 1}


@pytest.mark.parametrize(("image", "text"), [(4096, 37), (4096, 512), (16384, 256)])
def test_tables_of_positions_and_masks_count_no_more_than_their_tokens(image: int, text: int) -> None:
    """Those of 1024² and 2048² pixels, as Flux and Qwen-Image have them: their rows are many, and short."""
    engine = engine_of((1, IMAGE, 3072), (1, TEXT, 3072), (1, BOTH, 1, 64, 2, 2), (1, 1, BOTH, BOTH))
    both = image + text
    assert accepts(engine, (1, image, 3072), (1, text, 3072), (1, both, 1, 64, 2, 2), (1, 1, both, both))


@pytest.mark.parametrize(("batch", "is_accepted"), [(2, True), (3, False)])
def test_what_needs_longer_indices_is_left_to_the_block(batch: int, is_accepted: bool) -> None:
    """The hidden features, 65,536 tokens wide as they are, reach 2³¹ with the third sample."""
    engine = engine_of(({"batch": 1}, IMAGE, 3072))
    assert accepts(engine, (batch, 65536, 3072)) is is_accepted


def test_pixels_are_counted_where_height_and_width_are_alike() -> None:
    engine = engine_of((2, 320, {"height": 1}, {"width": 1}))
    assert accepts(engine, (2, 320, 256, 256)) and not accepts(engine, (2, 320, 512, 512))


def test_one_size_has_indices_as_long_as_it_needs() -> None:
    assert accepts(engine_of((8, 65536, 3072)), (8, 65536, 3072))
