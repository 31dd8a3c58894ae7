// The icons: lines on a grid of 20. Each is drawn inline and hidden from screen readers; its button has the name.

import {draw} from "./dom.js";

const PATHS = {
  alert: "M10 3 18 16.5H2ZM10 8v4M10 14.4v.1",
  answer: "M4 4v5a3 3 0 0 0 3 3h9M12.5 8.5 16 12l-3.5 3.5",
  back: "M12.5 4.5 7 10l5.5 5.5",
  branch: "M6 6.5v7M6 6.5a2 2 0 1 0 0-4 2 2 0 0 0 0 4ZM6 17.5a2 2 0 1 0 0-4 2 2 0 0 0 0 4ZM14 8.5a2 2 0 1 0 0-4 2 2 0 0 0 0 4ZM14 8.5c0 3-3 3.5-8 5",
  chart: "M3 3v14h14M6.5 13l3-4 3 2 4-5.5",
  chat: "M3.5 4h13v9.5H9L5.5 17v-3.5h-2Z",
  check: "M4 10.5 8.2 15 16.5 5.5",
  close: "M5 5l10 10M15 5 5 15",
  cluster: "M3 3h5.5v5.5H3ZM11.5 3H17v5.5h-5.5ZM3 11.5h5.5V17H3ZM11.5 11.5H17V17h-5.5Z",
  copy: "M7 7h9.5v9.5H7ZM13 7V3.5H3.5V13H7",
  edit: "M4 16l.8-3.5L13.3 4a1.6 1.6 0 0 1 2.7 2.7L7.5 15.2ZM11.5 5.8l2.7 2.7",
  export: "M10 3v9M6.5 8.5 10 12l3.5-3.5M4 13v3.5h12V13",
  filter: "M3 5h14M5.5 10h9M8.5 15h3",
  gear: "M3 6h7M14 6h3M12 4v4M3 14h3M10 14h7M8 12v4",
  help: "M7 7.5a3 3 0 1 1 4.5 2.6c-1 .6-1.5 1.1-1.5 2.2M10 15.4v.1",
  import: "M10 12V3M6.5 6.5 10 3l3.5 3.5M4 13v3.5h12V13",
  key: "M12.5 11a3.5 3.5 0 1 0-3.4-2.7L3 14.5V17h2.5v-2H8v-2l1.5-1.5",
  list: "M3 5.5h14M3 10h14M3 14.5h9",
  menu: "M3 5h14M3 10h14M3 15h14",
  models: "M10 2.5 16.5 6v8L10 17.5 3.5 14V6ZM3.5 6 10 9.7 16.5 6M10 9.7v7.8",
  more: "M9.7 4.6h.6M9.7 10h.6M9.7 15.4h.6",
  moon: "M16 12.5A7 7 0 0 1 7.5 4 6.8 6.8 0 1 0 16 12.5Z",
  next: "M7.5 4.5 13 10l-5.5 5.5",
  pin: "M7 3h6l-.8 5 2.8 3H5l2.8-3ZM10 11v6",
  play: "M6 4l10 6-10 6Z",
  plus: "M10 4v12M4 10h12",
  probability: "M3.5 15.5h3v-4h-3ZM8.5 15.5h3v-11h-3ZM13.5 15.5h3v-7h-3Z",
  repeat: "M16 8.5A6.3 6.3 0 0 0 4.6 6.6M4 3.5v3.4h3.4M4 11.5a6.3 6.3 0 0 0 11.4 1.9M16 16.5v-3.4h-3.4",
  search: "M9 14.5a5.5 5.5 0 1 0 0-11 5.5 5.5 0 0 0 0 11ZM13 13l4 4",
  shield: "M10 2.5 16 5v4.5c0 4-2.5 6.5-6 8-3.5-1.5-6-4-6-8V5Z",
  send: "M10 16.5v-13M4.5 9 10 3.5 15.5 9",
  stop: "M5.5 5.5h9v9h-9Z",
  sun: "M10 13.5a3.5 3.5 0 1 0 0-7 3.5 3.5 0 0 0 0 7ZM10 2v1.5M10 16.5V18M2 10h1.5M16.5 10H18M4.3 4.3l1.1 1.1M14.6 14.6l1.1 1.1M4.3 15.7l1.1-1.1M14.6 5.4l1.1-1.1",
  system: "M3 4h14v9.5H3ZM7 17h6M10 13.5V17",
  think: "M7.5 14.5h5M8.5 17h3M7.5 14.5c0-2-2.5-3-2.5-6a5 5 0 0 1 10 0c0 3-2.5 4-2.5 6",
  tools: "M12 4.2a3.8 3.8 0 0 0-1.2 4.6L3.5 16 5 17.5l7.2-7.3A3.8 3.8 0 0 0 17 5.5l-2.5 2.2L12.7 6Z",
  trash: "M3.5 5.5h13M8 5.5V3h4v2.5M5 5.5l.8 11.5h8.4L15 5.5M8.5 9v5M11.5 9v5",
  verify: "M10 2.5 16 5v4.5c0 4-2.5 6.5-6 8-3.5-1.5-6-4-6-8V5ZM7 10l2.2 2.2L13.2 8",
};

export function icon(name) {
  return draw("svg", {class: "icon", viewBox: "0 0 20 20", "aria-hidden": "true", focusable: "false"}, draw("path", {d: PATHS[name]}));
}
