// The list of conversations: search, rename, pin, export, import and delete.

import * as conversations from "./conversations.js";
import * as runs from "./runs.js";
import {make, menuButton, openDialog, setFlag, showNote} from "./dom.js";
import {icon} from "./icons.js";

const FILE = "lockstep-conversations.json";

export class ConversationList {
  /** `open(conversation)` shows one. `current()` returns the shown one. */
  constructor(open, current) {
    [this.open, this.current] = [open, current];
    this.search = make("input", {type: "search", "aria-label": "Search in conversations", placeholder: "Search", input: () => this.draw()});
    this.list = make("ul", {class: "chats", "aria-label": "Conversations"});
    this.file = make("input", {type: "file", accept: "application/json,.json", hidden: true, "aria-label": "File with conversations", change: () => this.import()});
    this.node = make("div", {class: "conversations"},
      make("div", {class: "row-of tight"},
        make("button", {type: "button", class: "new", click: () => this.open(conversations.fresh())}, icon("plus"), "New conversation"),
        menuButton("more", "Export and import", () => [
          ["export", "Export all", () => this.exportAll()], ["import", "Import", () => this.file.click()]])),
      make("label", {class: "search"}, icon("search"), this.search), this.list, this.file);
  }

  /** Draws the stored conversations, and returns them. */
  async draw() {
    const all = await conversations.all();
    const words = this.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const text = (of) => `${conversations.title(of)} ${of.turns.map((turn) => turn.text ?? "").join(" ")}`.toLowerCase();
    const shown = words.length ? all.filter((of) => words.every((word) => text(of).includes(word))) : all;
    const focused = this.list.contains(document.activeElement) ? document.activeElement.closest("li")?.dataset.id : null;
    this.list.replaceChildren(...shown.map((of) => this.entry(of)));
    if (focused) [...this.list.children].find((of) => of.dataset.id === focused)?.querySelector(".name").focus();
    if (!shown.length && words.length) this.list.replaceChildren(make("li", {class: "quiet small"}, "No conversation has these words."));
    return all;
  }

  entry(conversation) {
    const title = conversations.title(conversation);
    const open = make("button", {type: "button", class: "plain name", title, click: () => this.choose(conversation.id)},
      conversation.isPinned ? icon("pin") : null, make("span", {}, title), runs.running(conversation.id) ? make("span", {class: "dot", role: "img", "aria-label": "answering"}) : null);
    setFlag(open, "aria-current", conversation.id === this.current()?.id);
    setFlag(open, "aria-busy", Boolean(runs.running(conversation.id)));
    const menu = menuButton("more", `Change: ${title}`, () => [
      ["edit", "Rename", () => this.rename(conversation)],
      ["pin", conversation.isPinned ? "Unpin" : "Pin", () => this.change(conversation.id, (of) => (of.isPinned = !of.isPinned))],
      ["export", "Export", () => download(conversations.exported([conversation]))],
      ["trash", "Delete", () => this.remove(conversation)]]);
    return make("li", {"data-id": conversation.id}, open, menu);
  }

  /** Opens a conversation as it is stored now: it may have grown since the list was drawn. */
  async choose(id) {
    if (id === this.current()?.id) return;
    const conversation = await conversations.one(id);
    if (conversation) this.open(conversation);
  }

  async change(id, change) {
    const shown = this.current()?.id === id ? this.current() : null;
    const conversation = runs.running(id)?.conversation ?? shown ?? (await conversations.one(id));
    if (!conversation) return;
    change(conversation);
    await conversations.save(conversation, conversation.changed);
    this.draw();
  }

  rename(conversation) {
    const input = make("input", {type: "text", name: "name", "aria-label": "Name", value: conversations.title(conversation), maxlength: "80"});
    const save = (event) => {
      event.preventDefault();
      this.change(conversation.id, (of) => (of.name = input.value.trim()));
      dialog.close();
    };
    const dialog = openDialog("Rename the conversation", make("form", {class: "row-of", submit: save}, input, make("button", {class: "main"}, "Save")));
    input.select();
  }

  async remove(conversation) {
    await runs.remove(conversation.id);
    if (conversation.id === this.current()?.id) this.open(conversations.fresh());
    else this.draw();
  }

  async exportAll() {
    download(conversations.exported(await conversations.all()));
  }

  async import() {
    const [file] = this.file.files;
    this.file.value = "";
    if (!file) return;
    try {
      const n = await conversations.imported(await file.text());
      showNote(`${n} ${n === 1 ? "conversation" : "conversations"} imported`);
    } catch (error) {
      showNote(`Not imported: ${error.message}`);
    }
    this.draw();
  }

  /** Commands that open the conversations, by name. */
  commands(all) {
    return all.map((of) => ({icon: "chat", name: conversations.title(of), run: () => this.choose(of.id)}));
  }
}

function download(text) {
  const url = URL.createObjectURL(new Blob([text], {type: "application/json"}));
  make("a", {href: url, download: FILE}).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

