// Draws the figures of a page.

import { dark, read, recolor } from "./look.js";

const config = { displaylogo: false, scrollZoom: true, responsive: true,
  modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] };
const COLORED = ["marker", "line", "error_x", "error_y", "textfont", "colorscale"];
const repaint = (trace) => ({ ...trace,
  ...Object.fromEntries(COLORED.filter((key) => trace[key]).map((key) => [key, recolor(trace[key])])) });
const TITLE_PX = 64, LEGEND_PX = 40, NARROW_PX = 1000;
/** Copies only the text of a title, with bold type, line breaks and colours. */
function copyWords(from, to) {
  for (const node of from.childNodes) {
    if (node.nodeType === Node.TEXT_NODE) { to.append(node.textContent); continue; }
    const part = document.createElement({ B: "b", BR: "br" }[node.tagName] ?? "span");
    part.style.color = node.style.color;
    copyWords(node, part);
    to.append(part);
  }
}
/**
 * Writes a chart's title above the chart, where it can wrap, unless it repeats the page's heading.
 * @param {HTMLElement} element @param {any} figure its layout
 */
function writeTitle(element, { title = {}, margin, height, ...layout }) {
  const place = element.closest(".chart").querySelector(".title"), heading = document.querySelector("h1").textContent;
  const lines = Object.entries({ claim: title.text, where: title.subtitle?.text });
  place.replaceChildren(...lines.filter(([, text]) => text).map(([kind, text]) => {
    const line = document.createElement("p");
    line.className = kind;
    copyWords(new DOMParser().parseFromString(text, "text/html").body, line);
    return line;
  }).filter(({ textContent }) => textContent !== heading));
  const above = margin?.t - TITLE_PX, isNarrow = element.clientWidth < NARROW_PX;
  if (!title.text) return { ...layout, margin, height };
  const t = isNarrow ? above : Math.min(above, LEGEND_PX);
  return { ...layout, margin: { ...margin, t }, height: height - margin.t + t };
}
export function draw() {
  for (const element of /** @type {NodeListOf<HTMLElement>} */ (document.querySelectorAll(".figure"))) {
    const { data, layout } = read((element.dataset.shows ?? element.id) + "-data");
    if (layout.meta?.narrowest) element.style.minWidth = `${layout.meta.narrowest}px`; // narrower, its labels would overlap
    Plotly.react(element, data.map(repaint), writeTitle(element, recolor(layout)), config);
  }
}
dark.addEventListener("change", draw);
draw();
