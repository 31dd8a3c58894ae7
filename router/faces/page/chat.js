// Chats with the served models. `markdown.js` turns the text of a model into nodes; it is never parsed as HTML.

import {blank} from "./answer.js";
import {ConversationList} from "./conversationlist.js";
import * as conversations from "./conversations.js";
import * as runs from "./runs.js";
import {announce, bar, count, iconButton, make, setAttr, setText, showNote, showStatus} from "./dom.js";
import {icon} from "./icons.js";
import {Settings} from "./settings.js";
import {Turn} from "./turn.js";

/** Prompts for a first message, which every chat model can answer. */
const EXAMPLES = ["Name three colours and an object of each.", "Write a short poem about the sea at night.", "Explain in two sentences why the sky is blue."];
/** The text of the composer, while another view is shown. */
let draft = "";
/** How often the served models are requested again while there are none. */
const MODELS_EVERY_MS = 2000;
/** How near to the end the messages must be scrolled to follow a growing answer. */
const NEAR_PX = 80;

export class Chat {
  constructor() {
    this.shown = new Map();
    this.conversation = conversations.fresh();
    this.list = new ConversationList((conversation) => this.open(conversation), () => this.conversation);
    this.side = this.list.node;
    this.settings = new Settings(() => this.showSettings());
    this.turns = make("div", {class: "turns column", role: "log", "aria-label": "Conversation", "aria-live": "off"});
    this.scroller = make("div", {class: "scroller", tabindex: "-1"}, this.turns);
    this.text = make("textarea", {name: "text", rows: 1, "aria-label": "Your message", placeholder: "Write a message", keydown: (event) => this.key(event), input: () => this.buttons()});
    this.send = make("button", {class: "main round", type: "submit", disabled: true});
    this.summary = make("span", {class: "row-of small quiet"});
    this.think = make("button", {type: "button", class: "chip", hidden: true, "aria-pressed": "false", click: () => this.switchThinking()}, icon("think"), "Think");
    this.form = make("form", {class: "compose column", submit: (event) => (event.preventDefault(), this.submit())},
      make("div", {class: "box", click: (event) => event.target === event.currentTarget && this.text.focus()}, this.text, make("div", {class: "row-of"}, this.think, this.summary, make("span", {class: "push"}), this.send)));
    this.context = make("span", {class: "small quiet number"});
    this.gear = iconButton("gear", "Settings", () => this.settings.toggle(), {"aria-expanded": "false", "aria-controls": "settings"});
    const head = bar("chat", "Chat", this.settings.model, make("span", {class: "push"}), this.context, this.gear);
    head.querySelector("h1").classList.add("hidden");
    this.node = make("section", {class: "view chat", "aria-labelledby": "chat"}, make("div", {class: "talk"}, head, this.scroller, this.form), this.settings.node);
    this.endWatch = runs.watch((run, over) => this.onRunChange(run, over));
    this.text.value = draft;
    this.begin();
  }

  topics() {
    return [];
  }

  close() {
    draft = this.text.value;
    this.isClosed = true;
    this.endWatch();
  }

  commands() {
    return [
      {icon: "plus", name: "New conversation", keys: "n", run: () => this.open(conversations.fresh())},
      {icon: "search", name: "Search in conversations", keys: "s", run: () => (document.documentElement.toggleAttribute("data-drawer", true), this.list.search.focus())},
      {icon: "edit", name: "Write a message", keys: "/", run: () => this.text.focus()},
      {icon: "gear", name: "Settings of the chat", keys: ",", run: () => this.settings.toggle()},
      ...this.lastAnswer((answer) => [
        {icon: "shield", name: "Verify the last answer", keys: "v", run: () => answer.verify()},
        {icon: "repeat", name: "Regenerate the last answer", keys: "r", run: () => this.isBusy() || answer.regenerate()}]),
      ...(this.isBusy() ? [{icon: "stop", name: "Stop the answer", keys: ".", run: () => runs.stop(this.conversation.id)}] : []),
    ];
  }

  /** The conversations, which the palette lists behind all commands. */
  places() {
    return this.list.commands(this.all ?? []);
  }

  /** Returns the commands for the last answer, if there is one. */
  lastAnswer(commands) {
    const last = conversations.path(this.conversation).filter((turn) => turn.role === "assistant" && turn.over).at(-1);
    return last && this.shown.has(last.id) ? commands(this.shown.get(last.id)) : [];
  }

  async begin() {
    try {
      this.all = await conversations.all();
      this.open(this.all.find((of) => !of.isPinned) ?? this.all[0] ?? this.conversation);
    } catch (error) {
      this.open(this.conversation);
      showNote(`This browser stores no conversations: ${error.message}`);
    }
    await this.loadModels();
  }

  /** Loads the served models, again and again until there is one. */
  async loadModels() {
    let problem = "";
    try {
      await this.settings.load();
    } catch (error) {
      problem = error.message;
    }
    if (this.isClosed) return;
    showStatus(problem);
    if (!this.settings.model.value) return setTimeout(() => this.isClosed || this.loadModels(), MODELS_EVERY_MS);
    // Their figures name the context, which was not known before.
    for (const shown of this.shown.values()) shown.showStats();
  }

  async drawList() {
    try {
      this.all = await this.list.draw();
    } catch {
      // The first attempt has shown why.
    }
  }

  open(conversation) {
    // While an answer is under way, only the object of its run grows.
    this.conversation = runs.running(conversation.id)?.conversation ?? conversation;
    this.shown.clear();
    this.turns.replaceChildren();
    this.draw();
    this.buttons();
    this.drawList();
    this.scroller.scrollTop = this.scroller.scrollHeight;
    // If an answer was under way when the page was closed, it continues after its last event.
    const last = conversations.path(this.conversation).at(-1);
    if (last?.role === "assistant" && !last.over && conversations.requestOf(last) && !this.isBusy()) this.answer(last);
  }

  isBusy() {
    return Boolean(runs.running(this.conversation.id));
  }

  /** One button sends a message, or stops the answer that is under way. */
  buttons() {
    const isBusy = this.isBusy();
    this.send.disabled = !isBusy && !this.text.value.trim();
    if (this.sendStops === isBusy) return;
    this.sendStops = isBusy;
    this.send.replaceChildren(icon(isBusy ? "stop" : "send"));
    setAttr(this.send, "aria-label", isBusy ? "Stop" : "Send");
    setAttr(this.send, "title", isBusy ? "Stop" : "Send");
  }

  showSettings() {
    const can = this.settings.can();
    this.think.hidden = !can.includes("thinking");
    setAttr(this.think, "aria-pressed", `${this.settings.thinking.value !== "off"}`);
    setAttr(this.gear, "aria-expanded", `${!this.settings.node.hidden}`);
    this.node.classList.toggle("with-panel", !this.settings.node.hidden);
    this.summary.replaceChildren(...this.settings.summary().map((text) => make("span", {class: "badge"}, text)));
    if (!conversations.path(this.conversation).length) this.draw();
    this.showContext();
  }

  switchThinking() {
    this.settings.thinking.value = this.settings.thinking.value === "off" ? "on" : "off";
    this.settings.store();
  }

  showContext() {
    const last = conversations.path(this.conversation).filter((turn) => turn.usage).at(-1);
    const context = this.settings.context();
    setText(this.context, context ? `${count(last?.usage.total_tokens ?? 0)} of ${count(context)} tokens` : "");
    setAttr(this.context, "title", "Tokens of this conversation, and the most that the model can hold");
  }

  key(event) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      if (!this.isBusy()) this.submit();
    }
  }

  submit() {
    if (this.isBusy()) return runs.stop(this.conversation.id);
    const text = this.text.value;
    if (!text.trim() || !this.settings.model.value) return;
    this.text.value = "";
    this.sendMessage(text, this.conversation.at);
  }

  /** Adds a turn of the user below `parent`, and an answer below that turn. */
  sendMessage(text, parent) {
    const turn = conversations.add(this.conversation, {role: "user", parent, text});
    this.reply(turn, this.settings.request());
  }

  /** Adds the results of an answer's calls below it, and the next answer. */
  sendResults(answer, results) {
    const turn = conversations.add(this.conversation, {role: "tool", parent: answer.id, text: "", results});
    const {continued, ...request} = conversations.requestOf(answer);
    this.reply(turn, request);
  }

  /** Adds an answer below `turn`, which may already have others. */
  reply(turn, request) {
    const answer = conversations.add(this.conversation, blank(turn.id, request));
    this.draw();
    this.scroller.scrollTop = this.scroller.scrollHeight;
    this.answer(answer);
  }

  /** Opens a new conversation with the messages up to this one. */
  async branch(turn) {
    const copy = conversations.forked(this.conversation, turn);
    await conversations.save(copy);
    this.open(copy);
  }

  removeTurn(turn) {
    conversations.cut(this.conversation, turn);
    conversations.save(this.conversation).then(() => this.drawList());
    this.draw();
    this.showContext();
  }

  answer(turn) {
    announce("Answering");
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
    this.showContext();
    announce(turn.over === "ended" ? "Answer complete" : turn.broken ?? "Stopped");
  }

  drawSoon(turn) {
    if (this.drawing) return;
    this.drawing = true;
    const draw = () => requestAnimationFrame(() => {
      this.drawing = false;
      const began = performance.now();
      const {scrollHeight, clientHeight, scrollTop} = this.scroller;
      const isAtEnd = scrollHeight - clientHeight - scrollTop < NEAR_PX;
      this.shown.get(turn.id)?.show();
      if (isAtEnd) this.scroller.scrollTop = this.scroller.scrollHeight;
      this.took = performance.now() - began;
    });
    // Drawings that are slow are made less often, so the page stays responsive.
    if (this.took > 8) setTimeout(draw, Math.min(this.took * 4, 4000));
    else draw();
  }

  draw() {
    const turns = conversations.path(this.conversation);
    if (!turns.length) {
      this.shown.clear();
      return this.turns.replaceChildren(this.welcome());
    }
    this.turns.querySelector(".welcome")?.remove();
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

  /** What an empty conversation shows: the model, its context, and examples. */
  welcome() {
    const {settings} = this;
    const [model, can] = [settings.model.value, settings.can()];
    const {parameter_size: size} = settings.about.get(model)?.details ?? {};
    const facts = [size ? `${size} parameters` : null, settings.context() ? `${count(settings.context())} tokens of context` : null,
      can.includes("tools") ? "tools" : null, can.includes("thinking") ? "thinking" : null].filter(Boolean);
    const isChat = !can.length || can.includes("completion");
    const use = (text) => {
      this.text.value = text;
      this.submit();
    };
    return make("div", {class: "welcome"}, make("h2", {}, model || "No model is served yet"), make("p", {class: "quiet"}, facts.join(" · ")),
      isChat ? make("div", {class: "examples"}, EXAMPLES.map((text) => make("button", {type: "button", disabled: !model, click: () => use(text)}, text)))
        : make("p", {class: "note"}, "This model writes no text. It returns vectors or scores: see the Models view."));
  }

  go(turn) {
    this.conversation.at = conversations.end(this.conversation, turn).id;
    conversations.save(this.conversation);
    this.draw();
    this.shown.get(turn.id)?.branches.querySelector("button:not(:disabled)")?.focus();
  }
}
