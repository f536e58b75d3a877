// Shows the step that is selected, or in the address (#step=3); a click on a collective opens the timeline.

import { draw } from "./draw.js";
import { read } from "./look.js";
const pair = document.getElementById("pair");
if (pair) showSteps(pair);

/** @param {HTMLElement} pair the chart and the table */
function showSteps(pair) {
  const menu = /** @type {?HTMLSelectElement} */ (document.getElementById("steps"));
  const figure = /** @type {Figure} */ (document.getElementById("collectives")), table = pair.querySelector("table"), cells = read("cells");
  const lengths = menu ? read("lengths") : {};
  /** @type {Array<[Element, string]>} */
  const links = [...document.querySelectorAll('a[data-page="timeline"]')].map((link) => [link, link.getAttribute("href")]);
  const step = () => menu?.value ?? pair.dataset.step;
  const addressOf = (rank, collective) =>
    `${pair.dataset.timeline}#${new URLSearchParams({ step: step(), rank, collective })}`;

  /** A row of the table; its first cell links to the collective. */
  function rowOf([rank, collective, name, ...texts]) {
    const row = document.createElement("tr"), link = document.createElement("a");
    link.textContent = name;
    link.href = addressOf(rank, collective);
    const head = Object.assign(document.createElement("th"), { scope: "row" });
    head.append(link);
    row.append(head, ...texts.map((text, at) => {
      const { className } = table.tHead.rows[0].cells[at + 1];
      return Object.assign(document.createElement("td"), { className, textContent: text });
    }));
    return row;
  }

  function show() {
    if (menu) {
      figure.dataset.shows = `step-${menu.value}`;
      document.getElementById("length").textContent = lengths[menu.value] ? `takes ${lengths[menu.value]}` : "";
      for (const [link, page] of links) link.setAttribute("href", `${page}#step=${menu.value}`);
    }
    table.tBodies[0].replaceChildren(...cells[step()].map(rowOf));
    table.dispatchEvent(new Event("rows"));
    draw();
  }

  function follow() {
    const wanted = new URLSearchParams(location.hash.slice(1)).get("step");
    if (menu && [...menu.options].some(({ value }) => value === wanted)) menu.value = wanted;
    show();
  }

  menu?.addEventListener("change", () => {
    history.replaceState(null, "", `#step=${menu.value}`);
    show();
  });
  table.tBodies[0].addEventListener("click", (event) => {
    const target = /** @type {Element} */ (event.target);
    if (!target.closest("a") && getSelection().isCollapsed) target.closest("tr").querySelector("a").click();
  });
  figure.on("plotly_click", ({ points: [{ y }] }) => {
    const collective = figure.layout.meta[y];
    if (collective) location.assign(addressOf(...collective));
  });
  addEventListener("hashchange", follow);
  follow();
}
