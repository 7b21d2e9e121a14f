/** A chat with the server's model. Nothing of it is kept: a reload begins anew. */

import { events, request, setKey } from "../dashboard/api.js";
import { duration, integer } from "../dashboard/format.js";

const UNAUTHORIZED = 401;

const element = (id) => document.getElementById(id);
const [conversation, question, note] = ["conversation", "question", "note"].map(element);
const messages = []; // {role, content} so far
let model = null;
let aborter = null; // of the answer that comes

function add(kind, text = "", parent = conversation, tag = "div") {
  const node = document.createElement(tag);
  node.className = kind;
  node.textContent = text;
  parent.append(node);
  return node;
}

/** Shows an answer as it comes: thoughts folded, then text, then how fast it came. */
class Answer {
  constructor() {
    this.block = add("turn");
    this.thoughts = null;
    this.body = add("answer", "", this.block);
    this.startMs = performance.now();
    this.firstMs = null;
    this.usage = null;
    this.reason = null;
  }

  take(event) {
    if (event.error) throw new Error(event.error.message);
    if (event.usage) this.usage = event.usage;
    for (const { delta, finish_reason: reason } of event.choices) {
      if (delta.reasoning_content) this.#think(delta.reasoning_content);
      if (delta.content) this.body.append(delta.content);
      if (delta.content || delta.reasoning_content) this.firstMs ??= performance.now();
      this.reason = reason ?? this.reason;
    }
    conversation.scrollTo(0, conversation.scrollHeight);
  }

  #think(text) {
    if (!this.thoughts) {
      const box = document.createElement("details");
      box.className = "thinking";
      add("", "Thinking", box, "summary");
      this.thoughts = add("answer", "", box);
      this.block.prepend(box);
    }
    this.thoughts.append(text);
  }

  end(isStopped) {
    const endMs = performance.now();
    const parts = [];
    if (this.firstMs !== null) {
      parts.push(`first token after ${duration((this.firstMs - this.startMs) / 1000)}`);
    }
    const count = this.usage?.completion_tokens;
    if (count) {
      parts.push(`${integer(count)} tokens`);
      const gapS = (endMs - this.firstMs) / 1000 / Math.max(1, count - 1);
      if (count > 1) parts.push(`${duration(gapS)} each`, `${integer(1 / gapS)} a second`);
      const cached = this.usage.prompt_tokens_details?.cached_tokens;
      const prompt = `prompt of ${integer(this.usage.prompt_tokens)}`;
      parts.push(cached ? `${prompt}, ${integer(cached)} of them cached` : prompt);
    }
    if (isStopped) parts.push("stopped");
    if (this.reason === "length") parts.push("cut at its longest");
    add("timings", parts.join(" · "), this.block, "p");
    return this.body.textContent;
  }
}

async function ask(text) {
  const own = new AbortController();
  aborter = own;
  showState();
  say("");
  messages.push({ role: "user", content: text });
  add("question", text);
  const answer = new Answer();
  let isWhole = true;
  const body = { model, messages, stream: true, stream_options: { include_usage: true } };
  try {
    const options = { method: "POST", body, signal: own.signal };
    for await (const event of events("v1/chat/completions", options)) answer.take(event);
  } catch (error) {
    if (!own.signal.aborted) {
      isWhole = false;
      explain(error);
      question.value ||= text; // to be sent again
    }
  }
  if (aborter !== own) return; // the chat was begun anew
  aborter = null;
  const content = answer.end(own.signal.aborted);
  if (isWhole && content) messages.push({ role: "assistant", content });
  else messages.pop();
  showState();
}

/** Shows an error; asks for a key, if that is what lacks. */
function explain(error) {
  say(error instanceof TypeError ? "no answer from the server" : error.message, true);
  if (error.status !== UNAUTHORIZED) return;
  element("key-button").hidden = false;
  if (!element("key-dialog").open) element("key-dialog").showModal();
}

function say(text, isError = false) {
  note.textContent = text;
  note.classList.toggle("is-error", isError);
}

function showState() {
  element("send").disabled = aborter !== null || model === null;
  element("stop").disabled = aborter === null;
}

async function begin() {
  try {
    model = (await request("v1/models")).data[0].id;
    element("model").textContent = model;
    say("");
    question.focus();
  } catch (error) {
    explain(error);
  }
  showState();
}

element("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = question.value.trim();
  if (!text || aborter || model === null) return;
  question.value = "";
  ask(text);
});
question.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  element("ask").requestSubmit();
});
element("stop").addEventListener("click", () => aborter?.abort());
element("reset").addEventListener("click", () => {
  aborter?.abort();
  aborter = null;
  messages.length = 0;
  conversation.replaceChildren();
  say("");
  showState();
  question.focus();
});
element("key-button").addEventListener("click", () => element("key-dialog").showModal());
element("key-form").addEventListener("submit", () => {
  setKey(element("key").value);
  element("key").value = "";
  begin();
});
begin();
