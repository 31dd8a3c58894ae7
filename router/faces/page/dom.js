// Makes nodes. Text becomes text nodes only: no string is ever parsed as HTML.

import {icon} from "./icons.js";

const SVG = "http://www.w3.org/2000/svg";

/** A node: `make("p", {class: "quiet"}, "text", child)`. A function as a property handles the event of that name. */
export function make(name, properties = {}, ...children) {
  return filled(document.createElement(name), properties, children);
}

export function draw(name, properties = {}, ...children) {
  return filled(document.createElementNS(SVG, name), properties, children);
}

function filled(node, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (typeof value === "function") node.addEventListener(name, value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

const NOTE_MS = 4000;
let noteTimer = null;

/** Shows a message above the page until another replaces it. Screen readers announce it. */
export function showStatus(text) {
  clearTimeout(noteTimer);
  const status = document.getElementById("status");
  if (status) setText(status, text);
}

/** Shows a message for a few seconds. */
export function showNote(text) {
  showStatus(text);
  noteTimer = setTimeout(() => showStatus(""), NOTE_MS);
}

/** Copies a text to the clipboard, where the browser allows it. */
export const copyText = (text) => navigator.clipboard?.writeText(text).then(() => showNote("Copied"));

/** A message for screen readers only. */
export function announce(text) {
  const node = document.getElementById("announced");
  if (node) setText(node, text);
}

/** A button that shows an icon. `name` is its name for screen readers and its tooltip. */
export function iconButton(shape, name, click, more = {}) {
  return make("button", {type: "button", class: "bare", "aria-label": name, title: name, click, ...more}, icon(shape));
}

/** The bar at the top of a view: its title, and what belongs to all of it. */
export function bar(id, title, ...children) {
  const open = () => document.documentElement.toggleAttribute("data-drawer", true);
  return make("header", {class: "bar"}, iconButton("menu", "Open the navigation", open, {class: "bare drawer"}), make("h1", {id}, title), ...children);
}

/** Opens a dialog with a title. It is removed when it closes. Returns the dialog. */
export function openDialog(title, body, onClose = () => {}) {
  const dialog = make("dialog", {"aria-label": title, close: () => (dialog.remove(), onClose()), click: (event) => event.target === dialog && dialog.close()},
    make("header", {}, make("h2", {}, title), iconButton("close", "Close", () => dialog.close())), make("div", {class: "body"}, body));
  document.body.append(dialog);
  dialog.showModal();
  return dialog;
}

/**
 * A button that opens a menu, which stands in the page's body and is not cut off by a part of it. Its entries are `items()`,
 * each `[icon, name, run]`. Arrow keys move in the menu, Escape closes it.
 */
export function menuButton(shape, name, items) {
  let menu = null;
  const button = iconButton(shape, name, () => (menu ? close() : open()), {"aria-haspopup": "menu", "aria-expanded": "false"});
  const close = (focus) => {
    // Removing it moves the focus, which closes it again.
    const shown = menu;
    menu = null;
    shown?.remove();
    button.setAttribute("aria-expanded", "false");
    if (focus) button.focus();
  };
  const open = () => {
    const entries = items().map(([shape, name, run]) => make("button", {type: "button", role: "menuitem", click: () => (close(true), run())}, icon(shape), name));
    const move = (event) => {
      if (event.key === "Escape") return event.stopPropagation(), close(true);
      const by = {ArrowDown: 1, ArrowUp: -1}[event.key];
      if (!by) return;
      event.preventDefault();
      entries[(entries.indexOf(document.activeElement) + by + entries.length) % entries.length].focus();
    };
    menu = make("div", {class: "menu", role: "menu", tabindex: "-1", "aria-label": name, keydown: move}, entries);
    menu.addEventListener("focusout", (event) => menu && !menu.contains(event.relatedTarget) && event.relatedTarget !== button && close());
    document.body.append(menu);
    placeBelow(menu, button);
    button.setAttribute("aria-expanded", "true");
    entries[0]?.focus();
  };
  return button;
}

/** Puts a menu below a button, or above it where there is no room, within the window. */
function placeBelow(menu, button) {
  const [of, own] = [button.getBoundingClientRect(), menu.getBoundingClientRect()];
  const isBelow = of.bottom + own.height < innerHeight;
  menu.style.top = `${Math.max(4, isBelow ? of.bottom : of.top - own.height)}px`;
  menu.style.left = `${Math.max(4, Math.min(of.left, innerWidth - own.width - 8))}px`;
}

/** Replaces a text only if it has changed, so that a selection and a reader's place stay. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** The same as `setText` for an attribute. */
export function setAttr(node, name, value) {
  if (node.getAttribute(name) !== value) node.setAttribute(name, value);
}

const drawn = new WeakMap();

/** Replaces the child nodes of `place` if `data`, which they show, has changed. */
export function redraw(place, data, nodes) {
  const key = JSON.stringify(data);
  if (drawn.get(place) === key) return;
  drawn.set(place, key);
  place.replaceChildren(...nodes());
}

/** Sets an attribute to `true`, or removes it. */
export function setFlag(node, name, is) {
  if (is) node.setAttribute(name, "true");
  else node.removeAttribute(name);
}

/** A list of `[name, value, help]`, without those that have no value. The help is shown as a tooltip of the name. */
export function facts(all) {
  const shown = all.filter(([, value]) => value !== null && value !== undefined && value !== "");
  return make("dl", {class: "facts"}, shown.map(([name, value, help]) => make("div", {}, make("dt", {title: help}, name), make("dd", {}, value))));
}

export const bytes = (n) => {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (n >= 1024 && at < units.length - 1) [n, at] = [n / 1024, at + 1];
  return `${n >= 100 || at === 0 ? Math.round(n) : n.toFixed(1)} ${units[at]}`;
};

export const clock = (ms) => new Date(ms).toLocaleTimeString([], {hour12: false});

export const percent = (part) => `${Math.round(part * 100)}%`;

export const millis = (ms) => {
  if (ms === null || ms === undefined) return "–";
  if (ms < 1000) return `${Math.round(ms)} ms`;
  return ms < 120000 ? `${(ms / 1000).toFixed(ms < 10000 ? 1 : 0)} s` : `${Math.round(ms / 60000)} min`;
};

export const count = (n) => (n < 10 && !Number.isInteger(n) ? n.toFixed(1) : n >= 1e6 ? `${(n / 1e6).toFixed(1)}M` : n >= 1e4 ? `${Math.round(n / 1e3)}k` : `${Math.round(n)}`);
