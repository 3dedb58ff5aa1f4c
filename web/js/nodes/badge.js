// How many times as fast a node's engine makes pictures, above the node.
import { times } from "../lib/format.js";
import { stateOf } from "../lib/store.js";
import { idsOf, workflowId } from "./graph.js";

const COLOURS = { fgColor: "#fff", bgColor: "#15803d" };

/** Adds the badge; it is there while the times are known and the engine is in use. `button`: the node's own. */
export function addBadge(node, button) {
  if (typeof LGraphBadge === "undefined") return;
  const badge = new LGraphBadge({ text: "", ...COLOURS });
  // Nodes 2.0 asks again when what is read here changes: labels are told of, and this one has the times in it.
  node.badges?.push(() => {
    badge.text = button.label && gainOf(node);
    return badge;
  });
}

function gainOf(node) {
  const state = stateOf(idsOf(node), workflowId());
  const isUsed = state?.kind === "ready" && state.engine_ms;
  return isUsed ? times(state.eager_ms / state.engine_ms) : "";
}
