// What a node has to say of its engines, with a bar while one is built: a line, or as many as a reason takes.
import { h, icon, progressBar, say } from "../lib/dom.js";
import { t } from "../lib/words.js";

const MARGIN = 6;
const PADDING = 8; // above and below the text
const LEAST = 42;
const MOST = 200; // what is longer scrolls

/** Adds the line to a node; the widget has `show(view)`. The node grows by what a long reason takes, and back. */
export function addStateLine(node) {
  let [height, before] = [LEAST, 0];
  const fit = () => {
    const wanted = Math.min(MOST, Math.max(LEAST, line.height() + 2 * MARGIN));
    if (!line.element.isConnected || Math.abs(wanted - height) < 2) return;
    if (height === LEAST) before = node.size[1];
    height = wanted;
    node.setSize([node.size[0], height === LEAST ? before : Math.max(before, node.computeSize()[1])]);
    node.graph?.setDirtyCanvas(true, true);
  };
  const line = makeLine();
  new ResizeObserver(fit).observe(line.content);
  // Its type is no built-in one's, which Nodes 2.0 would put in its place.
  const widget = node.addDOMWidget("slipstream_state", "slipstream_state_line", line.element, {
    serialize: false, // not part of the prompt
    hideOnZoom: false,
    margin: MARGIN,
    getMinHeight: () => height,
    getMaxHeight: () => height,
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
  const bar = progressBar(t("build_progress"));
  const row = h("div", { class: "slipstream-state-row" }, symbol, text);
  const content = h("div", { class: "slipstream-state-content" }, row, bar.element);
  const element = h("div", { class: "slipstream-state" }, content);
  const show = (view) => {
    element.dataset.kind = view.kind;
    element.title = [view.text, view.tip].filter(Boolean).join("\n");
    symbol.className = `pi pi-${view.icon}`;
    say(text, view.text);
    bar.element.hidden = view.fraction === undefined;
    bar.set(view.fraction);
  };
  return { element, content, show, height: () => content.offsetHeight + PADDING };
}
