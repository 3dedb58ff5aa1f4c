// The button that builds a node's engines; while that goes on, it cancels.
import { app } from "../lib/comfy.js";
import { t } from "../lib/words.js";
import { build, cancel } from "./builder.js";

const DOUBLE_CLICK_MS = 500;

export function addBuildButton(node) {
  let shown = { label: t("build_engine"), tip: t("build_engine_tip"), waits: false, cancels: false };
  let last = 0;
  const press = () => {
    const again = Date.now() - last < DOUBLE_CLICK_MS;
    last = Date.now();
    if (again || shown.waits) return undefined;
    return shown.cancels ? cancel(node) : build(node);
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
