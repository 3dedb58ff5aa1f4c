// A button that is out of use while what it asked for is done.
import { toast } from "../lib/toast.js";
import { t } from "../lib/words.js";

/** Does `work`; a refusal is told. */
export async function busy(target, work) {
  target.disabled = true;
  target.setAttribute("aria-busy", "true");
  try {
    await work();
  } catch (error) {
    toast("error", t("refused"), error.message, { asked: true });
  } finally {
    target.disabled = false;
    target.removeAttribute("aria-busy");
  }
}
