// A list of any length: only the visible rows are nodes, and the nodes are reused.

import {make} from "./dom.js";

const SPARE = 6;

/**
 * `row()` makes an empty row, `fill(node, item)` writes into one, `key(item)` is the same for an item in each list. The
 * style sheet sets the row height. `head` stays above the rows. When items come or go above, the visible ones and the focus stay where they are.
 */
export class List {
  constructor(label, row, fill, key, head) {
    [this.row, this.fill, this.key, this.items, this.nodes] = [row, fill, key, [], []];
    this.rows = make("div", {class: "rows"});
    this.node = make("div", {class: "list", tabindex: "0", role: "region", "aria-label": label, scroll: () => this.drawSoon()}, head, this.rows);
    this.height = 0;
    this.isScheduled = false;
    new ResizeObserver(() => this.drawSoon()).observe(this.node);
  }

  show(items) {
    const top = this.height ? Math.floor(this.node.scrollTop / this.height) : 0;
    const [before, seen] = [this.items, this.items[top] && this.key(this.items[top])];
    this.items = items;
    if (top && seen !== undefined && before !== items) {
      const at = items.findIndex((item) => this.key(item) === seen);
      if (at >= 0 && at !== top) {
        this.fit();
        this.node.scrollTop += (at - top) * this.height;
      }
    }
    this.drawSoon();
  }

  /** Draws at the next frame, once for all calls before it. */
  drawSoon() {
    if (this.isScheduled) return;
    this.isScheduled = true;
    requestAnimationFrame(() => {
      this.isScheduled = false;
      this.draw();
    });
  }

  fit() {
    if (this.n_items !== this.items.length) this.rows.style.height = `${this.items.length * this.height}px`;
    this.n_items = this.items.length;
  }

  draw() {
    if (!this.height) this.height = this.rowHeight();
    if (!this.height) return;
    // Reads the layout before it writes: a read after a write forces a second layout.
    const {scrollTop, clientHeight} = this.node;
    const focused = this.nodes.includes(document.activeElement) ? document.activeElement.shows : undefined;
    const first = Math.max(0, Math.floor(scrollTop / this.height) - SPARE);
    const n = Math.max(0, Math.min(this.items.length - first, Math.ceil(clientHeight / this.height) + 2 * SPARE));
    this.fit();
    while (this.nodes.length < n) {
      const node = this.row();
      this.nodes.push(node);
      this.rows.append(node);
    }
    while (this.nodes.length > n) this.nodes.pop().remove();
    this.nodes.forEach((node, at) => {
      const item = this.items[first + at];
      const transform = `translateY(${(first + at) * this.height}px)`;
      if (node.style.transform !== transform) node.style.transform = transform;
      node.shows = this.key(item);
      this.fill(node, item);
      if (focused !== undefined && node.shows === focused && node !== document.activeElement) node.focus({preventScroll: true});
    });
  }

  rowHeight() {
    const probe = this.row();
    this.rows.append(probe);
    const {height} = probe.getBoundingClientRect();
    probe.remove();
    return height;
  }
}
