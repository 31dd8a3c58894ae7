// Chats with the served models. `markdown.js` turns the text of a model into nodes; it is never parsed as HTML.

import {blank, repeat} from "./answer.js";
import * as conversations from "./conversations.js";
import * as runs from "./runs.js";
import {make, setFlag, setText, showStatus} from "./dom.js";
import {finalLength, markdown, visible} from "./markdown.js";
import {get} from "./server.js";

const SETTINGS = "lockstep chat settings";
/** Longer answers are shown as plain text, because their markup takes too long to draw. */
const MARKUP_MAX = 200000;
/** The progress of shorter prompts is not shown: they are computed too fast. */
const PROMPT_SHOWN_MIN = 256;
/** Matches windows in which the list of conversations is beside the chat, as in `look.css`. */
const WIDE = "(min-width: 44.01rem)";
/** At most this many tokens of an answer are shown with their probabilities. */
const TOKENS_SHOWN_MAX = 4000;
const NUMBERS = [
  ["temperature", "Temperature", {min: 0, step: 0.1}], ["top_p", "Top p", {min: 0, max: 1, step: 0.05}], ["top_k", "Top k", {min: 0, step: 1}],
  ["min_p", "Min p", {min: 0, max: 1, step: 0.01}], ["max_tokens", "Max tokens", {min: 1, step: 1}], ["seed", "Seed", {min: 0, step: 1}],
];

export class Chat {
  constructor() {
    this.turns = make("div", {class: "turns", role: "log", "aria-label": "Conversation", "aria-live": "off"});
    this.shown = new Map();
    this.list = make("ul");
    this.text = make("textarea", {name: "text", rows: 3, "aria-label": "Your message", placeholder: "Write a message. Enter sends it, Shift+Enter starts a new line.", keydown: (event) => this.key(event)});
    this.send = make("button", {class: "main", type: "submit", disabled: true}, "Send");
    this.halt = make("button", {type: "button", disabled: true, click: () => runs.stop(this.conversation.id)}, "Stop");
    this.settings = settings();
    this.form = make("form", {class: "compose", submit: (event) => (event.preventDefault(), this.submit())},
      this.text, make("div", {class: "buttons"}, this.send, this.halt));
    this.node = make("section", {class: "chat", "aria-labelledby": "chat"},
      make("aside", {class: "chats", "aria-label": "Conversations"}, make("button", {type: "button", click: () => this.open(conversations.fresh())}, "New conversation"),
        make("details", {open: matchMedia(WIDE).matches}, make("summary", {}, "Conversations"), this.list),
        make("details", {}, make("summary", {}, "Model and sampling"), this.settings.node)),
      make("div", {}, make("h1", {id: "chat"}, "Chat"), this.turns, this.form));
    this.endWatch = runs.watch((run, over) => this.onRunChange(run, over));
    this.begin();
  }

  topics() {
    return [];
  }

  close() {
    this.endWatch();
  }

  async begin() {
    try {
      const {data} = await get("v1/models");
      this.settings.models(data.map((model) => model.id));
    } catch (error) {
      showStatus(error.message);
    }
    const all = await conversations.all();
    this.open(all[0] ?? conversations.fresh());
  }

  async drawList() {
    const all = await conversations.all();
    this.list.replaceChildren(...all.map((conversation) => {
      const open = make("button", {type: "button", class: "plain", click: () => this.choose(conversation.id)}, conversations.title(conversation));
      setFlag(open, "aria-current", conversation.id === this.conversation?.id);
      setFlag(open, "aria-busy", Boolean(runs.running(conversation.id)));
      const remove = make("button", {type: "button", class: "plain", "aria-label": `Delete: ${conversations.title(conversation)}`, click: () => this.remove(conversation)}, "×");
      return make("li", {}, open, remove);
    }));
  }

  async remove(conversation) {
    await runs.remove(conversation.id);
    if (conversation.id === this.conversation?.id) this.open(conversations.fresh());
    else this.drawList();
  }

  /** Opens a conversation as it is stored now: it may have grown since the list was drawn. */
  async choose(id) {
    if (id === this.conversation?.id) return;
    const conversation = await conversations.one(id);
    if (conversation) this.open(conversation);
  }

  open(conversation) {
    // While an answer is under way, only the object of its run grows.
    this.conversation = runs.running(conversation.id)?.conversation ?? conversation;
    this.shown.clear();
    this.turns.replaceChildren();
    this.draw();
    this.buttons();
    this.drawList();
    // If an answer was under way when the page was closed, it continues after its last event.
    const last = conversations.path(this.conversation).at(-1);
    if (last?.role === "assistant" && !last.over && conversations.requestOf(last) && !this.isBusy()) this.answer(last);
  }

  isBusy() {
    return Boolean(runs.running(this.conversation.id));
  }

  buttons() {
    this.send.disabled = this.isBusy();
    this.halt.disabled = !this.isBusy();
  }

  key(event) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      this.submit();
    }
  }

  submit() {
    const text = this.text.value;
    if (!text.trim() || this.send.disabled) return;
    this.text.value = "";
    this.sendMessage(text, this.conversation.at);
  }

  /** Adds a turn of the user below `parent`, and an answer below that turn. */
  sendMessage(text, parent) {
    const turn = conversations.add(this.conversation, {role: "user", parent, text});
    this.reply(turn, {...this.settings.body(), system: this.settings.system()});
  }

  /** Adds an answer below `turn`, which may already have others. */
  reply(turn, request) {
    const answer = conversations.add(this.conversation, blank(turn.id, request));
    this.draw();
    this.answer(answer);
  }

  answer(turn) {
    showStatus("Answering");
    runs.answer(this.conversation, turn);
    this.buttons();
    this.drawList();
  }

  /** Called when an answer has grown, in this conversation or in one that is not shown. */
  onRunChange({conversation, turn}, over) {
    if (over) this.drawList();
    if (conversation !== this.conversation) return;
    if (!over) return this.drawSoon(turn);
    this.buttons();
    this.draw();
    showStatus(turn.over === "ended" ? "Answer complete" : turn.broken ?? "Stopped");
  }

  drawSoon(turn) {
    if (this.drawing) return;
    this.drawing = true;
    const draw = () => requestAnimationFrame(() => {
      this.drawing = false;
      const began = performance.now();
      const below = document.documentElement.scrollHeight - innerHeight - scrollY < 80;
      this.shown.get(turn.id)?.show();
      if (below) scrollTo(0, document.documentElement.scrollHeight);
      this.took = performance.now() - began;
    });
    // Drawings that are slow are made less often, so the page stays responsive.
    if (this.took > 8) setTimeout(draw, Math.min(this.took * 4, 1000));
    else draw();
  }

  draw() {
    const turns = conversations.path(this.conversation);
    const ids = new Set(turns.map((turn) => turn.id));
    for (const [id, shown] of this.shown) {
      if (!ids.has(id)) {
        shown.node.remove();
        this.shown.delete(id);
      }
    }
    turns.forEach((turn, at) => {
      if (!this.shown.has(turn.id)) this.shown.set(turn.id, new Turn(turn, this));
      const shown = this.shown.get(turn.id);
      if (this.turns.children[at] !== shown.node) this.turns.insertBefore(shown.node, this.turns.children[at] ?? null);
      shown.show();
    });
  }

  go(turn) {
    this.conversation.at = conversations.end(this.conversation, turn).id;
    conversations.save(this.conversation);
    this.draw();
  }
}

class Turn {
  constructor(turn, chat) {
    [this.turn, this.chat, this.drawn, this.finalEnd] = [turn, chat, null, 0];
    this.author = make("span", {class: "author"}, turn.role === "user" ? "You" : "Model");
    this.state = make("span", {class: "warn"});
    this.branches = make("span");
    this.buttons = make("span");
    this.thought = make("details", {class: "thought", hidden: true}, make("summary", {}, "Thought"), make("div"));
    this.content = make("div", {class: "content", dir: "auto"});
    this.extra = make("div");
    this.node = make("article", {class: `turn ${turn.role}`, "aria-label": turn.role === "user" ? "You" : "Model"},
      make("header", {}, this.author, this.branches, this.buttons, this.state), this.thought, this.content, this.extra);
    this.make();
  }

  make() {
    const {turn, chat} = this;
    const button = (text, click) => make("button", {type: "button", class: "plain", click}, text);
    if (turn.role === "user") {
      this.buttons.append(button("Edit", () => this.edit()));
      return;
    }
    const parent = () => chat.conversation.turns.find((other) => other.id === turn.parent);
    const request = () => (({messages, ...rest}) => ({system: messages?.find((of) => of.role === "system")?.content, ...rest}))(conversations.requestOf(turn));
    this.buttons.append(
      button("Copy", () => navigator.clipboard?.writeText(turn.text).then(() => showStatus("Copied"))),
      button("Again, same seed", () => chat.isBusy() || chat.reply(parent(), {...request(), seed: Number(turn.seed)})),
      button("Again, other seed", () => chat.isBusy() || chat.reply(parent(), {...request(), seed: Math.floor(Math.random() * 2 ** 48)})),
      button("Repeat and compare", () => this.compare()),
      button("Tokens", () => this.tokens()));
  }

  show() {
    const {turn} = this;
    if (turn.role === "user") {
      if (this.drawn !== turn.text) setText(this.content, visible(turn.text));
      this.drawn = turn.text;
    } else {
      setText(this.author, turn.model ?? "Model");
      this.showThought();
      this.showContent();
      setText(this.state, stateOf(turn));
      this.node.setAttribute("aria-busy", `${!turn.over}`);
    }
    this.showBranches();
  }

  showThought() {
    this.thought.hidden = !this.turn.thought;
    if (this.turn.thought) setText(this.thought.lastChild, visible(this.turn.thought));
  }

  /** Draws the final part of an answer once, and only the rest again. */
  showContent() {
    const text = this.turn.calls ? `${this.turn.text}\n\n\`\`\`json\n${this.turn.calls}\n\`\`\`` : this.turn.text;
    if (this.drawn === text) return;
    if (text.length > MARKUP_MAX) {
      this.content.className = "content raw";
      if (this.drawn !== null && text.startsWith(this.drawn) && this.isRaw) this.content.append(visible(text.slice(this.drawn.length)));
      else this.content.replaceChildren(visible(text));
      [this.isRaw, this.drawn] = [true, text];
      return;
    }
    if (this.drawn === null || !text.startsWith(this.drawn)) {
      this.content.replaceChildren();
      [this.finalEnd, this.tail] = [0, null];
    }
    const end = finalLength(text, this.finalEnd);
    this.tail?.remove();
    if (end > this.finalEnd) {
      this.content.append(markdown(text.slice(this.finalEnd, end)));
      this.finalEnd = end;
    }
    this.tail = make("div", {}, markdown(text.slice(end)));
    this.content.append(this.tail);
    this.drawn = text;
  }

  showBranches() {
    const all = conversations.siblings(this.chat.conversation, this.turn);
    if (all.length < 2) return this.branches.replaceChildren();
    const at = all.indexOf(this.turn);
    const step = (by, text, label) => make("button", {type: "button", class: "plain", "aria-label": label, disabled: !all[at + by], click: () => this.chat.go(all[at + by])}, text);
    this.branches.replaceChildren(step(-1, "‹", "Previous version"), `${at + 1} of ${all.length}`, step(1, "›", "Next version"));
  }

  edit() {
    const area = make("textarea", {rows: 4, "aria-label": "Edited message"});
    area.value = this.turn.text;
    const close = () => this.extra.replaceChildren();
    this.extra.replaceChildren(area, make("div", {},
      make("button", {type: "button", click: () => this.chat.isBusy() || (close(), this.chat.sendMessage(area.value, this.turn.parent))}, "Send edited message"),
      make("button", {type: "button", class: "plain", click: close}, "Cancel")));
    area.focus();
  }

  async compare() {
    const {turn} = this;
    const status = make("p", {role: "status"}, "Repeating the request without caches …");
    this.extra.replaceChildren(status);
    const salt = crypto.getRandomValues(new Uint32Array(4)).join("-");
    const {same, why} = await repeat(turn, {...conversations.body(this.chat.conversation, turn), cache_salt: salt}, new AbortController().signal);
    status.className = same ? "good" : "bad";
    setText(status, same ? `Equal, bit for bit: ${why}` : same === null ? `Not compared: ${why}` : `Different: ${why}`);
  }

  /** Shows each token by its probability, and the alternatives to the token under the pointer or the focus. */
  tokens() {
    if (this.extra.querySelector(".tokens")) return this.extra.replaceChildren();
    const {tokens} = this.turn;
    if (!tokens.length) return this.extra.replaceChildren(make("p", {class: "quiet"}, "This answer has no probabilities. Enable “Probabilities of tokens” under “Model and sampling” before you send a message."));
    const details = make("div", {class: "alternatives", role: "status"}, "Point at a token, or move with the arrow keys.");
    const shown = tokens.slice(0, TOKENS_SHOWN_MAX).map((token, at) => make("button", {type: "button", class: `token p${level(token.logprob)}`, "aria-label": token.token.trim() ? null : JSON.stringify(token.token), tabindex: at ? "-1" : "0", "data-at": at}, visible(token.token)));
    const showToken = (node) => {
      const token = tokens[Number(node?.dataset?.at)];
      if (token) details.replaceChildren(alternatives(token));
    };
    const move = (event) => {
      const by = {ArrowRight: 1, ArrowLeft: -1}[event.key];
      const next = by && shown[Number(event.target.dataset?.at) + by];
      if (next) (event.preventDefault(), next.focus());
    };
    this.extra.replaceChildren(
      make("div", {class: "tokens", role: "group", "aria-label": "Tokens, by their probability", keydown: move, mouseover: (event) => showToken(event.target), focusin: (event) => showToken(event.target)}, shown),
      make("p", {class: "quiet"}, tokens.length > TOKENS_SHOWN_MAX ? `The first ${TOKENS_SHOWN_MAX} of ${tokens.length}` : ""), details);
  }
}

function stateOf(turn) {
  if (turn.broken && turn.over !== "ended") return turn.broken;
  if (turn.over) return turn.over === "stopped" ? "stopped" : turn.reason === "length" ? "cut at the limit" : "";
  const {total, cache, processed} = turn.progress ?? {};
  return total - cache >= PROMPT_SHOWN_MIN && processed < total ? `reading the prompt: ${processed} of ${total} tokens` : "…";
}

const level = (logprob) => Math.min(4, Math.floor(Math.exp(logprob) * 5));

function alternatives(token) {
  const row = (of, is) => make("tr", {}, make("td", {class: "mono"}, is ? make("strong", {}, JSON.stringify(visible(of.token))) : JSON.stringify(visible(of.token))), make("td", {}, `${(100 * Math.exp(of.logprob)).toFixed(1)}%`));
  const others = (token.top_logprobs ?? []).filter((other) => other.token !== token.token);
  return make("table", {}, make("tbody", {}, row(token, true), others.map((other) => row(other, false))));
}

/** The form for the model, the system prompt and the sampling, with the values that this browser has stored. */
function settings() {
  const stored = JSON.parse(localStorage.getItem(SETTINGS) ?? "{}");
  const model = make("select", {name: "model"});
  const system = make("textarea", {name: "system", rows: 3});
  system.value = stored.system ?? "";
  const numbers = NUMBERS.map(([name, label, limits]) => {
    const input = make("input", {type: "number", name, placeholder: "model's", ...limits});
    input.value = stored[name] ?? "";
    return {name, label, input};
  });
  const logprobs = make("input", {type: "checkbox", name: "logprobs"});
  logprobs.checked = stored.logprobs ?? true;
  const store = () => {
    const values = {model: model.value, system: system.value, logprobs: logprobs.checked};
    for (const {name, input} of numbers) values[name] = input.value;
    localStorage.setItem(SETTINGS, JSON.stringify(values));
  };
  const node = make("form", {class: "settings", change: store, submit: (event) => event.preventDefault()},
    make("label", {class: "whole"}, "Model", model), make("label", {class: "whole"}, "System prompt", system),
    numbers.map(({label, input}) => make("label", {}, label, input)), make("label", {class: "whole"}, "Probabilities of tokens", logprobs));
  return {
    node,
    system: () => system.value,
    models(names) {
      model.replaceChildren(...names.map((name) => make("option", {value: name}, name)));
      if (names.includes(stored.model)) model.value = stored.model;
    },
    body() {
      const body = {model: model.value, return_token_ids: true, certificate: true, sampling_defaults: "llama.cpp"};
      if (logprobs.checked) Object.assign(body, {logprobs: true, top_logprobs: 5});
      for (const {name, input} of numbers) if (input.value !== "") body[name] = Number(input.value);
      return body;
    },
  };
}
