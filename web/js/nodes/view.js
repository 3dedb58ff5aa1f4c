// What a node shows of its engines, made of the click's run, the server's builds and the node's last state.
import { capitalised, percent, roughly, speed } from "../lib/format.js";
import { said } from "../lib/said.js";
import { buildOf, leftOf, stateOf, store } from "../lib/store.js";
import { isEnglish, t } from "../lib/words.js";
import { isGoing, mayCancel, runOf } from "./builder.js";
import { kindOf, workflowId } from "./graph.js";

const ICONS = {
  ready: "bolt",
  building: "spinner pi-spin",
  queued: "clock",
  eager: "info-circle",
  off: "power-off",
  idle: "circle",
  failed: "times-circle",
  cancelled: "ban",
};

/** `{kind, icon, text, tip, fraction, figures, button}`; without a fraction there is no bar. */
export function viewOf(ids, node) {
  const run = runOf(ids);
  const build = buildOf(ids, workflowId());
  const view = ofRun(run, build) ?? ofBuild(build) ?? ofState(ids, run);
  return { ...view, icon: ICONS[view.kind] ?? ICONS.idle, button: buttonOf(run, build, view.kind, ids, node) };
}

/** What a line shows of a thing that does not work. */
export function failure(text) {
  return { kind: "failed", icon: ICONS.failed, text, tip: "" };
}

function ofRun(run, build) {
  if (!isGoing(run)) return null;
  if (run.phase === "ending") return { kind: "building", text: t("cancelling"), tip: "", fraction: null };
  if (build) return ofBuild(build);
  if (run.phase === "asking") return { kind: "building", text: t("asking"), tip: "", fraction: null };
  const kind = run.phase === "queued" ? "queued" : "building";
  const text = t(run.phase === "queued" ? "in_queue" : "first_step");
  return { kind, text: text + aboutTime(run.estimate), tip: t("dry_run_tip"), fraction: null };
}

function aboutTime(seconds) {
  return seconds ? ` · ${t("about", { time: roughly(seconds) })}` : "";
}

function ofBuild(build) {
  if (!build) return null;
  if (build.state === "queued") {
    const text = t(build.held ? "held" : "build_queued");
    return { kind: "queued", text, tip: [build.label, build.message].filter(Boolean).join("\n"), fraction: undefined };
  }
  const view = { kind: "building", text: phaseOf(build), fraction: build.fraction ?? null, figures: figuresOf(build) };
  return { ...view, tip: [build.label, view.figures].filter(Boolean).join("\n") };
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
  const parts = [typeof build.fraction === "number" ? percent(build.fraction) : ""];
  if (left !== null) parts.push(left > 0 ? t("left", { time: roughly(left) }) : t("any_moment"));
  else if (build.estimate_s) parts.push(t("about", { time: roughly(build.estimate_s) }));
  return parts.filter(Boolean).join(" · ");
}

function ofState(ids, run) {
  const state = stateOf(ids, workflowId());
  if (isNewer(run, state)) return { kind: run.result, text: withReason(t(`build_${run.result}`), run.message), tip: "" };
  if (!state && run?.result === "without") {
    return { kind: "eager", text: withReason(t("build_without"), run.message), tip: "" };
  }
  if (!state) return { kind: "idle", text: t("not_run"), tip: t("not_run_tip") };
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

/** The server's words are English; in other languages the facts say the same. */
function textOf(state) {
  if (isEnglish()) return capitalised(state.text);
  const kind = t(`state_${state.kind}`);
  const known = said(state.kind === "eager" ? state.tip : state.text); // a long text is cut short, its tip is not
  if (known) return state.kind === "eager" ? `${kind} · ${known}` : known;
  return [kind, speed(state)].filter(Boolean).join(" · ");
}

function tipOf(state) {
  const calls = t("calls", { engine: state.engine_calls ?? 0, eager: state.eager_calls ?? 0 });
  const ran = (state.engine_calls ?? 0) + (state.eager_calls ?? 0) > 0;
  const why = state.tip || state.text;
  return [said(why) ?? why, ran ? calls : ""].filter(Boolean).join("\n");
}

function buttonOf(run, build, kind, ids, node) {
  if (isGoing(run)) {
    const label = { asking: t("asking"), ending: t("cancelling") }[run.phase] ?? t("cancel");
    return { label, tip: t("cancel_tip"), waits: !mayCancel(run), cancels: true };
  }
  if (build) return { label: t("cancel"), tip: t("cancel_tip"), waits: false, cancels: true };
  const label = t("build_engine") + (kind === "ready" ? "" : beforehand(ids, node)); // what is ready is found at once
  return { label, tip: t("build_engine_tip"), waits: false, cancels: false };
}

/** How long a build is likely to take: of this node's model once it ran, else of its kind of model. */
function beforehand(ids, node) {
  const seconds = stateOf(ids, workflowId())?.build_s ?? store.system?.build_s?.[kindOf(node)];
  return seconds ? ` (${t("about", { time: roughly(seconds) })})` : "";
}
