// Answers under way, at most one in each conversation. They continue whichever conversation or view is shown.

import {stream} from "./answer.js";
import * as kept from "./conversations.js";

/** A growing answer is written to the browser's storage at most this often. */
const STORE_EVERY_MS = 500;

const runs = new Map();
const watchers = new Set();

/** Calls `heard(run, over)` when an answer has grown or has ended. Returns a function that ends the calls. */
export function watch(heard) {
  watchers.add(heard);
  return () => watchers.delete(heard);
}

/** The run of a conversation: `{conversation, turn}`. During the run, only this object of the conversation grows. */
export const running = (id) => runs.get(id);

export const stop = (id) => runs.get(id)?.abort.abort();

/** Streams the answer `turn`, which may have begun before. */
export async function answer(conversation, turn) {
  const run = {conversation, turn, abort: new AbortController()};
  runs.set(conversation.id, run);
  const say = (over) => watchers.forEach((heard) => heard(run, over));
  let stored = 0;
  const news = () => {
    say(false);
    if (Date.now() - stored > STORE_EVERY_MS) {
      stored = Date.now();
      store(run);
    }
  };
  await store(run);
  await stream(turn, kept.body(conversation, turn), news, run.abort.signal);
  await store(run);
  runs.delete(conversation.id);
  say(true);
}

/** Does not store a conversation that the user has deleted during the run. */
const store = (run) => (run.isForgotten ? null : kept.keep(run.conversation));

export function forget(id) {
  const run = runs.get(id);
  if (run) run.isForgotten = true;
  stop(id);
  return kept.forget(id);
}
