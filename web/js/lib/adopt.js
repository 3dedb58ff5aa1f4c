// Engines that no maker's key vouches for: a person says, once, that they are to be loaded.
import { app } from "./comfy.js";
import { bytes, when } from "./format.js";
import { server } from "./server.js";
import { toast } from "./toast.js";
import { t } from "./words.js";

const LISTED = 8; // engines that a question names one by one

/** Those of GET /engines that a person may vouch for. */
export function adoptable({ engines }) {
  return engines.filter((engine) => engine.adoptable);
}

/** Asks about engines of the store in `folder`, and has them trusted. Whether it was done; a refusal is thrown. */
export async function adopt(engines, folder) {
  const [n, from] = [engines.length, (origin) => engines.filter((engine) => engine.adoptable === origin).length];
  const parts = ["unsigned", "elsewhere"].map((origin) => [origin, from(origin)]).filter(([, count]) => count);
  const origins = parts.map(([origin, count]) => t(`adopt_${origin}`, { n: count })).join(" ");
  const rest = n > LISTED ? [t("adopt_more", { n: n - LISTED })] : [];
  const sure = await app.extensionManager.dialog.confirm({
    title: t("adopt_title", { n }),
    message: [t("adopt_sure", { n, folder }), origins].join(" "),
    itemList: [...engines.slice(0, LISTED).map(named), ...rest],
    hint: t("adopt_hint"),
  });
  if (!sure) return false;
  await server.adopt(engines.map((engine) => engine.digest));
  toast("success", t("adopted", { n }), t("tried_again"), { asked: true });
  return true;
}

function named(engine) {
  return [engine.label, engine.resolution, bytes(engine.bytes), when(engine.created), engine.digest.slice(0, 12)]
    .filter(Boolean)
    .join(" · ");
}
