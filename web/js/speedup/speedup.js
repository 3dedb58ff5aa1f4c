// "Speed up this workflow": places the Accelerate nodes that are missing, and has all engines built.
import { store } from "../lib/store.js";
import { toast } from "../lib/toast.js";
import { t } from "../lib/words.js";
import { build } from "../nodes/builder.js";
import { accelerateNodes, idsOf } from "../nodes/graph.js";
import { viewOf } from "../nodes/view.js";
import { place } from "./place.js";
import { planOf } from "./plan.js";

/** Places what is missing and builds what is not ready; returns the nodes that were placed. */
export async function speedUp() {
  const plan = planOf();
  if (!plan.length && !accelerateNodes().length) {
    toast("warn", t("speedup_nothing"), t("speedup_nothing_how"), { asked: true });
    return [];
  }
  const placed = await place(plan);
  for (const node of unready()) await build(node);
  return placed;
}

/** Accelerate nodes of the workflow whose engines are neither there nor under way, as far as is known. */
export function unready() {
  return accelerateNodes().filter((node) => viewOf(idsOf(node), node).kind !== "ready" && !isUnderWay(node));
}

export function isUnderWay(node) {
  return viewOf(idsOf(node), node).button.action === "cancel";
}

/** Seconds that building for a plan is likely to take, or null. */
export function secondsOf(plan) {
  const each = plan.map(({ kind }) => store.system?.build_s?.[kind.role]);
  return each.length && each.every(Boolean) ? each.reduce((sum, seconds) => sum + seconds, 0) : null;
}
