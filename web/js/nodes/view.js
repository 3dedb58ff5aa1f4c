// What a node shows of its engines, made of the click's run, the server's builds and the node's last state.
import { capitalised, percent, roughly, speed } from "../lib/format.js";
import { said } from "../lib/said.js";
import { buildOf, buildsOf, leftOf, stateOf, store } from "../lib/store.js";
import { isEnglish, t } from "../lib/words.js";
import { isGoing, mayCancel, runOf } from "./builder.js";
import { kindOf, workflowId } from "./graph.js";

const ICONS = {
  ready: "bolt",
  building: "spinner pi-spin",
  queued: "clock",
  eager: "info-circle",
  slower: "info-circle",
  off: "power-off",
  idle: "circle",
  failed: "times-circle",
  cancelled: "ban",
};

const REASONED = ["failed", "eager", "slower", "off"]; // kinds of which the server says why
const SHOWN_ABOVE = / · [\d.]+ → [\d.]+ ms a \w+(?= · )/; // the button says it

/** `{kind, icon, text, tip, fraction, button}`; without a fraction there is no bar. */
export function viewOf(ids, node) {
  const run = runOf(ids);
  const build = buildOf(ids, workflowId());
  const blocks = build ? null : blocksOf(ids);
  const view = ofRun(run, build, blocks) ?? ofBuild(build) ?? ofState(ids, run);
  return { ...view, icon: ICONS[view.kind] ?? ICONS.idle, button: buttonOf(run, build ?? blocks, view, ids, node) };
}

/** What a line shows of a thing that does not work. */
export function failure(text) {
  return { kind: "failed", icon: ICONS.failed, text, tip: "" };
}

/** How far the engines of a model's blocks are, in the form of a build; null where none is being built. */
function blocksOf(ids) {
  const state = stateOf(ids, workflowId());
  if (!state?.blocks_wanted) return null;
  const { kind, fraction, tip, blocks_built: n, blocks_wanted: all } = state;
  const held = kind === "queued" && buildsOf(ids, workflowId()).every((each) => each.held);
  return { state: kind === "queued" ? "queued" : "running", held, fraction, tip, counts: t("of_blocks", { n, all }) };
}

function ofBlocks({ state, held, fraction, tip, counts }) {
  if (state === "queued") return { kind: "queued", text: joined(t(held ? "held" : "build_queued"), counts), tip };
  return { kind: "building", text: counts, tip, fraction };
}

function ofRun(run, build, blocks) {
  if (!isGoing(run)) return null;
  if (run.phase === "ending") return { kind: "building", text: t("cancelling"), tip: "", fraction: null };
  if (build) return ofBuild(build);
  if (blocks) return ofBlocks(blocks);
  if (run.phase === "asking") return { kind: "building", text: t("asking"), tip: "", fraction: null };
  const kind = run.phase === "queued" ? "queued" : "building";
  const text = t(run.phase === "queued" ? "in_queue" : "first_step");
  return { kind, text: joined(text, aboutTime(run.estimate)), tip: t("dry_run_tip"), fraction: null };
}

function aboutTime(seconds) {
  return seconds ? t("about", { time: roughly(seconds) }) : "";
}

function joined(...parts) {
  return parts.filter(Boolean).join(" · ");
}

function ofBuild(build) {
  if (!build) return null;
  if (build.state === "queued") {
    const text = t(build.held ? "held" : "build_queued");
    return { kind: "queued", text, tip: [build.label, build.message].filter(Boolean).join("\n"), fraction: undefined };
  }
  const tip = [build.label, figuresOf(build)].filter(Boolean).join("\n");
  return { kind: "building", text: phaseOf(build), tip, fraction: build.fraction ?? null };
}

/** What a build does now. The server's words are English; in other languages its phase says it. */
export function phaseOf(build) {
  const words = build.message || build.phase || t("building");
  if (!isEnglish()) return t(`phase_${build.phase}`, {}, words);
  return capitalised(words);
}

/** "42 % · about 40 s left". */
export function figuresOf(build) {
  const left = leftOf(build);
  const part = percentOf(build);
  if (left !== null) return joined(part, left > 0 ? t("left", { time: roughly(left) }) : t("any_moment"));
  return joined(part, aboutTime(build.estimate_s));
}

function percentOf({ fraction }) {
  return typeof fraction === "number" ? percent(fraction) : "";
}

function ofState(ids, run) {
  const state = stateOf(ids, workflowId());
  if (isNewer(run, state)) return { kind: run.result, text: run.message || t(`build_${run.result}`), tip: "" };
  if (!state && run?.result === "without") {
    return { kind: "eager", text: withReason(t("build_without"), run.message), tip: "" };
  }
  if (!state) return { kind: "idle", text: t("not_run"), tip: t("not_run_tip") };
  const blocks = blocksOf(ids);
  if (blocks) return ofBlocks(blocks);
  const fraction = state.kind === "building" ? (state.fraction ?? null) : undefined;
  return { kind: state.kind, text: textOf(state), tip: tipOf(state), fraction };
}

function withReason(words, reason) {
  return [words, reason].filter(Boolean).join(": ");
}

/** A click that came to nothing is told until the server has news of the node. */
function isNewer(run, state) {
  return ["failed", "cancelled"].includes(run?.result) && !(state?.heard > run.over);
}

/** Where the model itself runs the line says all of the reason. The server's words are English; in other languages the
 * facts say the same. */
function textOf(state) {
  const why = saysReason(state) ? (state.tip || state.text).replace(/^\w+: /, "") : "";
  if (why) return said(why) ?? capitalised(why);
  const words = isEnglish() ? capitalised(state.text.replace(SHOWN_ABOVE, "")) : said(state.text);
  return joined(words ?? t(`state_${state.kind}`), callsOnModel(state), state.without_graphs ? t("without_graphs") : "");
}

/** How much of the last run no engine made; empty where engines made all. */
function callsOnModel({ last_run_eager_calls: n, last_run_calls: all }) {
  return n ? t("calls_on_model", { n, all }) : "";
}

/** Whether the line says all that the server has to say. */
function saysReason(state) {
  return REASONED.includes(state.kind) || isOfBlocks(state);
}

/** Whether engines of single blocks compute what no engine of the whole model may. */
function isOfBlocks({ kind, text }) {
  return kind === "ready" && text === "blocks";
}

function tipOf(state) {
  const calls = t("calls", { engine: state.engine_calls ?? 0, eager: state.eager_calls ?? 0 });
  const ran = (state.engine_calls ?? 0) + (state.eager_calls ?? 0) > 0;
  const more = saysReason(state) ? "" : (said(state.tip) ?? state.tip); // the line says reasons itself
  return [more, ran ? calls : ""].filter(Boolean).join("\n");
}

function buttonOf(run, build, view, ids, node) {
  if (isGoing(run) && ["asking", "ending"].includes(run.phase)) {
    const label = t(run.phase === "asking" ? "asking" : "cancelling");
    return { label, tip: t("cancel_tip"), action: null };
  }
  if (isGoing(run)) return { ...cancels(run, build), action: mayCancel(run) ? "cancel" : null };
  if (build) return cancels(run, build);
  const state = view.kind === "idle" ? null : stateOf(ids, workflowId());
  if (view.kind === "ready") return builds(joined(t(isOfBlocks(state) ? "ready_blocks" : "ready"), speed(state)), t("ready_tip"));
  if (view.kind === "slower") return builds(t("slower"), t("slower_tip"));
  const mend = view.kind === state?.kind ? state.mend : null;
  if (mend && mend !== "retry") return { label: t(`mend_${mend}`), tip: t(`mend_${mend}_tip`), action: mend };
  if (view.kind === "failed") return builds(joined(t("state_failed"), t("again")));
  if (view.kind === "eager") return builds(t("state_eager"), t("eager_tip"));
  return builds(t("build_engine") + beforehand(ids, node));
}

function builds(label, tip = t("build_engine_tip")) {
  return { label, tip, action: "build" };
}

/** What goes on, how far it is, and that a click ends it. */
function cancels(run, build) {
  const isQueued = build ? build.state === "queued" : run.phase === "queued";
  const building = build?.counts ?? t("building");
  const words = isQueued ? t(build?.held ? "waits_idle" : "waits") : build ? building : t("test_run");
  const far = build && !isQueued ? [percentOf(build), timeLeft(build)] : [];
  return {
    label: joined(build?.counts ? joined(words, far[0]) : [words, far[0]].filter(Boolean).join(" "), far[1], t("cancel")),
    tip: t("cancel_tip"),
    action: "cancel",
  };
}

function timeLeft(build) {
  const left = leftOf(build);
  return left ? roughly(left) : "";
}

/** How long a build is likely to take: of this node's model once it ran, else of its kind of model. How many kinds of
 * blocks a model is made of shows only when it runs. */
function beforehand(ids, node) {
  if (node.widgets?.some(({ name, value }) => name === "optimize" && value === "blocks")) return "";
  const seconds = stateOf(ids, workflowId())?.build_s ?? store.system?.build_s?.[kindOf(node)];
  return seconds ? ` (${t("about", { time: roughly(seconds) })})` : "";
}
