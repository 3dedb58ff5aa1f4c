// "Would this size be served by an engine?"
import { button, h, icon, replace } from "../lib/dom.js";
import { server } from "../lib/server.js";
import { t } from "../lib/words.js";
import { busy } from "./busy.js";
import { chips, roleOf, shapeOf } from "./card.js";

const FIELDS = [
  { name: "width", value: 512, min: 8, max: 16384, step: 8 },
  { name: "height", value: 512, min: 8, max: 16384, step: 8 },
  { name: "batch", value: 2, min: 1, max: 256, step: 1 },
  { name: "tokens", value: 77, min: 1, max: 4096, step: 1 },
];

export function makeHit() {
  const inputs = new Map(FIELDS.map((field) => [field.name, inputOf(field)]));
  const result = h("div", { class: "slipstream-result", role: "status", "aria-live": "polite" });
  const words = h("span", {}, t("would_hit"));
  const ask = h("button", { type: "submit", class: "slipstream-button primary" }, icon("search"), words);
  const fields = FIELDS.map(({ name }) => h("label", {}, h("span", {}, t(`field_${name}`)), inputs.get(name)));
  const form = h("form", { class: "slipstream-form", onsubmit: (event) => submit(event) }, fields, ask);
  const intro = h("p", { class: "muted" }, t("hit_intro"));
  const element = h("div", { class: "slipstream-view" }, intro, form, result);

  async function submit(event) {
    event.preventDefault();
    const call = Object.fromEntries([...inputs].map(([name, input]) => [name, Number(input.value)]));
    await busy(ask, async () => {
      const [answer, { engines }] = await Promise.all([server.hit(call), server.engines()]);
      tell(result, answer, call, new Map(engines.map((engine) => [engine.digest, engine])));
    });
  }

  return { element, show: () => {}, hide: () => {} };
}

function inputOf({ name, value, min, max, step }) {
  return h("input", { type: "number", class: "slipstream-input", name, value, min, max, step, required: true });
}

function tell(result, { hits, near }, { width, height }, engines) {
  const size = `${width}×${height}`;
  const verdict = hits.length ? ["check-circle", "good", "hit_yes"] : ["times-circle", "bad", "hit_no"];
  const [symbol, kind, text] = verdict;
  const known = ({ digest, label }) => engines.get(digest) ?? { digest, label };
  replace(
    result,
    h("div", { class: `slipstream-verdict ${kind}` }, icon(symbol), h("span", {}, t(text, { size }))),
    list(hits.map((hit) => cardOf(known(hit)))),
    near.length ? h("h4", {}, t("near")) : null,
    list(near.map((engine) => cardOf(known(engine), engine.why))),
  );
}

function list(cards) {
  return cards.length ? h("ul", { class: "slipstream-list" }, cards) : null;
}

function cardOf(engine, why = []) {
  const reasons = why.map((reason) => h("li", {}, reason));
  return h(
    "li",
    { class: "slipstream-card still" },
    h("span", { class: "slipstream-card-name" }, engine.label),
    engine.role ? chips([roleOf(engine), ...shapeOf(engine)]) : null,
    reasons.length ? h("div", { class: "slipstream-card-why" }, h("ul", {}, reasons)) : null,
  );
}
