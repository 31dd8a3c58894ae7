// Answers under way, one in each conversation at most. They go on whichever conversation is shown, and where none is.

import {stream} from "./answer.js";
import * as kept from "./conversations.js";

/** How long a growing answer's news may wait for the browser's storage. */
const STORE_EVERY_MS = 500;

const runs = new Map();
const watchers = new Set();

/** Calls `heard(run, over)` when an answer has grown or is over, until the function that it returns is called. */
export function watch(heard) {
  watchers.add(heard);
  return () => watchers.delete(heard);
}

/** The run of a conversation: `{conversation, turn}`. While it goes on, that object of the conversation is the one that grows. */
export const running = (id) => runs.get(id);

export const stop = (id) => runs.get(id)?.abort.abort();

/** Answers `turn`, which may have begun before. */
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

/** A conversation that was forgotten meanwhile stays forgotten. */
const store = (run) => (run.isForgotten ? null : kept.keep(run.conversation));

export function forget(id) {
  const run = runs.get(id);
  if (run) run.isForgotten = true;
  stop(id);
  return kept.forget(id);
}
