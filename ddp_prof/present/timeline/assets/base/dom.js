// Finds and makes elements of the page.

const byId = (id) => document.getElementById(id);

/** @param {string} name @param {...(Node | string)} children @returns {HTMLElement} */
function element(name, ...children) {
  const made = document.createElement(name);
  made.append(...children);
  return made;
}
