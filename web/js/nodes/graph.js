// Which nodes are ours, and by which ids the server knows them.
import { app } from "../lib/comfy.js";

export const BUILDING = [
  "SlipstreamAccelerateModel",
  "SlipstreamAccelerateControlNet",
  "SlipstreamAccelerateVAE",
  "SlipstreamAccelerateTextEncoder",
  "SlipstreamBuildEngine",
];
const KINDS = {
  SlipstreamAccelerateControlNet: "controlnet",
  SlipstreamAccelerateVAE: "vae",
  SlipstreamAccelerateTextEncoder: "text_encoder",
};
const NO_ID = "00000000-0000-0000-0000-000000000000"; // of a graph that was never saved nor queued

export function isOurs(node) {
  return Boolean(node.comfyClass?.startsWith("Slipstream"));
}

export function canBuild(node) {
  return BUILDING.includes(node.comfyClass);
}

/** Kind of the model that a node builds engines for. */
export function kindOf(node) {
  return KINDS[node.comfyClass] ?? "unet";
}

/** The whole workflow, also while a subgraph of it is open. */
export function root() {
  return app.rootGraph ?? app.graph;
}

export function nodesOf(graph) {
  return graph?.nodes ?? graph?._nodes ?? [];
}

/** Whether a node takes part: neither muted nor bypassed. */
export function enabled(node) {
  return (node.mode ?? 0) === 0;
}

/** Id of the open workflow, or null. */
export function workflowId() {
  const id = root()?.id;
  return id && id !== NO_ID ? String(id) : null;
}

/** Ids in a prompt: "4", within a subgraph "7:4"; several where a subgraph is used several times. */
export function idsOf(node) {
  return [...everyNode()].filter(([each]) => each === node).map(([, id]) => id);
}

/** Our nodes that build, with their ids. */
export function buildingNodes() {
  return [...everyNode()].filter(([node]) => canBuild(node));
}

/** Our nodes that run a model on engines and take part. */
export function accelerateNodes() {
  const nodes = buildingNodes().map(([node]) => node);
  return [...new Set(nodes)].filter((node) => node.comfyClass !== "SlipstreamBuildEngine" && enabled(node));
}

function* everyNode(graph = root(), prefix = "") {
  for (const node of nodesOf(graph)) {
    const id = `${prefix}${node.id}`;
    yield [node, id];
    if (node.subgraph) yield* everyNode(node.subgraph, `${id}:`);
  }
}

/** Where a link begins, looked for in subgraphs and around them: `{node}`, or `{node, input}` for an input of a subgraph's
 * node that nothing is joined to. Several where a subgraph is used several times. */
export function* originsOf(graph, id) {
  const link = linkAt(graph, id);
  if (!link) return;
  if (graph.inputNode && link.origin_id === graph.inputNode.id) {
    for (const outer of usesOf(graph)) {
      const input = outer.inputs?.[link.origin_slot];
      if (input?.link != null) yield* originsOf(outer.graph, input.link);
      else if (input) yield { node: outer, input };
    }
    return;
  }
  const node = graph.getNodeById(link.origin_id);
  if (!node?.subgraph) {
    if (node) yield { node };
    return;
  }
  for (const inner of node.subgraph.outputs?.[link.origin_slot]?.linkIds ?? []) yield* originsOf(node.subgraph, inner);
}

/** The nodes where a link ends, looked for in subgraphs and around them. */
export function* targetsOf(graph, id) {
  const link = linkAt(graph, id);
  if (!link) return;
  if (graph.outputNode && link.target_id === graph.outputNode.id) {
    for (const outer of usesOf(graph)) {
      for (const next of outer.outputs?.[link.target_slot]?.links ?? []) yield* targetsOf(outer.graph, next);
    }
    return;
  }
  const node = graph.getNodeById(link.target_id);
  if (!node?.subgraph) {
    if (node) yield node;
    return;
  }
  for (const inner of node.subgraph.inputs?.[link.target_slot]?.linkIds ?? []) yield* targetsOf(node.subgraph, inner);
}

function linkAt(graph, id) {
  return id == null ? null : (graph?.getLink?.(id) ?? graph?.links?.[id] ?? null);
}

/** The nodes that stand for a subgraph. */
function usesOf(graph) {
  return new Set([...everyNode()].map(([node]) => node).filter((node) => node.subgraph === graph));
}

/** The node that a command means: a selected one, else the first. */
export function chosenNode() {
  const selected = Object.values(app.canvas?.selected_nodes ?? {}).find(canBuild);
  return selected ?? buildingNodes()[0]?.[0] ?? null;
}
