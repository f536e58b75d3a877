// Measures texts, shortens them, and escapes them for Plotly.

export const FONT_PX = 12;
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

/** The text that fits: the title, its label, or the beginning of a title without a label. */
export function fitting(texts, room) {
  const [title, label] = texts;
  if (widthOf(title) <= room) return title;
  if (label) return widthOf(label) <= room ? label : "";
  const letters = Math.floor((title.length * room) / widthOf(title)) - 1;
  return letters >= 6 ? title.slice(0, letters) + "…" : "";
}

/** Escapes a name for Plotly, which reads a subset of HTML. */
export function asText(plain) {
  return plain.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
}
