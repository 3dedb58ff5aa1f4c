// ComfyUI's queue: which of its prompts builds engines, and how one ended.
import { api } from "../lib/comfy.js";

const END = "SlipstreamDryRunEnd";
const ASK_AGAIN_MS = 250;
const ASKED_TIMES = 8;

/** Where the node of a click is written, so that another tab and a reloaded page know it. */
export function signed(workflow, node) {
  return { ...workflow, extra: { ...workflow.extra, slipstream_build: node } };
}

/** The prompts in the queue that build: `{prompt, node, workflow, running}`. */
export async function queuedBuilds() {
  const queue = await json("/queue");
  return [...items(queue.queue_running, true), ...items(queue.queue_pending, false)];
}

function items(list, running) {
  return list.filter((item) => builds(item[2])).map((item) => ({ ...described(item), running }));
}

function builds(prompt) {
  return Object.values(prompt ?? {}).some((node) => node.class_type === END);
}

function described([, prompt, , extra]) {
  const workflow = extra?.extra_pnginfo?.workflow;
  return { prompt, node: workflow?.extra?.slipstream_build ?? null, workflow: workflow?.id ?? null };
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

function post(path, body) {
  return api.fetchApi(path, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
  });
}

async function json(path) {
  return (await api.fetchApi(path, { cache: "no-store" })).json();
}
