// The theme: the system's, light or dark. This browser stores the choice.

import {icon} from "./icons.js";
import {make} from "./dom.js";

const STORED = "lockstep theme";
const THEMES = [["system", "The system's theme"], ["light", "Light theme"], ["dark", "Dark theme"]];
const SHAPES = {system: "system", light: "sun", dark: "moon"};

export const theme = () => localStorage.getItem(STORED) ?? "system";

function setTheme(name) {
  if (name === "system") localStorage.removeItem(STORED);
  else localStorage.setItem(STORED, name);
  applyTheme();
}

export function applyTheme() {
  const name = theme();
  if (name === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  for (const button of document.querySelectorAll("[data-sets-theme]")) button.setAttribute("aria-pressed", `${button.dataset.setsTheme === name}`);
}

export function themeSwitch() {
  return make("div", {class: "segments", role: "group", "aria-label": "Theme"}, THEMES.map(([name, label]) =>
    make("button", {type: "button", "data-sets-theme": name, "aria-label": label, title: label, "aria-pressed": `${theme() === name}`, click: () => setTheme(name)}, icon(SHAPES[name]))));
}

export const themeCommands = () => THEMES.map(([name, label]) => ({icon: SHAPES[name], name: label, run: () => setTheme(name)}));
