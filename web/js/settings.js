// Settings in ComfyUI's dialog. The server's are the truth: they are loaded at the start and written through.
import { app } from "./lib/comfy.js";
import { h } from "./lib/dom.js";
import { server } from "./lib/server.js";
import { toast } from "./lib/toast.js";
import { t } from "./lib/words.js";

const GB = 2 ** 30;
const same = (value) => value;
const known = new Map(); // the server's name -> its value there

// In the order of the dialog, which shows the last one first.
const TABLE = [
  { id: "Slipstream.Notifications", name: "notifications", label: "Tell when a build has ended", type: "boolean" },
  {
    id: "Slipstream.Background",
    name: "background",
    label: "Build in the background",
    tooltip: "Whether background builds wait until ComfyUI's queue is empty.",
    options: { idle: "While idle", always: "Always" },
  },
  {
    id: "Slipstream.Precision",
    name: "precision",
    label: "Precision",
    tooltip: "What auto means on nodes. As the model: what ComfyUI chose for it.",
    options: { auto: "As the model", fp32: "fp32", fp16: "fp16", bf16: "bf16", fp8: "fp8", int8: "int8" },
  },
  {
    id: "Slipstream.Backend",
    name: "backend",
    label: "Backend",
    tooltip: "What auto means on nodes. Automatic: the first that works here. Off: your model, without Slipstream.",
    options: { auto: "Automatic", compiled: "Compiled", tensorrt: "TensorRT", off: "Off" },
  },
  {
    id: "Slipstream.SizeLimit",
    name: "limit_bytes",
    label: "Size limit (GB)",
    tooltip: "Engines that were not used for longest make room for new ones.",
    type: "number",
    attrs: { min: 1, max: 100000, maxFractionDigits: 2 },
    toServer: (gb) => Math.round(gb * GB),
    toPage: (bytes) => Math.round((100 * bytes) / GB) / 100,
  },
  {
    id: "Slipstream.Folder",
    name: "folder",
    label: "Engine folder",
    tooltip: "The whole path of a folder. Empty: models/slipstream of ComfyUI.",
    type: folderInput,
    toServer: (text) => text.trim() || null,
    toPage: (folder) => folder ?? "",
  },
];
const DEFAULTS = {
  notifications: true,
  background: "idle",
  precision: "auto",
  backend: "auto",
  limit_bytes: 20,
  folder: "",
};

export const settings = TABLE.map((entry) => ({
  id: entry.id,
  name: entry.label,
  tooltip: entry.tooltip,
  category: ["Slipstream", entry.name === "notifications" ? "Page" : "Engines", entry.label],
  type: entry.type ?? "combo",
  options: entry.options && Object.entries(entry.options).map(([value, text]) => ({ value, text })),
  attrs: entry.attrs,
  defaultValue: DEFAULTS[entry.name],
  onChange: (value) => change(entry, value),
}));

/** Shows what the server has. */
export async function startSettings() {
  try {
    await show(await server.settings());
  } catch (error) {
    console.warn(`Slipstream: ${error.message}`);
  }
}

async function show({ settings: values, fixed }) {
  for (const entry of TABLE.filter(({ name }) => name in values)) {
    known.set(entry.name, values[entry.name]);
    await app.extensionManager.setting.set(entry.id, (entry.toPage ?? same)(values[entry.name]));
    if (fixed?.[entry.name]) fix(entry, fixed[entry.name]);
  }
}

/** Writes a change through; a refused one is taken back. */
async function change(entry, value) {
  const wanted = (entry.toServer ?? same)(value);
  if (!known.has(entry.name) || known.get(entry.name) === wanted) return;
  if (entry.toPage && entry.toPage(known.get(entry.name)) === value) return; // rounded, not changed
  try {
    const answer = await server.change({ [entry.name]: wanted });
    await show(answer);
    if (answer.restart_needed && entry.name === "folder") toast("info", t("restart"), "", { asked: true });
  } catch (error) {
    toast("error", t("setting_refused"), error.message, { asked: true });
    await app.extensionManager.setting.set(entry.id, (entry.toPage ?? same)(known.get(entry.name)));
  }
}

/** What the environment decides cannot be changed here; the reason shows under the pointer. */
function fix(entry, why) {
  const setting = app.extensionManager.setting.settings[entry.id];
  setting.attrs = { ...entry.attrs, disabled: true, title: t("fixed", { why }) };
}

/** Takes a path when it is complete, not letter by letter. */
function folderInput(name, set, value, attrs) {
  return h("input", {
    type: "text",
    class: "p-inputtext p-component slipstream-setting",
    value: value ?? "",
    placeholder: "models/slipstream",
    spellcheck: false,
    "aria-label": name,
    disabled: attrs?.disabled,
    title: attrs?.title ?? value,
    onchange: (event) => set(event.target.value),
  });
}
