"""Node packs of other authors, as they are: a picture with one of their nodes is the same with and without Slipstream.

Each pack is measured in a process of its own, see `support/packs`. `docs/other-packs.md` is made from the rows.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slipstream.engine_cache import EngineStore
from slipstream.tests.comfyui.support.packs.loading import CORE, TOGETHER, VARIABLE, all_packs, packs_folder
from slipstream.tests.comfyui.support.packs.run import BLOCKS, GRAPHS, WHOLE

ROWS = "SLIPSTREAM_PACKS_ROWS"
"""Names a file that keeps the rows, but for those with what stands for graphs."""
TOLERANCE = 2e-4
CHANGES = 1e-3
SECONDS = 1800
LEAST = 0.5
"""Share of the calls of blocks that stays on engines with each of ComfyUI's own nodes."""
CODE = (
    "import sys; sys.path.insert(0, sys.argv[1]); import conftest\n"
    "from slipstream.tests.comfyui.support.packs.run import main\n"
    "main(*sys.argv[2:])"
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(SECONDS)]
PACKS = all_packs()
needs_packs = pytest.mark.skipif(
    not PACKS, reason=f"no packs in {packs_folder()}: {VARIABLE} names a folder that holds some"
)


def measured(pack: str, comfyui_dir: Path, store: Path, rows: Path, engines: str = WHOLE) -> list[dict[str, Any]]:
    """The rows of a pack."""
    tests = Path(__file__).resolve().parents[2]
    ran = subprocess.run(
        [sys.executable, "-c", CODE, str(tests), pack, str(comfyui_dir), str(store), str(rows), engines],
        env={**os.environ, "OMP_NUM_THREADS": "1", "SLIPSTREAM_STEP_TIMES": "off", "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout[-4000:]
    lines = rows.read_text(encoding="utf-8").splitlines()
    if engines != GRAPHS and (keep := os.environ.get(ROWS)):
        with Path(keep).open("a", encoding="utf-8") as kept:
            kept.writelines(f"{line}\n" for line in lines)
    return [json.loads(line) for line in lines]


@needs_packs
@pytest.mark.parametrize("pack", [*PACKS, TOGETHER])
def test_a_pack_makes_the_pictures_that_it_makes_without_slipstream(
    pack: str, comfyui_dir: Path, engine_store: EngineStore, tmp_path: Path
) -> None:
    rows = measured(pack, comfyui_dir, engine_store.root, tmp_path / "rows.jsonl")
    ran = [row for row in rows if not row["broken"]]
    if not ran:
        pytest.skip(f"{pack} does not run here, with or without Slipstream: {rows[0]['broken']}")
    for row in ran:
        what = f"{row['feature']} ({row['order']}): {row}"
        assert row["error"] <= TOLERANCE and row["error_afterwards"] <= TOLERANCE, f"a wrong picture: {what}"
        assert math.isfinite(row["effect"]), what
        assert not row["changes"] or row["effect"] >= CHANGES, f"the node did nothing, the row proves nothing: {what}"
        assert row["reasons"] or not row["eager_calls"], f"no reason: {what}"
        # Where a pack calls the model's parts itself, nobody asks Slipstream: then the picture is equal to the bit.
        assert row["engine_calls"] or row["reasons"] or row["error"] == 0, f"nothing says who computed it: {what}"
        # Some packs change ComfyUI's own code as soon as they are loaded.
        by_itself = not row["used"] and all("replaced comfy." in why for why in row["reasons"])
        assert row["used"] or by_itself or not row["eager_calls"], f"it is only installed: {what}"


@pytest.mark.parametrize("engines", [BLOCKS, GRAPHS])
@pytest.mark.parametrize("pack", [CORE, *PACKS])
def test_blocks_that_a_node_does_not_reach_into_stay_on_engines(
    pack: str, engines: str, comfyui_dir: Path, tmp_path: Path
) -> None:
    rows = measured(pack, comfyui_dir, tmp_path, tmp_path / "rows.jsonl", engines)
    ran = [row for row in rows if not row["broken"]]
    if not ran:
        pytest.skip(f"{pack} does not run here, with or without Slipstream: {rows[0]['broken']}")
    for row in ran:
        what = f"{row['feature']}: {row}"
        assert row["error"] <= TOLERANCE, f"a wrong picture: {what}"
        assert not row["changes"] or row["effect"] >= CHANGES, f"the node did nothing, the row proves nothing: {what}"
        assert row["blocks_on_engines"] == row["blocks"] or row["reasons"], f"no reason: {what}"
    if pack == CORE:
        # Flux's blocks hold attention and all the rest in one, and it is patched in all of them.
        few = {row["feature"] for row in ran if row["blocks_on_engines"] < LEAST * row["blocks"]}
        assert few <= {"NAGuidance, Flux"}, few
