// Step Skip's strip of dots: which steps of the sampler behind the node are computed, and what that saves.
import { api, app } from "../lib/comfy.js";
import { h, say } from "../lib/dom.js";
import { percent } from "../lib/format.js";
import { server } from "../lib/server.js";
import { t } from "../lib/words.js";
import { idsOf, workflowId } from "./graph.js";

const NODES = ["SlipstreamStepSkip", "SlipstreamStepSkipSampler", "SlipstreamKSamplerStepSkip", "SlipstreamSkipSigmas"];
const OWN = ["preset", "share", "computed_steps", "power", "step_list"];
const FILE = /\.(safetensors|sft|ckpt|pt|pth|bin|gguf)$/i;
const HEIGHT = 58;
const EVERY_MS = 1000; // what the sampler behind it is set to is told by nobody
const MOST_DOTS = 60;

export function addSkipStrip(node) {
  if (!NODES.includes(node.comfyClass)) return;
  const strip = makeStrip();
  const widget = node.addDOMWidget("slipstream_steps", "slipstream_steps_strip", strip.element, {
    serialize: false,
    hideOnZoom: false,
    margin: 6,
    getMinHeight: () => HEIGHT,
    getMaxHeight: () => HEIGHT,
    getValue: () => "",
    setValue: () => {},
  });
  widget.serialize = false; // not part of the workflow
  const list = node.widgets.find((each) => each.name === "preset");
  let [asked, known, ended] = ["", null, null];

  async function look() {
    if (!node.graph || !strip.element.isConnected) return;
    const query = queryOf(node);
    const now = JSON.stringify(query);
    if (now === asked) return;
    asked = now;
    try {
      [known, ended] = [await server.foreseeSkips(query), null];
      relabel(list, known);
      strip.show(known, ended);
    } catch (error) {
      strip.fail(error.message);
    }
  }

  const timer = setInterval(look, EVERY_MS);
  const hear = ({ detail }) => {
    if (!idsOf(node).includes(String(detail.node)) || (detail.workflow ?? null) !== workflowId()) return;
    ended = detail;
    if (known) strip.show(known, ended);
  };
  const forget = () => {
    asked = "";
  };
  api.addEventListener("slipstream.skipped", hear);
  api.addEventListener("slipstream.presets", forget);
  const removed = node.onRemoved;
  node.onRemoved = function () {
    clearInterval(timer);
    api.removeEventListener("slipstream.skipped", hear);
    api.removeEventListener("slipstream.presets", forget);
    removed?.apply(this, arguments);
  };
  setTimeout(look);
}

/** What the node chooses, and what the sampler behind it does. */
function queryOf(node) {
  const own = Object.fromEntries(
    OWN.map((name) => [name, valueOf(node, name)]).filter(([, value]) => value !== undefined),
  );
  if (own.preset !== "custom") for (const name of OWN.slice(1)) delete own[name];
  const behind = valueOf(node, "steps") === undefined ? nodesBehind(node) : [node];
  const found = (name) => behind.map((each) => valueOf(each, name)).find((value) => value !== undefined);
  const run = {
    steps: found("steps"),
    sampler: found("sampler_name"),
    scheduler: found("scheduler"),
    cfg: found("cfg"),
    files: filesOf([node, ...behind]).join("|") || undefined,
  };
  return { ...own, ...Object.fromEntries(Object.entries(run).filter(([, value]) => value !== undefined)) };
}

function valueOf(node, name) {
  return node.widgets?.find((widget) => widget.name === name)?.value;
}

/** Names of the model files in nodes and in those that their models come from: some tell of models for few steps. */
function filesOf(nodes) {
  const seen = [...nodes];
  for (const each of seen) {
    for (const input of each.inputs ?? []) {
      if (input.type !== "MODEL" || input.link === null || input.link === undefined) continue;
      const link = each.graph?.getLink?.(input.link) ?? each.graph?.links?.[input.link];
      const before = link && each.graph.getNodeById(link.origin_id);
      if (before && !seen.includes(before)) seen.push(before);
    }
  }
  const values = seen.flatMap((each) => each.widgets ?? []).map((widget) => widget.value);
  return [...new Set(values.filter((value) => typeof value === "string" && FILE.test(value)))];
}

/** The nodes that a node leads to, the nearest first. */
function nodesBehind(node) {
  const found = [];
  const open = [node];
  while (open.length && found.length < 30) {
    const each = open.shift();
    for (const output of each.outputs ?? []) {
      for (const id of output.links ?? []) {
        const link = each.graph?.getLink?.(id) ?? each.graph?.links?.[id];
        const next = link && each.graph.getNodeById(link.target_id);
        if (next && !found.includes(next)) {
          found.push(next);
          open.push(next);
        }
      }
    }
  }
  return found;
}

/** The list says what each preset saves with this sampler, the closest first. Its values stay those of saved workflows. */
function relabel(list, { steps, presets, offered }) {
  if (!list?.options) return;
  list.options.values = offered.includes(list.value) || !list.value ? offered : [...offered, list.value];
  list.options.getOptionLabel = (name) => {
    const preset = presets[name];
    if (!preset || !offered.includes(name)) return name ?? "";
    if (preset.reason) return t("saves_nothing", { name });
    return t("saves", { part: percent(1 - preset.computed / steps), name });
  };
  app.canvas?.setDirty(true, false);
}

function makeStrip() {
  const dots = h("div", { class: "slipstream-dots", role: "img" });
  const words = h("div", { class: "slipstream-state-text" });
  const element = h("div", { class: "slipstream-state slipstream-strip" }, dots, words);

  function show({ steps, computed, reason, remark, picture_db: decibels }, ended) {
    const are = new Set(computed);
    const shown = steps <= MOST_DOTS ? [...Array(steps).keys()] : [];
    dots.replaceChildren(...shown.map((step) => h("span", { class: are.has(step) ? "computed" : "skipped" })));
    const saves = t("computes", { n: are.size, steps, part: percent(1 - are.size / steps) });
    const said = reason ? t("computes_all", { why: reason }) : [saves, remark].filter(Boolean).join(" · ");
    const close = decibels === null ? "" : t("as_close", { n: Math.round(decibels) });
    const last = ended
      ? ended.reason
        ? t("computed_all", { why: ended.reason })
        : t("computed", { n: ended.computed, steps: ended.steps })
      : "";
    element.dataset.kind = reason || ended?.reason ? "eager" : "ready";
    say(words, last || said);
    element.title = [said, close, last].filter(Boolean).join("\n");
    dots.setAttribute("aria-label", said);
  }

  function fail(message) {
    dots.replaceChildren();
    element.dataset.kind = "failed";
    say(words, message);
    element.title = message;
  }

  return { element, show, fail };
}
