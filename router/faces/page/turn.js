// One message of a conversation: its text, its calls, what it cost, and what can be done with it.

import {repeat} from "./answer.js";
import * as conversations from "./conversations.js";
import {announce, copyText, count, iconButton, make, menuButton, millis, setText} from "./dom.js";
import {icon} from "./icons.js";
import {finalLength, markdown, visible} from "./markdown.js";
import {probabilities} from "./probabilities.js";
import {explainReuse, reuseText} from "./reuse.js";
import {get} from "./server.js";

/** Longer answers are shown as plain text, because their markup takes too long to draw. */
const MARKUP_MAX = 200000;
/** The progress of shorter prompts is not shown: they are computed too fast. */
const PROMPT_SHOWN_MIN = 256;
const NAMES = {user: "You", assistant: "Answer", tool: "Results of tools"};

export class Turn {
  constructor(turn, chat) {
    [this.turn, this.chat, this.drawn, this.finalEnd] = [turn, chat, null, 0];
    this.state = make("p", {class: "state"});
    this.branches = make("span", {class: "branches"});
    this.buttons = make("div", {class: "actions"});
    this.stats = make("p", {class: "stats"});
    this.badge = make("span", {role: "status"});
    this.thought = make("details", {class: "thought", hidden: true}, make("summary", {}, "Thought"), make("div"));
    this.content = make("div", {class: "content", dir: "auto"});
    this.calls = make("div", {class: "calls"});
    this.extra = make("div", {class: "extra"});
    this.node = make("article", {class: `turn ${turn.role}`, "aria-label": NAMES[turn.role]},
      this.thought, this.content, this.calls, this.state, this.stats, make("footer", {}, this.branches, this.buttons, this.badge), this.extra);
    this.addButtons();
  }

  addButtons() {
    const {turn} = this;
    const add = (...all) => this.buttons.append(...all);
    if (turn.role !== "tool") add(iconButton("copy", "Copy", () => copyText(turn.text)));
    if (turn.role === "user") add(iconButton("edit", "Edit", () => this.edit()));
    if (turn.role === "assistant") {
      this.goOn = iconButton("play", "Continue", () => this.chat.isBusy() || this.continue(), {hidden: true});
      add(iconButton("repeat", "Regenerate", () => this.chat.isBusy() || this.regenerate()), this.goOn,
        make("button", {type: "button", class: "bare named", "aria-label": "Verify", title: "Compute this answer again and compare every token", click: () => this.verify()}, icon("shield"), "Verify"), menuButton("more", "More", () => [["probability", "Probabilities", () => this.toggleProbabilities()], ...this.rareActions()]));
    } else add(menuButton("more", "More", () => this.rareActions()));
  }

  rareActions() {
    return [
      ["branch", "Branch into a new conversation", () => this.chat.branch(this.turn)],
      ["trash", "Delete from here", () => this.chat.isBusy() || this.chat.removeTurn(this.turn)]];
  }

  show() {
    const {turn} = this;
    if (turn.role === "user" && this.drawn !== turn.text) setText(this.content, visible(turn.text));
    if (turn.role === "tool" && this.drawn === null) this.content.replaceChildren(...turn.results.map(resultCard));
    if (turn.role !== "assistant") this.drawn = turn.text ?? "";
    else {
      this.showThought();
      this.showContent();
      this.showCalls();
      this.showState();
      this.node.setAttribute("aria-busy", `${!turn.over}`);
    }
    this.showBranches();
  }

  showState() {
    const {turn} = this;
    const text = stateOf(turn);
    const isWaiting = !turn.over && !turn.broken && !turn.text && !turn.thought && !turn.calls?.length;
    setText(this.state, isWaiting && text === "…" ? "" : text);
    this.state.className = turn.over && turn.broken ? "state bad" : `state quiet${isWaiting ? " waiting" : ""}`;
    this.goOn.hidden = !(turn.over && turn.text && (turn.over === "stopped" || turn.reason === "length") && !conversations.callsOf(turn).length);
    this.buttons.hidden = !turn.over;
    if (turn.over && this.stats.childElementCount === 0) this.showStats();
  }

  showStats() {
    if (this.turn.role === "assistant" && this.turn.over) this.stats.replaceChildren(...this.statNodes());
  }

  /** What the answer cost: tokens, speed, the first token, the context, and how much of the prompt was reused. */
  statNodes() {
    const {turn, chat} = this;
    const nodes = [];
    const add = (text, title) => nodes.push(make("span", {title}, text));
    if (turn.ids?.length) add(`${count(turn.ids.length)} ${turn.ids.length === 1 ? "token" : "tokens"}`, "Tokens of this answer");
    const speed = speedOf(turn);
    if (speed) add(`${speed.toFixed(1)} tokens/s`, "Tokens in a second, behind the first one");
    if (turn.times?.first) add(`first token ${millis(turn.times.first - turn.times.sent)}`, "The time from the request to the first token");
    const [used, context] = [turn.usage?.total_tokens, chat.settings.context(turn.model)];
    if (used && context) add(`${count(used)} of ${count(context)} context`, "Tokens of the prompt and the answer, and the most that the model can hold");
    if (turn.usage?.prompt_tokens_details) {
      nodes.push(make("button", {type: "button", class: "link", title: "Why was the rest computed?", click: () => explainReuse(turn, conversations.body(chat.conversation, turn))}, reuseText(turn.usage)));
    }
    if (turn.answer) nodes.push(make("a", {href: `#requests/${encodeURIComponent(turn.answer)}`}, "where the time went"));
    return nodes;
  }

  showThought() {
    const {turn} = this;
    this.thought.hidden = !turn.thought;
    if (!turn.thought) return;
    setText(this.thought.firstChild, turn.over || turn.text ? "Thought" : "Thinking …");
    setText(this.thought.lastChild, visible(turn.thought));
  }

  /** Draws the final part of an answer once, and only the rest again. */
  showContent() {
    const {text, over} = this.turn;
    // At its end the whole answer is drawn once more: its parts were drawn apart.
    if (over && this.drawn !== null && !this.isFinal) this.drawn = null;
    this.isFinal = Boolean(over);
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

  /** Shows each call as a card. When the answer is complete and nothing follows it, the cards take results. */
  showCalls() {
    const calls = conversations.callsOf(this.turn);
    if (!calls.length) return;
    const isOpen = this.turn.over === "ended" && calls.every((call) => call.id) && !this.chat.conversation.turns.some((other) => other.parent === this.turn.id);
    const key = JSON.stringify([calls, isOpen]);
    if (this.callsDrawn === key) return;
    this.callsDrawn = key;
    const inputs = calls.map((call) => make("textarea", {rows: 2, "aria-label": `Result of ${call.name}`, placeholder: "Result, as text or JSON"}));
    this.calls.replaceChildren(...calls.map((call, at) => make("section", {class: "call", "aria-label": `Call of ${call.name}`},
      make("h2", {}, icon("tools"), call.name || "Call"), make("pre", {tabindex: "0", "aria-label": "Arguments"}, make("code", {}, visible(pretty(call.arguments)))), isOpen ? inputs[at] : null)));
    if (!isOpen) return;
    const send = () => this.chat.isBusy() || this.chat.sendResults(this.turn, calls.map((call, at) => ({id: call.id, name: call.name, text: inputs[at].value})));
    this.calls.append(make("button", {type: "button", class: "main", click: send}, "Send the results"));
  }

  showBranches() {
    const all = conversations.siblings(this.chat.conversation, this.turn);
    const at = all.indexOf(this.turn);
    const key = all.length < 2 ? "" : `${at} of ${all.length}`;
    if (this.branchesDrawn === key) return;
    this.branchesDrawn = key;
    if (!key) return this.branches.replaceChildren();
    const step = (by, shape, label) => iconButton(shape, label, () => this.chat.go(all[at + by]), {disabled: !all[at + by]});
    this.branches.replaceChildren(step(-1, "back", "Previous version"), make("span", {class: "number"}, `${at + 1} of ${all.length}`), step(1, "next", "Next version"));
  }

  edit() {
    const area = make("textarea", {rows: 4, "aria-label": "Edited message"});
    area.value = this.turn.text;
    const close = () => {
      this.extra.replaceChildren();
      this.content.hidden = false;
    };
    this.content.hidden = true;
    this.extra.replaceChildren(area, make("div", {class: "row-of"},
      make("button", {type: "button", class: "main", click: () => this.chat.isBusy() || (close(), this.chat.sendMessage(area.value, this.turn.parent))}, "Send"),
      make("button", {type: "button", class: "plain", click: close}, "Cancel")));
    area.focus();
  }

  request() {
    const {messages, ...rest} = conversations.requestOf(this.turn) ?? this.chat.settings.request();
    return {system: messages?.find((of) => of.role === "system")?.content, ...rest};
  }

  parent() {
    return this.chat.conversation.turns.find((other) => other.id === this.turn.parent);
  }

  /** Draws another answer, beside this one. */
  regenerate() {
    const {continued, ...request} = this.request();
    this.chat.reply(this.parent(), {...request, seed: Math.floor(Math.random() * 2 ** 48)});
  }

  /** Continues the text of this answer, in a version beside it. */
  continue() {
    this.chat.reply(this.parent(), {...this.request(), continued: this.turn.text});
  }

  /** Requests the same answer again, on another replica if one is free, and without any cache; compares every token. */
  async verify() {
    const {turn} = this;
    if (turn.seed === undefined || !turn.ids.length) return this.showBadge("warn", "alert", "Not verified: the answer has no tokens or no seed");
    this.showBadge("", "shield", "Verifying …");
    const salt = crypto.getRandomValues(new Uint32Array(4)).join("-");
    const first = await replicaOf(turn.answer);
    const again = {...conversations.body(this.chat.conversation, turn), cache_salt: salt, ...(first ? {apart_from: first} : {})};
    const result = await repeat(turn, again, new AbortController().signal);
    if (result.same === null) return this.showBadge("warn", "alert", `Not verified: ${result.why}`);
    const where = place(first, await replicaOf(result.other.answer));
    if (result.same) return this.showBadge("good", "verify", `Verified: ${where}, all ${turn.ids.length} tokens are the same`);
    this.showBadge("bad", "alert", `Different from token ${result.at + 1} on: ${turn.ids[result.at]} was ${result.other.ids[result.at] ?? "missing"}, ${where}`);
  }

  showBadge(kind, shape, text) {
    this.badge.className = `badge ${kind}`;
    this.badge.replaceChildren(icon(shape), text);
    this.badge.scrollIntoView({block: "nearest"});
    announce(text);
  }

  toggleProbabilities() {
    if (this.extra.querySelector(".tokens")) return this.extra.replaceChildren();
    this.extra.replaceChildren(...probabilities(this.turn.tokens));
  }
}

/** The replica that computed an answer, as long as the router remembers it. */
async function replicaOf(id) {
  try {
    return (await get(`requests/${encodeURIComponent(id)}`)).replica;
  } catch {
    return null;
  }
}

const place = (first, second) => (first && second && first !== second ? `computed again on ${second} (before: ${first})` : "computed again without any cache");

function speedOf({ids, times}) {
  if (!times?.first || ids.length < 2 || times.last <= times.first) return null;
  return ((ids.length - 1) * 1000) / (times.last - times.first);
}

function stateOf(turn) {
  if (turn.broken && turn.over !== "ended") return turn.broken;
  if (turn.over) return turn.over === "stopped" ? "Stopped" : turn.reason === "length" ? "Cut at the limit of tokens" : "";
  const {total, cache, processed} = turn.progress ?? {};
  return total - cache >= PROMPT_SHOWN_MIN && processed < total ? `Reading the prompt: ${processed} of ${total} tokens` : "…";
}

function resultCard({name, text}) {
  return make("section", {class: "call", "aria-label": `Result of ${name}`}, make("h2", {}, icon("answer"), `Result of ${name}`), make("pre", {tabindex: "0"}, make("code", {}, visible(text))));
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
