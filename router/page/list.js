// A list of any length: only the visible rows are nodes, and the nodes are reused.

import {make} from "./dom.js";

const SPARE = 6;

/**
 * `row()` makes an empty row, `fill(node, item)` writes into one. The style sets the row height, measured once.
 */
export class List {
  constructor(label, row, fill) {
    [this.row, this.fill, this.items, this.nodes] = [row, fill, [], []];
    this.tall = make("div", {class: "tall"});
    this.node = make("div", {class: "list", tabindex: "0", role: "region", "aria-label": label, scroll: () => this.ask()}, this.tall);
    this.height = 0;
    this.asked = false;
    new ResizeObserver(() => this.ask()).observe(this.node);
  }

  show(items) {
    this.items = items;
    this.ask();
  }

  /** Draws once per frame, however often it is called. */
  ask() {
    if (this.asked) return;
    this.asked = true;
    requestAnimationFrame(() => {
      this.asked = false;
      this.draw();
    });
  }

  draw() {
    if (!this.height) this.height = this.measured();
    if (!this.height) return;
    // Reads the layout before it writes: a read after a write would force a new layout at once.
    const {scrollTop, clientHeight} = this.node;
    const first = Math.max(0, Math.floor(scrollTop / this.height) - SPARE);
    const n = Math.max(0, Math.min(this.items.length - first, Math.ceil(clientHeight / this.height) + 2 * SPARE));
    if (this.n_items !== this.items.length) this.tall.style.height = `${this.items.length * this.height}px`;
    this.n_items = this.items.length;
    while (this.nodes.length < n) {
      const node = this.row();
      this.nodes.push(node);
      this.tall.append(node);
    }
    while (this.nodes.length > n) this.nodes.pop().remove();
    this.nodes.forEach((node, at) => {
      const place = `translateY(${(first + at) * this.height}px)`;
      if (node.style.transform !== place) node.style.transform = place;
      this.fill(node, this.items[first + at]);
    });
  }

  measured() {
    const probe = this.row();
    this.tall.append(probe);
    const {height} = probe.getBoundingClientRect();
    probe.remove();
    return height;
  }
}
