// Engines for the user's own models: a grid of model files and picture sizes. A click on a cell builds.
import { button, h, icon, replace, say } from "../lib/dom.js";
import { percent } from "../lib/format.js";
import { translated } from "../lib/said.js";
import { server } from "../lib/server.js";
import { on } from "../lib/store.js";
import { toast } from "../lib/toast.js";
import { t } from "../lib/words.js";
import { wrongIn } from "../nodes/sizes.js";
import { every, whileSeen } from "./seen.js";

const EVERY_MS = 2000; // while something is built
const SHOWN = 60; // rows; the filter finds the others
const SYMBOLS = {
  ready: "check-circle",
  building: "spinner pi-spin",
  stale: "exclamation-triangle",
  failed: "times-circle",
  missing: "plus",
};
const KINDS = { ready: "good", stale: "warn", failed: "bad" };
const SIZES_KEY = "Slipstream.Sizes";

export function makeModels() {
  const filter = h("input", {
    type: "search",
    class: "slipstream-input",
    placeholder: t("filter_models"),
    "aria-label": t("filter_models"),
    oninput: () => draw(),
  });
  const sizes = h("input", {
    class: "slipstream-input",
    placeholder: "768x512",
    "aria-label": t("more_sizes"),
    title: t("more_sizes"),
    value: localStorage.getItem(SIZES_KEY) ?? "",
    onchange: () => changeSizes(),
  });
  const fields = h("div", { class: "slipstream-fields" }, filter, sizes);
  const note = h("p", { class: "muted" }, t("models_intro"));
  const table = h("div", { class: "slipstream-grid-place" });
  const element = h("div", { class: "slipstream-view" }, note, fields, table);
  let [report, rest] = [null, null];

  async function load() {
    try {
      report = await server.models(sizes.value.trim());
      draw();
    } catch (error) {
      replace(
        table,
        h("p", { class: "slipstream-card-why" }, error.message),
        button({ text: t("again"), onclick: load }),
      );
    }
  }

  function changeSizes() {
    const wrong = wrongIn(sizes.value);
    if (wrong) return toast("warn", wrong, "", { asked: true });
    localStorage.setItem(SIZES_KEY, sizes.value);
    return load();
  }

  function draw() {
    if (!report) return;
    const words = filter.value.toLowerCase().split(/\s+/);
    const rows = report.models.filter(({ model }) => words.every((word) => model.toLowerCase().includes(word)));
    replace(table, gridOf(report.sizes, rows.slice(0, SHOWN), build));
    say(note, rows.length ? t("models_intro") : t("no_models"));
    follow();
  }

  /** Progress of builds of this grid is asked for, as long as there are any. */
  function follow() {
    const isBuilding = report.models.some(({ cells }) => cells.some((cell) => cell.state === "building"));
    if (isBuilding && element.isConnected) rest ??= every(EVERY_MS, load);
    else end();
  }

  function end() {
    rest?.();
    rest = null;
  }

  async function build(model, size) {
    const [width, height] = size.split("x").map(Number);
    try {
      await server.buildFor(model, width, height);
    } catch (error) {
      toast("error", t("refused"), error.message, { asked: true });
    }
    await load();
  }

  const begin = () => {
    const quiet = on("engines", load);
    return () => {
      quiet();
      end();
    };
  };
  return { element, ...whileSeen(begin, load) };
}

function gridOf(sizes, rows, build) {
  const head = h(
    "tr",
    {},
    h("th", { scope: "col" }, t("model")),
    sizes.map((size) => h("th", { scope: "col" }, size.replace("x", "×"))),
  );
  const row = ({ model, cells }) =>
    h(
      "tr",
      {},
      h("th", { scope: "row", title: model }, shortOf(model)),
      cells.map((cell, at) => cellOf(cell, model, sizes[at], build)),
    );
  return h("table", { class: "slipstream-grid" }, h("thead", {}, head), h("tbody", {}, rows.map(row)));
}

function cellOf(cell, model, size, build) {
  const words = t(`cell_${cell.state}`);
  const can = ["missing", "stale", "failed"].includes(cell.state);
  const title = [`${shortOf(model)}, ${size}: ${words}`, translated(cell.why), can ? t("cell_click") : ""]
    .filter(Boolean)
    .join("\n");
  const far = cell.state === "building" && cell.fraction ? percent(cell.fraction) : null;
  const content = far ?? icon(SYMBOLS[cell.state]);
  const made = h(
    "button",
    {
      type: "button",
      class: `slipstream-cell ${KINDS[cell.state] ?? ""}`,
      title,
      "aria-label": title,
      "data-key": `${model} ${size}`,
      disabled: !can,
      onclick: () => build(model, size),
    },
    content,
  );
  return h("td", {}, made);
}

/** The name of a file without its folders and ending. */
function shortOf(model) {
  return model
    .split("/")
    .at(-1)
    .replace(/\.(safetensors|ckpt|pt|sft|gguf)$/, "");
}
