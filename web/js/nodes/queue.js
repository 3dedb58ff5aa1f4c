// ComfyUI's queue: which of its prompts a click asked for, and how one ended.
import { api } from "../lib/comfy.js";

const MARK = "slipstream_build";
const ASK_AGAIN_MS = 250;
const ASKED_TIMES = 8;

/** The queued copy of a workflow names the click's node, so that another tab and a reloaded page know it. */
export function signed(workflow, node) {
  return { ...workflow, extra: { ...workflow.extra, [MARK]: node } };
}

/** A workflow that comes from such a copy, out of the history say, is an ordinary one again. */
export function unsign(workflow) {
  if (workflow?.extra) delete workflow.extra[MARK];
}

/** The prompts of clicks that wait or run: `{prompt, node, workflow, running}`. */
export async function queuedBuilds() {
  const queue = await json("/queue");
  return [...items(queue.queue_running, true), ...items(queue.queue_pending, false)];
}

function items(list, running) {
  return list.map((item) => ({ ...described(item), running })).filter((item) => item.node);
}

function described([, prompt, , extra]) {
  const workflow = extra?.extra_pnginfo?.workflow;
  return { prompt, node: workflow?.extra?.[MARK] ?? null, workflow: workflow?.id ?? null };
}

/** How a prompt that left the queue ended: `{status: "success" | "error" | "cancelled", message}`. */
export async function endOf(prompt) {
  for (let asked = 0; asked < ASKED_TIMES; asked += 1) {
    const entry = (await json(`/history/${prompt}`))[prompt];
    if (entry?.status) return ended(entry.status);
    await new Promise((resolve) => setTimeout(resolve, ASK_AGAIN_MS)); // the history can lag behind the queue
  }
  return { status: "cancelled", message: "" }; // it was taken out of the queue before it ran
}

function ended(status) {
  const messages = new Map(status.messages ?? []);
  if (status.status_str === "success") return { status: "success", message: "" };
  const error = messages.get("execution_error");
  if (!error) return { status: "cancelled", message: "" };
  return { status: "error", message: error.exception_message?.trim() || error.exception_type };
}

/** Takes a prompt out of the queue, or interrupts it: whichever it is by now. */
export async function cancelPrompt(prompt) {
  await post("/queue", { delete: [prompt] });
  await post("/interrupt", { prompt_id: prompt });
}

async function post(path, body) {
  const headers = { "Content-Type": "application/json" };
  const answer = await api.fetchApi(path, { method: "POST", headers, body: JSON.stringify(body) });
  if (!answer.ok) throw new Error(`${answer.status} ${answer.statusText}`);
}

async function json(path) {
  return (await api.fetchApi(path, { cache: "no-store" })).json();
}
