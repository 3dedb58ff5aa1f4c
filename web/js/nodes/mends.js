// What can be done where a node has no engine, by the names that the server has for it.
import { adopt, adoptable } from "../lib/adopt.js";
import { app } from "../lib/comfy.js";
import { server } from "../lib/server.js";
import { stateOf } from "../lib/store.js";
import { toast } from "../lib/toast.js";
import { t } from "../lib/words.js";
import { build } from "./builder.js";
import { idsOf, workflowId } from "./graph.js";

const SETTINGS = "Comfy.ShowSettingsDialog";

/** Each is given the node. */
export const mends = {
  compiler: sayCompiler,
  precision: (node) => chooseAuto(node, "precision"),
  backend: (node) => chooseAuto(node, "backend"),
  adopt: vouch,
  settings: () => app.extensionManager.command.execute(SETTINGS),
};

/** The server knows which compiler its system needs, and how one gets it. */
function sayCompiler(node) {
  const reason = stateOf(idsOf(node), workflowId())?.tip ?? "";
  const message = [reason, t("compiler_then")].join("\n\n");
  return app.extensionManager.dialog.confirm({ title: t("compiler_title"), message, type: "info" });
}

/** The question is about all such engines of the store: a model may run on several. */
async function vouch(node) {
  try {
    const report = await server.engines();
    const engines = adoptable(report);
    if (engines.length && !(await adopt(engines, report.store))) return;
  } catch (error) {
    toast("error", t("refused"), error.message, { asked: true });
    return;
  }
  await build(node);
}

function chooseAuto(node, name) {
  const widget = node.widgets.find((each) => each.name === name);
  widget.value = "auto";
  widget.callback?.("auto");
  return build(node);
}
