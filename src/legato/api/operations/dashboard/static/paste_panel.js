/** The panel for pasting a long prompt: buttons, progress, pictures, the verdict. */

import { comparePastes, verdictOf } from "./experiment.js";
import { duration, integer } from "./format.js";
import { OwnStreams } from "./own_streams.js";
import { commonWindow, drawPaste } from "./pastes.js";

const NUM_PASSES = 3;
const TOLERATED = 1.25; // the verdict is on the longest gap, but a promise is for 99 of 100

const element = (id) => document.getElementById(id);

export class PastePanel {
  /** @param {LiveState} state that tells how far the prompt has come */
  constructor(state) {
    this.state = state;
    this.streams = new OwnStreams(() => this.#showStreams());
    this.aborter = null; // of the running pass
    this.pass = null; // the running one: {index, title, numTokens, requestId}
    this.results = [];
    element("paste").addEventListener("click", () => this.#paste());
    element("cancel").addEventListener("click", () => this.aborter.abort());
    element("streams").addEventListener("click", () => this.#toggleStreams());
  }

  /** Enables the buttons, as the server's context length is known now. */
  enable() {
    element("paste").disabled = false;
    element("streams").disabled = this.aborter !== null;
  }

  /** Draws the progress and the results. */
  show(palette) {
    if (this.pass) this.#showProgress();
    const windowS = commonWindow(this.results);
    this.results.forEach((result, i) => {
      drawPaste(element(`paste-${i}`), result, windowS, palette);
      element(`paste-${i}-title`).textContent = result.title;
      element(`paste-${i}-gap`).textContent = `longest gap ${duration(result.gapS)}`;
      element(`paste-${i}-ttft`).textContent = `TTFT ${duration(result.ttftS)}`;
    });
    const best = Math.min(...this.results.map(({ gapS }) => gapS));
    this.results.forEach(({ gapS, promiseS }, i) => {
      const most = promiseS === null ? 2 * best : TOLERATED * promiseS;
      element(`paste-${i}-gap`).classList.toggle("is-late", gapS > most);
    });
  }

  async #paste() {
    const maxModelLen = this.state.about.max_model_len;
    const wasRunning = this.streams.isRunning;
    this.streams.stop();
    this.streams.start(maxModelLen);
    this.aborter = new AbortController();
    this.results = [];
    this.#setBusy(true);
    try {
      this.#tell("Starting 8 streams …");
      const results = await comparePastes(this.streams, {
        maxModelLen,
        signal: this.aborter.signal,
        onStart: (pass) => { this.pass = pass; },
        onEnd: (result) => this.#take(result),
      });
      this.#tell(verdictOf(results));
    } catch (error) {
      const isCancelled = this.aborter.signal.aborted;
      this.#tell(isCancelled ? "Cancelled; the settings are as before." : error.message, !isCancelled);
    } finally {
      this.pass = this.aborter = null;
      if (!wasRunning) this.streams.stop();
      this.#setBusy(false);
    }
  }

  #take(result) {
    this.results.push(result);
    element("results").hidden = false;
    element(`paste-${this.results.length - 1}`).closest("figure").hidden = false;
  }

  #setBusy(isBusy) {
    element("paste").hidden = isBusy;
    element("cancel").hidden = !isBusy;
    element("progress").hidden = !isBusy;
    element("progress").value = 0;
    element("streams").disabled = isBusy;
    element("settings").closest("section").inert = isBusy; // it is put back
    if (!isBusy) return;
    element("results").hidden = true;
    for (const figure of element("results").children) figure.hidden = true;
    element("cancel").focus();
  }

  #showProgress() {
    const { index, title, numTokens, requestId } = this.pass;
    const stream = this.state.live.find(({ id }) => id.includes(requestId));
    const numComputed = Math.min(numTokens, stream?.numComputed ?? 0);
    const share = (numComputed + this.#numUnderWay(stream)) / numTokens;
    element("progress").value = (index + Math.min(1, share)) / NUM_PASSES;
    const told = stream ? `${integer(numComputed)} of ${integer(numTokens)} tokens` : "streams settle";
    this.#tell(`${index + 1} of ${NUM_PASSES}: ${title.toLowerCase()}, ${told} …`);
  }

  /** Estimates how many of a stream's tokens the running step has computed so far. */
  #numUnderWay(stream) {
    const step = this.state.runningSteps.find(({ prefills }) => prefills.has(stream?.id));
    if (!step?.predictedS) return 0;
    return step.prefills.get(stream.id) * Math.min(1, (this.state.nowS() - step.startS) / step.predictedS);
  }

  #toggleStreams() {
    if (this.streams.isRunning) this.streams.stop();
    else this.streams.start(this.state.about.max_model_len);
  }

  #showStreams() {
    const { isRunning, error } = this.streams;
    element("streams").textContent = isRunning ? "Stop the streams" : "Start 8 streams";
    element("streams").setAttribute("aria-pressed", String(isRunning));
    if (error) this.#tell(error.message, true);
  }

  #tell(text, isError = false) {
    const message = element("experiment-message");
    if (message.textContent !== text) message.textContent = text;
    message.classList.toggle("is-error", isError);
  }
}
