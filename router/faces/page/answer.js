// Streams one answer, resumes it after a lost connection, and requests it a second time to compare both.

import {HttpError, events, pause, post} from "./server.js";

const PATH = "v1/chat/completions";
/** A stream fails after more than this many lost connections in a row without an event between them. */
const TRIES_MAX = 30;

/**
 * Streams into `turn`. It can be stored at any time and continued later: `turn.last` is the id of its last event.
 * Calls `onChange` after each change.
 */
export async function stream(turn, body, onChange, signal) {
  let tries = 0;
  turn.times ??= {sent: Date.now()};
  while (!turn.over) {
    const lastBefore = turn.last;
    try {
      const more = turn.last ? {"last-event-id": turn.last} : {};
      const sent = {...body, stream: true, stream_options: {include_usage: true}, return_progress: true};
      const reply = await post(PATH, sent, {signal, more});
      turn.seed = reply.headers.get("x-lockstep-seed") ?? turn.seed;
      turn.policy = reply.headers.get("x-lockstep-policy-digest") ?? turn.policy;
      turn.prompt = reply.headers.get("x-lockstep-prompt-hash") ?? turn.prompt;
      turn.broken = null;
      onChange();
      for await (const event of events(reply)) applyEvent(turn, event, onChange);
      if (!turn.over) turn.broken = "connection lost: reconnecting";
    } catch (error) {
      if (signal.aborted) {
        turn.over = "stopped";
        break;
      }
      if (error instanceof HttpError && ![401, 429, 500, 502, 503, 504].includes(error.status)) {
        turn.over = "failed";
        turn.broken = error.message;
        break;
      }
      if (error instanceof HttpError && (error.status === 401 || !turn.last)) {
        turn.over = "failed";
        turn.broken = error.message;
        break;
      }
      turn.broken = error instanceof HttpError ? error.message : "the server does not respond: retrying";
    }
    if (turn.over) break;
    tries = turn.last === lastBefore ? tries + 1 : 0;
    if (tries > TRIES_MAX) {
      turn.over = "failed";
      break;
    }
    onChange();
    await pause(Math.min(100 * 2 ** tries, 3000), signal);
    if (signal.aborted) turn.over = "stopped";
  }
  onChange();
}

function applyEvent(turn, event, onChange) {
  if (event.data === "[DONE]") {
    turn.over ??= "ended";
    return onChange();
  }
  const chunk = JSON.parse(event.data);
  if (chunk.error) {
    turn.broken = chunk.error.message;
    // An `invalid_request_error` (an expired key or deadline) is final, and so is any error before the first event. After
    // other errors the answer is resumed.
    if (!turn.last || ["invalid_request_error"].includes(chunk.error.type)) turn.over = "failed";
    return onChange();
  }
  turn.answer = chunk.id ?? turn.answer;
  turn.model = chunk.model ?? turn.model;
  // Progress through the prompt, until the first token.
  turn.progress = chunk.prompt_progress ?? null;
  for (const choice of chunk.choices ?? []) {
    turn.text += choice.delta?.content ?? "";
    turn.thought += choice.delta?.reasoning_content ?? choice.delta?.reasoning ?? "";
    for (const part of choice.delta?.tool_calls ?? []) addCall(turn.calls, part);
    turn.ids.push(...(choice.token_ids ?? []));
    turn.tokens.push(...(choice.logprobs?.content ?? []));
    if (choice.finish_reason) turn.reason = choice.finish_reason;
    if (choice.certificate) turn.certificate = choice.certificate;
  }
  if (chunk.usage) turn.usage = chunk.usage;
  if (chunk.timings) turn.timings = chunk.timings;
  if (turn.ids.length) {
    turn.times.first ??= Date.now();
    turn.times.last = Date.now();
  }
  // `last` moves only here: after an earlier break the resumed stream repeats this event.
  if (event.id) turn.last = event.id;
  onChange();
}

function addCall(calls, {index, id, function: of}) {
  calls[index] ??= {id, name: "", arguments: ""};
  calls[index].name += of?.name ?? "";
  calls[index].arguments += of?.arguments ?? "";
}

/** An answer that has not begun. If the request continues a text, the answer begins with that text. */
export const blank = (parent, request) => ({role: "assistant", parent, text: request?.continued ?? "", thought: "", calls: [], ids: [], tokens: [], request, over: null, last: null, broken: null});

/** Requests the same answer again with the same seed, and compares it token by token. */
export async function repeat(turn, body, signal) {
  const other = blank(null, null);
  await stream(other, {...body, seed: Number(turn.seed), max_tokens: Math.max(turn.ids.length, 1)}, () => {}, signal);
  if (other.over !== "ended") return {same: null, why: other.broken ?? "the second answer is incomplete"};
  const at = turn.ids.findIndex((id, i) => other.ids[i] !== id);
  return {same: at < 0, at, other};
}
