// Slipstream in ComfyUI's page: what is on nodes, the sidebar tab, settings and commands.
import { app } from "./lib/comfy.js";
import { canvasEntries, commands, keybindings, menuCommands, nodeEntries } from "./commands.js";
import { loadStyle } from "./lib/dom.js";
import { startSaid } from "./lib/said.js";
import { startStore } from "./lib/store.js";
import { adopt, startBuilder } from "./nodes/builder.js";
import { dressNode, startNodes, updateAll } from "./nodes/nodes.js";
import { unsign } from "./nodes/queue.js";
import { settings, startSettings } from "./settings.js";
import { registerTab } from "./sidebar/tab.js";

app.registerExtension({
  name: "slipstream",
  commands,
  keybindings,
  menuCommands,
  settings,
  getCanvasMenuItems: canvasEntries,
  getNodeMenuItems: nodeEntries,
  async setup() {
    loadStyle();
    await startSaid();
    registerTab();
    startNodes();
    await Promise.all([startStore(), startSettings(), startBuilder()]);
  },
  nodeCreated: dressNode,
  beforeConfigureGraph: unsign,
  // The graph was replaced: by another workflow, by undo, by a page that was loaded again.
  afterConfigureGraph() {
    updateAll();
    adopt();
  },
});
