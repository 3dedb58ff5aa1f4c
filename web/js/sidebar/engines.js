// The engines on disk: a filter, cards, what the store takes, and what can be done to all of them.
import { adopt, adoptable } from "../lib/adopt.js";
import { app } from "../lib/comfy.js";
import { button, h, icon, progressBar, replace, say } from "../lib/dom.js";
import { bytes } from "../lib/format.js";
import { server } from "../lib/server.js";
import { on } from "../lib/store.js";
import { toast } from "../lib/toast.js";
import { t } from "../lib/words.js";
import { busy } from "./busy.js";
import { makeCard } from "./card.js";
import { makeDetails } from "./details.js";
import { whileSeen } from "./seen.js";

/** The view: `{element, show, hide}`. */
export function makeEngines() {
  const list = h("ul", { class: "slipstream-list", "aria-label": t("view_engines") });
  const disk = makeDisk();
  const filter = makeFilter(() => draw());
  const ofNobody = makeOfNobody();
  const page = h("div", { class: "slipstream-view" }, disk.element, ofNobody.element, filter.element, list);
  const element = h("div", { class: "slipstream-pages" }, page);
  let report = null;

  async function load() {
    try {
      report = await server.engines();
      disk.show(report);
      ofNobody.show(report);
      draw();
    } catch (error) {
      replace(list, empty("exclamation-triangle", error.message, button({ text: t("again"), onclick: load })));
    }
  }

  function draw() {
    if (!report) return;
    const wanted = report.engines.filter((engine) => fits(engine, filter.text()));
    filter.element.hidden = !report.engines.length;
    if (!report.engines.length) return replace(list, empty("bolt", t("no_engines"), null, t("no_engines_how")));
    if (!wanted.length) return replace(list, empty("search", t("none_fits", { text: filter.text() })));
    return replace(
      list,
      wanted.map((engine) => makeCard(engine, () => openDetails(engine.digest))),
    );
  }

  function openDetails(digest) {
    const back = () => {
      element.replaceChildren(page);
      list.querySelector(`[data-key="${digest}"]`)?.focus();
    };
    const details = makeDetails(digest, back);
    element.replaceChildren(details);
    details.querySelector("button")?.focus();
  }

  return { element, ...whileSeen(() => on("engines", load), load) };
}

function empty(symbol, text, action = null, more = "") {
  const lines = [icon(symbol), h("p", {}, text), more ? h("p", { class: "muted" }, more) : null, action];
  return h("li", { class: "slipstream-empty" }, lines);
}

/** A filter: every word is somewhere in the engine. */
function fits(engine, text) {
  const facts = ["label", "role", "backend", "precision", "optimize", "gpu", "state", "resolution", "batch", "digest"];
  const all = [...facts.map((name) => engine[name] ?? ""), ...(engine.models ?? []), ...(engine.reasons ?? [])]
    .join(" ")
    .toLowerCase();
  return text
    .toLowerCase()
    .split(/\s+/)
    .every((word) => all.includes(word));
}

function makeFilter(changed) {
  const input = h("input", {
    type: "search",
    class: "slipstream-input",
    placeholder: t("filter"),
    "aria-label": t("filter"),
    "data-key": "filter",
    oninput: changed,
  });
  const element = h("div", { class: "slipstream-filter" }, icon("search"), input);
  return { element, text: () => input.value.trim() };
}

/** How full the store is, with what acts on all engines. */
function makeDisk() {
  const bar = progressBar(t("disk_use"));
  const used = h("span", {});
  const more = h("span", { class: "muted" });
  let report = null;
  const actions = [
    button({ symbol: "verified", title: t("verify_all"), key: "verify-all", onclick: (event) => verifyAll(event) }),
    button({ symbol: "eraser", title: t("prune"), key: "prune", onclick: (event) => prune(event, report) }),
  ];
  const words = h("div", { class: "slipstream-disk-words" }, used, more);
  const line = h("div", { class: "slipstream-disk-line" }, words, actions);
  const element = h("div", { class: "slipstream-disk" }, line, bar.element);
  const show = (now) => {
    report = now;
    const over = now.bytes > now.limit_bytes;
    say(used, t("used_of", { used: bytes(now.bytes), limit: bytes(now.limit_bytes) }));
    say(more, t("engines_free", { n: now.engines.length, free: bytes(now.free_bytes ?? 0) }));
    bar.set(now.limit_bytes ? now.bytes / now.limit_bytes : 0);
    bar.element.classList.toggle("full", over);
    element.title = now.store;
  };
  return { element, show };
}

/** How many engines no maker's key vouches for, with a button that asks whether they are to be loaded. */
function makeOfNobody() {
  const words = h("p", {});
  const ask = button({
    symbol: "key",
    text: t("adopt"),
    key: "adopt",
    onclick: (event) => busy(event.currentTarget, () => adopt(adoptable(report), report.store)),
  });
  const element = h("div", { class: "slipstream-card-why slipstream-of-nobody", hidden: true }, words, ask);
  let report = null;
  const show = (now) => {
    report = now;
    const { length } = adoptable(now);
    element.hidden = !length;
    say(words, t("not_trusted", { n: length }));
  };
  return { element, show };
}

async function verifyAll(event) {
  await busy(event.currentTarget, async () => {
    const { problems } = await server.verifyAll();
    const bad = Object.entries(problems).filter(([, problem]) => problem);
    const detail = bad.map(([digest, problem]) => `${digest.slice(0, 12)}: ${problem}`).join("\n");
    if (bad.length) toast("error", t("verified_bad", { n: bad.length }), detail, { asked: true });
    else toast("success", t("verified_all", { n: Object.keys(problems).length }), "", { asked: true });
  });
}

async function prune(event, report) {
  const target = event.currentTarget;
  if (!report) return;
  const limit = bytes(report.limit_bytes);
  const sure = await app.extensionManager.dialog.confirm({ title: t("prune"), message: t("prune_sure", { limit }) });
  if (!sure) return;
  await busy(target, async () => {
    const { removed, bytes: freed } = await server.prune(report.limit_bytes);
    toast("success", t("pruned", { n: removed.length, size: bytes(freed) }), "", { asked: true });
  });
}
