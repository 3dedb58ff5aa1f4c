// What the server last said about nodes and builds, and who wants to hear of changes.
import { api } from "./comfy.js";
import { Refused, server } from "./server.js";

const TICK_MS = 1000;
const listeners = new Map();
const states = new Map(); // node and workflow -> state
let ticking = null;

export const store = { builds: [], heard: 0, policy: "idle", system: null, savedMs: 0 };

/** Calls `listener` at each event of a topic: nodes, builds, engines, result, log. Returns how to stop it. */
export function on(topic, listener) {
  if (!listeners.has(topic)) listeners.set(topic, new Set());
  listeners.get(topic).add(listener);
  return () => listeners.get(topic).delete(listener);
}

export function tell(topic, data) {
  for (const listener of listeners.get(topic) ?? []) listener(data);
}

/** The state of a node by the ids that it goes by, in its workflow. */
export function stateOf(ids, workflow) {
  const known = ids.flatMap((id) => [...(states.get(id)?.values() ?? [])]);
  return known.findLast((state) => sameWorkflow(state.workflow, workflow)) ?? null;
}

/** All builds that a node waits for. */
export function buildsOf(ids, workflow) {
  return store.builds.filter((build) => build.nodes.some((each) => isOne(each, ids, workflow)));
}

/** The build that makes an engine for the whole of a node's model: one that runs before one that waits. */
export function buildOf(ids, workflow) {
  const mine = buildsOf(ids, workflow).filter((build) => build.role !== "block");
  return mine.find((build) => build.state === "running") ?? mine[0] ?? null;
}

/** Whether a node that the server names is the one with these ids. */
export function isOne(named, ids, workflow) {
  return ids.includes(String(named.node)) && sameWorkflow(named.workflow, workflow);
}

/** Whether two ids are of one workflow. One without an id was never queued by this page, so no other can be it. */
export function sameWorkflow(one, other) {
  return (one || null) === (other || null);
}

/** Seconds left of a build, going on between the server's reports. */
export function leftOf(build) {
  if (build.left_s === null || build.left_s === undefined) return null;
  return Math.max(0, build.left_s - (Date.now() - store.heard) / 1000);
}

/** Begins to listen and asks for what already is. */
export async function startStore() {
  api.addEventListener("slipstream.nodes", ({ detail }) => keepStates(detail));
  api.addEventListener("slipstream.builds", ({ detail }) => keepBuilds(detail));
  api.addEventListener("slipstream.engines", () => tell("engines"));
  api.addEventListener("slipstream.result", ({ detail }) => hearResult(detail));
  api.addEventListener("reconnected", refresh); // what happened meanwhile was not heard
  await refresh();
}

/** Asks for everything again. A server that cannot be asked leaves the page as it is. */
export async function refresh() {
  try {
    const [nodes, builds, system] = await Promise.all([server.nodes(), server.builds(), server.system()]);
    store.system = system;
    states.clear();
    keepStates(nodes);
    keepBuilds(builds);
    tell("engines");
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    console.warn(`Slipstream: ${error.message}`);
  }
}

/** The state of a node as the server knows it this moment; events of it may be under way still. */
export async function askState(id, workflow) {
  const { nodes, saved_ms } = await server.nodes();
  keepStates({ nodes: nodes.filter((each) => isOne(each, [id], workflow)), saved_ms });
  return stateOf([id], workflow);
}

/** A build that has ended changes how long the next is thought to take. */
async function hearResult(result) {
  tell("result", result);
  store.system = await server.system().catch(() => store.system);
  tell("builds");
}

function keepStates({ nodes, saved_ms: saved }) {
  store.savedMs = saved ?? store.savedMs;
  for (const state of nodes) {
    const id = String(state.node);
    if (!states.has(id)) states.set(id, new Map());
    const key = state.workflow ?? "";
    states.get(id).delete(key); // the newest goes last
    states.get(id).set(key, { ...state, heard: Date.now() });
  }
  tell("nodes");
}

function keepBuilds(report) {
  store.builds = report.builds;
  store.policy = report.policy;
  store.heard = Date.now();
  tell("builds");
  tick();
}

/** The time left goes on between reports, so whoever shows builds is called once a second while there are any. */
function tick() {
  if (store.builds.length && ticking === null) ticking = setInterval(() => tell("builds"), TICK_MS);
  if (!store.builds.length && ticking !== null) {
    clearInterval(ticking);
    ticking = null;
  }
}
