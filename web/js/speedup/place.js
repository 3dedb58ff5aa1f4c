// Puts the planned nodes into the workflow, as one change that ComfyUI's undo takes back.
import { app } from "../lib/comfy.js";

const GAP = 80;
const TITLE = 30;
const DRAWN_MS = 120; // a few frames

/** Adds and wires the nodes; returns them. */
export async function place(plan) {
  if (!plan.length) return [];
  app.canvas.emitBeforeChange();
  try {
    const made = plan.map((each) => ({ ...each, node: add(each.graph, each.kind.node) }));
    await drawn(); // from then on their sizes are true
    for (const graph of new Set(plan.map((each) => each.graph)))
      wire(
        graph,
        made.filter((each) => each.graph === graph),
      );
    await drawn();
    return made.map(({ node }) => node);
  } finally {
    app.canvas.emitAfterChange();
    app.canvas.setDirty(true, true);
  }
}

function drawn() {
  return new Promise((resolve) => setTimeout(resolve, DRAWN_MS));
}

/** In a column of their own, for which what stands right of it makes room. */
function wire(graph, made) {
  const targets = made.flatMap((each) => each.targets.map(({ node }) => node));
  const left = Math.min(...targets.map((node) => node.pos[0]));
  const width = Math.max(...made.map(({ node }) => node.size[0]));
  let top = Math.min(...targets.map((node) => node.pos[1]));
  makeRoom(
    graph,
    left,
    width + GAP,
    made.map(({ node }) => node),
  );
  for (const { node, origin, slot, targets: behind } of made) {
    node.pos = [left, top];
    top += node.size[1] + TITLE + GAP / 2;
    origin.connect(slot, node, 0);
    for (const target of behind) node.connect(0, target.node, target.slot);
  }
}

function add(graph, type) {
  const node = LiteGraph.createNode(type);
  graph.add(node);
  return node;
}

function makeRoom(graph, left, width, except) {
  for (const node of graph._nodes ?? graph.nodes) {
    if (node.pos[0] >= left && !except.includes(node)) node.pos = [node.pos[0] + width, node.pos[1]];
  }
  for (const group of graph._groups ?? graph.groups ?? []) {
    const [x, , wide] = group._bounding ?? [...group.pos, ...group.size];
    if (x >= left - GAP / 2) group.pos = [group.pos[0] + width, group.pos[1]];
    else if (x + wide > left) group.size = [group.size[0] + width, group.size[1]];
  }
}
