// Draws the figure without Plotly, from the same traces and layout, at the same places, until Plotly has been read.

import { element } from "../base/dom.js";
import { asText, FONT_PX, widthIn } from "../base/letters.js";
import { LEGEND_LINE } from "../lanes/arrange.js";

const LEGEND_SWATCH = 30, LEGEND_TEXT = 40, LEGEND_EDGE = 5, LEGEND_GAP = 5; // pixels, as Plotly lays legends out
const BASELINE = 0.25, LEGEND_BASELINE = 0.39, LINE_HEIGHT = 1.3; // of the size of letters

/** @param {HTMLElement} figure @param {Object[]} traces @param {Object} layout both as for Plotly */
export function sketch(figure, traces, layout) {
  const { width, height, margin: { l, r, t, b }, xaxis, font } = layout;
  const [from, to] = xaxis.range, wide = width - l - r, high = height - t - b;
  const x = (ms) => ((ms - from) / (to - from)) * wide, y = (top) => (top / layout.yaxis.range[0]) * high;
  const parts = [
    ...layout.shapes.map(({ y0, line }) => `<path d="M${l},${t + y(y0)}h${wide}" stroke="${line.color}" stroke-width="${line.width}"/>`),
    ...xaxis.tickvals.map((ms) => `<path d="M${l + x(ms)},${t}v${high}" stroke="${xaxis.gridcolor}" shape-rendering="crispEdges"/>`),
    `<svg x="${l}" y="${t}" width="${wide}" height="${high}">`,
    ...traces.map((trace) => (trace.fill ? sketchedFill(trace, x, y) : trace.mode === "text" ? sketchedText(trace, x, y) : "")),
    "</svg>",
    ...layout.annotations.map((each) => sketchedNumber(each, font.family, l + x(each.x), t + y(each.y))),
    ...xaxis.tickvals.map((ms, at) => letters(xaxis.ticktext[at], l + x(ms), height - b + 13, FONT_PX, xaxis.tickfont.color)),
    letters(xaxis.title.text, l + wide / 2, height - b + 31.9, xaxis.title.font.size, xaxis.title.font.color),
    sketchedLegend(traces.filter(({ showlegend }) => showlegend), layout),
  ];
  const made = element("div");
  made.className = "sketch";
  made.innerHTML = `<svg width="${width}" height="${height}" font-family="${asText(font.family).replace(/"/g, "&quot;")}" fill="${font.color}">${parts.join("")}</svg>`;
  figure.replaceChildren(made);
  figure.style.height = `${height}px`;
}

/** Removes the sketch when Plotly has drawn the figure. */
export function removeSketch(figure) {
  figure.querySelector(".sketch")?.remove();
  figure.style.height = "";
}

function letters(text, x, y, size, color, anchor = "middle") {
  return `<text x="${x}" y="${y}" font-size="${size}" fill="${color}" text-anchor="${anchor}">${asText(text)}</text>`;
}

function sketchedFill({ x: xs, y: ys, fillcolor }, x, y) {
  const places = xs.map((ms, at) => (ms === null ? "" : `${x(ms).toFixed(2)},${y(ys[at]).toFixed(2)}`)).filter(Boolean);
  return places.length ? `<path d="M${places.join("L")}Z" fill="${fillcolor}"/>` : "";
}

/** The text is already escaped for Plotly, and `<br>` breaks its lines. */
function sketchedText({ x: xs, y: ys, text, textfont: { size, color } }, x, y) {
  return xs.map((ms, at) => {
    const lines = text[at].split("<br>"), top = y(ys[at]) + BASELINE * size - ((lines.length - 1) * LINE_HEIGHT * size) / 2;
    return `<text font-size="${size}" fill="${color[at]}" text-anchor="middle">${lines.map((line, at) =>
      `<tspan x="${x(ms)}" y="${top + at * LINE_HEIGHT * size}">${line}</tspan>`).join("")}</text>`;
  }).join("");
}

function sketchedNumber({ text, font: { size, color }, bgcolor, xshift, xanchor }, family, x, y) {
  const width = widthIn(text, size, family), top = Math.round(y - 8);
  const left = Math.round(x + xshift - (xanchor === "right" ? width + 4 : 0));
  return `<rect x="${left}" y="${top}" width="${width + 4}" height="16" fill="${bgcolor}"/>`
    + letters(text, left + 2, top + 12, size, color, "start");
}

/** The legend in one line if there is room, else in columns as wide as the widest entry. */
function sketchedLegend(traces, { width, margin: { l, r, t }, legend: { font: { size } }, font }) {
  const widths = traces.map(({ name }) => LEGEND_TEXT + widthIn(name, size, font.family) + LEGEND_GAP), widest = Math.max(...widths);
  const room = width - l - r, isLine = widths.reduce((sum, each) => sum + each, 0) <= room;
  const columns = isLine ? traces.length : Math.max(1, Math.floor(room / widest)), lines = Math.ceil(traces.length / columns);
  let left = 0;
  return traces.map(({ name, fillcolor }, at) => {
    const x = l + (isLine ? left : (at % columns) * widest);
    const y = t - LEGEND_EDGE - LEGEND_LINE * (lines - Math.floor(at / columns) - 0.5);
    left += widths[at];
    return `<rect x="${x + 5}" y="${y - 3}" width="${LEGEND_SWATCH}" height="6" fill="${fillcolor}"/>`
      + letters(name, x + LEGEND_TEXT, y + LEGEND_BASELINE * size, size, font.color, "start");
  }).join("");
}
