// Small helpers to make elements.

/** An element. Properties named on… are listeners; `class`, `data-…` and `aria-…` are attributes. */
export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) give(element, name, value);
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

function give(element, name, value) {
  if (value === undefined || value === null || value === false) return;
  if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
  else if (name in element && !name.startsWith("aria")) element[name] = value;
  else element.setAttribute(name, value === true ? "" : value);
}

/** A PrimeIcon that says nothing to screen readers. */
export function icon(name, more = "") {
  return h("i", { class: `pi pi-${name} ${more}`.trim(), "aria-hidden": "true" });
}

/** A button with an icon, a text, or both; one without text needs a `title`, which is also read out. */
export function button({ symbol, text, title, kind = "", key, onclick, disabled = false, pressed }) {
  return h(
    "button",
    {
      type: "button",
      class: `slipstream-button ${kind} ${text ? "" : "only-icon"}`.trim(),
      title,
      "aria-label": text ? undefined : title,
      "aria-pressed": pressed === undefined ? undefined : String(pressed),
      "data-key": key,
      disabled,
      onclick,
    },
    symbol ? icon(symbol) : null,
    text ? h("span", {}, text) : null,
  );
}

/** A progress bar; `set(null)` shows that work goes on without saying how far it is. */
export function progressBar(label) {
  const fill = h("div", { class: "slipstream-bar-fill" });
  const element = h("div", { class: "slipstream-bar", role: "progressbar", "aria-label": label }, fill);
  const set = (fraction) => {
    const known = fraction !== null && fraction !== undefined;
    element.classList.toggle("unknown", !known);
    fill.style.width = known ? `${Math.min(100, Math.max(0, fraction * 100))}%` : "";
    if (known) element.setAttribute("aria-valuenow", String(Math.round(fraction * 100)));
    else element.removeAttribute("aria-valuenow");
  };
  return { element, set };
}

/** Replaces what an element holds and keeps the keyboard where it was, by `data-key`. */
export function replace(element, ...children) {
  const key = element.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
  element.replaceChildren(...children.flat().filter(Boolean));
  if (key) element.querySelector(`[data-key="${CSS.escape(key)}"]`)?.focus();
}

/** Sets a text only where it differs, so that a selection and screen readers are left alone. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Loads the pack's style sheet once. */
export function loadStyle() {
  if (document.getElementById("slipstream-style")) return;
  const href = new URL("../style.css", import.meta.url).href;
  document.head.append(h("link", { id: "slipstream-style", rel: "stylesheet", href }));
}
