// Finds and makes elements of the page.

/** @param {string} id @returns {any} */
export const byId = (id) => document.getElementById(id);

/**
 * @template {keyof HTMLElementTagNameMap} T
 * @param {T} name @param {...(Node | string)} children @returns {HTMLElementTagNameMap[T]}
 */
export function element(name, ...children) {
  const made = document.createElement(name);
  made.append(...children);
  return made;
}
