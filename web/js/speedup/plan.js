// Where Accelerate nodes belong in the open workflow, and what they will not reach.
import { app } from "../lib/comfy.js";
import { enabled, nodesOf, root } from "../nodes/graph.js";

/** For each type of link: the node that accelerates it, and the outputs by which a node is known to compute with it. */
const KINDS = [
  { type: "MODEL", node: "SlipstreamAccelerateModel", role: "unet", computes: ["LATENT", "GUIDER"] },
  { type: "CONTROL_NET", node: "SlipstreamAccelerateControlNet", role: "controlnet", computes: ["CONDITIONING"] },
  { type: "VAE", node: "SlipstreamAccelerateVAE", role: "vae", computes: ["IMAGE", "LATENT"] },
];

/** Nodes that change a model so that engines cannot stand for all of it, with what of it stays on the model itself; as
 * measured in docs/other-packs.md. */
const EAGER = [
  [/^TorchCompileModel/, "eager_compiled"],
  [/^DeepCache$/, "eager_itself"],
  [/^(IPAdapter|ApplyIPAdapter|ApplyInstantID|ApplyPulid|PulidModel|LLLiteLoader|Attention ?couple)/i, "eager_attention"],
  [/^(\w*HyperTile|TomePatchModel|NAGuidance|NormalizedAttention|WanVideoNAG|KSamplerWithNAG|PLADIS)/, "eager_attention"],
  [/^(FreeU|WAS_FreeU|BlehDeepShrink|BlehBlockCFG|SeamlessTile|TGate|ADE_AnimateDiffLoader)/, "eager_blocks"],
  [/^(ApplyFBCache|TeaCache|ApplyTeaCache|MagCache|WanChunkFeedForward|DitForwardOverrider)/, "eager_blocks"],
  [/^(PatchModelAddDownscale|PerturbedAttention|SmoothedEnergyGuidance|SelfAttentionGuidance)/, "eager_part"],
  [/^(TokenPerturbationGuidance|SkipLayerGuidance)/, "eager_part"],
];

/** What to put where: `{kind, graph, origin, slot, targets: [{node, slot}]}` for each output that is not accelerated. */
export function planOf(graph = root()) {
  const here = KINDS.flatMap((kind) => placesOf(graph, kind));
  return here.concat(
    ...nodesOf(graph)
      .filter((node) => node.subgraph && enabled(node))
      .map((node) => planOf(node.subgraph)),
  );
}

/** The nodes whose work stays on the user's model, with the reason's name: `{node, reason}`. */
export function staysEager(graph = root()) {
  const reasonOf = (node) => EAGER.find(([pattern]) => pattern.test(node.comfyClass ?? ""))?.[1];
  const found = (node) =>
    reasonOf(node) ? [{ node, reason: reasonOf(node) }] : node.subgraph ? staysEager(node.subgraph) : [];
  return nodesOf(graph).filter(enabled).flatMap(found);
}

function placesOf(graph, kind) {
  const places = new Map();
  for (const node of nodesOf(graph).filter(enabled)) {
    for (const [slot, input] of (node.inputs ?? []).entries()) {
      const link = linkOf(graph, input);
      const origin = link && graph.getNodeById(link.origin_id);
      if (!origin || !ends(node, input, kind) || isAccelerated(graph, origin, kind)) continue;
      const key = `${origin.id}:${link.origin_slot}`;
      const place = places.get(key) ?? { kind, graph, origin, slot: link.origin_slot, targets: [] };
      places.set(key, place);
      place.targets.push({ node, slot });
    }
  }
  return [...places.values()].filter(({ targets }) => targets.some(({ node }) => computes(node, kind)));
}

/** Whether a link of this kind leads no further than to this node. */
function ends(node, input, { type, node: accelerates }) {
  const hands = node.outputs?.some((output) => output.type === type);
  return input.type === type && !hands && !holds(node, accelerates);
}

function computes(node, kind) {
  return node.outputs?.some((output) => kind.computes.includes(output.type)) ?? false;
}

/** Whether a subgraph accelerates by itself what it is given. */
function holds(node, accelerates) {
  return (
    Boolean(node.subgraph) &&
    nodesOf(node.subgraph).some((inner) => inner.comfyClass === accelerates || holds(inner, accelerates))
  );
}

function isAccelerated(graph, node, kind) {
  if (node.comfyClass === kind.node || holds(node, kind.node)) return true;
  const before = (node.inputs ?? []).filter((input) => input.type === kind.type || input.type === "*");
  const origins = before.map((input) => graph.getNodeById(linkOf(graph, input)?.origin_id));
  return origins.some((origin) => origin && isAccelerated(graph, origin, kind));
}

function linkOf(graph, input) {
  if (input.link === null || input.link === undefined) return null;
  return graph.getLink?.(input.link) ?? graph.links[input.link] ?? null;
}

/** A node's name, as it is read on the canvas. */
export function titleOf(node) {
  return node.title || node.type;
}

/** Brings a node into view, and selects it. */
export function lookAt(node) {
  if (app.canvas.graph !== node.graph) app.canvas.setGraph(node.graph);
  app.canvas.selectNode?.(node);
  app.canvas.centerOnNode(node);
}
