// Conversations, stored in this browser only. Each is a tree of turns, so that an edited message or a repeated answer
// stands beside the earlier one.

const [BASE, STORE] = ["lockstep", "conversations"];
/** Beyond this number the oldest conversations are deleted. */
const KEPT_MAX = 200;
const TITLE_MAX = 60;

/** A promise of the result of a database request. */
const done = (request) => new Promise((resolve, reject) => {
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});

function opened() {
  const request = indexedDB.open(BASE, 1);
  request.onupgradeneeded = () => request.result.createObjectStore(STORE, {keyPath: "id"});
  return done(request);
}

const store = async (mode) => (await opened()).transaction(STORE, mode).objectStore(STORE);

export async function all() {
  const kept = await done((await store("readonly")).getAll());
  return kept.sort((a, b) => b.changed - a.changed);
}

export const one = async (id) => done((await store("readonly")).get(id));

export async function keep(conversation) {
  const kept = await store("readwrite");
  await done(kept.put({...conversation, changed: Date.now()}));
  if ((await done(kept.count())) <= KEPT_MAX) return;
  for (const old of (await all()).slice(KEPT_MAX)) await forget(old.id);
}

export async function forget(id) {
  await done((await store("readwrite")).delete(id));
}

export function fresh() {
  return {id: crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`, changed: Date.now(), turns: [], at: null, next: 1};
}

/** Adds a turn and makes it the current one. */
export function add(conversation, turn) {
  const added = {id: conversation.next, ...turn};
  conversation.next += 1;
  conversation.turns.push(added);
  conversation.at = added.id;
  return added;
}

const byId = (conversation) => new Map(conversation.turns.map((turn) => [turn.id, turn]));

/** The turns from the first to the one at `at`, which is shown last. */
export function path(conversation, at = conversation.at) {
  const turns = byId(conversation);
  const out = [];
  for (let turn = turns.get(at); turn; turn = turns.get(turn.parent)) out.push(turn);
  return out.reverse();
}

/** The request that a turn answers. Its messages come from the branch before the turn and are stored only there. */
export function body(conversation, turn) {
  const {system, ...asked} = turn.asked;
  if (asked.messages) return asked;
  const messages = path(conversation, turn.parent).map(({role, text}) => ({role, content: text}));
  return {...asked, messages: system ? [{role: "system", content: system}, ...messages] : messages};
}

export const siblings = (conversation, turn) => conversation.turns.filter((other) => other.parent === turn.parent);

/** The end of the branch that begins at a turn: follows the newest turn each time. */
export function end(conversation, turn) {
  let last = turn;
  for (;;) {
    const next = conversation.turns.filter((other) => other.parent === last.id).at(-1);
    if (!next) return last;
    last = next;
  }
}

export function title(conversation) {
  const first = conversation.turns.find((turn) => turn.role === "user");
  const text = first?.text.trim().replace(/\s+/g, " ") ?? "";
  return text.length > TITLE_MAX ? `${text.slice(0, TITLE_MAX)}…` : text || "New conversation";
}
