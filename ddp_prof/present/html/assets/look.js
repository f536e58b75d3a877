// The data that a page holds, and its colours: light, or dark if the reader's system prefers that.

/** Data that the page holds as JSON, in an element. @param {string} id @returns {any} */
export const read = (id) => JSON.parse(document.getElementById(id).textContent);
export const dark = matchMedia("(prefers-color-scheme: dark)");
/** @type {Record<string, string>} */
const darkOf = read("recoloring");
/** Replaces all colours in a part of a figure by those that the reader prefers. @template T @param {T} part @returns {T} */
export const recolor = (part) => JSON.parse(
  JSON.stringify(part).replace(/#[0-9a-f]{6}/g, (color) => (dark.matches && darkOf[color]) || color));

const PAPER = 975; // pixels of a sheet in landscape, A4 or letter, within its margins

/** On paper a page is laid out for the width of the window, for which its figures were drawn, and made smaller. */
addEventListener("beforeprint", () => document.body.style.setProperty("--print", String(Math.min(1, PAPER / innerWidth))));
