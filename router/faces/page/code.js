// Colours code: comments, strings, numbers, keywords and called names of a dozen languages. Reads a text once.

import {copyText, iconButton, make} from "./dom.js";

/** Longer code stays in one colour, and so does what follows this number of coloured parts. */
const [COLOURED_MAX, PARTS_MAX] = [100000, 5000];

const words = (text) => new Set(text.split(" "));
const C_LIKE = "break case catch class const continue default do else enum extends false finally for if import in instanceof interface new null private protected public return static super switch this throw throws true try typeof var void while";
const SLASHES = String.raw`\/\/[^\n]*|\/\*(?:[^*]|\*(?!\/))*(?:\*\/|$)`;
const HASHES = String.raw`#[^\n]*`;
const QUOTED = String.raw`"(?:[^"\\\n]|\\.)*"?|'(?:[^'\\\n]|\\.)*'?`;
const WITH_BACKTICKS = String.raw`${QUOTED}|${"`"}(?:[^${"`"}\\]|\\[^])*${"`"}?`;

const language = (comments, strings, keywords, isCaseless = false) => ({comments, strings, keywords: words(keywords), isCaseless});
const LANGUAGES = {
  c: language(SLASHES, QUOTED, `${C_LIKE} auto char double extern float goto inline int long register short signed sizeof struct typedef union unsigned volatile bool constexpr delete explicit friend mutable namespace nullptr operator template typename using virtual noexcept override`),
  css: language(String.raw`\/\*(?:[^*]|\*(?!\/))*(?:\*\/|$)`, QUOTED, "important inherit initial none auto"),
  go: language(SLASHES, WITH_BACKTICKS, "break case chan const continue default defer else fallthrough for func go goto if import interface map package range return select struct switch type var true false nil string int int64 float64 bool error byte rune any"),
  java: language(SLASHES, QUOTED, `${C_LIKE} abstract boolean byte char double final float implements int long package record short synchronized transient var volatile yield String`),
  js: language(SLASHES, WITH_BACKTICKS, `${C_LIKE} async await debugger delete export from function get let of set undefined yield type as readonly string number boolean any never unknown declare namespace implements abstract keyof`),
  json: language("(?!)", QUOTED, "true false null"),
  python: language(HASHES, String.raw`"""(?:[^"\\]|\\(?:[^]|$)|"(?!""))*(?:"""|$)|'''(?:[^'\\]|\\(?:[^]|$)|'(?!''))*(?:'''|$)|${QUOTED}`, "and as assert async await break class continue def del elif else except False finally for from global if import in is lambda match case None nonlocal not or pass raise return self True try while with yield"),
  ruby: language(HASHES, QUOTED, "alias and begin break case class def defined? do else elsif end ensure false for if in module next nil not or redo rescue retry return self super then true undef unless until when while yield require attr_reader attr_accessor puts"),
  rust: language(SLASHES, String.raw`"(?:[^"\\]|\\[^])*"?|'(?:[^'\\\n]|\\.)'`, "as async await break const continue crate dyn else enum extern false fn for if impl in let loop match mod move mut pub ref return self Self static struct super trait true type unsafe use where while bool char f32 f64 i8 i16 i32 i64 i128 isize str u8 u16 u32 u64 u128 usize String Vec Option Result Some None Ok Err"),
  shell: language(HASHES, String.raw`"(?:[^"\\]|\\[^])*"?|'[^']*'?`, "if then else elif fi for in do done while until case esac function return export local echo cd exit set unset source sudo"),
  sql: language(String.raw`--[^\n]*|\/\*(?:[^*]|\*(?!\/))*(?:\*\/|$)`, String.raw`'(?:[^']|'')*'?|"[^"\n]*"?`, "add all alter and as asc between by case check column constraint create cross default delete desc distinct drop else end exists foreign from full group having in index inner insert into is join key left like limit not null offset on or order outer primary references returning right select set table then union unique update values view when where with int integer text varchar boolean date timestamp count sum avg min max", true),
  toml: language(HASHES, QUOTED, "true false"),
  yaml: language(HASHES, QUOTED, "true false null yes no"),
};
const ALIASES = {
  "c++": "c", bash: "shell", cc: "c", cpp: "c", cs: "java", csharp: "java", golang: "go", h: "c", hpp: "c", javascript: "js", jsx: "js", jsonc: "json", kotlin: "java", py: "python", python3: "python",
  rb: "ruby", rs: "rust", sh: "shell", swift: "java", console: "shell", ts: "js", tsx: "js", typescript: "js", yml: "yaml", zsh: "shell", scss: "css", php: "js", scala: "java", ini: "toml",
};
const patterns = new Map();

function patternOf(name) {
  if (!patterns.has(name)) {
    const {comments, strings} = LANGUAGES[name];
    patterns.set(name, new RegExp(`(${comments})|(${strings})|(\\b\\d[\\w.]*)|([A-Za-z_$][\\w$]*)`, "g"));
  }
  return patterns.get(name);
}

/** Returns the nodes of a text: coloured if the language is known. */
function coloured(text, given) {
  const name = ALIASES[given.toLowerCase()] ?? given.toLowerCase();
  if (!Object.hasOwn(LANGUAGES, name) || text.length > COLOURED_MAX) return [text];
  const {keywords, isCaseless} = LANGUAGES[name];
  const nodes = [];
  let from = 0;
  const add = (kind, at, part) => {
    if (at > from) nodes.push(text.slice(from, at));
    nodes.push(make("span", {class: kind}, part));
    from = at + part.length;
  };
  for (const {0: part, 1: comment, 2: string, 3: number, index} of text.matchAll(patternOf(name))) {
    if (nodes.length > PARTS_MAX) break;
    if (comment) add("t-com", index, part);
    else if (string) add("t-str", index, part);
    else if (number) add("t-num", index, part);
    else if (keywords.has(isCaseless ? part.toLowerCase() : part)) add("t-key", index, part);
    else if (text[index + part.length] === "(") add("t-fun", index, part);
  }
  if (from < text.length) nodes.push(text.slice(from));
  return nodes;
}

/** A block of code with its language and a button that copies it. */
export function codeBlock(text, given) {
  return make("div", {class: "code"}, make("header", {}, make("span", {}, given || "text"), iconButton("copy", "Copy the code", () => copyText(text))),
    make("pre", {tabindex: "0", "aria-label": given ? `Code in ${given}` : "Code"}, make("code", {}, coloured(text, given ?? ""))));
}
