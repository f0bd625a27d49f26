// Requests to the server this page came from: JSON, and server-sent events of a streamed completion.

/** An answer of the server other than success, or no answer. Its texts come from the server: show them as text only. */
export class RequestError extends Error {
  constructor(title, message, { status = 0, detail = "" } = {}) {
    super(message);
    this.title = title;
    this.status = status;
    this.detail = detail;
  }
}

const TITLES = {
  400: "The server refused the request",
  401: "The server asks for an API key",
  413: "The request is too large",
  429: "The queue is full",
  503: "The server takes no requests now",
  504: "The request took too long",
};

/** A JSON document of the server. */
export async function getJson(path, key) {
  const response = await send(path, { headers: authorization(key) });
  return response.json();
}

/** Post a request and yield the JSON of its events, in batches of all that arrived at a time. */
export async function* streamEvents(path, body, { key, signal }) {
  const response = await send(path, {
    method: "POST",
    headers: { "Content-Type": "application/json", ...authorization(key) },
    body: JSON.stringify(body),
    signal,
  });
  const requestId = response.headers.get("X-Request-Id");
  let finished = false;
  for await (const lines of readLines(response.body)) {
    const events = [];
    for (const line of lines) {
      if (!line.startsWith("data:")) continue; // comments keep the connection open; blank lines end an event
      const data = line.slice(5).trim();
      if (data === "[DONE]") {
        finished = true;
        continue;
      }
      const event = JSON.parse(data);
      if (event.error) throw errorOf(0, event.error, { requestId, title: "The request failed" });
      events.push(event);
    }
    if (events.length) yield events;
  }
  if (!finished) throw new RequestError("The stream broke off", "The connection was closed before the text was whole.");
}

async function send(path, options) {
  let response;
  try {
    response = await fetch(path, { ...options, cache: "no-store", credentials: "same-origin" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new RequestError("No answer", "The server cannot be reached. Is it still running?");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  let error = {};
  try {
    error = (await response.json()).error ?? {};
  } catch {
    // Something in front of the server answered; the status must do.
  }
  return errorOf(response.status, error, {
    requestId: response.headers.get("X-Request-Id"),
    retryAfter: response.headers.get("Retry-After"),
  });
}

function errorOf(status, error, { requestId, retryAfter, title } = {}) {
  const detail = [
    status ? `HTTP ${status}` : "",
    error.code ? `code ${error.code}` : "",
    error.param ? `parameter ${error.param}` : "",
    retryAfter ? `try again in ${retryAfter} s` : "",
    requestId ? `request ${requestId}` : "",
  ];
  return new RequestError(title ?? TITLES[status] ?? "The request failed", String(error.message ?? "No reason was given."), {
    status,
    detail: detail.filter(Boolean).join(" · "),
  });
}

function authorization(key) {
  return key ? { Authorization: `Bearer ${key}` } : {};
}

/** Whole lines of a stream of bytes, all that arrived at a time. */
async function* readLines(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split(/\r?\n/);
      rest = lines.pop();
      if (lines.length) yield lines;
    }
  } finally {
    reader.cancel().catch(() => {}); // leaving early closes the connection, and the server frees the row
  }
}
