// The sampling run that a node of step skipping is part of, as far as the graph tells it before it is run.

const OWN = ["preset", "share", "computed_steps", "power", "step_list"];
const FILE = /\.(safetensors|sft|ckpt|pt|pth|bin|gguf)$/i;
const BESIDE = ["SAMPLER", "SIGMAS", "GUIDER"]; // types of what a sampler node is told by other nodes
const MASKS = ["SetLatentNoiseMask", "VAEEncodeForInpaint", "InpaintModelConditioning"];
const MOST = 30; // nodes to look at

/** What the node chooses, and what the sampler behind it does: the question that the server is asked. */
export function runOf(node) {
  const own = Object.fromEntries(
    OWN.map((name) => [name, valueOf(node, name)]).filter(([, value]) => value !== undefined),
  );
  if (own.preset !== "custom") for (const name of OWN.slice(1)) delete own[name];
  const behind = valueOf(node, "steps") === undefined ? nodesBehind(node) : [node];
  const told = [...behind, ...nodesBefore([node, ...behind], BESIDE)];
  const found = (name) => told.map((each) => valueOf(each, name)).find((value) => value !== undefined);
  const run = {
    ...lengthOf(told.find((each) => valueOf(each, "steps") !== undefined)),
    sampler: found("sampler_name") ?? methodOf(told),
    scheduler: found("scheduler"),
    cfg: found("cfg"),
    files: filesOf([node, ...told]).join("|") || undefined,
    mask: isMasked(behind) || undefined,
  };
  return { ...own, ...Object.fromEntries(Object.entries(run).filter(([, value]) => value !== undefined)) };
}

function valueOf(node, name) {
  return node.widgets?.find((widget) => widget.name === name)?.value;
}

/** The method of a node for one sampler alone, by its class: "dpmpp_2m_sde" of SamplerDPMPP_2M_SDE. */
function methodOf(nodes) {
  const classes = nodes.filter((node) => node.outputs?.some((output) => output.type === "SAMPLER"));
  const name = classes.map((node) => /^Sampler(\w+)$/.exec(node.comfyClass)?.[1]).find(Boolean);
  return name?.replace(/([a-z])(?=[A-Z])|([A-Z])(?=[A-Z][a-z])/g, "$&_").toLowerCase();
}

/** How many steps are sampled, and how many as small a whole run would have: a part of one has fewer. */
function lengthOf(node) {
  if (!node) return {};
  const steps = valueOf(node, "steps");
  const [first, last] = [valueOf(node, "start_at_step") ?? 0, valueOf(node, "end_at_step") ?? steps];
  const part = Math.min(last, steps) - first;
  const denoise = valueOf(node, "denoise") ?? 1;
  return { steps: part > 0 ? part : steps, whole_steps: denoise > 0 && denoise < 1 ? Math.floor(steps / denoise) : steps };
}

/** Names of the model files that lie before nodes: some tell of models for few steps. */
function filesOf(nodes) {
  const values = [...nodes, ...nodesBefore(nodes, ["MODEL"])]
    .flatMap((each) => each.widgets ?? [])
    .map((widget) => widget.value);
  return [...new Set(values.filter((value) => typeof value === "string" && FILE.test(value)))];
}

/** Whether the latent that the nearest sampler begins with has a mask for inpainting. */
function isMasked(behind) {
  const sampler = behind.find((node) => node.inputs?.some((input) => input.type === "LATENT" && input.link != null));
  const latents = sampler ? nodesBefore([sampler], ["LATENT"]) : [];
  return latents.some((node) => MASKS.includes(node.comfyClass) && (valueOf(node, "noise_mask") ?? true));
}

/** The nodes that nodes get something of these types from, and so on. */
function nodesBefore(nodes, types) {
  const seen = [...nodes];
  for (const each of seen) {
    for (const input of each.inputs ?? []) {
      if (!types.includes(input.type)) continue;
      const before = nodeAt(each.graph, input.link, "origin_id");
      if (before && !seen.includes(before) && seen.length < nodes.length + MOST) seen.push(before);
    }
  }
  return seen.slice(nodes.length);
}

/** The nodes that a node leads to, the nearest first. */
function nodesBehind(node) {
  const found = [];
  const open = [node];
  while (open.length && found.length < MOST) {
    const each = open.shift();
    for (const link of (each.outputs ?? []).flatMap((output) => output.links ?? [])) {
      const next = nodeAt(each.graph, link, "target_id");
      if (!next || found.includes(next)) continue;
      found.push(next);
      open.push(next);
    }
  }
  return found;
}

/** The node at one end of a link. */
function nodeAt(graph, id, end) {
  const link = id == null ? null : (graph?.getLink?.(id) ?? graph?.links?.[id]);
  return link ? graph.getNodeById(link[end]) : null;
}
