// The sampling runs that a node of step skipping is part of, as far as the graph tells them before they are run.
import { enabled, originsOf, targetsOf } from "./graph.js";

const OWN = ["preset", "share", "computed_steps", "power", "step_list"];
const FILE = /\.(safetensors|sft|ckpt|pt|pth|bin|gguf)$/i;
const BESIDE = ["SAMPLER", "SIGMAS", "GUIDER"]; // types of what a sampler node is told by other nodes
const MASKS = ["SetLatentNoiseMask", "VAEEncodeForInpaint", "InpaintModelConditioning"];
const NEEDED = ["steps", "sampler", "cfg"];
const UNGUIDED = "BasicGuider"; // of ComfyUI's own, the one without a CFG
const MOST = 30; // nodes to look at
const UNKNOWN = Symbol("a value that another node computes");

/**
 * The question that the server is asked, `query`: what the node chooses, and what the first sampler does of which that
 * is known; without a sampler where it is known of none. `samplers`: how many there are, unless all do the same.
 */
export function runOf(node) {
  const own = ownOf(node);
  const runs = samplersOf(node).map((sampler) => runOfSampler(node, sampler));
  const isOne = new Set(runs.map((run) => JSON.stringify(run))).size < 2;
  return { query: { ...own, ...(own && runs.find(Boolean)) }, samplers: isOne ? 1 : runs.length };
}

/** What the node chooses; null where another node chooses it. */
function ownOf(node) {
  const own = settled(Object.fromEntries(OWN.map((name) => [name, valueOf(node, name)])));
  if (own && own.preset !== "custom") return { preset: own.preset };
  return own;
}

/** What a sampler does; null where the graph does not tell enough of it. */
function runOfSampler(node, sampler) {
  const told = [sampler, ...nodesBefore([sampler], BESIDE)];
  if (told.some((each) => each !== node && changesSigmas(each))) return null;
  const found = (name) => told.map((each) => valueOf(each, name)).find((value) => value !== undefined);
  const long = told.find((each) => valueOf(each, "steps") !== undefined) ?? sampler;
  const run = settled({
    steps: valueOf(long, "steps"),
    denoise: valueOf(long, "denoise"),
    start_at_step: valueOf(long, "start_at_step"),
    end_at_step: valueOf(long, "end_at_step"),
    sampler: found("sampler_name") ?? methodOf(told),
    scheduler: found("scheduler"),
    cfg: found("cfg") ?? (told.some((each) => each.comfyClass === UNGUIDED) ? 1 : undefined),
    files: filesOf([node, ...told]).join("|") || undefined,
    mask: isMasked(sampler) || undefined,
  });
  return run && NEEDED.every((name) => name in run) ? run : null;
}

/** Values by name without those that are not there; null where one is not known. */
function settled(values) {
  const there = Object.entries(values).filter(([, value]) => value !== undefined);
  return there.some(([, value]) => value === UNKNOWN) ? null : Object.fromEntries(there);
}

/** Whether a node makes another schedule of the one that it is given. */
function changesSigmas(node) {
  return [node.inputs, node.outputs].every((slots) => slots?.some((slot) => slot.type === "SIGMAS"));
}

/** The value of a node's input: its widget's, or where it is joined to another node that one's, if it is a primitive. */
function valueOf(node, name) {
  const input = node.inputs?.find((each) => (each.widget?.name ?? each.name) === name);
  if (input?.link == null) return widgetOf(node, name)?.value;
  const values = [...originsOf(node.graph, input.link)].map(valueAt);
  return values.length && values.every((value) => value === values[0]) ? values[0] : UNKNOWN;
}

/** `input`: of a subgraph's node, which has a widget for it where nothing is joined to it. */
function valueAt({ node, input }) {
  if (input) return (widgetOf(node, input.widget?.name ?? input.name) ?? { value: UNKNOWN }).value;
  if (node.type === "PrimitiveNode") return node.widgets?.[0]?.value ?? UNKNOWN; // the page's own
  return (/^Primitive/.test(node.comfyClass) ? valueOf(node, "value") : UNKNOWN) ?? UNKNOWN;
}

function widgetOf(node, name) {
  return node.widgets?.find((widget) => widget.name === name);
}

/** The method of a node for one sampler alone, by its class: "dpmpp_2m_sde" of SamplerDPMPP_2M_SDE. */
function methodOf(nodes) {
  const classes = nodes.filter((node) => node.outputs?.some((output) => output.type === "SAMPLER"));
  const name = classes.map((node) => /^Sampler(\w+)$/.exec(node.comfyClass)?.[1]).find(Boolean);
  return name?.replace(/([a-z])(?=[A-Z])|([A-Z])(?=[A-Z][a-z])/g, "$&_").toLowerCase();
}

/** Names of the model files that lie before nodes: some tell of models for few steps. */
function filesOf(nodes) {
  const values = [...nodes, ...nodesBefore(nodes, ["MODEL"])]
    .flatMap((each) => each.widgets ?? [])
    .map((widget) => widget.value);
  return [...new Set(values.filter((value) => typeof value === "string" && FILE.test(value)))];
}

/** Whether the latent that a sampler begins with has a mask for inpainting. */
function isMasked(sampler) {
  const latents = nodesBefore([sampler], ["LATENT"]);
  return latents.some((node) => MASKS.includes(node.comfyClass) && (valueOf(node, "noise_mask") ?? true));
}

/** The nodes that nodes get something of these types from, and so on, into subgraphs and out of them. */
function nodesBefore(nodes, types) {
  const seen = [...nodes];
  for (const each of seen) {
    for (const input of each.inputs ?? []) {
      if (!types.includes(input.type)) continue;
      for (const { node: before } of originsOf(each.graph, input.link)) {
        if (!seen.includes(before) && seen.length < nodes.length + MOST) seen.push(before);
      }
    }
  }
  return seen.slice(nodes.length);
}

/** The samplers that a node leads to, the nearest first; what lies behind them is another run. */
function samplersOf(node) {
  if (samples(node)) return [node];
  const found = [];
  const open = [node];
  while (open.length && found.length < MOST) {
    const each = open.shift();
    for (const link of (each.outputs ?? []).flatMap((output) => output.links ?? [])) {
      for (const next of targetsOf(each.graph, link)) {
        if (found.includes(next)) continue;
        found.push(next);
        if (!samples(next)) open.push(next);
      }
    }
  }
  return found.filter((each) => samples(each) && enabled(each));
}

function samples(node) {
  const isWhole = ["steps", "sampler_name"].every((name) => valueOf(node, name) !== undefined);
  return isWhole || Boolean(node.outputs?.some((output) => output.type === "LATENT"));
}
