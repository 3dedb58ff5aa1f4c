// What Slipstream has logged; asked for only while it is looked at.
import { button, h, say } from "../lib/dom.js";
import { clock } from "../lib/format.js";
import { server } from "../lib/server.js";
import { toast } from "../lib/toast.js";
import { t } from "../lib/words.js";
import { every, whileSeen } from "./seen.js";

const EVERY_MS = 1500;
const KEPT = 1000;
const NEAR_END = 40; // pixels from the end at which new lines are still followed

export function makeLog() {
  const lines = h("ol", { class: "slipstream-log", tabIndex: 0, "aria-label": t("view_log") });
  const note = h("p", { class: "muted slipstream-note" }, t("no_log"));
  const copy = button({ symbol: "copy", text: t("copy"), kind: "quiet", onclick: () => copyAll(lines) });
  const head = h("div", { class: "slipstream-bar-of-buttons" }, copy);
  const element = h("div", { class: "slipstream-view filling" }, head, note, lines);
  let next = 0;
  let asking = false;

  async function load() {
    if (asking || document.hidden) return;
    asking = true;
    try {
      const answer = await server.log(next);
      next = answer.next;
      add(lines, answer.lines);
      say(note, lines.childElementCount ? "" : t("no_log"));
    } catch (error) {
      say(note, error.message);
    } finally {
      asking = false;
      note.hidden = !note.textContent;
      lines.hidden = !lines.childElementCount;
    }
  }

  return { element, ...whileSeen(() => every(EVERY_MS, load), load) };
}

function add(list, lines) {
  if (!lines.length) return;
  const follows = list.scrollHeight - list.scrollTop - list.clientHeight < NEAR_END;
  list.append(...lines.map(lineOf));
  while (list.childElementCount > KEPT) list.firstElementChild.remove();
  if (follows) list.scrollTop = list.scrollHeight;
}

function lineOf({ time, level, text }) {
  const kind = String(level).toLowerCase();
  return h("li", { class: kind }, h("time", {}, clock(time)), h("span", {}, text));
}

async function copyAll(list) {
  try {
    await navigator.clipboard.writeText([...list.children].map((line) => line.innerText).join("\n"));
    toast("success", t("copied"), "", { asked: true });
  } catch {
    toast("warn", t("not_copied"), "", { asked: true });
  }
}
