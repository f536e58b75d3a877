"use strict";
const read = (id) => JSON.parse(document.getElementById(id).textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");
const darkOf = read("recoloring");
const recolor = (part) => JSON.parse(
  JSON.stringify(part).replace(/#[0-9a-f]{6}/g, (color) => (dark.matches && darkOf[color]) || color));
const config = { displaylogo: false, scrollZoom: true, responsive: true,
  modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] };
const COLORED = ["marker", "line", "error_x", "error_y"];
const repaint = (trace) => ({ ...trace,
  ...Object.fromEntries(COLORED.filter((key) => trace[key]).map((key) => [key, recolor(trace[key])])) });
function draw() {
  for (const element of document.querySelectorAll(".figure")) {
    const { data, layout } = read((element.dataset.shows ?? element.id) + "-data");
    Plotly.react(element, data.map(repaint), recolor(layout), config);
  }
}
dark.addEventListener("change", draw);
draw();
