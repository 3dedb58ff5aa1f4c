// One short line on a node, with a bar while an engine is built.
import { h, icon, progressBar, say } from "../lib/dom.js";
import { t } from "../lib/words.js";

const HEIGHT = 40;

/** Adds the line to a node; the widget has `show(view)`. */
export function addStateLine(node) {
  const line = makeLine();
  // Its type is no built-in one's, which Nodes 2.0 would put in its place.
  const widget = node.addDOMWidget("slipstream_state", "slipstream_state_line", line.element, {
    serialize: false, // not part of the prompt
    hideOnZoom: false,
    margin: 6,
    getMinHeight: () => HEIGHT,
    getMaxHeight: () => HEIGHT,
    getValue: () => "",
    setValue: () => {},
  });
  widget.serialize = false; // nor of the workflow
  widget.show = line.show;
  return widget;
}

function makeLine() {
  const symbol = icon("circle");
  const text = h("span", { class: "slipstream-state-text", role: "status" });
  const figures = h("span", { class: "slipstream-state-figures" });
  const bar = progressBar(t("build_progress"));
  const row = h("div", { class: "slipstream-state-row" }, symbol, text, figures);
  const element = h("div", { class: "slipstream-state" }, row, bar.element);
  const show = (view) => {
    element.dataset.kind = view.kind;
    element.title = [view.text, view.tip].filter(Boolean).join("\n");
    symbol.className = `pi pi-${view.icon}`;
    say(text, view.text);
    say(figures, view.figures ?? "");
    bar.element.hidden = view.fraction === undefined;
    bar.set(view.fraction);
  };
  return { element, show };
}
