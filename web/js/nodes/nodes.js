// Puts button, state line and text on nodes and keeps them up to date.
import { on } from "../lib/store.js";
import { addBadge } from "./badge.js";
import { addBuildButton } from "./build_button.js";
import { foldAdvanced } from "./fold.js";
import { buildingNodes, canBuild, idsOf, isOurs } from "./graph.js";
import { onSizes, wrongSizes } from "./sizes.js";
import { addSkipStrip } from "./skip_strip.js";
import { addSlider } from "./slider.js";
import { addStateLine } from "./state_line.js";
import { addText, showsText } from "./text.js";
import { failure, viewOf } from "./view.js";

const WIDTH = 320; // of a new node: lines are long, and ComfyUI makes nodes as narrow as their own widgets

const widgets = new WeakMap(); // node -> {button, line}

export function dressNode(node) {
  if (!isOurs(node)) return;
  foldAdvanced(node);
  if (canBuild(node)) {
    const button = addBuildButton(node);
    widgets.set(node, { button, line: addStateLine(node) });
    addBadge(node, button);
    onSizes(node, () => setTimeout(() => update(node, idsOf(node))));
    setTimeout(() => update(node, idsOf(node))); // its id comes after its creation
  }
  if (showsText(node)) addText(node);
  addSlider(node);
  addSkipStrip(node);
  if (canBuild(node) || showsText(node)) node.setSize([Math.max(node.size[0], WIDTH), node.size[1]]);
}

export function updateAll() {
  const ids = new Map();
  for (const [node, id] of buildingNodes()) ids.set(node, [...(ids.get(node) ?? []), id]);
  for (const [node, all] of ids) update(node, all);
}

function update(node, ids) {
  const mine = widgets.get(node);
  if (!mine || !ids.length) return;
  const view = viewOf(ids, node);
  const wrong = ["build", null].includes(view.button.action) ? wrongSizes(node) : null;
  mine.line.show(wrong ? failure(wrong) : view);
  mine.button.show(view.button);
}

/** Nodes follow the server's events from here on. */
export function startNodes() {
  on("nodes", updateAll);
  on("builds", updateAll);
  updateAll();
}
