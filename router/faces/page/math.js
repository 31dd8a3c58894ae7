// Formulas of TeX as MathML: the common subset of commands. A formula that has others is shown as its text. Reads each
// character once, and nests to a limit.

const MATHML = "http://www.w3.org/1998/Math/MathML";
const FORMULA_MAX = 2000;
const DEPTH_MAX = 20;

const GREEK = {
  alpha: "α", beta: "β", gamma: "γ", delta: "δ", epsilon: "ϵ", varepsilon: "ε", zeta: "ζ", eta: "η", theta: "θ", vartheta: "ϑ", iota: "ι", kappa: "κ", lambda: "λ", mu: "μ", nu: "ν", xi: "ξ",
  pi: "π", rho: "ρ", sigma: "σ", tau: "τ", upsilon: "υ", phi: "ϕ", varphi: "φ", chi: "χ", psi: "ψ", omega: "ω", Gamma: "Γ", Delta: "Δ", Theta: "Θ", Lambda: "Λ", Xi: "Ξ", Pi: "Π", Sigma: "Σ",
  Upsilon: "Υ", Phi: "Φ", Psi: "Ψ", Omega: "Ω", infty: "∞", partial: "∂", nabla: "∇", ell: "ℓ", hbar: "ℏ", emptyset: "∅", varnothing: "∅", Re: "ℜ", Im: "ℑ", aleph: "ℵ",
};
const SIGNS = {
  times: "×", cdot: "⋅", div: "÷", pm: "±", mp: "∓", ast: "∗", circ: "∘", bullet: "∙", oplus: "⊕", otimes: "⊗", cap: "∩", cup: "∪", setminus: "∖", wedge: "∧", land: "∧", vee: "∨", lor: "∨", neg: "¬", lnot: "¬",
  le: "≤", leq: "≤", ge: "≥", geq: "≥", ne: "≠", neq: "≠", approx: "≈", equiv: "≡", sim: "∼", simeq: "≃", cong: "≅", propto: "∝", ll: "≪", gg: "≫", in: "∈", notin: "∉", ni: "∋", subset: "⊂", subseteq: "⊆", supset: "⊃",
  supseteq: "⊇", to: "→", rightarrow: "→", leftarrow: "←", leftrightarrow: "↔", Rightarrow: "⇒", implies: "⟹", Leftarrow: "⇐", Leftrightarrow: "⇔", iff: "⟺", mapsto: "↦", uparrow: "↑", downarrow: "↓",
  forall: "∀", exists: "∃", mid: "∣", parallel: "∥", perp: "⊥", angle: "∠", ldots: "…", dots: "…", cdots: "⋯", vdots: "⋮", ddots: "⋱", prime: "′", langle: "⟨", rangle: "⟩", lfloor: "⌊", rfloor: "⌋", lceil: "⌈", rceil: "⌉",
  "{": "{", "}": "}", "|": "‖", "%": "%", "$": "$", "#": "#", "&": "&", "_": "_", colon: ":", therefore: "∴", because: "∵", star: "⋆", dagger: "†",
};
const LARGE = {sum: "∑", prod: "∏", int: "∫", iint: "∬", oint: "∮", bigcup: "⋃", bigcap: "⋂", coprod: "∐"};
const NAMED = new Set("sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln exp lim max min sup inf det dim ker gcd arg mod deg Pr argmax argmin softmax".split(" "));
const WITH_LIMITS = new Set("lim max min sup inf argmax argmin sum prod bigcup bigcap coprod".split(" "));
const ACCENTS = {hat: "^", bar: "¯", overline: "¯", vec: "→", dot: "˙", ddot: "¨", tilde: "~", widehat: "^", widetilde: "~"};
const FONTS = {mathbf: "bold", boldsymbol: "bold", mathbb: "double", mathrm: "plain", mathit: "", mathcal: "", mathsf: "", operatorname: "plain", text: "text", textbf: "text", textit: "text", mbox: "text"};
const DOUBLE = {C: "ℂ", H: "ℍ", N: "ℕ", P: "ℙ", Q: "ℚ", R: "ℝ", Z: "ℤ", E: "𝔼"};
const SPACES = {",": ".17em", ":": ".22em", ";": ".28em", " ": ".25em", quad: "1em", qquad: "2em", "!": "0"};
const TABLES = {matrix: "", pmatrix: "()", bmatrix: "[]", vmatrix: "||", Bmatrix: "{}", cases: "{", aligned: "", align: "", "align*": "", array: ""};

class Unknown extends Error {}

const node = (name, attributes = {}, ...children) => {
  const made = document.createElementNS(MATHML, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
};

/** Returns a formula as a MathML node, or null if it has a command that is not in the subset. */
export function formula(text, isBlock) {
  if (text.length > FORMULA_MAX) return null;
  try {
    const reader = new Reader(text);
    const row = reader.row(null, 0);
    if (reader.peek() !== undefined) return null;
    return node("math", {...(isBlock ? {display: "block"} : {}), "aria-label": text.trim()}, row);
  } catch (error) {
    if (error instanceof Unknown) return null;
    throw error;
  }
}

class Reader {
  constructor(text) {
    this.parts = text.match(/\\(?:[a-zA-Z]+\*?|[^])|\d+(?:\.\d+)?|\s+|[^]/g) ?? [];
    this.at = 0;
  }

  peek() {
    return this.parts[this.at];
  }

  skipSpace() {
    while (/^\s/.test(this.peek() ?? "")) this.at += 1;
  }

  /** A row of terms up to `end`: a part, or a function of it. */
  row(end, depth) {
    if (depth > DEPTH_MAX) throw new Unknown();
    const isEnd = typeof end === "function" ? end : (part) => part === end;
    const row = node("mrow");
    for (this.skipSpace(); this.peek() !== undefined && !isEnd(this.peek()); this.skipSpace()) row.append(this.scripted(depth));
    return row;
  }

  /** A term with its subscript and superscript. */
  scripted(depth) {
    const name = this.peek().slice(1);
    const base = this.term(depth);
    let [below, above, primes] = [null, null, ""];
    for (this.skipSpace(); ["_", "^", "'"].includes(this.peek()); this.skipSpace()) {
      const part = this.parts[this.at++];
      // A second script of one kind has no meaning.
      if ((part === "_" && below) || (part === "^" && above)) throw new Unknown();
      if (part === "'") primes += "′";
      else if (part === "_") below = this.argument(depth);
      else above = this.argument(depth);
    }
    if (primes) above = node("mrow", {}, node("mo", {}, primes), ...(above ? [above] : []));
    const isAround = WITH_LIMITS.has(name);
    if (below && above) return node(isAround ? "munderover" : "msubsup", {}, base, below, above);
    if (below) return node(isAround ? "munder" : "msub", {}, base, below);
    return above ? node(isAround ? "mover" : "msup", {}, base, above) : base;
  }

  /** A group in braces, or one term. */
  argument(depth) {
    this.skipSpace();
    if (this.peek() === undefined) throw new Unknown();
    return this.peek() === "{" ? this.group(depth) : this.term(depth + 1);
  }

  group(depth) {
    this.at += 1;
    const row = this.row("}", depth + 1);
    this.close("}");
    return row;
  }

  close(part) {
    if (this.parts[this.at++] !== part) throw new Unknown();
  }

  /** The plain text of a group. */
  plain() {
    this.skipSpace();
    this.close("{");
    const from = this.at;
    while (this.peek() !== undefined && this.peek() !== "}") this.at += 1;
    this.close("}");
    return this.parts.slice(from, this.at - 1).join("");
  }

  term(depth) {
    if (depth > DEPTH_MAX) throw new Unknown();
    const part = this.parts[this.at];
    if (part === "{") return this.group(depth);
    this.at += 1;
    if (part.startsWith("\\")) return this.command(part.slice(1), depth);
    if (/^\d/.test(part)) return node("mn", {}, part);
    if (/^\p{L}/u.test(part)) return node("mi", {}, part);
    if (["_", "^", "}", "&", "$"].includes(part)) throw new Unknown();
    return node("mo", "()[]|".includes(part) ? {stretchy: "false"} : {}, part === "-" ? "−" : part === "*" ? "∗" : part);
  }

  command(name, depth) {
    if (Object.hasOwn(GREEK, name)) return node("mi", {}, GREEK[name]);
    if (Object.hasOwn(SIGNS, name)) return node("mo", {}, SIGNS[name]);
    if (Object.hasOwn(LARGE, name)) return node("mo", {largeop: "true"}, LARGE[name]);
    if (NAMED.has(name)) return node("mi", {mathvariant: "normal"}, name);
    if (Object.hasOwn(SPACES, name)) return node("mspace", {width: SPACES[name]});
    if (Object.hasOwn(FONTS, name)) return this.font(FONTS[name], depth);
    if (Object.hasOwn(ACCENTS, name)) return node("mover", {accent: "true"}, this.argument(depth), node("mo", {}, ACCENTS[name]));
    switch (name) {
      case "frac": case "dfrac": case "tfrac": return node("mfrac", {}, this.argument(depth), this.argument(depth));
      case "binom": return node("mrow", {}, node("mo", {}, "("), node("mfrac", {linethickness: "0"}, this.argument(depth), this.argument(depth)), node("mo", {}, ")"));
      case "sqrt": return this.root(depth);
      case "left": return this.fenced(depth);
      case "begin": return this.table(depth);
      case "displaystyle": case "textstyle": case "limits": case "nolimits": case "big": case "Big": case "bigl": case "bigr": case "Bigl": case "Bigr": return node("mrow");
      default: throw new Unknown();
    }
  }

  font(kind, depth) {
    if (kind === "text") return node("mtext", {}, this.plain());
    if (kind === "plain") return node("mi", {mathvariant: "normal"}, this.plain());
    if (kind === "double") return node("mi", {}, [...this.plain()].map((letter) => DOUBLE[letter] ?? letter).join(""));
    const row = this.argument(depth);
    return kind === "bold" ? node("mrow", {class: "bold"}, row) : row;
  }

  root(depth) {
    this.skipSpace();
    if (this.peek() !== "[") return node("msqrt", {}, this.argument(depth));
    this.at += 1;
    const degree = this.row("]", depth + 1);
    this.close("]");
    return node("mroot", {}, this.argument(depth), degree);
  }

  fenced(depth) {
    const fence = () => {
      this.skipSpace();
      const part = this.parts[this.at++] ?? "";
      if (part.startsWith("\\") && !Object.hasOwn(SIGNS, part.slice(1))) throw new Unknown();
      return part === "." ? "" : part.startsWith("\\") ? SIGNS[part.slice(1)] : part;
    };
    const open = fence();
    const row = this.row("\\right", depth + 1);
    this.close("\\right");
    return node("mrow", {}, node("mo", {fence: "true"}, open), row, node("mo", {fence: "true"}, fence()));
  }

  table(depth) {
    const name = this.plain();
    if (!Object.hasOwn(TABLES, name)) throw new Unknown();
    if (name === "array") this.plain();
    const table = node("mtable", name === "cases" || name.startsWith("align") ? {columnalign: "left"} : {});
    const isEnd = (part) => part === "&" || part === "\\\\" || part === "\\end";
    for (let cells = node("mtr"); ; ) {
      cells.append(node("mtd", {}, this.row(isEnd, depth + 1)));
      const part = this.parts[this.at++];
      if (part === undefined) throw new Unknown();
      if (part === "&") continue;
      table.append(cells);
      if (part === "\\end") break;
      cells = node("mtr");
    }
    if (this.plain() !== name) throw new Unknown();
    const [open, close] = [TABLES[name][0], TABLES[name][1]];
    return node("mrow", {}, ...(open ? [node("mo", {}, open)] : []), table, ...(close ? [node("mo", {}, close)] : []));
  }
}
