// Draws the frame, chooses the view, loads the viewer's rights, and runs the one stream of changes for the shown view.

import {Chat} from "./chat.js";
import {Cluster} from "./cluster.js";
import {Commands} from "./commands.js";
import {Load} from "./load.js";
import {Models} from "./models.js";
import {Requests} from "./requests.js";
import {iconButton, make, setFlag, setText, showStatus} from "./dom.js";
import {icon} from "./icons.js";
import {applyTheme, themeCommands, themeSwitch} from "./theme.js";
import {HttpError, get, key, watch} from "./server.js";

const VIEWS = [
  {name: "chat", title: "Chat", icon: "chat", keys: "g c", make: () => new Chat(), isAllowed: (viewer) => viewer.chats},
  {name: "models", title: "Models", icon: "models", keys: "g m", make: () => new Models(viewer), isAllowed: (viewer) => viewer.chats},
  {name: "cluster", title: "Cluster", icon: "cluster", keys: "g k", make: () => new Cluster(), isAllowed: ({sees}) => sees.cluster && !sees.elsewhere},
  {name: "requests", title: "Requests", icon: "list", keys: "g r", make: (rest) => new Requests(rest), isAllowed: () => true},
  {name: "load", title: "Load", icon: "chart", keys: "g l", make: () => new Load(), isAllowed: ({sees}) => sees.cluster && !sees.elsewhere},
];

const START_AGAIN_MS = 1000;
const [place, side] = ["view", "side"].map((id) => document.getElementById(id));
const nav = make("nav", {id: "views", "aria-label": "Views"});
const ofView = make("div", {class: "of-view"});
const version = make("span", {class: "quiet small push"});
const changeKey = iconButton("key", "Use another API key", () => (key.set(""), start()), {hidden: true});
let [viewer, shown, watching, name] = [null, null, null, null];

const commands = new Commands(() => [
  ...(shown?.commands?.() ?? []),
  ...allowedViews().map((view) => ({icon: view.icon, name: `Go to ${view.title}`, keys: view.keys, run: () => (location.hash = view.name)})),
  ...themeCommands(),
  {icon: "help", name: "Show the keyboard shortcuts", keys: "?", run: () => commands.openShortcuts()},
  ...(shown?.places?.() ?? []),
]);

function drawFrame() {
  const close = () => document.documentElement.removeAttribute("data-drawer");
  side.append(
    make("p", {class: "brand"}, make("img", {src: "page/icon.svg", alt: ""}), "Lockstep"),
    nav, ofView,
    make("div", {class: "foot"}, themeSwitch(), iconButton("help", "Keyboard shortcuts", () => commands.openShortcuts()), changeKey, version));
  side.after(make("button", {type: "button", class: "shade", "aria-label": "Close the navigation", click: close}));
  side.addEventListener("click", (event) => event.target.closest("a, .of-view button:not([aria-haspopup])") && close());
  addEventListener("keydown", (event) => event.key === "Escape" && close());
  // The address stays that of the view.
  document.querySelector(".skip").addEventListener("click", (event) => (event.preventDefault(), place.focus()));
  document.body.append(make("p", {id: "announced", class: "hidden", role: "status", "aria-live": "polite"}));
  applyTheme();
}

/** A part of the address. One that is not encoded stays what it is. */
const decoded = (text) => {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
};

const allowedViews = () => (viewer ? VIEWS.filter((view) => view.isAllowed(viewer)) : []);

/** Returns whether this port serves a path to this key. */
const isServed = async (path) => {
  try {
    await get(path);
    return true;
  } catch (error) {
    if (error instanceof HttpError && [401, 403, 404].includes(error.status)) return false;
    throw error;
  }
};

/** Loads the viewer's rights. They decide which views exist. The server checks them again at each request. */
async function start() {
  try {
    viewer = await get("viewer");
    // If operators have their own port, each port serves only some of the paths.
    const [chats, cluster] = await Promise.all([isServed("v1/models"), viewer.sees.cluster ? isServed("cluster") : false]);
    Object.assign(viewer, {chats});
    viewer.sees.elsewhere = viewer.sees.cluster && !cluster;
    changeKey.hidden = !viewer.asks_for_keys;
    setText(version, viewer.version);
    document.getElementById("key")?.remove();
    showStatus("");
    const before = name;
    show();
    // The view is still the same after a stream has ended for good: it gets another one.
    if (before && name === before) follow();
  } catch (error) {
    clear();
    if (error instanceof HttpError && error.status === 401) return requestKey();
    showStatus(`The server does not respond: ${error.message}`);
    setTimeout(start, 2 * START_AGAIN_MS);
  }
}

/** Shows the form for an API key in place of a view. */
function requestKey() {
  const input = make("input", {type: "password", name: "key", autocomplete: "off", spellcheck: "false", "aria-label": "API key", placeholder: "API key"});
  const use = (event) => {
    event.preventDefault();
    key.set(input.value.trim());
    clear();
    start();
  };
  const problem = key.get() ? make("p", {class: "bad", role: "alert"}, "This API key is unknown.") : null;
  place.replaceChildren(make("form", {id: "key", class: "gate card", submit: use},
    make("h1", {}, "This server requires an API key"), make("p", {class: "quiet small"}, "This browser keeps the key until the tab is closed."), problem,
    make("div", {class: "row-of"}, input, make("button", {class: "main"}, "Use"))));
  input.focus();
}

function clear() {
  watching?.abort();
  shown?.close?.();
  [viewer, shown, name] = [null, null, null];
  changeKey.hidden = true;
  place.replaceChildren();
  nav.replaceChildren();
  ofView.replaceChildren();
}

function show() {
  const views = allowedViews();
  if (!views.length) return;
  const [requested, rest] = location.hash.slice(1).split("/", 2).map(decoded);
  const view = views.find((of) => of.name === requested) ?? views[0];
  nav.replaceChildren(...views.map((of) => {
    const link = make("a", {href: `#${of.name}`}, icon(of.icon), of.title);
    if (of === view) link.setAttribute("aria-current", "page");
    return link;
  }));
  document.title = `${view.title} · Lockstep`;
  if (name === view.name) return rest ? shown.open?.(rest) : shown.openNone?.();
  watching?.abort();
  shown?.close?.();
  name = view.name;
  shown = view.make(rest);
  place.replaceChildren(shown.node);
  ofView.replaceChildren(...(shown.side ? [shown.side] : []));
  scrollTo(0, 0);
  follow();
}

/** Watches the topics of the shown view, and only while the page is visible. */
function follow() {
  watching?.abort();
  // The problem of another view's stream is none of this one.
  if (place.hasAttribute("aria-busy")) showStatus("");
  setFlag(place, "aria-busy", false);
  const topics = shown?.topics() ?? [];
  if (!topics.length || document.hidden) return;
  watching = new AbortController();
  const [view, signal] = [shown, watching.signal];
  const onState = (problem, hasEnded) => {
    setFlag(place, "aria-busy", Boolean(problem));
    showStatus(problem ?? "");
    if (hasEnded) setTimeout(start, START_AGAIN_MS);
  };
  watch(topics, (topic, data) => view === shown && view.update(topic, data), onState, signal);
}

drawFrame();
addEventListener("hashchange", show);
document.addEventListener("visibilitychange", follow);
start();

