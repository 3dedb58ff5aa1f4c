"""Writes the tables of `docs/other-packs.md` from rows that `test_packs.py` kept: `python table.py ROWS…`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[4] / "docs" / "other-packs.md"
TOGETHER = "all packs together"
CORE, CORES_NAME = "ComfyUI", "ComfyUI's own nodes"
BY_BLOCKS = "by blocks"
TOLERANCE = 2e-4
BEGIN, END = "<!-- made by tests/comfyui/support/packs/table.py -->", "<!-- end -->"
BEGIN_BLOCKS, END_BLOCKS = BEGIN.replace("made", "by blocks, made"), END.replace("end", "end of by blocks")
AUTHORS = {
    "Comfy-WaveSpeed": "chengzeyi",
    "ComfyUI-Advanced-ControlNet": "Kosinkadink",
    "ComfyUI-AnimateDiff-Evolved": "Kosinkadink",
    "ComfyUI-GGUF": "city96",
    "ComfyUI-Impact-Pack": "ltdrdata",
    "ComfyUI-Impact-Subpack": "ltdrdata",
    "ComfyUI-Inspire-Pack": "ltdrdata",
    "ComfyUI-KJNodes": "kijai",
    "ComfyUI-MagCache": "Zehong-Ma",
    "ComfyUI-NAG": "ChenDarYen",
    "ComfyUI-PuLID-Flux": "balazik",
    "ComfyUI-TeaCache": "welltop-cn",
    "ComfyUI-TiledDiffusion": "shiimizu",
    "ComfyUI-bleh": "blepping",
    "ComfyUI-deepcache": "styler00dollar",
    "ComfyUI-layerdiffuse": "huchenlei",
    "ComfyUI-ppm": "pamparamm",
    "ComfyUI-seamless-tiling": "spinagon",
    "ComfyUI_IPAdapter_plus": "cubiq",
    "ComfyUI_InstantID": "cubiq",
    "ComfyUI_Patches_ll": "lldacing",
    "ComfyUI_PuLID_Flux_ll": "lldacing",
    "ComfyUI_TGate": "JettHu",
    "ComfyUI_TiledKSampler": "BlenderNeko",
    "ControlNet-LLLite-ComfyUI": "kohya-ss",
    "FreeU_Advanced": "WASasquatch",
    "attention-couple-ComfyUI": "laksjdjf",
    "efficiency-nodes-comfyui": "jags111",
    "sd-perturbed-attention": "pamparamm",
}

Row = dict[str, Any]


def main(*files: str) -> None:
    """Put the tables into the page, of engines of whole models, of blocks, or of both, as there are rows of them."""
    rows = [json.loads(line) for file in files for line in Path(file).read_text(encoding="utf-8").splitlines()]
    by_blocks = [row for row in rows if row["order"] == BY_BLOCKS]
    if whole := [row for row in rows if row["order"] != BY_BLOCKS]:
        _put(BEGIN, tables(whole), END)
    if by_blocks:
        _put(BEGIN_BLOCKS, table_by_blocks(by_blocks), END_BLOCKS)


def _put(begin: str, text: str, end: str) -> None:
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(begin)
    after = rest.partition(end)[2]
    PAGE.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}", encoding="utf-8")


def table_by_blocks(rows: list[Row]) -> str:
    """What stays on engines of blocks."""
    ran = [row for row in rows if row["used"] and not row["broken"]]
    packs = {row["pack"] for row in ran} - {CORE}
    wrong = [row for row in ran if row["error"] > TOLERANCE]
    kept = [row for row in ran if row["blocks"] and row["blocks_on_engines"] >= _MUCH * row["blocks"]]
    lines = [
        f"{len(ran)} features of {len(packs)} packs and of ComfyUI itself: {len(wrong)} wrong pictures. "
        f"With {len(kept)} of them engines compute {100 * _MUCH:.0f} % of the calls of blocks or more.",
        "",
        "| pack | feature | model | ComfyUI | changes the picture by | calls of blocks on engines | the others | off |",
        "|---|---|---|---|---|---|---|---|",
    ]
    ran.sort(key=lambda row: (row["pack"] != CORE, row["pack"].lower(), row["comfyui"]))
    return "\n".join([*lines, *map(_line_by_blocks, ran)])


_MUCH = 0.7


def _line_by_blocks(row: Row) -> str:
    changes = percent(row["effect"]) if row["changes"] else f"{percent(row['effect'])} (meant to change nothing)"
    share = f"{row['blocks_on_engines']} of {row['blocks']}"
    if not row["blocks"]:
        share = "none is called through Slipstream"
    cells = (_name(row), row["feature"], row["family"], row["comfyui"], changes, share, _cell(_short(row["reasons"])))
    return f"| {' | '.join(cells)} | {percent(row['error'])} |"


def tables(rows: list[Row]) -> str:
    """What was measured, then what the packs could not do."""
    features: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        features.setdefault((row["pack"], row["feature"], row["comfyui"]), []).append(row)
    works = [found for found in features.values() if not found[0]["broken"]]
    unused = [found for found in works if not found[0]["used"]]
    shown = sorted((found for found in works if any(row["used"] or row["eager_calls"] for row in found)), key=_place)
    used = [found for found in shown if found[0]["used"]]
    ran = {(found[0]["pack"], found[0]["feature"]) for found in works}
    broken = [
        found[0]
        for (pack, feature, _), found in sorted(features.items())
        if found[0]["broken"] and (pack, feature) not in ran
    ]
    runs = [row for found in works for row in found]
    wrong = [row for row in runs if max(row["error"], row["error_afterwards"]) > TOLERANCE]
    served = [found for found in unused if all(row["engine_calls"] and not row["eager_calls"] for row in found)]
    packs = {found[0]["pack"] for found in used} - {TOGETHER}
    lines = [
        f"{len(used)} features of {len(packs)} packs in {sum(map(len, used))} runs: {len(wrong)} wrong pictures. "
        f"Of the pictures afterwards, without the pack's node, the furthest is off by "
        f"{percent(max(row['error_afterwards'] for row in runs))}. With a pack installed and none of its nodes in the "
        f"workflow, {len(served)} of {len(unused)} leave the whole picture to the engine.",
        "",
        "| pack | feature | model | ComfyUI | changes the picture by | computed by | off from ComfyUI alone |",
        "|---|---|---|---|---|---|---|",
        *(_line(found) for found in shown),
    ]
    if broken:
        lines += ["", "These do not run in the ComfyUI that they were tried in, with or without Slipstream:", ""]
        lines += ["| pack | feature | ComfyUI | what it says |", "|---|---|---|---|"]
        lines += [f"| {_name(row)} | {row['feature']} | {row['comfyui']} | {_cell(row['broken'])} |" for row in broken]
    return "\n".join(lines)


def _place(found: list[Row]) -> tuple[str, str]:
    return found[0]["pack"].lower(), found[0]["comfyui"]


def _name(row: Row) -> str:
    pack = row["pack"]
    author = AUTHORS.get(pack)
    if pack in (TOGETHER, CORE):
        return CORES_NAME if pack == CORE else pack
    return f"{f'[{pack}](https://github.com/{author}/{pack})' if author else pack} {row['commit']}"


def _line(found: list[Row]) -> str:
    row = found[0]
    changes = percent(row["effect"]) if row["changes"] else f"{percent(row['effect'])} (meant to change nothing)"
    said = {_computed_by(one): one["order"] for one in found}
    computed = "; ".join(said) if len(said) == 1 else "; ".join(f"{order}: {by}" for by, order in said.items())
    cells = (_name(row), row["feature"], row["family"], row["comfyui"], changes, _cell(computed))
    return f"| {' | '.join(cells)} | {percent(max(row['error'] for row in found))} |"


def _computed_by(row: Row) -> str:
    calls = row["engine_calls"] + row["eager_calls"]
    if not calls:
        return f"neither: {_reasons(row['reasons'])}" if row["reasons"] else "the pack itself"
    if not row["eager_calls"]:
        return "engine"
    plain = f"your model: {_reasons(row['reasons'])}"
    return plain if not row["engine_calls"] else f"engine {row['engine_calls'] / calls:.0%}, else {plain}"


def _reasons(reasons: Iterable[str]) -> str:
    return "; ".join(reasons)


def _short(reasons: list[str]) -> str:
    """The first one, where each of many blocks has its own."""
    return _reasons(reasons) if len(reasons) < 3 else f"{reasons[0]}; and {len(reasons) - 1} like it"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def percent(share: float) -> str:
    """For people: one or two digits that matter, nothing below a thousandth of a per cent."""
    if share == 0:
        return "0"
    return "under 0.001 %" if share < 1e-5 else f"{100 * share:.2g} %" if share < 1 else f"{100 * share:.0f} %"


if __name__ == "__main__":
    main(*sys.argv[1:])
