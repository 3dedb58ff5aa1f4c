// Short notices in ComfyUI's own corner.
import { app } from "./comfy.js";

const LIFE_MS = { success: 6000, info: 6000, warn: 10000, error: 15000 };

/** Shows a notice. `asked`: it answers a click and is shown nowhere else, so the setting does not keep it back. */
export function toast(severity, summary, detail = "", { asked = false } = {}) {
  if (!asked && app.extensionManager.setting.get("Slipstream.Notifications") === false) return;
  app.extensionManager.toast.add({ severity, summary, detail, life: LIFE_MS[severity] });
}
