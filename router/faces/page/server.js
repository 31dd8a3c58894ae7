// Sends requests to this page's own server, with the API key if there is one. The text of conversations is in bodies,
// never in addresses.

const KEY = "lockstep key";

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

/** An error reply of the server. */
export class HttpError extends Error {
  constructor(status, message, retryAfter) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

function headers(more) {
  const apiKey = key.get();
  return {...(apiKey ? {authorization: `Bearer ${apiKey}`} : {}), ...more};
}

async function toError(reply) {
  const text = await reply.text();
  let message = text;
  try {
    message = JSON.parse(text).error?.message ?? text;
  } catch {
    // The reply is not JSON: a proxy sent it.
  }
  return new HttpError(reply.status, message || `status ${reply.status}`, Number(reply.headers.get("retry-after-ms")) || 1000);
}

export async function get(path, signal) {
  const reply = await fetch(path, {headers: headers(), signal, cache: "no-store"});
  if (!reply.ok) throw await toError(reply);
  return reply.json();
}

export async function post(path, body, {signal, more = {}} = {}) {
  const reply = await fetch(path, {method: "POST", headers: headers({"content-type": "application/json", ...more}), body: JSON.stringify(body), signal});
  if (!reply.ok) throw await toError(reply);
  return reply;
}

/** The events of a stream: `{name, id, data}`. An event counts once its empty line has arrived. */
export async function* events(reply) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const {value, done} = await reader.read();
      if (done) return;
      rest += value;
      let from = 0;
      for (let end = rest.indexOf("\n\n"); end >= 0; end = rest.indexOf("\n\n", from)) {
        const event = parsed(rest.slice(from, end));
        from = end + 2;
        if (event) yield event;
      }
      rest = rest.slice(from);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function parsed(text) {
  const event = {name: "message", id: null, data: null};
  for (const line of text.split("\n")) {
    const colon = line.indexOf(":");
    if (colon <= 0) continue;
    const [field, value] = [line.slice(0, colon), line.slice(colon + 1).replace(/^ /, "")];
    if (field === "event") event.name = value;
    else if (field === "id") event.id = value;
    else if (field === "data") event.data = event.data === null ? value : `${event.data}\n${value}`;
  }
  return event.data === null ? null : event;
}

const pause = (ms, signal) => new Promise((resolve) => {
  const timer = setTimeout(resolve, ms);
  signal?.addEventListener("abort", () => (clearTimeout(timer), resolve()), {once: true});
});

/**
 * Watches `topics` until `signal` aborts, and reconnects when the stream ends. Calls `onEvent(name, data)` for
 * each event, and `onState(problem, hasEnded)` when the state of the connection changes.
 */
export async function watch(topics, onEvent, onState, signal) {
  let wait = 250;
  while (!signal.aborted) {
    try {
      const reply = await fetch(`events?of=${topics.join(",")}`, {headers: headers(), signal, cache: "no-store"});
      if (!reply.ok) throw await toError(reply);
      wait = 250;
      for await (const event of events(reply)) {
        if (event.name === "draining") onState("the server is shutting down");
        else if (event.name === "error") throw new HttpError(401, JSON.parse(event.data).error?.message ?? "the API key is no longer valid");
        else {
          onState(null);
          onEvent(event.name, JSON.parse(event.data));
        }
      }
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof HttpError && error.status < 500 && error.status !== 429) return onState(error.message, true);
      onState("the server does not respond: retrying");
    }
    await pause(wait, signal);
    wait = Math.min(wait * 2, 5000);
  }
}

export {pause};
