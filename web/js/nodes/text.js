// Some nodes show their text on themselves.
import { h } from "../lib/dom.js";

const NODES_WITH_TEXT = [
  "SlipstreamEngineInfo",
  "SlipstreamBuildEngine",
  "SlipstreamCompareImages",
  "SlipstreamSkipCalibrate",
];
const HEIGHT = 60;

export function showsText(node) {
  return NODES_WITH_TEXT.includes(node.comfyClass);
}

/** Adds the text; it is output, not input: neither saved with the workflow nor sent with the prompt. */
export function addText(node) {
  const area = h("textarea", { class: "comfy-multiline-input slipstream-text", readOnly: true, rows: 3 });
  const widget = node.addDOMWidget("slipstream_text", "slipstream_text_area", area, {
    serialize: false,
    getMinHeight: () => HEIGHT,
    getValue: () => area.value,
    setValue: (value) => (area.value = value ?? ""),
  });
  widget.serialize = false;
  const executed = node.onExecuted;
  node.onExecuted = function (message) {
    executed?.apply(this, arguments);
    widget.value = (message?.text ?? []).join("\n");
  };
}
