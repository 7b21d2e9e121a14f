/** The form of the server's settings: each change is sent at once. */

import { request } from "./api.js";
import { integer } from "./format.js";

const DURATIONS = new Set(["itl_slo_s", "tpot_slo_s", "ttft_slo_s"]);
const IN_EFFECT = "In effect from the next step on, for all.";

/** Change settings of the server, null giving back a default; returns all of them. */
export function changeSettings(changes, options) {
  return request("settings", { method: "PATCH", body: changes, ...options });
}

export class SettingsForm {
  /** @param {(settings: object) => void} onChange told what the server answers to a change */
  constructor(form, message, onChange) {
    this.form = form;
    this.message = message;
    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("change", async (event) => {
      const field = event.target;
      try {
        onChange(await changeSettings({ [field.name]: value(field) }));
        this.#tell(field, IN_EFFECT);
      } catch (error) {
        this.#tell(field, error.message, true);
      }
    });
  }

  /** Show settings as the server told them; what was not accepted stays to be corrected. */
  show({ asked, resolved, most_batched_tokens: most }) {
    for (const field of this.form.elements) {
      if (field.getAttribute("aria-invalid") === "true" || field === document.activeElement) continue;
      if (field.type === "checkbox") field.checked = asked[field.name];
      else if (DURATIONS.has(field.name)) field.value = asMs(asked[field.name]);
      else field.value = asked[field.name] ?? "";
    }
    const budget = this.form.elements.max_num_batched_tokens;
    budget.max = most;
    budget.placeholder = `auto: ${integer(resolved.max_num_batched_tokens)}`;
  }

  #tell(field, text, isError = false) {
    for (const other of this.form.elements) other.removeAttribute("aria-invalid");
    if (isError) field.setAttribute("aria-invalid", "true");
    if (field.type === "checkbox" && isError) {
      field.checked = !field.checked; // there is nothing else it could be corrected to
      field.removeAttribute("aria-invalid");
    }
    this.message.textContent = text;
    this.message.classList.toggle("is-error", isError);
  }
}

function value(field) {
  if (field.type === "checkbox") return field.checked;
  if (field.type !== "number") return field.value;
  if (field.validity.badInput) return field.value; // for the server to refuse
  if (field.value === "") return null;
  return DURATIONS.has(field.name) ? Number(field.value) / 1000 : Number(field.value);
}

function asMs(seconds) {
  return seconds === null ? "" : String(+(1000 * seconds).toFixed(3));
}
