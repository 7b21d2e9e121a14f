/** Requests to the page's own server, with an API key if it needs one. */

const KEY = "legato-api-key";

/** An error from the server. */
export class ApiError extends Error {
  constructor(status, message, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export function setKey(key) {
  sessionStorage.setItem(KEY, key);
}

/** Whether requests are made with a key. */
export function hasKey() {
  return Boolean(sessionStorage.getItem(KEY));
}

/**
 * @param {string} path below the server's root, without a leading slash
 * @param {{method?: string, body?: object, signal?: AbortSignal, keepalive?: boolean,
 *   requestId?: string}} [options]
 * @returns {Promise<Response>} rejects with an ApiError if the status is not 200
 */
async function send(path, { method = "GET", body, signal, keepalive, requestId } = {}) {
  const headers = {};
  const key = sessionStorage.getItem(KEY);
  if (key) headers.Authorization = `Bearer ${key}`;
  if (requestId) headers["X-Request-Id"] = requestId;
  if (body) headers["Content-Type"] = "application/json";
  const response = await fetch(new URL(path, document.baseURI), {
    method, headers, signal, keepalive, body: body && JSON.stringify(body), cache: "no-store",
  });
  if (response.ok) return response;
  const told = await response.json().catch(() => null);
  const error = told?.error;
  throw new ApiError(response.status, error?.message ?? response.statusText, error?.code);
}

/** Returns the JSON of the server's answer; options as in `send`. */
export async function request(path, options) {
  return (await send(path, options)).json();
}

/** Yields the data of server-sent events as parsed JSON; options as in `send`. */
export async function* events(path, options) {
  const response = await send(path, options);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (text + value).split("\n\n");
      text = parts.pop();
      for (const part of parts) {
        const data = part.replace(/^data: /, "");
        if (data === "[DONE]") return;
        yield JSON.parse(data);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
