// Chats with the served models. `markdown.js` turns the text of a model into nodes; it is never parsed as HTML.

import {again, blank} from "./answer.js";
import * as kept from "./conversations.js";
import * as runs from "./runs.js";
import {make, mark, say, tell} from "./dom.js";
import {markdown, settled, visible} from "./markdown.js";
import {get} from "./server.js";

const SETTINGS = "lockstep chat settings";
/** Longer answers are shown as plain text, because their markup takes too long to draw. */
const MARKUP_MAX = 200000;
/** The progress of shorter prompts is not shown: they are computed too fast. */
const PROMPT_SHOWN_MIN = 256;
/** Matches windows in which the list of conversations stands beside the chat, as in `look.css`. */
const WIDE = "(min-width: 44.01rem)";
/** At most this many tokens of an answer are shown with their probabilities. */
const TOKENS_SHOWN_MAX = 4000;
const NUMBERS = [
  ["temperature", "Temperature", {min: 0, step: 0.1}], ["top_p", "Top p", {min: 0, max: 1, step: 0.05}], ["top_k", "Top k", {min: 0, step: 1}],
  ["min_p", "Min p", {min: 0, max: 1, step: 0.01}], ["max_tokens", "At most (tokens)", {min: 1, step: 1}], ["seed", "Seed", {min: 0, step: 1}],
];

export class Chat {
  constructor() {
    this.turns = make("div", {class: "turns", role: "log", "aria-label": "Conversation", "aria-live": "off"});
    this.shown = new Map();
    this.list = make("ul");
    this.text = make("textarea", {name: "text", rows: 3, "aria-label": "Your message", placeholder: "Ask something. Enter sends, Shift+Enter makes a line.", keydown: (event) => this.key(event)});
    this.send = make("button", {class: "main", type: "submit", disabled: true}, "Send");
    this.halt = make("button", {type: "button", disabled: true, click: () => runs.stop(this.conversation.id)}, "Stop");
    this.settings = settings();
    this.form = make("form", {class: "ask", submit: (event) => (event.preventDefault(), this.ask())},
      this.text, make("div", {class: "buttons"}, this.send, this.halt));
    this.node = make("section", {class: "chat", "aria-labelledby": "chat"},
      make("aside", {class: "chats", "aria-label": "Conversations"}, make("button", {type: "button", click: () => this.open(kept.fresh())}, "New conversation"),
        make("details", {open: matchMedia(WIDE).matches}, make("summary", {}, "Conversations"), this.list),
        make("details", {}, make("summary", {}, "Model and sampling"), this.settings.node)),
      make("div", {}, make("h1", {id: "chat"}, "Chat"), this.turns, this.form));
    this.unwatch = runs.watch((run, over) => this.heard(run, over));
    this.begin();
  }

  topics() {
    return [];
  }

  close() {
    this.unwatch();
  }

  async begin() {
    try {
      const {data} = await get("v1/models");
      this.settings.models(data.map((model) => model.id));
    } catch (error) {
      tell(error.message);
    }
    const all = await kept.all();
    this.open(all[0] ?? kept.fresh());
  }

  async listed() {
    const all = await kept.all();
    this.list.replaceChildren(...all.map((conversation) => {
      const open = make("button", {type: "button", class: "plain", click: () => this.choose(conversation.id)}, kept.title(conversation));
      mark(open, "aria-current", conversation.id === this.conversation?.id);
      mark(open, "aria-busy", Boolean(runs.running(conversation.id)));
      const forget = make("button", {type: "button", class: "plain", "aria-label": `Forget: ${kept.title(conversation)}`, click: () => this.forget(conversation)}, "×");
      return make("li", {}, open, forget);
    }));
  }

  async forget(conversation) {
    await runs.forget(conversation.id);
    if (conversation.id === this.conversation?.id) this.open(kept.fresh());
    else this.listed();
  }

  /** Opens a conversation as it is stored now: it may have grown since the list was drawn. */
  async choose(id) {
    if (id === this.conversation?.id) return;
    const conversation = await kept.one(id);
    if (conversation) this.open(conversation);
  }

  open(conversation) {
    // While an answer is under way, only the object of its run grows.
    this.conversation = runs.running(conversation.id)?.conversation ?? conversation;
    this.shown.clear();
    this.turns.replaceChildren();
    this.draw();
    this.buttons();
    this.listed();
    // If an answer was under way when the page was closed, it continues after its last event.
    const last = kept.path(this.conversation).at(-1);
    if (last?.role === "assistant" && !last.over && last.asked && !this.isBusy()) this.answer(last);
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
      this.ask();
    }
  }

  ask() {
    const text = this.text.value;
    if (!text.trim() || this.send.disabled) return;
    this.text.value = "";
    this.tell(text, this.conversation.at);
  }

  /** Adds a turn of the user below `parent`, and an answer below that turn. */
  tell(text, parent) {
    const turn = kept.add(this.conversation, {role: "user", parent, text});
    this.reply(turn, {...this.settings.body(), system: this.settings.system()});
  }

  /** Adds an answer below `turn`, which may already have others. */
  reply(turn, asked) {
    const answer = kept.add(this.conversation, blank(turn.id, asked));
    this.draw();
    this.answer(answer);
  }

  answer(turn) {
    tell("The answer comes");
    runs.answer(this.conversation, turn);
    this.buttons();
    this.listed();
  }

  /** Called when an answer has grown, in this conversation or in one that is not shown. */
  heard({conversation, turn}, over) {
    if (over) this.listed();
    if (conversation !== this.conversation) return;
    if (!over) return this.drawSoon(turn);
    this.buttons();
    this.draw();
    tell(turn.over === "ended" ? "The answer is complete" : turn.broken ?? "Stopped");
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
    // A slow drawing is repeated less often, so that the page responds most of the time.
    if (this.took > 8) setTimeout(draw, Math.min(this.took * 4, 1000));
    else draw();
  }

  draw() {
    const turns = kept.path(this.conversation);
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
    this.conversation.at = kept.end(this.conversation, turn).id;
    kept.keep(this.conversation);
    this.draw();
  }
}

class Turn {
  constructor(turn, chat) {
    [this.turn, this.chat, this.drawn, this.settled] = [turn, chat, null, 0];
    this.who = make("span", {class: "who"}, turn.role === "user" ? "You" : "Model");
    this.state = make("span", {class: "warn"});
    this.branches = make("span");
    this.buttons = make("span");
    this.thought = make("details", {class: "thought", hidden: true}, make("summary", {}, "Thought"), make("div"));
    this.said = make("div", {class: "said", dir: "auto"});
    this.extra = make("div");
    this.node = make("article", {class: `turn ${turn.role}`, "aria-label": turn.role === "user" ? "You" : "Model"},
      make("header", {}, this.who, this.branches, this.buttons, this.state), this.thought, this.said, this.extra);
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
    const asked = () => (({messages, ...rest}) => ({system: messages?.find((of) => of.role === "system")?.content, ...rest}))(turn.asked);
    this.buttons.append(
      button("Copy", () => navigator.clipboard?.writeText(turn.text).then(() => tell("Copied"))),
      button("Again, same seed", () => chat.isBusy() || chat.reply(parent(), {...asked(), seed: Number(turn.seed)})),
      button("Again, other seed", () => chat.isBusy() || chat.reply(parent(), {...asked(), seed: Math.floor(Math.random() * 2 ** 48)})),
      button("Same again?", () => this.same()),
      button("Tokens", () => this.tokens()));
  }

  show() {
    const {turn} = this;
    if (turn.role === "user") {
      if (this.drawn !== turn.text) say(this.said, visible(turn.text));
      this.drawn = turn.text;
    } else {
      say(this.who, turn.model ?? "Model");
      this.showThought();
      this.showSaid();
      say(this.state, stateOf(turn));
      this.node.setAttribute("aria-busy", `${!turn.over}`);
    }
    this.showBranches();
  }

  showThought() {
    this.thought.hidden = !this.turn.thought;
    if (this.turn.thought) say(this.thought.lastChild, visible(this.turn.thought));
  }

  /** Draws the final part of an answer once, and only the rest again. */
  showSaid() {
    const text = this.turn.calls ? `${this.turn.text}\n\n\`\`\`json\n${this.turn.calls}\n\`\`\`` : this.turn.text;
    if (this.drawn === text) return;
    if (text.length > MARKUP_MAX) {
      this.said.className = "said raw";
      if (this.drawn !== null && text.startsWith(this.drawn) && this.isRaw) this.said.append(visible(text.slice(this.drawn.length)));
      else this.said.replaceChildren(visible(text));
      [this.isRaw, this.drawn] = [true, text];
      return;
    }
    if (this.drawn === null || !text.startsWith(this.drawn)) {
      this.said.replaceChildren();
      [this.settled, this.tail] = [0, null];
    }
    const end = settled(text, this.settled);
    this.tail?.remove();
    if (end > this.settled) {
      this.said.append(markdown(text.slice(this.settled, end)));
      this.settled = end;
    }
    this.tail = make("div", {}, markdown(text.slice(end)));
    this.said.append(this.tail);
    this.drawn = text;
  }

  showBranches() {
    const all = kept.siblings(this.chat.conversation, this.turn);
    if (all.length < 2) return this.branches.replaceChildren();
    const at = all.indexOf(this.turn);
    const step = (by, text, label) => make("button", {type: "button", class: "plain", "aria-label": label, disabled: !all[at + by], click: () => this.chat.go(all[at + by])}, text);
    this.branches.replaceChildren(step(-1, "‹", "The one before"), `${at + 1} of ${all.length}`, step(1, "›", "The next one"));
  }

  edit() {
    const area = make("textarea", {rows: 4, "aria-label": "Edited message"});
    area.value = this.turn.text;
    const close = () => this.extra.replaceChildren();
    this.extra.replaceChildren(area, make("div", {},
      make("button", {type: "button", click: () => this.chat.isBusy() || (close(), this.chat.tell(area.value, this.turn.parent))}, "Ask this instead"),
      make("button", {type: "button", class: "plain", click: close}, "Leave it")));
    area.focus();
  }

  async same() {
    const {turn} = this;
    const said = make("p", {role: "status"}, "Asked again, apart from all caches …");
    this.extra.replaceChildren(said);
    const salt = crypto.getRandomValues(new Uint32Array(4)).join("-");
    const {same, why} = await again(turn, {...kept.body(this.chat.conversation, turn), cache_salt: salt}, new AbortController().signal);
    said.className = same ? "good" : "bad";
    say(said, same ? `Equal, bit for bit: ${why}` : same === null ? `Not compared: ${why}` : `Different: ${why}`);
  }

  /** Shows each token by its probability, and the alternatives to the token under the pointer or the focus. */
  tokens() {
    if (this.extra.querySelector(".tokens")) return this.extra.replaceChildren();
    const {tokens} = this.turn;
    if (!tokens.length) return this.extra.replaceChildren(make("p", {class: "quiet"}, "Tokens come with their probabilities if that is chosen under “Model and sampling” before asking."));
    const about = make("div", {class: "alternatives", role: "status"}, "Point at a token, or go there with the arrow keys.");
    const shown = tokens.slice(0, TOKENS_SHOWN_MAX).map((token, at) => make("button", {type: "button", class: `token p${level(token.logprob)}`, "aria-label": token.token.trim() ? null : JSON.stringify(token.token), tabindex: at ? "-1" : "0", "data-at": at}, visible(token.token)));
    const tell = (node) => {
      const token = tokens[Number(node?.dataset?.at)];
      if (token) about.replaceChildren(alternatives(token));
    };
    const move = (event) => {
      const by = {ArrowRight: 1, ArrowLeft: -1}[event.key];
      const next = by && shown[Number(event.target.dataset?.at) + by];
      if (next) (event.preventDefault(), next.focus());
    };
    this.extra.replaceChildren(
      make("div", {class: "tokens", role: "group", "aria-label": "Tokens, by their probability", keydown: move, mouseover: (event) => tell(event.target), focusin: (event) => tell(event.target)}, shown),
      make("p", {class: "quiet"}, tokens.length > TOKENS_SHOWN_MAX ? `The first ${TOKENS_SHOWN_MAX} of ${tokens.length}` : ""), about);
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
  const said = JSON.parse(localStorage.getItem(SETTINGS) ?? "{}");
  const model = make("select", {name: "model"});
  const system = make("textarea", {name: "system", rows: 3});
  system.value = said.system ?? "";
  const numbers = NUMBERS.map(([name, label, limits]) => {
    const input = make("input", {type: "number", name, placeholder: "model's", ...limits});
    input.value = said[name] ?? "";
    return {name, label, input};
  });
  const logprobs = make("input", {type: "checkbox", name: "logprobs"});
  logprobs.checked = said.logprobs ?? true;
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
      if (names.includes(said.model)) model.value = said.model;
    },
    body() {
      const body = {model: model.value, return_token_ids: true, certificate: true, sampling_defaults: "llama.cpp"};
      if (logprobs.checked) Object.assign(body, {logprobs: true, top_logprobs: 5});
      for (const {name, input} of numbers) if (input.value !== "") body[name] = Number(input.value);
      return body;
    },
  };
}
