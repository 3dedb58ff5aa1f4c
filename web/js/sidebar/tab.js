// The sidebar tab: a head with the store's size, and one of five views below it.
import { app } from "../lib/comfy.js";
import { button, h } from "../lib/dom.js";
import { server } from "../lib/server.js";
import { on, store } from "../lib/store.js";
import { toast } from "../lib/toast.js";
import { t } from "../lib/words.js";
import { makeBuilds } from "./builds.js";
import { makeEngines } from "./engines.js";
import { makeLog } from "./log.js";
import { makeModels } from "./models.js";
import { makeSpeedUp } from "./speedup.js";

const ID = "slipstream";
const VIEWS = [
  { name: "speedup", symbol: "bolt", make: makeSpeedUp },
  { name: "engines", symbol: "database", make: makeEngines },
  { name: "builds", symbol: "wrench", make: makeBuilds },
  { name: "models", symbol: "th-large", make: makeModels },
  { name: "log", symbol: "list", make: makeLog },
];
let open = null; // the panel while it is on the page
let last = "speedup"; // the view that was seen last

export function registerTab() {
  app.extensionManager.registerSidebarTab({
    id: ID,
    icon: "pi pi-bolt",
    title: "Slipstream",
    tooltip: t("tab_tip"),
    type: "custom",
    render: mount,
    destroy: unmount,
  });
}

/** Opens the tab, or closes it, as the keys of ComfyUI's own tabs do. */
export function toggleTab() {
  app.extensionManager.sidebarTab.toggleSidebarTab(ID);
}

/** Opens the tab at a view. */
export function openView(name) {
  last = name;
  if (open) open.choose(name);
  else toggleTab();
}

/** ComfyUI may render a tab again while it is there. */
function mount(place) {
  if (open && place.contains(open.element)) return;
  unmount();
  open = makePanel();
  place.style.height = "100%";
  place.replaceChildren(open.element);
}

function unmount() {
  open?.close();
  open?.element.remove();
  open = null;
}

function makePanel() {
  const views = new Map(VIEWS.map(({ name, make }) => [name, make()]));
  const tabs = VIEWS.map((view) => makeTab(view, choose));
  const strip = h("div", { class: "slipstream-tabs", role: "tablist", "aria-label": "Slipstream" }, tabs);
  strip.addEventListener("keydown", (event) => walk(event, tabs));
  const body = h("div", { class: "slipstream-body", role: "tabpanel", id: "slipstream-panel" });
  const page = button({ symbol: "external-link", title: t("open_page"), kind: "quiet", onclick: openPage });
  const head = h("div", { class: "slipstream-head" }, h("span", { class: "slipstream-title" }, "Slipstream"), page);
  const element = h("div", { class: "slipstream-panel" }, head, strip, body);
  const quiet = on("builds", () => count(tabs));
  let shown = null;

  function choose(name) {
    last = name;
    views.get(shown)?.hide();
    shown = name;
    for (const tab of tabs) mark(tab, tab.dataset.name === name);
    body.setAttribute("aria-labelledby", `slipstream-tab-${name}`);
    body.replaceChildren(views.get(name).element);
    views.get(name).show();
  }

  count(tabs);
  choose(last);
  const close = () => {
    quiet();
    views.get(shown)?.hide();
  };
  return { element, choose, close };
}

/** The page by Gradio; the window opens with the click, since browsers let no other one open. */
async function openPage() {
  const place = window.open("", "_blank");
  try {
    const { url } = await server.openPage();
    if (place) place.location = url;
    else window.location.assign(url);
  } catch (error) {
    place?.close();
    toast("error", t("not_opened"), error.message, { asked: true });
  }
}

function makeTab({ name, symbol }, choose) {
  const tab = button({ symbol, text: t(`view_${name}`), kind: "tab", onclick: () => choose(name) });
  tab.id = `slipstream-tab-${name}`;
  tab.dataset.name = name;
  tab.setAttribute("role", "tab");
  tab.setAttribute("aria-controls", "slipstream-panel");
  return tab;
}

function mark(tab, chosen) {
  tab.setAttribute("aria-selected", String(chosen));
  tab.tabIndex = chosen ? 0 : -1;
}

/** How many builds there are, on their tab. */
function count(tabs) {
  const tab = tabs.find((each) => each.dataset.name === "builds");
  tab.dataset.count = store.builds.length || "";
}

/** Arrow keys walk through the tabs. */
function walk(event, tabs) {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!step) return;
  const here = tabs.indexOf(document.activeElement);
  const next = tabs[(here + step + tabs.length) % tabs.length];
  next.focus();
  next.click();
}
