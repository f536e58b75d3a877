// Links a kernel's name to the timeline; #kernel=...&shape=...&phase=..., from a link of the timeline, selects its row.

import { read } from "./look.js";
const kernels = read("kernels"), rows = kernels.length ? [.../** @type {HTMLTableElement} */ (document.querySelector("table.sortable")).tBodies[0].rows] : [];
const timeline = document.querySelector('a[data-page="timeline"]').getAttribute("href");
kernels.forEach((kernel, at) => {
  const link = document.createElement("a"), cell = rows[at].cells[0];
  link.href = `${timeline}#${new URLSearchParams(kernel)}`;
  link.append(...cell.childNodes);
  cell.append(link);
});

function follow() {
  const query = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  const find = (...keys) => kernels.findIndex((kernel) => keys.every((key) => kernel[key] === query[key]));
  const [exact, alike] = [find("kernel", "shape", "phase"), find("kernel")];
  const chosen = rows[exact < 0 ? alike : exact];
  for (const row of rows) row.classList.toggle("chosen", row === chosen);
  chosen?.scrollIntoView({ block: "center" });
}
addEventListener("hashchange", follow);
follow();
