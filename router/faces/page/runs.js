// Answers under way, at most one in each conversation. They continue whichever conversation or view is shown.

import {stream} from "./answer.js";
import * as conversations from "./conversations.js";
import {showNote} from "./dom.js";

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
    if (Date.now() - stored > STORE_EVERY_MS && !run.isStoring) {
      stored = Date.now();
      store(run);
    }
  };
  try {
    await store(run);
    await stream(turn, conversations.body(conversation, turn), onChange, run.abort.signal);
  } finally {
    await store(run);
    runs.delete(conversation.id);
    notify(true);
  }
}

/** Stores the conversation of a run, unless the user has deleted it during the run. */
async function store(run) {
  if (run.isRemoved) return;
  run.isStoring = true;
  try {
    await conversations.save(run.conversation);
  } catch (error) {
    showNote(`This browser does not store the conversation: ${error.message}`);
  } finally {
    run.isStoring = false;
  }
}

export function remove(id) {
  const run = runs.get(id);
  if (run) run.isRemoved = true;
  stop(id);
  return conversations.remove(id);
}
