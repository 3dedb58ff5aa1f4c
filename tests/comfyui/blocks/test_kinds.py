"""Which blocks are of one kind, and so share an engine."""

from __future__ import annotations

from typing import Any

import torch

from slipstream.compile_backend.blocks.backend import BlockBackend
from slipstream.compile_backend.blocks.call_form import taken_apart
from slipstream.core.spec import Optimize, Precision
from slipstream.hosts.comfy.blocks.block_architecture import ComfyBlock
from slipstream.hosts.comfy.models.diffusion_model import ComfyDiffusionModel
from slipstream.runtime.blocks.block_plans import block_plans, lent_plans
from slipstream.tests.comfyui.support.models import tiny

CPU = torch.device("cpu")
BLOCK = "middle_block.1.transformer_blocks.0"


def keys(
    patcher: Any,
    path: str = BLOCK,
    tokens: int = 16,
    text: int = 77,
    batch: int = 2,
    are_lent: bool = False,
    **more: Any,
) -> list[str]:
    """Digests of the engines that a block's call wants: those for all sizes, for such sizes, and for its own.

    Args:
        are_lent: of those that may be lent to it instead.
    """
    owner = ComfyDiffusionModel.of(patcher.model)
    width = owner.fresh.get_submodule(path).norm1.weight.shape[0]
    example = {"context": (batch, text, 32), "x": (batch, tokens, width)}
    form, _ = taken_apart({**dict.fromkeys(example, torch.empty(0)), **more})
    block = ComfyBlock(owner, path, form, example, dict.fromkeys(example, (0, 1)))
    dtypes = (torch.float32, torch.float32)
    plans = block_plans(block, dtypes, Precision.FP32, CPU, Optimize.BLOCKS, BlockBackend())
    return [plan.key.digest for plan in (lent_plans(plans[0]) if are_lent else plans)]


def test_blocks_of_one_kind_share_an_engine() -> None:
    model = tiny.model()
    blocks = [name for name, _ in model.model.diffusion_model.named_modules() if name.endswith("transformer_blocks.0")]
    found = [keys(model, name)[0] for name in blocks]
    assert 1 < len(set(found)) < len(blocks)
    assert keys(model) == keys(tiny.model(seed=2))


def test_sizes_share_an_engine_and_have_one_each_beside() -> None:
    first, second = keys(tiny.model()), keys(tiny.model(), tokens=36, text=154, batch=4)
    assert first[:2] == second[:2] and first[2] != second[2]
    third = keys(tiny.model(), tokens=77)
    assert first[0] == third[0] and first[1] != third[1], "there are as many tokens as the text has"


def test_calls_of_one_may_be_lent_engines_of_their_kind_for_several() -> None:
    model = tiny.model()
    several, one, lent = keys(model), keys(model, batch=1), keys(model, batch=1, are_lent=True)
    assert lent[0] == several[0] and len(set(lent)) == 3, "of both tensors, and of either"
    assert not {*lent} & {*one} and keys(model, are_lent=True) == []
    assert keys(model, batch=1, tokens=36, text=154, are_lent=True)[0] == several[0]
    assert several[0] not in keys(model, batch=1, are_lent=True, another=1)


def test_other_kinds_have_other_engines() -> None:
    model = tiny.model()
    assert keys(model)[0] != keys(model, batch=1)[0]  # an axis of one may mean something else to code
    assert keys(model)[0] != keys(model, "input_blocks.1.1.transformer_blocks.0")[0]
    assert keys(model)[0] != keys(model, another=1)[0]


def test_a_setting_that_code_reads_makes_another_kind() -> None:
    model, other = tiny.model(), tiny.model()
    before = keys(model)
    architecture = ComfyDiffusionModel.of(other.model)
    architecture.fresh.get_submodule(BLOCK).norm1.eps = 1e-3
    assert keys(other) != before
