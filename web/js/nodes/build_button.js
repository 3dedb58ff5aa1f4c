// The button of a node: it says how the node's engines are, and does what can be done about it.
import { app } from "../lib/comfy.js";
import { t } from "../lib/words.js";
import { build, cancel } from "./builder.js";
import { mends } from "./mends.js";

const DOUBLE_CLICK_MS = 500;

export function addBuildButton(node) {
  const actions = { build, cancel, ...mends };
  let shown = { label: t("build_engine"), tip: t("build_engine_tip"), action: "build" };
  let last = -Infinity;
  const press = () => {
    const now = window.event?.timeStamp ?? performance.now(); // of the click: a busy page hears of it late
    const again = now - last < DOUBLE_CLICK_MS;
    last = now;
    return again ? undefined : actions[shown.action]?.(node);
  };
  const widget = node.addWidget("button", "slipstream_build", null, press, { serialize: false });
  widget.serialize = false; // not part of the workflow
  widget.show = (button) => {
    const changed = button.label !== widget.label;
    shown = button;
    widget.label = button.label;
    widget.tooltip = button.tip;
    if (changed) app.canvas?.setDirty(true, false);
  };
  widget.show(shown);
  return widget;
}
