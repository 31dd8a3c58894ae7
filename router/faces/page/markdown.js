// Markdown as nodes: paragraphs, headings, lists, tasks, quotes, tables, code, formulas, emphasis and links. Other syntax
// stays text, also images: none is fetched. Reads each line once, makes no HTML and runs no code. A link shows its target
// and uses http or https only.

import {codeBlock} from "./code.js";
import {make} from "./dom.js";
import {formula} from "./math.js";

/** Text beyond this number of nodes is shown as plain text. */
const NODES_MAX = 20000;
const DEPTH_MAX = 8;
/** A formula of more lines stays text. */
const FORMULA_LINES_MAX = 40;
/** In a longer paragraph, marks stay text. */
const INLINE_MAX = 20000;
/** Marks that change the direction of text, and control characters: shown by their code points. */
const INVISIBLE = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]/g;

export const visible = (text) => text.replace(INVISIBLE, (char) => `\u2039${char.codePointAt(0).toString(16).padStart(4, "0")}\u203a`);

export function markdown(text) {
  const out = document.createDocumentFragment();
  const budget = {left: NODES_MAX};
  const lines = visible(text).split("\n");
  blocks(lines, out, budget, 0);
  return out;
}

/** The length of the final part of a growing answer: up to the last empty line outside code. */
export function finalLength(text, from = 0) {
  let [end, at, mark] = [from, from, null];
  while (at < text.length) {
    const line = text.indexOf("\n", at);
    if (line < 0) break;
    const content = text.slice(at, line);
    if (mark) mark = content.trim().startsWith(mark) ? null : mark;
    else mark = /^\s*(`{3,}|~{3,})/.exec(content)?.[1] ?? null;
    if (!mark && content.trim() === "") end = line + 1;
    at = line + 1;
  }
  return end;
}

function blocks(lines, out, budget, depth) {
  let at = 0;
  while (at < lines.length) {
    if (budget.left <= 0) {
      out.append(make("pre", {}, lines.slice(at).join("\n")));
      return;
    }
    budget.left -= 1;
    at = block(lines, at, out, budget, depth);
  }
}

function block(lines, at, out, budget, depth) {
  const line = lines[at];
  if (line.trim() === "") return at + 1;
  const fence = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)/.exec(line);
  if (fence) return code(lines, at, fence, out);
  const behind = displayed(lines, at, out);
  if (behind !== null) return behind;
  const heading = /^ {0,3}(#{1,6})\s+(.*)$/s.exec(line);
  if (heading) {
    // A model's headings are not part of the page's outline.
    out.append(inline(make("p", {class: `heading h${heading[1].length}`}), heading[2].replace(/\s#+\s*$/, ""), budget));
    return at + 1;
  }
  if (/^ {0,3}([-*_])(?:\s*\1){2,}\s*$/.test(line)) {
    out.append(make("hr"));
    return at + 1;
  }
  if (depth < DEPTH_MAX && /^ {0,3}>/.test(line)) return quote(lines, at, out, budget, depth);
  if (depth < DEPTH_MAX && item(line)) return list(lines, at, out, budget, depth);
  if (line.includes("|") && isRule(lines[at + 1] ?? "")) return table(lines, at, out, budget);
  return paragraph(lines, at, out, budget);
}

/** The line below a table's head. The pattern is one class of characters, so it never backtracks. */
const isRule = (line) => /^[\s:|-]+$/.test(line) && line.includes("|") && line.includes("-");

function code(lines, at, [, mark, language], out) {
  let last = at + 1;
  while (last < lines.length && !lines[last].trim().startsWith(mark)) last += 1;
  out.append(codeBlock(lines.slice(at + 1, last).join("\n"), language));
  return last + 1;
}

/** A formula between `$$` or `\[` and `\]`, on its own lines. Returns the line behind it, or null if there is none. */
function displayed(lines, at, out) {
  const open = /^\s*(\$\$|\\\[)/.exec(lines[at])?.[1];
  if (!open) return null;
  const close = open === "$$" ? "$$" : "\\]";
  let [text, last] = [lines[at].trimStart().slice(2), at];
  while (!text.trimEnd().endsWith(close) && last - at < FORMULA_LINES_MAX && last + 1 < lines.length) {
    last += 1;
    text += `\n${lines[last]}`;
  }
  const inside = text.trimEnd();
  if (!inside.endsWith(close)) return null;
  const made = formula(inside.slice(0, -2), true);
  if (!made) return null;
  out.append(make("div", {class: "wide", tabindex: "0", role: "group", "aria-label": "Formula"}, made));
  return last + 1;
}

function quote(lines, at, out, budget, depth) {
  let end = at;
  while (end < lines.length && /^ {0,3}>/.test(lines[end])) end += 1;
  const node = make("blockquote");
  blocks(lines.slice(at, end).map((line) => line.replace(/^ {0,3}> ?/, "")), node, budget, depth + 1);
  out.append(node);
  return end;
}

const item = (line) => /^( {0,12})([-*+]|\d{1,9}[.)])\s+(.*)$/s.exec(line);

function list(lines, at, out, budget, depth) {
  const [, indent, mark] = item(lines[at]);
  const ordered = /\d/.test(mark);
  const node = ordered ? make("ol", {start: parseInt(mark, 10)}) : make("ul");
  while (at < lines.length && budget.left > 0) {
    const found = item(lines[at]);
    if (!found || found[1].length !== indent.length || /\d/.test(found[2]) !== ordered) break;
    const inside = [found[3]];
    const width = found[0].length - found[3].length;
    at += 1;
    while (at < lines.length && (lines[at].startsWith(" ".repeat(Math.min(width, indent.length + 2))) || (lines[at].trim() !== "" && !item(lines[at]) && inside.at(-1).trim() !== ""))) {
      inside.push(lines[at].replace(new RegExp(`^ {0,${width}}`), ""));
      at += 1;
    }
    const task = /^\[([ xX])\]\s+/.exec(inside[0]);
    const itemNode = make("li", {class: task ? "task" : null});
    budget.left -= 1;
    if (task) {
      inside[0] = inside[0].slice(task[0].length);
      itemNode.append(make("input", {type: "checkbox", disabled: true, checked: task[1] !== " ", "aria-label": task[1] === " " ? "open" : "done"}));
    }
    if (inside.length === 1) inline(itemNode, inside[0], budget);
    else blocks(inside, itemNode, budget, depth + 1);
    node.append(itemNode);
    while (at + 1 < lines.length && lines[at].trim() === "" && item(lines[at + 1])?.[1].length === indent.length) at += 1;
  }
  out.append(node);
  return at;
}

function table(lines, at, out, budget) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
  const aligned = cells(lines[at + 1]).map((rule) => (rule.endsWith(":") ? (rule.startsWith(":") ? "to-center" : "to-end") : null));
  const row = (line, name) => {
    const all = cells(line).slice(0, Math.max(budget.left, 1));
    budget.left -= all.length + 1;
    return make("tr", {}, all.map((cell, column) => inline(make(name, {class: aligned[column]}), cell, budget)));
  };
  const head = make("thead", {}, row(lines[at], "th"));
  const body = make("tbody");
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|") && budget.left > 0) {
    body.append(row(lines[end], "td"));
    end += 1;
  }
  out.append(make("table", {tabindex: "0"}, head, body));
  return end;
}

function paragraph(lines, at, out, budget) {
  let end = at + 1;
  const ends = (line) => line.trim() === "" || /^ {0,3}(```|~~~|#{1,6}\s|>)/.test(line) || item(line);
  while (end < lines.length && !ends(lines[end])) end += 1;
  out.append(inline(make("p"), lines.slice(at, end).join("\n"), budget));
  return end;
}

// Each alternative ends at its own mark, so that the pattern does not scan a text again from each of its characters.
const MARKS = /(?<!`)(`{1,3})([^`]+)\1(?!`)|\\\(([^\n]{1,500}?)\\\)|(?<![\w$\\])\$([^\s$](?:[^$\n]{0,500}[^\s$\\])?)\$(?![\w$])|\*\*([^*\n]+)\*\*|__([^_\n]+)__|\*([^*\s][^*\n]*)\*|\b_([^_\n]+)_\b|~~([^~\n]+)~~|\[([^\]\n]{1,500})\]\((https?:\/\/[^)\s]{1,2000})\)|(https?:\/\/[^\s<>"')\]]{1,2000})|(\n)/g;

function inline(node, text, budget) {
  let from = 0;
  for (const found of text.length > INLINE_MAX ? [] : text.matchAll(MARKS)) {
    if (budget.left <= 0) break;
    budget.left -= 1;
    if (found.index > from) node.append(text.slice(from, found.index));
    const [all, , code, math, math2, strong, strong2, em, em2, deleted, label, target, bare, line] = found;
    from = found.index + all.length;
    if (code !== undefined) node.append(make("code", {}, code));
    else if (math ?? math2) node.append(formula(math ?? math2, false) ?? all);
    else if (strong ?? strong2) node.append(make("strong", {}, strong ?? strong2));
    else if (em ?? em2) node.append(make("em", {}, em ?? em2));
    else if (deleted) node.append(make("del", {}, deleted));
    else if (target ?? bare) node.append(link(label ?? bare, target ?? bare));
    else if (line) node.append(make("br"));
  }
  if (from < text.length) node.append(text.slice(from));
  return node;
}

/** If the text of a link differs from its target, the link shows both. */
function link(label, target) {
  const text = label === target ? label : `${label} (${target})`;
  return make("a", {href: target, rel: "noreferrer noopener nofollow", target: "_blank"}, text);
}
