// How builds ended, as notices.
import { duration, speed } from "../lib/format.js";
import { translated } from "../lib/said.js";
import { toast } from "../lib/toast.js";
import { t } from "../lib/words.js";

/** Says how a click ended, unless a result of its node's engine has said it already. */
export function sayEnd(run, state) {
  if (run.heard === run.result || (run.heard === "failed" && run.result === "without")) return;
  const made = run.built.size ? t("engines_built", { n: run.built.size }) : "";
  if (run.result === "failed") toast("error", t("build_failed"), run.message);
  if (run.result === "cancelled") toast("info", t("build_cancelled"), made);
  if (run.result === "without") toast("warn", t("build_without"), joined(run.message, made));
  const ready = () => joined(state.tip, madeFor(run, state), speed(state));
  if (run.result === "done") toast("success", t("engine_built"), ready());
}

/** Says how a build ended that no click waits for. */
export function sayResult(result) {
  const { label, seconds, message } = result;
  if (result.result === "failed") return toast("error", t("build_failed"), `${label}: ${translated(message)}`);
  if (result.result === "cancelled") return toast("info", t("build_cancelled"), label);
  return toast("success", t("engine_built"), joined(label, t("took", { time: duration(seconds) })));
}

function madeFor({ built }, { digest }) {
  if (!built.size) return t("there_already");
  const [first] = built.values();
  if (built.size === 1 && first.id === digest) return t("took", { time: duration(first.seconds) });
  return t("engines_built", { n: built.size });
}

function joined(...parts) {
  return parts.filter(Boolean).join(" · ");
}
