// Some nodes show their text on themselves.
import { app } from "../../scripts/app.js";
import { ComfyWidgets } from "../../scripts/widgets.js";

const NODES_WITH_TEXT = [
  "SlipstreamEngineInfo",
  "SlipstreamBuildEngine",
  "SlipstreamCompareImages",
  "SlipstreamSkipCalibrate",
];

app.registerExtension({
  name: "slipstream.text",
  nodeCreated(node) {
    if (!NODES_WITH_TEXT.includes(node.comfyClass)) return;
    const { widget } = ComfyWidgets.STRING(node, "slipstream_text", ["STRING", { multiline: true }], app);
    // Output, not input: neither saved with the workflow nor sent with the prompt.
    widget.serialize = false;
    widget.options = { ...widget.options, serialize: false };
    const element = widget.element ?? widget.inputEl;
    if (element) element.readOnly = true;
    const executed = node.onExecuted;
    node.onExecuted = function (message) {
      executed?.apply(this, arguments);
      widget.value = (message?.text ?? []).join("\n");
    };
  },
});
