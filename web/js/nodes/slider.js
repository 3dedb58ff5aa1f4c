// Two pictures in one place, with a line between them that follows the pointer.
import { api } from "../lib/comfy.js";
import { h } from "../lib/dom.js";
import { t } from "../lib/words.js";

const HEIGHT = 180;
const TOLD = "slipstream_ab"; // by Compare Images: the picture and its reference
const STEP = 0.05; // of a key

/** Adds the slider to Compare Images; it is there once the node has run. */
export function addSlider(node) {
  if (node.comfyClass !== "SlipstreamCompareImages") return;
  const slider = makeSlider();
  const widget = node.addDOMWidget("slipstream_slider", "slipstream_slider_area", slider.element, {
    serialize: false,
    getMinHeight: () => HEIGHT,
    getValue: () => "",
    setValue: () => {},
  });
  widget.serialize = false; // not part of the workflow
  const executed = node.onExecuted;
  node.onExecuted = function (message) {
    executed?.apply(this, arguments);
    if (message?.[TOLD]?.length === 2) slider.show(...message[TOLD].map(addressOf));
  };
}

function addressOf({ filename, subfolder, type }) {
  return api.apiURL(`/view?${new URLSearchParams({ filename, subfolder: subfolder ?? "", type })}`);
}

function makeSlider() {
  const [image, reference] = ["slipstream-ab-image", "slipstream-ab-reference"].map((kind) =>
    h("img", { class: kind, draggable: false, alt: "" }),
  );
  const line = h("div", { class: "slipstream-ab-line" });
  const words = [h("span", {}, t("ab_image")), h("span", {}, t("ab_reference"))];
  const stage = h("div", { class: "slipstream-ab-stage" }, reference, image, line);
  const names = h("div", { class: "slipstream-ab-names" }, words);
  const element = h(
    "div",
    {
      class: "slipstream-ab",
      tabIndex: 0,
      role: "slider",
      "aria-label": t("ab"),
      "aria-valuemin": 0,
      "aria-valuemax": 100,
    },
    stage,
    names,
  );
  let at = 0.5;

  function put(share) {
    at = Math.min(1, Math.max(0, share));
    image.style.clipPath = `inset(0 ${100 * (1 - at)}% 0 0)`;
    line.style.left = `${100 * at}%`;
    element.setAttribute("aria-valuenow", String(Math.round(100 * at)));
  }

  stage.addEventListener("pointermove", (event) => {
    const { left, width } = stage.getBoundingClientRect();
    if (width) put((event.clientX - left) / width);
  });
  element.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -STEP, ArrowRight: STEP }[event.key];
    if (by) put(at + by);
    if (by) event.stopPropagation();
  });
  reference.addEventListener("load", () => {
    stage.style.setProperty("--slipstream-ratio", `${reference.naturalWidth} / ${reference.naturalHeight}`);
  });
  put(at);
  element.classList.add("empty");
  const show = (imageUrl, referenceUrl) => {
    element.classList.remove("empty");
    [image.src, reference.src] = [imageUrl, referenceUrl];
  };
  return { element, show };
}
