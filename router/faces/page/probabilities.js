// Shows each token of an answer by its probability, and the alternatives to the token under the pointer or the focus.

import {make} from "./dom.js";
import {visible} from "./markdown.js";

/** At most this many tokens of an answer are shown. */
const SHOWN_MAX = 4000;
const LEVELS = 5;

export function probabilities(tokens) {
  if (!tokens.length) return [make("p", {class: "note tokens"}, "This answer has no probabilities. Enable “Keep the probabilities of tokens” in the settings before you send a message.")];
  const details = make("div", {class: "alternatives", role: "status"}, "Point at a token, or move with the arrow keys.");
  const shown = tokens.slice(0, SHOWN_MAX).map((token, at) => make("button", {type: "button", class: `token p${level(token.logprob)}`, "aria-label": token.token.trim() ? null : JSON.stringify(token.token), tabindex: at ? "-1" : "0", "data-at": at}, visible(token.token)));
  const showToken = (node) => {
    const token = tokens[Number(node?.dataset?.at)];
    if (token) details.replaceChildren(alternatives(token));
  };
  const move = (event) => {
    const by = {ArrowRight: 1, ArrowLeft: -1}[event.key];
    const next = by && shown[Number(event.target.dataset?.at) + by];
    if (next) (event.preventDefault(), next.focus());
  };
  return [
    make("div", {class: "tokens", role: "group", "aria-label": "Tokens, by their probability", keydown: move, mouseover: (event) => showToken(event.target), focusin: (event) => showToken(event.target)}, shown),
    make("ul", {class: "legend", "aria-label": "Colours of probabilities"}, Array.from({length: LEVELS}, (_, at) => make("li", {}, make("span", {class: `swatch p${at}`}), `${at * 20} to ${at * 20 + 20}%`))),
    tokens.length > SHOWN_MAX ? make("p", {class: "quiet small"}, `The first ${SHOWN_MAX} of ${tokens.length} tokens`) : "", details];
}

const level = (logprob) => Math.min(LEVELS - 1, Math.floor(Math.exp(logprob) * LEVELS));

function alternatives(token) {
  const row = (of, is) => make("tr", {}, make("td", {class: "mono"}, is ? make("strong", {}, JSON.stringify(visible(of.token))) : JSON.stringify(visible(of.token))), make("td", {}, `${(100 * Math.exp(of.logprob)).toFixed(1)}%`));
  const others = (token.top_logprobs ?? []).filter((other) => other.token !== token.token);
  return make("table", {}, make("tbody", {}, row(token, true), others.map((other) => row(other, false))));
}
