// The open workflow: what would be accelerated, what is, what it gained, and what stays on the user's model.
import { api } from "../lib/comfy.js";
import { h, icon, replace, say } from "../lib/dom.js";
import { duration, roughly, speed, times } from "../lib/format.js";
import { on, stateOf, store } from "../lib/store.js";
import { t } from "../lib/words.js";
import { accelerateNodes, idsOf, workflowId } from "../nodes/graph.js";
import { viewOf } from "../nodes/view.js";
import { lookAt, planOf, staysEager, titleOf } from "../speedup/plan.js";
import { isUnderWay, missing, secondsOf, speedUp, staysOnModel } from "../speedup/speedup.js";
import { busy } from "./busy.js";
import { every, whileSeen } from "./seen.js";

const EVERY_MS = 1500; // ComfyUI does not tell of every change of the graph

export function makeSpeedUp() {
  const words = h("span", {}, t("speedup"));
  const go = h(
    "button",
    { type: "button", class: "slipstream-button primary", onclick: () => busy(go, speedUp) },
    icon("bolt"),
    words,
  );
  const about = h("p", { class: "muted" });
  const list = h("ul", { class: "slipstream-list", "aria-label": t("view_speedup") });
  const saved = h("p", { class: "slipstream-saved" });
  const element = h("div", { class: "slipstream-view" }, about, go, list, saved);
  let shown = "";

  function draw() {
    const plan = planOf();
    const placed = accelerateNodes();
    const waiting = missing();
    say(about, aboutOf(plan, placed, waiting));
    say(words, t(plan.length || !placed.length ? "speedup" : "build_engines"));
    go.hidden = !plan.length && !waiting.length && placed.length > 0;
    const rows = [...placed.map(stateRow), ...plan.map(planRow), ...staysEager().map(eagerRow)];
    const now = JSON.stringify(rows.map(({ node, ...row }) => [node.id, row]));
    if (now !== shown) replace(list, rows.map(rowOf));
    shown = now;
    say(saved, store.savedMs >= 1000 ? t("saved", { time: duration(store.savedMs / 1000) }) : "");
  }

  const follow = () => {
    const ends = [on("nodes", draw), on("builds", draw), every(EVERY_MS, draw)];
    api.addEventListener("graphChanged", draw);
    return () => {
      ends.forEach((end) => end());
      api.removeEventListener("graphChanged", draw);
    };
  };
  return { element, ...whileSeen(follow, draw) };
}

function aboutOf(plan, placed, waiting) {
  if (!plan.length && !placed.length) return t("speedup_nothing_how");
  if (!plan.length && placed.some(isUnderWay)) return t("speedup_building");
  if (!plan.length && waiting.length) return t("speedup_builds");
  if (!plan.length) return t(placed.some(staysOnModel) ? "speedup_stays" : "speedup_done");
  const seconds = secondsOf(plan);
  return [t("speedup_intro"), seconds ? t("speedup_time", { time: roughly(seconds) }) : ""].filter(Boolean).join(" ");
}

function stateRow(node) {
  const ids = idsOf(node);
  const view = viewOf(ids, node);
  const state = stateOf(ids, workflowId());
  const gain = state?.engine_ms ? `${speed(state)} · ${times(state.eager_ms / state.engine_ms)}` : "";
  const why = staysOnModel(node) ? t("runs_on_model", { why: view.text }) : view.text;
  const done = gain || (view.kind === "ready" ? t("ready_soon") : why);
  const text = isUnderWay(node) ? view.button.label.replace(` · ${t("cancel")}`, "") : done;
  return { node, symbol: view.icon, title: titleOf(node), text, kind: view.kind };
}

function planRow({ kind, origin, targets }) {
  const node = targets[0].node;
  const where = t("between", { from: titleOf(origin), to: targets.map((each) => titleOf(each.node)).join(", ") });
  return { node, symbol: "plus-circle", title: t(`accelerate_${kind.role}`), text: where, kind: "idle" };
}

/** On a GPU a model's blocks have engines of their own, and those that a node does not reach stay on them. */
function eagerRow({ node, reason }) {
  const text = store.system?.gpu ? t(`${reason}_gpu`, {}, t(reason)) : t(reason);
  return { node, symbol: "info-circle", title: titleOf(node), text, kind: "eager" };
}

function rowOf({ node, symbol, title, text, kind }) {
  const words = h("span", { class: "slipstream-card-name" }, title);
  const head = h("div", { class: "slipstream-card-head" }, h("span", {}, icon(symbol), " ", words));
  const line = h("div", { class: "slipstream-row-text" }, text);
  const card = h(
    "button",
    { type: "button", class: "slipstream-card", "data-kind": kind, onclick: () => lookAt(node) },
    head,
    line,
  );
  return h("li", {}, card);
}
