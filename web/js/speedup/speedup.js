// "Speed up this workflow": places the Accelerate nodes that are missing, and has all engines built.
import { stateOf, store } from "../lib/store.js";
import { toast } from "../lib/toast.js";
import { t } from "../lib/words.js";
import { build } from "../nodes/builder.js";
import { accelerateNodes, idsOf, workflowId } from "../nodes/graph.js";
import { viewOf } from "../nodes/view.js";
import { place } from "./place.js";
import { planOf } from "./plan.js";

const MISSING = ["idle", "failed", "cancelled"]; // kinds of nodes whose engines a build may bring
const UNDER_WAY = ["building", "queued"];
const ON_MODEL = ["slower", "off", "eager"]; // kinds of nodes that say why none is used

/** Places nodes and builds engines that are missing; returns the nodes that were placed. */
export async function speedUp() {
  const plan = planOf();
  if (!plan.length && !accelerateNodes().length) {
    toast("warn", t("speedup_nothing"), t("speedup_nothing_how"), { asked: true });
    return [];
  }
  const placed = await place(plan);
  for (const node of missing()) await build(node);
  return placed;
}

/** Accelerate nodes of the workflow whose engines are missing and not under way, as far as is known. */
export function missing() {
  return accelerateNodes().filter((node) => !isUnderWay(node) && (MISSING.includes(kindOf(node)) || isLeftToHand(node)));
}

/** Whether a node's model runs without an engine for a reason that no build would change. */
export function staysOnModel(node) {
  return ON_MODEL.includes(kindOf(node)) && !isUnderWay(node) && !isLeftToHand(node);
}

/** Whether a node's engine is missing since it is built only when somebody asks. */
function isLeftToHand(node) {
  return kindOf(node) === "eager" && stateOf(idsOf(node), workflowId())?.mend === "retry";
}

function kindOf(node) {
  return viewOf(idsOf(node), node).kind;
}

export function isUnderWay(node) {
  const { kind, button } = viewOf(idsOf(node), node);
  return UNDER_WAY.includes(kind) || button.action === "cancel";
}

/** Seconds that building for a plan is likely to take, or null. */
export function secondsOf(plan) {
  const each = plan.map(({ kind }) => store.system?.build_s?.[kind.role]);
  return each.length && each.every(Boolean) ? each.reduce((sum, seconds) => sum + seconds, 0) : null;
}
