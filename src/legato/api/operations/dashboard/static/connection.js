/** Keeps the stream of updates connected, and shows the connection's state. */

import { ApiError, events, hasKey, setKey } from "./api.js";
import { age, counted } from "./format.js";

const RETRY_MS = 1000;
const SILENT_S = 4; // without an update, though the server sends one each second
const UNAUTHORIZED = 401;
const NO_ADMINS_KEY = "admin_key_required";
const SHUTTING_DOWN = "shutting_down";

/** Attributes: `isLive`: whether the page is up to date. */
export class Connection {
  /**
   * @param {{box, text, button, dialog, dialogText, form, cancel: HTMLElement}} parts
   * @param {(update: object) => void} onUpdate given each
   */
  constructor(parts, onUpdate) {
    Object.assign(this, parts);
    this.onUpdate = onUpdate;
    this.isLive = false;
    this.heardMs = null; // when the last update came
    this.isDraining = false;
    this.button.addEventListener("click", () => this.dialog.showModal());
    this.cancel.addEventListener("click", () => this.dialog.close());
    this.form.addEventListener("submit", () => {
      setKey(this.form.elements.key.value);
      this.form.elements.key.value = "";
    });
    setInterval(() => this.#listenFor(), RETRY_MS);
  }

  /** Follows the server while the page is open. */
  async follow() {
    for (;;) {
      try {
        for await (const update of events("dashboard/events")) this.#take(update);
        this.#show(this.isDraining ? "the server has drained and ends" : "reconnecting", false);
      } catch (error) {
        const isKeyWanted = error.status === UNAUTHORIZED || error.code === NO_ADMINS_KEY;
        if (error instanceof ApiError && isKeyWanted) {
          await this.#askForKey(error.code === NO_ADMINS_KEY ? "--admin-api-key" : "--api-key");
          continue;
        }
        this.#show(this.#reason(error), false);
      }
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    }
  }

  #take(update) {
    this.heardMs = performance.now();
    this.isDraining = update.is_draining;
    this.onUpdate(update);
    if (update.is_draining) {
      this.#show(`draining: ${counted(update.num_in_flight, "request")} left, no more taken`, true);
    } else if (update.trouble) {
      this.#show("no engine just now", false);
    } else {
      this.#show(update.num_dropped ? `live, ${update.num_dropped} records lost` : "live", true);
    }
  }

  #reason(error) {
    if (!(error instanceof ApiError)) {
      console.info(error.message);
      return `no answer from the server${this.#since()}; trying again`;
    }
    if (error.code === SHUTTING_DOWN) return "draining: the server takes no more requests";
    return `${error.message} (${error.status})`;
  }

  #since() {
    if (this.heardMs === null) return "";
    return ` for ${age((performance.now() - this.heardMs) / 1000)}`;
  }

  /** Detects a silent server: its connection may be open although it, or the network, is gone. */
  #listenFor() {
    const silentS = (performance.now() - this.heardMs) / 1000;
    if (this.isLive && silentS > SILENT_S) {
      this.#show(`nothing heard of the server for ${age(silentS)}`, false);
    }
  }

  /** Resolves once the user has entered a key; `flag` names the kind of key. */
  async #askForKey(flag) {
    this.#show(hasKey() ? "wrong API key" : "waiting for an API key", false);
    this.button.hidden = false;
    this.dialogText.textContent = hasKey()
      ? `This key is none that the dashboard may be used with (${flag}).`
      : `This server asks for a key (${flag}). It is kept until this tab is closed.`;
    this.dialogText.classList.toggle("is-error", hasKey());
    if (!this.dialog.open) this.dialog.showModal();
    await new Promise((resolve) => {
      this.form.addEventListener("submit", resolve, { once: true });
    });
  }

  #show(text, isLive) {
    this.isLive = isLive;
    if (this.text.textContent !== text) this.text.textContent = text;
    this.box.classList.toggle("is-live", isLive);
    document.body.classList.toggle("is-stale", !isLive);
  }
}
