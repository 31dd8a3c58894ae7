// The served models; and for operators of one machine, the models on its disk and those that it could fetch, with
// whether each fits.

import {bar, bytes, copyText, count, facts, make} from "./dom.js";
import {icon} from "./icons.js";
import {get, HttpError, post} from "./server.js";

const ABILITIES = {completion: "writes text", embedding: "returns vectors", tools: "calls tools", thinking: "thinks", insert: "fills gaps in code"};

export class Models {
  constructor(viewer) {
    this.served = make("div", {class: "cards"});
    this.machine = make("div", {class: "stack"});
    this.node = make("section", {class: "view", "aria-labelledby": "models"}, bar("models", "Models"), make("h2", {}, "Served now"), this.served, this.machine);
    this.loadServed();
    if (viewer.sees.cluster && !viewer.sees.elsewhere) this.loadMachine();
  }

  topics() {
    return [];
  }

  async loadServed() {
    const {data} = await get("v1/models");
    const shown = await Promise.all(data.map(async (model) => ({...model, about: await (await post("api/show", {model: model.id})).json()})));
    this.served.replaceChildren(...shown.map(card));
    if (!shown.length) this.served.replaceChildren(make("p", {class: "note"}, "No model is served yet."));
  }

  async loadMachine() {
    this.machine.replaceChildren(make("p", {class: "quiet small"}, "Reading the models on this machine …"));
    try {
      const {models, catalogue} = await get("models/machine");
      this.machine.replaceChildren(make("h2", {}, "On this machine"), onDisk(models), make("h2", {}, "Available"),
        make("p", {class: "quiet small"}, "Fetch a model with the command beside it, and start the server with its name. Whether it fits is computed for this machine's memory."), toFetch(catalogue));
    } catch (error) {
      if (!(error instanceof HttpError)) throw error;
      // This server is one of several, and its own disk says nothing about them.
      this.machine.replaceChildren();
    }
  }
}

function card({id, root, max_model_len: context, about}) {
  const {details = {}, capabilities = []} = about;
  const abilities = capabilities.length ? capabilities : ["classifier"];
  return make("article", {class: "card model", "aria-label": id}, make("h3", {}, id),
    make("div", {class: "row-of"}, abilities.map((name) => make("span", {class: "badge"}, ABILITIES[name] ?? name))),
    facts([["Parameters", details.parameter_size], ["Family", details.family], ["Context", context ? `${count(context)} tokens` : null], ["Source", root]]));
}

const table = (label, names, rows) => make("div", {class: "card wide", tabindex: "0", role: "region", "aria-label": label}, make("table", {class: "table"},
  make("thead", {}, make("tr", {}, names.map((name) => make("th", {scope: "col"}, name)))),
  make("tbody", {}, rows.map((cells) => make("tr", {}, cells.map((cell, at) => make("td", {"data-label": names[at], class: at ? null : "strong"}, cell)))))));

function onDisk(models) {
  if (!models.length) return make("p", {class: "note"}, "No model has been fetched to this machine.");
  return table("Models on this machine", ["Model", "Family", "Weights", "Size", "From"], models.map((of) => [
    of.model, of.family ?? make("span", {class: "bad", title: of.error}, "not supported"), of.quantization ?? "–", bytes(of.bytes), of.origin]));
}

function toFetch(catalogue) {
  return table("Models to fetch", ["Model", "Good at", "Size", "Fits this machine", "Command"], catalogue.map((of) => [
    of.model, of.about, bytes(of.bytes), fit(of.fit), of.here ? make("span", {class: "badge good"}, "on this machine") : command(of.model)]));
}

function fit({fits, context, weight_bytes, kv_bytes, why_not}) {
  if (!fits) return make("span", {class: "badge bad", title: why_not}, "no");
  return make("span", {title: `${bytes(weight_bytes)} of weights and ${bytes(kv_bytes)} of KV cache`}, `with ${count(context)} tokens of context`);
}

function command(name) {
  const text = `lockstep pull ${name}`;
  return make("button", {type: "button", class: "command mono", title: "Copy the command", click: () => copyText(text)}, text, icon("copy"));
}
