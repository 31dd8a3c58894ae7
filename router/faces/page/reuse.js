// Why a part of a prompt was computed again: the prompt's own text, the part that was reused, the first position that
// was not, and the reason.

import {count, facts, make, openDialog} from "./dom.js";
import {visible} from "./markdown.js";
import {post} from "./server.js";

/** The reasons of `usage.prompt_tokens_details.reuse_ended`: a short form, and a sentence. */
const REASONS = {
  whole: ["all that could be reused", "All that can be reused was in memory. Memory is kept in blocks of tokens, so what follows the last full block is computed."],
  first_use: ["not seen before", "No earlier request had this text behind what was reused, or it has no full block of tokens."],
  differs: ["the prompt differs here", "An earlier request began in the same way. From here on this prompt differs from it."],
  state_not_kept: ["no saved state here", "The text is known, but the state of the model's recurrent layers was not kept at this position."],
  evicted: ["removed from memory", "More of this prompt was in memory, and was removed to make room for other requests."],
  not_fetched: ["not read from disk or host memory", "More of this prompt was on disk or in host memory. It was not read, because it came too late or computing was faster."],
  bypassed: ["reuse was not allowed", "This request forbids reuse, or needs numbers of each position of its prompt."],
  apart: ["apart from the cache", "This request neither reads nor fills the cache."],
  off: ["the prefix cache is off", "The server was started without a prefix cache."],
};
/** A longer text is shown without its middle. */
const SHOWN_MAX = 20000;

/** A short form for the line below an answer. */
export function reuseText({prompt_tokens: n, prompt_tokens_details: {cached_tokens: cached = 0}}) {
  return cached ? `${count(cached)} of ${count(n)} prompt tokens reused` : `${count(n)} prompt tokens computed`;
}

/** Opens a dialog with the prompt of an answer. */
export async function explainReuse(turn, body) {
  const {prompt_tokens: n, prompt_tokens_details: details} = turn.usage;
  const cached = details.cached_tokens ?? 0;
  const {reason, position} = details.reuse_ended ?? {};
  const [short, sentence] = REASONS[reason] ?? [reason, ""];
  const fetched = details.cached_tokens_fetched ?? 0;
  const text = make("div", {class: "prompt", tabindex: "0", "aria-label": "The prompt"}, make("p", {class: "quiet"}, "Loading the prompt …"));
  openDialog("Why was my prompt computed again?", [
    make("p", {}, sentence),
    facts([["Reused from memory", count(cached - fetched)], ["Reused from disk or host memory", fetched ? count(fetched) : null], ["Computed", count(n - cached)],
      ["Reuse ended because", short], ["Known up to token", position > cached ? count(position) : null, "More of the prompt is known, but could not be reused"]]),
    make("ul", {class: "legend", "aria-label": "Colours of the prompt"}, [["reused", "reused"], ["computed", "computed"]].map(([kind, label]) => make("li", {}, make("span", {class: `swatch ${kind}`}), label))),
    text]).classList.add("broad");
  try {
    text.replaceChildren(...(await promptNodes(body, cached)));
  } catch (error) {
    text.replaceChildren(make("p", {class: "bad"}, `The prompt cannot be shown: ${error.message}`));
  }
}

async function promptNodes(body, cached) {
  const {model, messages, tools, chat_template_kwargs, add_generation_prompt, continue_final_message} = body;
  const {tokens} = await (await post("tokenize", {model, messages, tools, chat_template_kwargs, add_generation_prompt, continue_final_message})).json();
  const plain = async (ids) => (ids.length ? (await (await post("detokenize", {model, tokens: ids})).json()).prompt : "");
  const [reused, computed] = await Promise.all([plain(tokens.slice(0, cached)), plain(tokens.slice(cached))]);
  return [make("mark", {class: "reused"}, shortened(reused)), make("mark", {class: "computed"}, shortened(computed))];
}

function shortened(text) {
  if (text.length <= SHOWN_MAX) return visible(text);
  const part = SHOWN_MAX / 2;
  return `${visible(text.slice(0, part))}\n… ${count(text.length - SHOWN_MAX)} characters …\n${visible(text.slice(-part))}`;
}
