// What can be called from menus and by keys.
import { t } from "./lib/words.js";
import { store } from "./lib/store.js";
import { toast } from "./lib/toast.js";
import { build, cancel, cancelBuild } from "./nodes/builder.js";
import { buildingNodes, canBuild, chosenNode, idsOf } from "./nodes/graph.js";
import { viewOf } from "./nodes/view.js";
import { openView, toggleTab } from "./sidebar/tab.js";
import { lookAt } from "./speedup/plan.js";
import { speedUp } from "./speedup/speedup.js";

async function buildChosen() {
  const node = chosenNode();
  if (!node) return toast("warn", t("no_node"), "", { asked: true });
  return build(node);
}

/** Cancels what the chosen node builds, else what any node of the workflow builds, else what builds at all. */
async function cancelAny() {
  const nodes = [chosenNode(), ...buildingNodes().map(([node]) => node)].filter(Boolean);
  const going = nodes.find((node) => viewOf(idsOf(node), node).button.action === "cancel");
  if (going) return cancel(going);
  const build = store.builds.find((each) => each.state === "running") ?? store.builds[0];
  if (build) return cancelBuild(build.id);
  return toast("info", t("nothing_builds"), "", { asked: true });
}

/** Places and builds, and shows what comes of it. */
async function speedUpAndShow() {
  openView("speedup");
  const [first] = await speedUp();
  if (first) lookAt(first);
}

export const commands = [
  { id: "Slipstream.SpeedUp", label: "Speed up this workflow", icon: "pi pi-bolt", function: speedUpAndShow },
  { id: "Slipstream.BuildEngine", label: "Build engine", icon: "pi pi-bolt", function: buildChosen },
  { id: "Slipstream.CancelBuild", label: "Cancel build", icon: "pi pi-times", function: cancelAny },
  { id: "Slipstream.OpenTab", label: "Show engines", icon: "pi pi-database", function: toggleTab },
];

// With Ctrl, since Alt changes the letters on a Mac; neither ComfyUI nor browsers keep these for themselves.
export const keybindings = [
  { combo: { key: "b", ctrl: true, shift: true }, commandId: "Slipstream.BuildEngine" },
  { combo: { key: "x", ctrl: true, shift: true }, commandId: "Slipstream.CancelBuild" },
  { combo: { key: "l", ctrl: true, shift: true }, commandId: "Slipstream.OpenTab" },
];

export const menuCommands = [{ path: ["Extensions", "Slipstream"], commands: commands.map((command) => command.id) }];

const entry = (name, callback) => ({ content: `Slipstream: ${t(name)}`, callback });

/** Entries of the menu of the canvas. */
export function canvasEntries() {
  return [null, entry("speedup", speedUpAndShow), entry("show_engines", () => openView("engines"))];
}

/** Entries of the menu of a node: of those that build. */
export function nodeEntries(node) {
  if (!canBuild(node)) return [];
  const { button } = viewOf(idsOf(node), node);
  const acts =
    button.action === "cancel" ? entry("cancel_build", () => cancel(node)) : entry("build_engine", () => build(node));
  return [null, acts, entry("show_engines", () => openView("engines"))];
}
