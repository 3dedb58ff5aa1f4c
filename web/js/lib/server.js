// The pack's routes; docs/web-api.md describes them.
import { api } from "./comfy.js";
import { translated } from "./said.js";
import { t } from "./words.js";

const ROOT = "/slipstream/v1";

/** The server said no; the message says what to do. */
export class Refused extends Error {
  constructor(code, message) {
    super(message);
    this.code = code;
  }
}

async function ask(path, body) {
  let answer;
  try {
    answer = await api.fetchApi(ROOT + path, body === undefined ? { cache: "no-store" } : posted(body));
  } catch {
    throw new Refused("unreachable", t("unreachable"));
  }
  const data = await answer.json().catch(() => null);
  if (answer.ok && data) return data;
  const message = data?.error?.message ?? `${answer.status} ${answer.statusText}`;
  throw new Refused(data?.error?.code ?? "failed", translated(message));
}

function posted(body) {
  return { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
}

export const server = {
  engines: () => ask("/engines"),
  engine: (digest) => ask(`/engines/${digest}`),
  verify: (digest) => ask(`/engines/${digest}/verify`, {}),
  tryAgain: (digest) => ask(`/engines/${digest}/try_again`, {}),
  verifyAll: () => ask("/engines/verify", {}),
  remove: (digest) => ask(`/engines/${digest}/delete`, {}),
  adopt: (digests) => ask("/engines/adopt", { digests }),
  prune: (limit) => ask("/engines/prune", { limit_bytes: limit }),
  models: (sizes) => ask(`/models?sizes=${encodeURIComponent(sizes)}`),
  buildFor: (model, width, height) => ask("/models/build", { model, width, height }),
  builds: () => ask("/builds"),
  cancel: (digest) => ask(`/builds/${digest}/cancel`, {}),
  nodes: () => ask("/nodes"),
  dryRun: (prompt, node) => ask("/dry-run", { prompt, node }),
  log: (after) => ask(`/log?after=${after}`),
  settings: () => ask("/settings"),
  change: (settings) => ask("/settings", settings),
  system: () => ask("/system"),
  foreseeSkips: (query) => ask(`/step-skip?${new URLSearchParams(query)}`),
  openPage: () => ask("/ui", {}),
};
