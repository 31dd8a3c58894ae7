// Conversations, stored in this browser only. Each is a tree of turns: an edited message or a repeated answer is a
// branch beside the earlier one.

const [DATABASE, STORE] = ["lockstep", "conversations"];
/** Beyond this number the oldest conversations are deleted. */
const CONVERSATIONS_MAX = 200;
const TITLE_MAX = 60;

/** A promise of the result of a database request. */
const result = (request) => new Promise((resolve, reject) => {
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});

function opened() {
  const request = indexedDB.open(DATABASE, 1);
  request.onupgradeneeded = () => request.result.createObjectStore(STORE, {keyPath: "id"});
  return result(request);
}

const store = async (mode) => (await opened()).transaction(STORE, mode).objectStore(STORE);

export async function all() {
  const stored = await result((await store("readonly")).getAll());
  return stored.sort((a, b) => b.changed - a.changed);
}

export const one = async (id) => result((await store("readonly")).get(id));

export async function save(conversation) {
  const objects = await store("readwrite");
  await result(objects.put({...conversation, changed: Date.now()}));
  if ((await result(objects.count())) <= CONVERSATIONS_MAX) return;
  for (const old of (await all()).slice(CONVERSATIONS_MAX)) await remove(old.id);
}

export async function remove(id) {
  await result((await store("readwrite")).delete(id));
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

/** The turns of the branch that ends at the turn `at`. */
export function path(conversation, at = conversation.at) {
  const turns = byId(conversation);
  const out = [];
  for (let turn = turns.get(at); turn; turn = turns.get(turn.parent)) out.push(turn);
  return out.reverse();
}

/** The sampling parameters and system prompt of an answer. Earlier builds stored them as `asked`, some with messages. */
export const requestOf = (turn) => turn.request ?? turn.asked;

/** The request of an answer. Its messages come from the branch before the turn and are stored only there. */
export function body(conversation, turn) {
  const {system, ...request} = requestOf(turn);
  if (request.messages) return request;
  const messages = path(conversation, turn.parent).map(({role, text}) => ({role, content: text}));
  return {...request, messages: system ? [{role: "system", content: system}, ...messages] : messages};
}

export const siblings = (conversation, turn) => conversation.turns.filter((other) => other.parent === turn.parent);

/** The last turn of the newest branch below a turn. */
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
