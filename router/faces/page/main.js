// Chooses the view, loads the viewer's rights, and runs the one stream of changes for the shown view.

import {Chat} from "./chat.js";
import {Cluster} from "./cluster.js";
import {Load} from "./load.js";
import {Requests} from "./requests.js";
import {make, setFlag, showStatus} from "./dom.js";
import {HttpError, get, key, watch} from "./server.js";

const VIEWS = [
  {name: "chat", title: "Chat", make: () => new Chat(), isAllowed: (viewer) => viewer.chats},
  {name: "cluster", title: "Cluster", make: () => new Cluster(), isAllowed: ({sees}) => sees.cluster && !sees.elsewhere},
  {name: "requests", title: "Requests", make: (rest) => new Requests(rest), isAllowed: () => true},
  {name: "load", title: "Load", make: () => new Load(), isAllowed: ({sees}) => sees.cluster && !sees.elsewhere},
];

const [place, nav, form] = ["view", "views", "key"].map((id) => document.getElementById(id));
let [viewer, shown, watching, name] = [null, null, null, null];

/** Returns whether this port serves a path to this key. */
const isServed = async (path) => {
  try {
    await get(path);
    return true;
  } catch (error) {
    if (error instanceof HttpError) return false;
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
    form.hidden = !viewer.asks_for_keys;
    showStatus("");
    show();
  } catch (error) {
    clear();
    const needsKey = error instanceof HttpError && error.status === 401;
    form.hidden = !needsKey;
    showStatus(needsKey ? (key.get() ? "This API key is unknown." : "An API key is required.") : `The server does not respond: ${error.message}`);
    if (needsKey) form.elements.key.focus();
    else setTimeout(start, 2000);
  }
}

function clear() {
  watching?.abort();
  shown?.close?.();
  [shown, name] = [null, null];
  place.replaceChildren();
  nav.replaceChildren();
}

function show() {
  if (!viewer) return;
  const views = VIEWS.filter((view) => view.isAllowed(viewer));
  const [requested, rest] = location.hash.slice(1).split("/", 2).map(decodeURIComponent);
  const view = views.find((of) => of.name === requested) ?? views[0];
  nav.replaceChildren(...views.map((of) => {
    const link = make("a", {href: `#${of.name}`}, of.title);
    if (of === view) link.setAttribute("aria-current", "page");
    return link;
  }));
  document.title = `${view.title} · Lockstep`;
  if (name === view.name) return rest && shown.open?.(rest);
  watching?.abort();
  shown?.close?.();
  name = view.name;
  shown = view.make(rest);
  place.replaceChildren(shown.node);
  follow();
}

/** Watches the topics of the shown view, and only while the page is visible. */
function follow() {
  watching?.abort();
  const topics = shown?.topics() ?? [];
  if (!topics.length || document.hidden) return;
  watching = new AbortController();
  const [view, signal] = [shown, watching.signal];
  const onState = (problem, hasEnded) => {
    setFlag(place, "aria-busy", Boolean(problem));
    showStatus(problem ?? "");
    if (hasEnded) start();
  };
  watch(topics, (topic, data) => view === shown && view.update(topic, data), onState, signal);
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  key.set(form.elements.key.value.trim());
  form.elements.key.value = "";
  clear();
  start();
});
addEventListener("hashchange", (event) => (new URL(event.newURL).hash === "#view" ? null : show()));
document.addEventListener("visibilitychange", follow);
start();
