// Builds that were asked for by a click: from the dry run's prompt to its end in ComfyUI's queue.
import { api, app } from "../lib/comfy.js";
import { paced } from "../lib/paced.js";
import { translated } from "../lib/said.js";
import { server } from "../lib/server.js";
import { askState, buildOf, buildsOf, isOne, on, sameWorkflow, store, tell } from "../lib/store.js";
import { toast } from "../lib/toast.js";
import { t } from "../lib/words.js";
import { idsOf, workflowId } from "./graph.js";
import { cancelPrompt, endOf, queuedBuilds, signed } from "./queue.js";
import { sayEnd, sayResult } from "./results.js";

const DOUBLE_CLICK_MS = 1000; // a second click within it is no cancel
const LOOK_MS = 2000; // the queue says each change; this is for events that got lost
const PACE_MS = 500; // a graph of many outputs changes the queue's state often, and its answer holds whole prompts
const RESULT_MS = 700; // results of engines may come after the prompt's end
const RESULTS_MS = 3000; // and those of builds that were seen are waited for so long

const runs = new Set(); // at most one of a node
let looking = null;
let remaining = null; // prompts in ComfyUI's queue, as it last said

/**
 * The click's run of a node: `{phase: asking | queued | running | ending | over, estimate, message, result}`;
 * `heard`: the last result of an engine of this node, `built`: results of all engines that it made, by their ids,
 * `awaited`: ids of engines that were seen to be built for it and have no result yet.
 */
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
  const run = { ...facts, heard: null, built: new Map(), awaited: new Set() };
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
  const ended = going ? [going] : buildsOf(ids, workflowId()); // those of blocks all together
  await Promise.all(ended.map((build) => cancelBuild(build.id)));
}

async function cancelRun(run) {
  const { phase } = run;
  run.phase = "ending";
  tell("builds");
  try {
    await cancelPrompt(run.prompt);
  } catch (error) {
    if (run.phase === "ending") run.phase = phase; // it may be asked again
    tell("builds");
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
  const lookSoon = paced(() => (isLooking() ? lookNow() : adopt()), PACE_MS);
  api.addEventListener("status", ({ detail }) => {
    remaining = detail?.exec_info?.queue_remaining ?? remaining; // nothing is said while the server is away
    lookSoon();
  });
  on("result", noteResult);
  on("builds", noteBuilds);
  await adopt();
}

/** Takes up builds of another tab, or of this page before it was loaded again. */
export async function adopt() {
  if (remaining === 0) return;
  takeUp(await queuedBuilds().catch(() => []));
}

function takeUp(queue) {
  for (const item of queue) {
    const isKnown = (run) => run.prompt === item.prompt || (isGoing(run) && isOne(run, [item.node], item.workflow));
    if ([...runs].some(isKnown)) continue;
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
  if (!queue) return;
  takeUp(queue);
  await Promise.all(going.map((run) => follow(run, queue)));
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
  if (run.settling || !isGoing(run)) return;
  run.settling = true;
  try {
    await settled(run);
  } catch (error) {
    console.warn(`Slipstream: ${error.message}`); // an answer got lost: the next look asks again
  } finally {
    run.settling = false;
  }
}

async function settled(run) {
  const { status, message } = await endOf(run.prompt);
  const latest = Date.now() + RESULTS_MS;
  do await new Promise((resolve) => setTimeout(resolve, RESULT_MS));
  while (status === "success" && run.awaited.size && Date.now() < latest);
  if (status !== "success") return end(run, status === "error" ? "failed" : "cancelled", message);
  const state = await askState(run.node, run.workflow);
  if (state?.kind === "ready") return end(run, "done", "", state);
  return end(run, "without", state?.tip || state?.text || t("no_state"), state);
}

/** Remembers how a run ended and says it. */
function end(run, result, message, state = null) {
  Object.assign(run, { phase: "over", result, message: translated(message), over: Date.now() });
  tell("builds");
  sayEnd(run, state);
}

/** Remembers which engines are built for a click's prompt: a busy server tells of results long after they are there. */
function noteBuilds() {
  for (const run of runs) {
    const mine = store.builds.filter((build) => build.role !== "block" && build.nodes.length && mayBeOf(build, run));
    for (const build of mine) if (build.state === "running") run.awaited.add(build.id);
  }
}

/** What a click builds is said at its end, when it is known whether its node got an engine. */
function noteResult(result) {
  for (const run of runs) run.awaited.delete(result.id);
  const isOwn = (run) => result.nodes?.some((each) => isOne(each, [run.node], run.workflow));
  const own = [...runs].find((run) => isGoing(run) && isOwn(run));
  const mine = own ?? [...runs].find((run) => mayBeOf(result, run));
  const isOfBlock = result.role === "block"; // one of dozens: the node says how they are
  if (own && !isOfBlock) own.heard = result.result;
  if (mine && result.result === "built") mine.built.set(result.id, result);
  else if (!isOfBlock) sayResult(result);
}

/** Whether a click's prompt that runs may have built an engine of another node; a list of sizes names no node. */
function mayBeOf({ nodes }, run) {
  if (!["running", "ending"].includes(run.phase)) return false;
  return !nodes?.length || nodes.some((each) => sameWorkflow(each.workflow, run.workflow));
}
