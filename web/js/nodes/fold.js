// Inputs that few people need are folded away on the classic canvas. Nodes 2.0 does that by itself.
import { t } from "../lib/words.js";

/** Folds what the server calls advanced, and adds a button that unfolds it. What another node gives stays in sight. */
export function foldAdvanced(node) {
  const advanced = node.widgets?.filter((widget) => widget.options?.advanced) ?? [];
  if (!advanced.length || !node.getLayoutWidgets) return; // older pages leave a hole where a widget is hidden
  const isLinked = (widget) => node.inputs?.some((input) => input.widget?.name === widget.name && input.link != null);
  for (const widget of advanced) {
    const hidden = () => !LiteGraph.vueNodesMode && !node.showAdvanced && !isLinked(widget);
    Object.defineProperty(widget, "hidden", { get: hidden, set: () => {}, configurable: true });
  }
  const toggle = node.addWidget("button", "slipstream_more", null, () => unfold(node), {
    canvasOnly: true,
    serialize: false,
  });
  toggle.serialize = false; // not part of the workflow
  Object.defineProperty(toggle, "label", { get: () => t(node.showAdvanced ? "less" : "more"), set: () => {} });
}

function unfold(node) {
  const before = node.computeSize()[1];
  node.showAdvanced = !node.showAdvanced;
  node.setSize([node.size[0], node.size[1] + node.computeSize()[1] - before]);
  node.graph?.setDirtyCanvas(true, true);
}
