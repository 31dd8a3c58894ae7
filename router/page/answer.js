// Streams one answer, resumes it after a lost connection, and requests it a second time to compare both.

import {Refused, events, pause, post} from "./server.js";

const PATH = "v1/chat/completions";
/** A stream that breaks off more often than this in a row, without an event between, is given up. */
const TRIES_MAX = 30;

/**
 * Streams into `turn`. It can be stored at any moment and continued later: `turn.last` is the id of its last event.
 * Calls `news` after each change.
 */
export async function stream(turn, body, news, signal) {
  let tries = 0;
  while (!turn.over) {
    const n = turn.last;
    try {
      const more = turn.last ? {"last-event-id": turn.last} : {};
      const sent = {...body, stream: true, stream_options: {include_usage: true}, return_progress: true};
      const reply = await post(PATH, sent, {signal, more});
      turn.seed = reply.headers.get("x-lockstep-seed") ?? turn.seed;
      turn.policy = reply.headers.get("x-lockstep-policy-digest") ?? turn.policy;
      turn.prompt = reply.headers.get("x-lockstep-prompt-hash") ?? turn.prompt;
      turn.broken = null;
      news();
      for await (const event of events(reply)) hear(turn, event, news);
      if (!turn.over) turn.broken = "the connection was lost: going on";
    } catch (error) {
      if (signal.aborted) {
        turn.over = "stopped";
        break;
      }
      if (error instanceof Refused && ![401, 429, 500, 502, 503, 504].includes(error.status)) {
        turn.over = "failed";
        turn.broken = error.message;
        break;
      }
      if (error instanceof Refused && (error.status === 401 || !turn.last)) {
        turn.over = "failed";
        turn.broken = error.message;
        break;
      }
      turn.broken = error instanceof Refused ? error.message : "the server does not answer: going on when it does";
    }
    if (turn.over) break;
    tries = turn.last === n ? tries + 1 : 0;
    if (tries > TRIES_MAX) {
      turn.over = "failed";
      break;
    }
    news();
    await pause(Math.min(100 * 2 ** tries, 3000), signal);
    if (signal.aborted) turn.over = "stopped";
  }
  news();
}

function hear(turn, event, news) {
  if (event.data === "[DONE]") {
    turn.over ??= "ended";
    return news();
  }
  const told = JSON.parse(event.data);
  if (told.error) {
    turn.broken = told.error.message;
    // Final are an `invalid_request_error` (an expired key or deadline) and any error before the first event. After
    // other errors the answer is resumed.
    if (!turn.last || ["invalid_request_error"].includes(told.error.type)) turn.over = "failed";
    return news();
  }
  turn.answer = told.id ?? turn.answer;
  turn.model = told.model ?? turn.model;
  // Progress through the prompt, until the first token.
  turn.progress = told.prompt_progress ?? null;
  for (const choice of told.choices ?? []) {
    turn.text += choice.delta?.content ?? "";
    turn.thought += choice.delta?.reasoning_content ?? choice.delta?.reasoning ?? "";
    for (const call of choice.delta?.tool_calls ?? []) turn.calls += `${call.function?.name ?? ""}${call.function?.arguments ?? ""}`;
    turn.ids.push(...(choice.token_ids ?? []));
    turn.tokens.push(...(choice.logprobs?.content ?? []));
    if (choice.finish_reason) turn.reason = choice.finish_reason;
    if (choice.certificate) turn.certificate = choice.certificate;
  }
  if (told.usage) turn.usage = told.usage;
  // `last` moves only here: after an earlier break the resumed stream repeats this event.
  if (event.id) turn.last = event.id;
  news();
}

/** An answer that has not begun. */
export const blank = (parent, asked) => ({role: "assistant", parent, text: "", thought: "", calls: "", ids: [], tokens: [], asked, over: null, last: null, broken: null});

/** Requests the same answer again with the same seed, and compares it token by token. */
export async function again(turn, body, signal) {
  const other = blank(null, null);
  await stream(other, {...body, seed: Number(turn.seed), max_tokens: Math.max(turn.ids.length, 1)}, () => {}, signal);
  if (other.over !== "ended") return {same: null, why: other.broken ?? "it did not come to its end"};
  const at = turn.ids.findIndex((id, i) => other.ids[i] !== id);
  const replica = other.policy === turn.policy ? `policy ${(other.policy ?? "").slice(0, 12)}` : `another policy: ${(other.policy ?? "").slice(0, 12)}`;
  if (at < 0) return {same: true, why: `${turn.ids.length} of ${turn.ids.length} token ids are the same, ${replica}`};
  return {same: false, why: `token ${at} differs: ${turn.ids[at]} was said, and then ${other.ids[at] ?? "nothing"}; ${replica}`};
}
