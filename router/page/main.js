// Chooses the view, loads the viewer's rights, and runs the one stream of changes for the shown view.

import {Chat} from "./chat.js";
import {Cluster} from "./cluster.js";
import {Load} from "./load.js";
import {Requests} from "./requests.js";
import {make, mark, tell} from "./dom.js";
import {Refused, get, key, watch} from "./server.js";

const VIEWS = [
  {name: "chat", title: "Chat", make: () => new Chat(), may: (viewer) => viewer.chats},
  {name: "cluster", title: "Cluster", make: () => new Cluster(), may: ({sees}) => sees.cluster && !sees.elsewhere},
  {name: "requests", title: "Requests", make: (rest) => new Requests(rest), may: () => true},
  {name: "load", title: "Load", make: () => new Load(), may: ({sees}) => sees.cluster && !sees.elsewhere},
];

const [place, nav, form] = ["view", "views", "key"].map((id) => document.getElementById(id));
let [viewer, shown, watching, name] = [null, null, null, null];

const answers = async (path) => {
  try {
    await get(path);
    return true;
  } catch (error) {
    if (error instanceof Refused) return false;
    throw error;
  }
};

/** Loads the viewer's rights. They decide which views exist; the server refuses the rest whatever is shown here. */
async function enter() {
  try {
    viewer = await get("viewer");
    // If operators have their own port, each port serves only a part of the pages.
    const [chats, cluster] = await Promise.all([answers("v1/models"), viewer.sees.cluster ? answers("cluster") : false]);
    Object.assign(viewer, {chats});
    viewer.sees.elsewhere = viewer.sees.cluster && !cluster;
    form.hidden = !viewer.asks_for_keys;
    tell("");
    show();
  } catch (error) {
    leave();
    const asks = error instanceof Refused && error.status === 401;
    form.hidden = !asks;
    tell(asks ? (key.get() ? "This API key is not known here." : "An API key is needed.") : `The server does not answer: ${error.message}`);
    if (asks) form.elements.key.focus();
    else setTimeout(enter, 2000);
  }
}

function leave() {
  watching?.abort();
  shown?.close?.();
  [shown, name] = [null, null];
  place.replaceChildren();
  nav.replaceChildren();
}

function show() {
  if (!viewer) return;
  const views = VIEWS.filter((view) => view.may(viewer));
  const [asked, rest] = location.hash.slice(1).split("/", 2).map(decodeURIComponent);
  const view = views.find((of) => of.name === asked) ?? views[0];
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
  const going = (why, ended) => {
    mark(place, "aria-busy", Boolean(why));
    tell(why ?? "");
    if (ended) enter();
  };
  watch(topics, (topic, data) => view === shown && view.hear(topic, data), going, signal);
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  key.set(form.elements.key.value.trim());
  form.elements.key.value = "";
  leave();
  enter();
});
addEventListener("hashchange", (event) => (new URL(event.newURL).hash === "#view" ? null : show()));
document.addEventListener("visibilitychange", follow);
enter();
