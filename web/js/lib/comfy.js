// ComfyUI's own modules, named in one place because their path depends on the folder of who asks.
export { api } from "../../../scripts/api.js";
export { app } from "../../../scripts/app.js";
