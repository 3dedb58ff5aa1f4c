// Step Skip's strip of dots: which steps of the sampler behind the node are computed, and what that saves.
import { api, app } from "../lib/comfy.js";
import { h, say } from "../lib/dom.js";
import { percent } from "../lib/format.js";
import { translated } from "../lib/said.js";
import { server } from "../lib/server.js";
import { t } from "../lib/words.js";
import { idsOf, workflowId } from "./graph.js";
import { runOf } from "./skip_run.js";

const NODES = ["SlipstreamStepSkip", "SlipstreamStepSkipSampler", "SlipstreamKSamplerStepSkip", "SlipstreamSkipSigmas"];
const HEIGHT = 58;
const EVERY_MS = 1000; // what the sampler behind it is set to is told by nobody
const AGAIN_MS = 5000; // after a question that was not answered
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
  let [asked, known, ended, again] = ["", null, null, 0];

  async function look() {
    if (!node.graph || !strip.element.isConnected) return;
    const { query, samplers } = runOf(node);
    const now = JSON.stringify([query, samplers]);
    if (now === asked && Date.now() < again) return;
    [asked, again] = [now, Infinity];
    try {
      const answer = await server.foreseeSkips(query);
      if (now !== asked) return; // a later question was answered meanwhile, or is about to be
      [known, ended] = [{ ...answer, samplers }, null];
      relabel(list, known);
      strip.show(known, ended);
    } catch (error) {
      if (now !== asked) return;
      again = Date.now() + AGAIN_MS;
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

/** The list says what each preset saves with this sampler, the closest first. Its values stay those of saved workflows. */
function relabel(list, { steps, presets, offered }) {
  if (!list?.options) return;
  const values = offered.includes(list.value) || !list.value ? offered : [...offered, list.value];
  const getOptionLabel = (name) => {
    const preset = presets[name];
    if (!preset || !offered.includes(name)) return name ?? "";
    if (preset.reason) return t("saves_nothing", { name });
    return t("saves", { part: percent(1 - preset.computed / steps), name });
  };
  list.options = { ...list.options, values, getOptionLabel };
  if (list._state?.options) list._state.options = list.options; // Nodes 2.0 reads them there, and hears of others alone
  app.canvas?.setDirty(true, false);
}

function makeStrip() {
  const dots = h("div", { class: "slipstream-dots", role: "img" });
  const words = h("div", { class: "slipstream-state-text" });
  const element = h("div", { class: "slipstream-state slipstream-strip" }, dots, words);

  function show({ steps, computed, reason, remark, picture_db: decibels, samplers }, ended) {
    const are = new Set(computed);
    const shown = computed && steps <= MOST_DOTS ? [...Array(steps).keys()] : [];
    dots.replaceChildren(...shown.map((step) => h("span", { class: are.has(step) ? "computed" : "skipped" })));
    const saves = computed ? t("computes", { n: are.size, steps, part: percent(1 - are.size / steps) }) : t("depends");
    const does = reason ? t("computes_all", { why: translated(reason) }) : saves;
    const which = computed && samplers > 1 ? t("one_of", { n: samplers }) : "";
    const said = [does, translated(remark), which].filter(Boolean).join(" · ");
    const close = decibels === null ? "" : t("as_close", { n: Math.round(decibels) });
    const last = ended
      ? ended.reason
        ? t("computed_all", { why: translated(ended.reason) })
        : t("computed", { n: ended.computed, steps: ended.steps })
      : "";
    element.dataset.kind = reason || ended?.reason ? "eager" : computed || ended ? "ready" : "idle";
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
