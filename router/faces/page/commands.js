// The palette of commands (Ctrl-K), the list of shortcuts (?), and the keys themselves.

import {icon} from "./icons.js";
import {make, openDialog} from "./dom.js";

const SHOWN_MAX = 12;

/** `all()` returns the commands: `{name, icon, keys, run}`. `keys` is one key, or two that are pressed in a row. */
export class Commands {
  constructor(all) {
    [this.all, this.first] = [all, null];
    addEventListener("keydown", (event) => this.onKey(event));
  }

  onKey(event) {
    if ((event.ctrlKey || event.metaKey) && !event.altKey && event.key.toLowerCase() === "k") {
      event.preventDefault();
      return this.open();
    }
    const inText = event.target.closest?.("input, textarea, select, dialog, [role=menu]");
    if (inText || event.ctrlKey || event.metaKey || event.altKey || event.isComposing) return;
    const keys = this.first ? `${this.first} ${event.key}` : event.key;
    const commands = this.all();
    const found = commands.find((command) => command.keys === keys);
    this.first = commands.some((command) => command.keys?.startsWith(`${event.key} `)) ? event.key : null;
    if (!found) return;
    event.preventDefault();
    this.first = null;
    found.run();
  }

  open() {
    if (document.querySelector("dialog[open]")) return;
    const commands = this.all();
    const list = make("ul", {id: "found", role: "listbox", "aria-label": "Commands"});
    const input = make("input", {type: "text", role: "combobox", "aria-label": "Find a command or a conversation", "aria-controls": "found", "aria-expanded": "true",
      autocomplete: "off", spellcheck: "false", placeholder: "Find a command or a conversation", input: () => show(), keydown: (event) => move(event)});
    let [found, at] = [[], 0];
    const run = (command) => {
      dialog.close();
      command.run();
    };
    const show = (next = 0) => {
      const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      found = commands.filter(({name}) => words.every((word) => name.toLowerCase().includes(word))).slice(0, SHOWN_MAX);
      at = Math.max(0, Math.min(next, found.length - 1));
      list.replaceChildren(...found.map((command, i) => make("li", {id: `found-${i}`, role: "option", "aria-selected": `${i === at}`, click: () => run(command)},
        icon(command.icon), make("span", {}, command.name), command.keys ? keysOf(command.keys) : null)));
      if (!found.length) list.replaceChildren(make("li", {class: "quiet", role: "option", "aria-selected": "false"}, "Nothing has this name."));
      input.setAttribute("aria-activedescendant", found.length ? `found-${at}` : "");
      list.children[at]?.scrollIntoView({block: "nearest"});
    };
    const move = (event) => {
      if (event.key === "Enter" && found[at]) return event.preventDefault(), run(found[at]);
      const by = {ArrowDown: 1, ArrowUp: -1}[event.key];
      if (!by || !found.length) return;
      event.preventDefault();
      show((at + by + found.length) % found.length);
    };
    const dialog = openDialog("Commands", [input, list]);
    dialog.classList.add("palette");
    input.focus();
    show();
  }

  openShortcuts() {
    const rows = [["Find a command", "Ctrl K"], ...this.all().filter(({keys}) => keys).map(({name, keys}) => [name, keys]),
      ["Send the message", "Enter"], ["Start a new line", "Shift Enter"], ["Close a dialog or a menu", "Escape"]];
    openDialog("Keyboard shortcuts", make("table", {class: "shortcuts"}, make("tbody", {}, rows.map(([name, keys]) => make("tr", {}, make("td", {}, name), make("td", {}, keysOf(keys)))))));
  }
}

const keysOf = (keys) => make("span", {class: "keys"}, keys.split(" ").map((key) => make("kbd", {}, key)));
