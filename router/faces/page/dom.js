// Makes nodes. Text becomes text nodes only: no string is ever parsed as HTML.

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

/** Shows a message in the status line, which screen readers announce. */
export function showStatus(text) {
  const status = document.getElementById("status");
  if (status) setText(status, text);
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

export function facts(pairs) {
  const shown = pairs.filter(([, value]) => value !== null && value !== undefined && value !== "");
  return make("dl", {class: "facts"}, shown.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));
}

export const bytes = (n) => {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (n >= 1024 && at < units.length - 1) [n, at] = [n / 1024, at + 1];
  return `${n >= 100 || at === 0 ? Math.round(n) : n.toFixed(1)} ${units[at]}`;
};

export const percent = (part) => `${Math.round(part * 100)}%`;

export const millis = (ms) => {
  if (ms === null || ms === undefined) return "–";
  if (ms < 1000) return `${Math.round(ms)} ms`;
  return ms < 120000 ? `${(ms / 1000).toFixed(1)} s` : `${Math.round(ms / 60000)} min`;
};

export const count = (n) => (n >= 1e6 ? `${(n / 1e6).toFixed(1)}M` : n >= 1e4 ? `${Math.round(n / 1e3)}k` : `${Math.round(n)}`);
