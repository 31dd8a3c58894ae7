// The model, the system prompt, the sampling, tools and the form of answers. This browser stores the values.

import {iconButton, make, setText} from "./dom.js";
import {get, post} from "./server.js";

const STORED = "lockstep chat settings";
const NUMBERS = [
  ["temperature", "Temperature", {min: 0, step: 0.1}], ["top_p", "Top p", {min: 0, max: 1, step: 0.05}], ["top_k", "Top k", {min: 0, step: 1}],
  ["min_p", "Min p", {min: 0, max: 1, step: 0.01}], ["max_tokens", "Max tokens", {min: 1, step: 1}], ["seed", "Seed", {min: 0, step: 1}],
];
const TOOLS_EXAMPLE = `[{"name": "weather", "parameters": {"type": "object",
  "properties": {"city": {"type": "string"}}}}]`;
const SCHEMA_EXAMPLE = `{"type": "object", "properties": {"name": {"type": "string"}}}`;

/** Returns tools in the form of a request. Accepts that form, bare functions, and one tool without a list. */
function parseTools(text) {
  if (!text.trim()) return [];
  const given = JSON.parse(text);
  return (Array.isArray(given) ? given : [given]).map((tool) => {
    const of = tool.function ?? tool;
    if (typeof of.name !== "string") throw new Error("each tool must have a name");
    return {type: "function", function: of};
  });
}

function parseSchema(text) {
  if (!text.trim()) return null;
  const schema = JSON.parse(text);
  if (typeof schema !== "object" || schema === null || Array.isArray(schema)) throw new Error("a schema is an object");
  return schema;
}

function stored() {
  try {
    return JSON.parse(localStorage.getItem(STORED) ?? "{}");
  } catch {
    return {};
  }
}

export class Settings {
  constructor(onChange) {
    this.onChange = onChange;
    this.stored = stored();
    this.about = new Map();
    this.model = make("select", {name: "model", "aria-label": "Model", change: () => (this.store(), this.describe())});
    this.system = make("textarea", {name: "system", rows: 4, placeholder: "How the model should behave"});
    this.numbers = NUMBERS.map(([name, label, limits]) => ({name, label, input: make("input", {type: "number", name, placeholder: "default", ...limits})}));
    this.thinking = make("select", {name: "thinking"}, [["", "The model's default"], ["on", "On"], ["off", "Off"]].map(([value, text]) => make("option", {value}, text)));
    this.tools = this.json("tools", "Tools", "Their JSON schemas. The model may call them, and you answer the calls by hand.", TOOLS_EXAMPLE, parseTools);
    this.schema = this.json("schema", "Form of answers", "A JSON schema that every answer must match.", SCHEMA_EXAMPLE, parseSchema);
    this.logprobs = make("input", {type: "checkbox", name: "logprobs"});
    this.restore();
    const group = (title, ...children) => make("section", {class: "group"}, make("h3", {}, title), children);
    const field = (label, input) => make("label", {class: "field"}, make("span", {}, label), input);
    this.thinkingField = field("Thinking", this.thinking);
    this.node = make("aside", {class: "panel", id: "settings", "aria-label": "Settings", hidden: true},
      make("div", {class: "row-of"}, make("h2", {}, "Settings"), iconButton("close", "Close the settings", () => this.toggle(), {class: "bare push"})),
      make("form", {class: "settings", change: () => this.store(), submit: (event) => event.preventDefault()},
        group("System prompt", this.system),
        group("Sampling", make("div", {class: "pairs"}, this.numbers.map(({label, input}) => field(label, input))), this.thinkingField),
        group("Tools", this.tools.node), group("JSON output", this.schema.node),
        make("label", {class: "check"}, this.logprobs, "Keep the probabilities of tokens"),
        make("button", {type: "button", click: () => this.reset()}, "Reset to the defaults")));
  }

  /** A field for JSON, which shows what is wrong with its text. */
  json(name, label, help, placeholder, parse) {
    const id = `about-${name}`;
    const about = make("p", {id, class: "small quiet"}, help);
    const input = make("textarea", {name, rows: 4, class: "mono", spellcheck: "false", placeholder, "aria-label": label, "aria-describedby": id});
    const value = () => {
      try {
        return parse(input.value);
      } catch (error) {
        return error;
      }
    };
    const check = () => {
      const wrong = value() instanceof Error ? value().message : "";
      setText(about, wrong ? `Not used: ${wrong}` : help);
      about.className = wrong ? "small bad" : "small quiet";
      input.setAttribute("aria-invalid", `${Boolean(wrong)}`);
    };
    input.addEventListener("input", check);
    return {input, check, node: make("div", {class: "field"}, input, about), value: () => (value() instanceof Error ? null : value())};
  }

  restore() {
    this.system.value = this.stored.system ?? "";
    for (const {name, input} of this.numbers) input.value = this.stored[name] ?? "";
    this.thinking.value = this.stored.thinking ?? "";
    for (const of of [this.tools, this.schema]) {
      of.input.value = this.stored[of.input.name] ?? "";
      of.check();
    }
    this.logprobs.checked = this.stored.logprobs ?? false;
  }

  store() {
    const values = {model: this.model.value, system: this.system.value, thinking: this.thinking.value, logprobs: this.logprobs.checked};
    for (const {name, input} of [...this.numbers, {name: "tools", input: this.tools.input}, {name: "schema", input: this.schema.input}]) values[name] = input.value;
    localStorage.setItem(STORED, JSON.stringify(values));
    this.onChange();
  }

  reset() {
    this.stored = {model: this.model.value};
    this.restore();
    this.store();
  }

  toggle() {
    this.node.hidden = !this.node.hidden;
    if (!this.node.hidden) this.system.focus();
    this.onChange();
  }

  /** Loads the served models. */
  async load() {
    const {data} = await get("v1/models");
    this.served = data;
    this.model.replaceChildren(...data.map(({id}) => make("option", {value: id}, id)));
    if (data.some(({id}) => id === this.stored.model)) this.model.value = this.stored.model;
    await this.describe();
  }

  /** Loads what the chosen model can do. */
  async describe() {
    const name = this.model.value;
    if (name && !this.about.has(name)) {
      try {
        this.about.set(name, await (await post("api/show", {model: name})).json());
      } catch {
        this.about.set(name, {});
      }
    }
    const defaults = new Map((this.about.get(name)?.parameters ?? "").split("\n").map((line) => line.split(" ")));
    for (const {name: of, input} of this.numbers) input.placeholder = defaults.has(of) ? `default (${defaults.get(of)})` : "default";
    const can = this.can();
    this.thinkingField.hidden = !can.includes("thinking");
    this.onChange();
  }

  can() {
    return this.about.get(this.model.value)?.capabilities ?? [];
  }

  /** The number of tokens that the chosen model, or another one, can read and write. */
  context(name = this.model.value) {
    return this.served?.find(({id}) => id === name)?.max_model_len ?? null;
  }

  /** The settings of a request, with the system prompt as `system`. */
  request() {
    const request = {model: this.model.value, system: this.system.value, return_token_ids: true, certificate: true, sampling_defaults: "llama.cpp"};
    if (this.logprobs.checked) Object.assign(request, {logprobs: true, top_logprobs: 5});
    for (const {name, input} of this.numbers) if (input.value !== "") request[name] = Number(input.value);
    if (this.thinking.value && this.can().includes("thinking")) request.chat_template_kwargs = {enable_thinking: this.thinking.value === "on", thinking: this.thinking.value === "on"};
    const [tools, schema] = [this.tools.value(), this.schema.value()];
    if (tools?.length) request.tools = tools;
    if (schema) request.response_format = {type: "json_schema", json_schema: {name: "answer", schema, strict: true}};
    return request;
  }

  /** What the composer shows about these settings. */
  summary() {
    const tools = this.tools.value()?.length;
    return [
      this.system.value.trim() ? "System prompt" : null, tools ? `${tools} ${tools === 1 ? "tool" : "tools"}` : null,
      this.schema.value() ? "JSON" : null, this.numbers.some(({input}) => input.value !== "") ? "Custom sampling" : null,
    ].filter(Boolean);
  }
}
