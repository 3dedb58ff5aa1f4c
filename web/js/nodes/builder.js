// Builds that were asked for by a click: from the dry run's prompt to its end in ComfyUI's queue.
import { api, app } from "../lib/comfy.js";
import { duration } from "../lib/format.js";
import { server } from "../lib/server.js";
import { buildOf, isOne, on, tell } from "../lib/store.js";
import { toast } from "../lib/toast.js";
import { t } from "../lib/words.js";
import { idsOf, workflowId } from "./graph.js";
import { cancelPrompt, endOf, queuedBuilds, signed } from "./queue.js";

const DOUBLE_CLICK_MS = 1000; // a second click within it is no cancel
const LOOK_MS = 2000; // the queue says each change; this is for events that got lost
const RESULT_MS = 400; // results of engines may come after the prompt's end

const runs = new Set(); // at most one of a node
let looking = null;

/** The click's run of a node: `{phase: asking | queued | running | ending | over, estimate, message, result}`. */
export function runOf(ids) {
  const workflow = workflowId();
  return [...runs].findLast((run) => isOne(run, ids, workflow)) ?? null;
}

export function isGoing(run) {
  return Boolean(run) && run.phase !== "over";
}

/** Whether a click would cancel, and is not the second half of a double click. */
export function mayCancel(run) {
  return isGoing(run) && Boolean(run.prompt) && run.phase !== "ending" && Date.now() - run.since >= DOUBLE_CLICK_MS;
}

/** Builds the engines of a node, unless that is going on. */
export async function build(node) {
  const ids = idsOf(node);
  if (!ids.length || isGoing(runOf(ids))) return;
  const run = begin({ node: ids[0], workflow: workflowId(), phase: "asking", since: Date.now() });
  try {
    await queue(run);
  } catch (error) {
    end(run, "failed", refusalOf(error));
  }
}

function begin(facts) {
  for (const run of runs) if (!isGoing(run) && isOne(run, [facts.node], facts.workflow)) runs.delete(run);
  const run = { ...facts, heard: false };
  runs.add(run);
  tell("builds");
  return run;
}

async function queue(run) {
  const { output, workflow } = await app.graphToPrompt();
  run.workflow = workflow.id ?? run.workflow;
  if (!output[run.node]) throw new Error(t("muted"));
  const asked = await server.dryRun(output, run.node);
  run.estimate = asked.estimate_s;
  const answer = await api.queuePrompt(0, { output: asked.prompt, workflow: signed(workflow, run.node) });
  run.prompt = answer.prompt_id;
  run.phase = "queued";
  setTimeout(() => tell("builds"), DOUBLE_CLICK_MS + 1 - (Date.now() - run.since));
  tell("builds");
  look();
}

/** Why a build could not be queued. What is wrong in the graph is shown as ComfyUI shows it, too. */
function refusalOf(error) {
  const nodes = Object.values(error.response?.node_errors ?? {});
  if (error.response) showAsComfyUI(error);
  const say = (node) => node.errors.map((each) => `${node.class_type}: ${each.message} ${each.details}`);
  const wrong = nodes.flatMap(say);
  return wrong.join("; ").trim() || error.response?.error?.message || error.message || String(error);
}

function showAsComfyUI(error) {
  error.stack = ""; // else ComfyUI names this file as what may be wrong
  const options = { title: t("refused_prompt"), reportType: "promptExecutionError" };
  app.extensionManager.dialog?.showErrorDialog?.(error, options);
}

/** Cancels what builds for a node: the click's prompt, else a build in the background. */
export async function cancel(node) {
  const ids = idsOf(node);
  const run = runOf(ids);
  if (isGoing(run)) return mayCancel(run) ? cancelRun(run) : undefined;
  const going = buildOf(ids, workflowId());
  if (going) await cancelBuild(going.id);
}

async function cancelRun(run) {
  run.phase = "ending";
  tell("builds");
  try {
    await cancelPrompt(run.prompt);
  } catch (error) {
    toast("error", t("not_cancelled"), error.message, { asked: true });
  }
  await lookNow();
}

export async function cancelBuild(digest) {
  try {
    await server.cancel(digest);
  } catch (error) {
    if (error.code !== "not_found") toast("error", t("not_cancelled"), error.message, { asked: true });
  }
}

// Following the queue

/** Begins to follow the queue: what is in it already, and each change that ComfyUI tells of. */
export async function startBuilder() {
  api.addEventListener("status", () => (isLooking() ? lookNow() : adopt()));
  on("result", noteResult);
  await adopt();
}

/** Takes up builds of another tab, or of this page before it was loaded again. */
export async function adopt() {
  for (const item of await queuedBuilds().catch(() => [])) {
    const known = [...runs].some((run) => isGoing(run) && isOne(run, [item.node], item.workflow));
    if (!item.node || known) continue;
    begin({ ...item, phase: item.running ? "running" : "queued", since: 0 });
    look();
  }
}

function isLooking() {
  return looking !== null;
}

function look() {
  if (!isLooking()) looking = setInterval(lookNow, LOOK_MS);
  return lookNow();
}

async function lookNow() {
  const going = [...runs].filter((run) => isGoing(run) && run.prompt);
  if (!going.length) {
    clearInterval(looking);
    looking = null;
    return;
  }
  const queue = await queuedBuilds().catch(() => null); // ComfyUI may be starting again
  if (queue) await Promise.all(going.map((run) => follow(run, queue)));
}

async function follow(run, queue) {
  const found = queue.find((item) => item.prompt === run.prompt);
  if (!found) return settle(run);
  if (run.phase === "queued" && found.running) {
    run.phase = "running";
    tell("builds");
  }
}

async function settle(run) {
  if (run.settling) return;
  run.settling = true;
  const { status, message } = await endOf(run.prompt);
  await new Promise((resolve) => setTimeout(resolve, RESULT_MS));
  if (status === "success") end(run, "done", run.heard ? "" : t("nothing_to_build"));
  else end(run, status === "error" ? "failed" : "cancelled", message);
}

/** Remembers how a run ended and says it, unless a result of one of its engines has said it already. */
function end(run, result, message) {
  Object.assign(run, { phase: "over", result, message, over: Date.now() });
  tell("builds");
  if (run.heard && result !== "failed") return;
  if (result === "failed" && run.heard !== "failed") toast("error", t("build_failed"), message);
  if (result === "cancelled") toast("info", t("build_cancelled"));
  if (result === "done") toast("success", t("engines_ready"), message);
}

function noteResult(result) {
  const isOf = (run) => result.nodes?.some((each) => isOne(each, [run.node], run.workflow));
  const mine = [...runs].find((run) => isGoing(run) && isOf(run));
  if (mine) mine.heard = result.result;
  sayResult(result);
}

function sayResult({ result, label, seconds, speedup, message }) {
  if (result === "failed") return toast("error", t("build_failed"), `${label}: ${message}`);
  if (result === "cancelled") return toast("info", t("build_cancelled"), label);
  const took = t("took", { time: duration(seconds) });
  const faster = speedup ? `, ${t("faster", { times: speedup.toFixed(1) })}` : "";
  return toast("success", t("engine_built"), `${label}: ${took}${faster}`);
}
