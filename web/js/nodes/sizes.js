// Whether a list of picture sizes can be read, said while it is written.
import { t } from "../lib/words.js";

const SIZE = /^(\d{1,5})[x×*](\d{1,5})$/i;
const EVERY = ["", "auto", "automatic"];

/** What is wrong with a node's `resolutions`, in words; null where nothing is, or another node gives them. */
export function wrongSizes(node) {
  const widget = widgetOf(node);
  const isLinked = node.inputs?.some((input) => input.name === "resolutions" && input.link != null);
  return widget && !isLinked ? wrongIn(String(widget.value ?? "")) : null;
}

function widgetOf(node) {
  return node.widgets?.find((each) => each.name === "resolutions");
}

/** What is wrong in a list of sizes, or null. */
export function wrongIn(text) {
  if (EVERY.includes(text.trim().toLowerCase())) return null;
  const parts = text.replace(/\s*([x×*])\s*/gi, "$1").split(/[,;\s]+/).filter(Boolean);
  const wrong = parts.find((part) => !isSize(part));
  return wrong === undefined ? null : t("wrong_size", { size: wrong });
}

function isSize(part) {
  const [, ...sides] = part.match(SIZE) ?? [];
  return sides.length === 2 && sides.every((side) => Number(side) > 0 && Number(side) % 8 === 0);
}

/** Calls `changed` whenever the node's `resolutions` are another text. */
export function onSizes(node, changed) {
  const widget = widgetOf(node);
  if (!widget) return;
  const before = widget.callback;
  widget.callback = function (...values) {
    const result = before?.apply(this, values);
    changed();
    return result;
  };
}
