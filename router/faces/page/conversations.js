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

let database = null;

/** The database, opened once. If that fails, the next call tries again. */
function opened() {
  if (database) return database;
  const request = indexedDB.open(DATABASE, 1);
  request.onupgradeneeded = () => request.result.createObjectStore(STORE, {keyPath: "id"});
  database = result(request);
  database.catch(() => (database = null));
  return database;
}

const store = async (mode) => (await opened()).transaction(STORE, mode).objectStore(STORE);

/** All conversations: pinned ones first, then the newest. */
export async function all() {
  const stored = await result((await store("readonly")).getAll());
  return stored.sort((a, b) => Boolean(b.isPinned) - Boolean(a.isPinned) || b.changed - a.changed);
}

export const one = async (id) => result((await store("readonly")).get(id));

export async function save(conversation, changed = Date.now()) {
  conversation.changed = changed;
  const objects = await store("readwrite");
  await result(objects.put(conversation));
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

/** The calls of an answer: `{id, name, arguments}`. Earlier builds stored one text, which has no id. */
export const callsOf = (turn) => (Array.isArray(turn.calls) ? turn.calls : turn.calls ? [{id: "", name: "", arguments: turn.calls}] : []);

/** The messages that a turn adds to a request. */
function messagesOf(turn) {
  if (turn.role === "tool") return turn.results.map(({id, text}) => ({role: "tool", tool_call_id: id, content: text}));
  const calls = turn.role === "assistant" ? callsOf(turn).filter((call) => call.id) : [];
  if (!calls.length) return [{role: turn.role, content: turn.text}];
  const made = calls.map(({id, name, arguments: given}) => ({id, type: "function", function: {name, arguments: given}}));
  return [{role: turn.role, content: turn.text, tool_calls: made}];
}

/** The request of an answer. Its messages come from the branch before the turn and are stored only there. */
export function body(conversation, turn) {
  const {system, continued, ...request} = requestOf(turn) ?? {};
  if (request.messages) return request;
  const messages = path(conversation, turn.parent).flatMap(messagesOf);
  if (system) messages.unshift({role: "system", content: system});
  if (!continued) return {...request, messages};
  messages.push({role: "assistant", content: continued});
  return {...request, messages, add_generation_prompt: false, continue_final_message: true};
}

export const siblings = (conversation, turn) => conversation.turns.filter((other) => other.parent === turn.parent);

/** Removes a turn and all turns below it. The branch before it becomes the current one. */
export function cut(conversation, turn) {
  const removed = new Set([turn.id]);
  for (const other of conversation.turns) if (removed.has(other.parent)) removed.add(other.id);
  conversation.turns = conversation.turns.filter((other) => !removed.has(other.id));
  const beside = conversation.turns.filter((other) => other.parent === turn.parent).at(-1);
  conversation.at = beside ? end(conversation, beside).id : turn.parent;
}

/** A new conversation with the turns up to one, which were copied from another. */
export function forked(conversation, turn) {
  const copy = fresh();
  for (const of of path(conversation, turn.id)) add(copy, {...structuredClone(of), id: copy.next, parent: copy.at});
  return copy;
}

/** The last turn of the newest branch below a turn. */
export function end(conversation, turn) {
  let last = turn;
  for (;;) {
    const next = conversation.turns.filter((other) => other.parent === last.id).at(-1);
    if (!next) return last;
    last = next;
  }
}

/** The text of a file with conversations. */
export const exported = (conversations) => JSON.stringify({lockstep: "conversations", version: 1, conversations}, null, 1);

const list = (value) => (Array.isArray(value) ? value : []);

/** A turn of a file in the form of this build. An answer that was under way in the other browser is not continued. */
function importedTurn(turn) {
  const {id, role, parent} = turn;
  const plain = {id, role, parent, text: `${turn.text ?? ""}`};
  if (role === "user") return plain;
  if (role === "tool") return {...plain, results: list(turn.results).map((of) => ({id: `${of?.id}`, name: `${of?.name}`, text: `${of?.text}`}))};
  return {...turn, ...plain, thought: `${turn.thought ?? ""}`, calls: callsOf(turn), ids: list(turn.ids), tokens: list(turn.tokens), over: turn.over ?? "stopped", last: null};
}

/** A conversation of a file, with an id of its own. Throws if its turns are no tree. */
function importedConversation(given) {
  const ids = new Set();
  for (const turn of given?.turns ?? [null]) {
    const isTurn = ["user", "assistant", "tool"].includes(turn?.role) && Number.isInteger(turn.id) && !ids.has(turn.id);
    if (!isTurn || (turn.parent !== null && !ids.has(turn.parent))) throw new Error("a conversation has turns of another form");
    ids.add(turn.id);
  }
  const turns = given.turns.map(importedTurn);
  return {...fresh(), turns, at: ids.has(given.at) ? given.at : turns.at(-1)?.id ?? null, next: Math.max(0, ...ids) + 1, isPinned: Boolean(given.isPinned),
    ...(given.name ? {name: `${given.name}`} : {}), changed: Number.isFinite(given.changed) ? given.changed : Date.now()};
}

/** Stores the conversations of a file, all or none. Returns how many. Throws if it is not such a file. */
export async function imported(text) {
  const {lockstep, version, conversations} = JSON.parse(text);
  if (lockstep !== "conversations" || version !== 1 || !Array.isArray(conversations)) throw new Error("the file has no conversations of this page");
  const read = conversations.map(importedConversation);
  if ((await all()).length + read.length > CONVERSATIONS_MAX) throw new Error(`this browser keeps at most ${CONVERSATIONS_MAX} conversations: delete some first`);
  for (const conversation of read) await save(conversation, conversation.changed);
  return read.length;
}

export function title(conversation) {
  if (conversation.name) return conversation.name;
  const first = conversation.turns.find((turn) => turn.role === "user");
  const text = first?.text.trim().replace(/\s+/g, " ") ?? "";
  return text.length > TITLE_MAX ? `${text.slice(0, TITLE_MAX)}…` : text || "New conversation";
}
