// Answers under way, at most one in each conversation. They continue whichever conversation or view is shown.

import {stream} from "./answer.js";
import * as conversations from "./conversations.js";

/** A growing answer is written to the browser's storage at most this often. */
const STORE_EVERY_MS = 500;

const runs = new Map();
const watchers = new Set();

/** Calls `onChange(run, over)` when an answer has grown or has ended. Returns a function that ends the calls. */
export function watch(onChange) {
  watchers.add(onChange);
  return () => watchers.delete(onChange);
}

/** The run of a conversation: `{conversation, turn}`. During the run, only this object of the conversation grows. */
export const running = (id) => runs.get(id);

export const stop = (id) => runs.get(id)?.abort.abort();

/** Streams the answer `turn`, from its start or from where it was interrupted. */
export async function answer(conversation, turn) {
  const run = {conversation, turn, abort: new AbortController()};
  runs.set(conversation.id, run);
  const notify = (over) => watchers.forEach((watcher) => watcher(run, over));
  let stored = 0;
  const onChange = () => {
    notify(false);
    if (Date.now() - stored > STORE_EVERY_MS) {
      stored = Date.now();
      store(run);
    }
  };
  await store(run);
  await stream(turn, conversations.body(conversation, turn), onChange, run.abort.signal);
  await store(run);
  runs.delete(conversation.id);
  notify(true);
}

/** Does not store a conversation that the user has deleted during the run. */
const store = (run) => (run.isRemoved ? null : conversations.save(run.conversation));

export function remove(id) {
  const run = runs.get(id);
  if (run) run.isRemoved = true;
  stop(id);
  return conversations.remove(id);
}
