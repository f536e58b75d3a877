// Measures texts, shortens them, and escapes them for Plotly.

import { withoutNamespaces } from "./format.js";

export const FONT_PX = 12;
const LEAST_LETTERS = 6;
const widths = new Map();
/** @type {?CanvasRenderingContext2D} */
let measuring = null;

/** The width of a text in pixels. @param {string} text @param {number} size @param {string} family */
export function widthIn(text, size, family) {
  measuring ??= document.createElement("canvas").getContext("2d");
  measuring.font = `${size}px ${family}`;
  return measuring.measureText(text).width;
}

/** The same in the letters of the lanes. @param {string} text @returns {number} */
export function widthOf(text) {
  if (!widths.has(text)) widths.set(text, widthIn(text, FONT_PX, "sans-serif"));
  return widths.get(text);
}

/** The text that fits: the title, its label or, without a label, the title without namespaces, or its beginning. */
export function fitting(texts, room) {
  const [title, label] = texts;
  if (widthOf(title) <= room) return title;
  if (label) return widthOf(label) <= room ? label : "";
  const name = withoutNamespaces(title);
  if (widthOf(name) <= room) return name;
  let letters = Math.floor((name.length * room) / widthOf(name)) - 1;
  while (letters >= LEAST_LETTERS && widthOf(`${name.slice(0, letters)}…`) > room) letters -= 1;
  return letters >= LEAST_LETTERS ? `${name.slice(0, letters)}…` : "";
}

/** Escapes a name for Plotly, which reads a subset of HTML. */
export function asText(plain) {
  return plain.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
}

/** White where it can be read on a colour (a contrast of 4.5, as WCAG 2 has it), else black, which then can. */
export function inkOn(color) {
  const linear = [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16) / 255)
    .map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
  const light = linear[0] * 0.2126 + linear[1] * 0.7152 + linear[2] * 0.0722;
  return 1.05 / (light + 0.05) >= 4.5 ? "#ffffff" : "#000000";
}
