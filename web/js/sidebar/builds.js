// Builds that run and wait. Rows are changed in place: the server reports several times a second.
import { button, h, icon, progressBar, say } from "../lib/dom.js";
import { duration } from "../lib/format.js";
import { on, store } from "../lib/store.js";
import { t } from "../lib/words.js";
import { cancelBuild } from "../nodes/builder.js";
import { figuresOf, phaseOf } from "../nodes/view.js";
import { chips, roleOf, shapeOf } from "./card.js";
import { whileSeen } from "./seen.js";

export function makeBuilds() {
  const list = h("ul", { class: "slipstream-list", "aria-label": t("view_builds") });
  const none = h("div", { class: "slipstream-empty" }, icon("wrench"), h("p", {}, t("no_builds")));
  const how = h("p", { class: "muted" });
  none.append(how);
  const element = h("div", { class: "slipstream-view" }, list, none);
  const rows = new Map();

  function draw() {
    const going = new Set(store.builds.map((build) => build.id));
    for (const [id, row] of rows) if (!going.has(id)) drop(id, row);
    for (const build of store.builds) rowOf(build).show(build);
    none.hidden = store.builds.length > 0;
    say(how, t(store.policy === "always" ? "policy_always" : "policy_idle"));
  }

  function drop(id, row) {
    row.element.remove();
    rows.delete(id);
  }

  function rowOf(build) {
    if (!rows.has(build.id)) {
      rows.set(build.id, makeRow(build));
      list.append(rows.get(build.id).element);
    }
    return rows.get(build.id);
  }

  return { element, ...whileSeen(() => on("builds", draw), draw) };
}

function makeRow(build) {
  const phase = h("span", { class: "slipstream-state-text" });
  const figures = h("span", { class: "slipstream-state-figures" });
  const bar = progressBar(`${t("build_progress")}: ${build.label}`);
  const stop = button({ symbol: "times", text: t("cancel"), kind: "small", onclick: () => press() });
  const press = async () => {
    stop.disabled = true;
    await cancelBuild(build.id);
    stop.disabled = false;
  };
  const name = h("span", { class: "slipstream-card-name" }, build.label);
  const head = h("div", { class: "slipstream-card-head" }, name, stop);
  const words = h("div", { class: "slipstream-row-words" }, phase, figures);
  const parts = [head, chips([roleOf(build), ...shapeOf(build)]), words, bar.element];
  const element = h("li", { class: "slipstream-card still" }, parts);
  const show = (now) => {
    const queued = now.state === "queued";
    say(phase, queued ? t(now.held ? "held" : "build_queued") : phaseOf(now));
    say(figures, queued ? "" : figuresOf(now) || duration(now.seconds));
    bar.element.hidden = queued;
    bar.set(now.fraction);
  };
  return { element, show };
}
