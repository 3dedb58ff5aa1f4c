// One engine in the list.
import { h, icon } from "../lib/dom.js";
import { ago, bytes, error, speed, when } from "../lib/format.js";
import { translated } from "../lib/said.js";
import { t } from "../lib/words.js";

export function makeCard(engine, open) {
  const name = h("span", { class: "slipstream-card-name" }, engine.label);
  const head = h("div", { class: "slipstream-card-head" }, name, badge(engine));
  const stale = engine.state === "stale";
  const reason = engine.caution || (stale && (ofNobody(engine) ?? engine.reasons?.[0]));
  const why = reason ? h("div", { class: "slipstream-card-why" }, translated(reason)) : null;
  const card = h(
    "button",
    { type: "button", class: `slipstream-card ${stale ? "stale" : ""}`, "data-key": engine.digest, onclick: open },
    head,
    chips([roleOf(engine), ...shapeOf(engine)]),
    engine.models?.length
      ? h("div", { class: "slipstream-row-text" }, t("used_by", { names: engine.models.join(", ") }))
      : null,
    facts(engine),
    why,
  );
  return h("li", {}, card);
}

/** Why an engine is not loaded that no maker's key vouches for, in brief. */
function ofNobody({ adoptable }) {
  return adoptable ? t(`is_${adoptable}`) : null;
}

/** Which part of the pipeline an engine runs, in words. */
export function roleOf({ role }) {
  return t(`role_${role}`, {}, role);
}

/** What an engine is for, and how it computes, in words. */
export function shapeOf(engine) {
  const batch = engine.batch ? t("batch_of", { n: String(engine.batch) }) : "";
  return [engine.resolution, batch, engine.precision, t(`backend_${engine.backend}`, {}, engine.backend)];
}

/** Whether ComfyUI would use the engine here and now. */
export function badge(engine) {
  const stale = engine.state === "stale";
  const isWarned = stale || engine.caution;
  const title = engine.caution || (stale ? (engine.reasons ?? []).join("\n") : t("state_ok_tip"));
  const symbol = icon(isWarned ? "exclamation-triangle" : "check-circle");
  const words = stale ? "stale" : engine.caution ? "careful" : "ok";
  const text = engine.retired ? t("retired") : t(words);
  return h("span", { class: `slipstream-badge ${isWarned ? "warn" : "good"}`, title }, symbol, text);
}

export function chips(texts) {
  const made = texts.filter(Boolean).map((text) => h("span", { class: "slipstream-chip" }, text));
  return h("div", { class: "slipstream-chips" }, made);
}

function facts(engine) {
  const all = [
    engine.speedup ? fact("bolt", speed(engine), t("speed_tip"), engine.speedup > 1.05 ? "good" : "") : null,
    fact("database", bytes(engine.bytes), t("size")),
    fact("chart-line", error(engine.error), t("error_tip")),
    fact("clock", ago(engine.last_used), `${t("last_used")}: ${when(engine.last_used)}`),
    engine.gpu ? fact("microchip", engine.gpu, t("made_on")) : null,
  ];
  return h("div", { class: "slipstream-facts" }, all);
}

function fact(symbol, text, title, more = "") {
  return h("span", { class: `slipstream-fact ${more}`.trim(), title }, icon(symbol), text);
}
