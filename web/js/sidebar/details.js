// All that is known about one engine, and what can be done to it.
import { adopt } from "../lib/adopt.js";
import { app } from "../lib/comfy.js";
import { button, h, replace } from "../lib/dom.js";
import { ago, bytes, duration, error, speed, times, when } from "../lib/format.js";
import { translated } from "../lib/said.js";
import { server } from "../lib/server.js";
import { toast } from "../lib/toast.js";
import { t } from "../lib/words.js";
import { busy } from "./busy.js";
import { badge, chips, roleOf, shapeOf } from "./card.js";

const SHORT = 12; // digits of a digest that tell engines apart

/** The page of an engine; `back` returns to the list. */
export function makeDetails(digest, back) {
  const body = h("div", { class: "slipstream-details" }, h("p", { class: "muted" }, t("loading")));
  const backButton = button({ symbol: "arrow-left", text: t("back"), kind: "quiet", onclick: back });
  const head = h("div", { class: "slipstream-bar-of-buttons" }, backButton);
  const page = h("div", { class: "slipstream-view" }, head, body);
  page.addEventListener("keydown", (event) => event.key === "Escape" && back());
  fill(body, digest, back);
  return page;
}

async function fill(body, digest, back) {
  try {
    const engine = await server.engine(digest);
    replace(body, ...parts(engine, () => fill(body, digest, back), back));
  } catch (problem) {
    replace(body, h("p", { class: "slipstream-card-why" }, problem.message));
  }
}

function parts(engine, again, back) {
  const name = h("h3", { class: "slipstream-card-name" }, engine.label);
  return [
    h("div", { class: "slipstream-card-head" }, name, badge(engine)),
    chips(shapeOf(engine)),
    reasons(engine),
    ofNobody(engine, again),
    caution(engine, again),
    actions(engine, again, back),
    section(t("facts"), table(factsOf(engine)), true),
    section(t("checks"), checks(engine)),
    section(t("shapes"), table(Object.entries(engine.shapes ?? {}).map(([name, axes]) => [name, axes.join(" × ")]))),
    section(t("files"), table(filesOf(engine))),
    section(t("factors"), table(flat(engine.factors ?? {}))),
  ];
}

function reasons(engine) {
  if (!engine.reasons?.length) return null;
  const list = h("ul", {}, engine.reasons.map((reason) => h("li", {}, translated(reason))));
  return h("div", { class: "slipstream-card-why" }, h("strong", {}, t("why_missed")), list);
}

/** A way to have an engine loaded that no maker's key vouches for. */
function ofNobody(engine, again) {
  if (!engine.adoptable) return null;
  const folder = engine.directory;
  return button({
    symbol: "key",
    text: t("adopt", { n: 1 }),
    key: "adopt",
    onclick: (event) => busy(event.currentTarget, async () => (await adopt([engine], folder)) && again()),
  });
}

/** What an earlier process came to by this engine, and a way to forget that. */
function caution(engine, again) {
  if (!engine.caution) return null;
  const retry = button({
    symbol: "refresh",
    text: t("again"),
    key: "try-again",
    title: t("try_again_tip"),
    onclick: (event) =>
      busy(event.currentTarget, async () => {
        await server.tryAgain(engine.digest);
        toast("success", t("tried_again"), engine.label, { asked: true });
        again();
      }),
  });
  return h("div", { class: "slipstream-card-why" }, h("p", {}, translated(engine.caution)), retry);
}

function actions(engine, again, back) {
  const verify = button({
    symbol: "verified",
    text: t("verify"),
    key: "verify",
    onclick: (event) => check(event, engine, again),
  });
  const remove = button({
    symbol: "trash",
    text: t("delete"),
    kind: "danger",
    key: "delete",
    title: engine.in_use ? t("in_use") : undefined,
    onclick: (event) => drop(event, engine, back),
  });
  return h("div", { class: "slipstream-bar-of-buttons" }, verify, remove);
}

async function check(event, engine, again) {
  await busy(event.currentTarget, async () => {
    const { problem } = await server.verify(engine.digest);
    if (problem) toast("error", t("verified_bad", { n: 1 }), problem, { asked: true });
    else toast("success", t("verified"), engine.label, { asked: true });
    again();
  });
}

async function drop(event, engine, back) {
  const target = event.currentTarget;
  const message = t("delete_sure", { label: engine.label, size: bytes(engine.bytes) });
  const sure = await app.extensionManager.dialog.confirm({ title: t("delete_title"), message, type: "delete" });
  if (!sure) return;
  await busy(target, async () => {
    await server.remove(engine.digest);
    toast("success", t("deleted"), engine.label, { asked: true });
    back();
  });
}

function factsOf(engine) {
  return [
    [t("speed"), engine.speedup ? `${speed(engine)} (${times(engine.speedup)})` : t("no_speed")],
    [t("error"), error(engine.error)],
    [t("size"), bytes(engine.bytes)],
    [t("made_on"), engine.gpu ?? "CPU"],
    [t("built"), `${when(engine.created)}, ${t("took", { time: duration(engine.build_s) })}`],
    [t("last_used"), ago(engine.last_used)],
    [t("role"), roleOf(engine)],
    [t("optimize"), engine.optimize],
    [t("in_use_now"), t(engine.in_use ? "yes" : "no")],
    [t("id"), engine.digest],
    [t("folder"), engine.directory],
  ];
}

function checks(engine) {
  const all = Object.entries(engine.verifications ?? {});
  if (!all.length) return h("p", { class: "muted" }, t("no_checks"));
  return table(all.map(([weights, check]) => [weights.slice(0, SHORT), sayCheck(check)]));
}

function sayCheck(check) {
  const eager = check.eager_error === null ? "" : `, ${t("own_error", { error: error(check.eager_error) })}`;
  const note = check.note ? ` (${check.note})` : "";
  return `${t("error")} ${error(check.relative_error)}${eager}, ${when(check.when)}${note}`;
}

function filesOf(engine) {
  const say = (file) => `${bytes(file.bytes)}, ${file.sha256.slice(0, SHORT)}…`;
  return Object.entries(engine.files ?? {}).map(([name, file]) => [name, say(file)]);
}

/** Factors of the key as dotted names; the shapes have a table of their own. */
function flat(node, name = "") {
  if (name === "spec.profile") return [];
  if (node === null || typeof node !== "object" || Array.isArray(node)) return [[name, plain(node)]];
  return Object.entries(node).flatMap(([key, child]) => flat(child, name ? `${name}.${key}` : key));
}

function plain(value) {
  return typeof value === "string" ? value : JSON.stringify(value);
}

function table(rows) {
  const made = rows.filter(([, value]) => value !== undefined && value !== null);
  const pair = ([name, value]) => [h("dt", {}, name), h("dd", {}, value)];
  return h("dl", { class: "slipstream-table" }, made.flatMap(pair));
}

function section(title, content, open = false) {
  return h("details", { open }, h("summary", {}, title), content);
}
