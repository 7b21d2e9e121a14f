/** The form of the server's settings: each change is sent at once, and can be undone. */

import { request } from "./api.js";
import { integer } from "./format.js";

const DURATIONS = new Set(["itl_slo_s", "tpot_slo_s", "ttft_slo_s"]);
const IN_EFFECT = "In effect from the next step on, for all.";

/** Changes settings of the server; null restores a default. Returns all settings. */
export function changeSettings(changes, options) {
  return request("settings", { method: "PATCH", body: changes, ...options });
}

export class SettingsForm {
  /**
   * @param {{form, message, undo, copy: HTMLElement}} parts
   * @param {(settings: object) => void} onChange called with the server's answer to a change
   */
  constructor({ form, message, undo, copy }, onChange) {
    Object.assign(this, { form, message, undoButton: undo, onChange });
    this.asked = null; // the server's settings, without values that it refused
    this.flags = "";
    this.before = []; // the values that this page's changes replaced, the latest last
    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("change", (event) => this.#change(event.target));
    undo.addEventListener("click", () => this.#undo());
    copy.addEventListener("click", () => this.#copy());
  }

  /** Shows the server's settings; a refused value stays, to be corrected. */
  show({ asked, resolved, most_batched_tokens: most }, flags = this.flags) {
    this.asked = asked;
    this.flags = flags;
    for (const field of this.form.elements) {
      if (field.getAttribute("aria-invalid") === "true" || field === document.activeElement) continue;
      this.#fill(field);
    }
    const budget = this.form.elements.max_num_batched_tokens;
    budget.max = most;
    budget.placeholder = `auto: ${integer(resolved.max_num_batched_tokens)}`;
  }

  #fill(field) {
    if (field.type === "checkbox") field.checked = this.asked[field.name];
    else if (DURATIONS.has(field.name)) this.#fillDuration(field, this.asked[field.name]);
    else field.value = this.asked[field.name] ?? "";
  }

  /** Shows a word in place of a duration, as of --itl-slo, as what an empty field stands for. */
  #fillDuration(field, value) {
    field.value = typeof value === "number" ? String(+(1000 * value).toFixed(3)) : "";
    if (typeof value === "string") field.placeholder = value;
  }

  async #change(field) {
    const before = { [field.name]: this.asked[field.name] };
    try {
      this.onChange(await changeSettings({ [field.name]: value(field) }));
      this.before.push(before);
      this.#tell(IN_EFFECT);
    } catch (error) {
      this.#tell(error.message, field);
    }
    this.#offerUndo();
  }

  async #undo() {
    const refused = this.form.querySelector("[aria-invalid=true]");
    if (refused) {
      this.#fill(refused);
      this.#tell(IN_EFFECT);
    } else {
      const changes = this.before.pop();
      try {
        const settings = await changeSettings(changes);
        this.onChange(settings);
        this.#tell("Undone.");
      } catch (error) {
        this.before.push(changes);
        this.#tell(error.message, this.form.elements[Object.keys(changes)[0]]);
      }
    }
    this.#offerUndo();
  }

  #offerUndo() {
    const isRefused = this.form.querySelector("[aria-invalid=true]") !== null;
    this.undoButton.disabled = !this.before.length && !isRefused;
  }

  async #copy() {
    if (!this.flags) {
      this.#tell("All is as by default: no flags are needed.");
      return;
    }
    const code = document.createElement("code");
    code.textContent = this.flags;
    this.#tell("");
    this.message.append("Flags of legato serve: ", code);
    getSelection().selectAllChildren(code);
    // Only pages from this machine, or over TLS, can copy; on others the text is selected.
    await navigator.clipboard?.writeText(this.flags).then(
      () => this.message.append(" (copied)"), () => {});
  }

  /** Shows a message. Args: `refused`: the field whose value was refused, if any. */
  #tell(text, refused = null) {
    for (const field of this.form.elements) field.removeAttribute("aria-invalid");
    if (refused?.type === "checkbox") this.#fill(refused); // else it could not be corrected
    else refused?.setAttribute("aria-invalid", "true");
    this.message.textContent = text;
    this.message.classList.toggle("is-error", refused !== null);
  }
}

function value(field) {
  if (field.type === "checkbox") return field.checked;
  if (field.type !== "number") return field.value;
  if (field.validity.badInput) return field.value; // the server refuses it
  if (field.value === "") return null;
  return DURATIONS.has(field.name) ? Number(field.value) / 1000 : Number(field.value);
}
