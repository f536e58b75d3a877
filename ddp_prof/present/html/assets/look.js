// The data that a page holds, and its colours: light, or dark if the reader's system prefers that.

/** Data that the page holds as JSON, in an element. @param {string} id @returns {any} */
export const read = (id) => JSON.parse(document.getElementById(id).textContent);
export const dark = matchMedia("(prefers-color-scheme: dark)");
/** @type {Record<string, string>} */
const darkOf = read("recoloring");
/** Replaces all colours in a part of a figure by those that the reader prefers. @template T @param {T} part @returns {T} */
export const recolor = (part) => JSON.parse(
  JSON.stringify(part).replace(/#[0-9a-f]{6}/g, (color) => (dark.matches && darkOf[color]) || color));
