// Draws boxes and cells as Plotly traces. Plotly makes an SVG element for each bar, and for each part of a line between
// gaps. Thousands of elements are slow, one long path is not; so each category is one filled line without gaps.

/** @import { Box, Cell } from "../data/merge.js" */
/** @import { Row } from "../data/rows.js" */
/** @import { Timeline } from "./timeline.js" */
import { recolor } from "../../../html/assets/look.js";
import { milliseconds } from "../base/format.js";
import { asText, fitting, FONT_PX, inkOn, widthOf } from "../base/letters.js";
import { arrowOf } from "../lanes/launches.js";
import { needArrows } from "../lanes/needs.js";

const LEAST_TEXT = 24, LEAST_EDGE = 6, PADDING = 8; // pixels
const TICK = 5;
const MOST_NUMBERS = 8, NUMBER_PX = 56; // beside exposed time that is too thin to hold its length
const PALE = "38", SHADE = "22"; // opacity

/**
 * Rectangles of one colour as one closed line. From a stem at the left it runs along the bottom of each row, around
 * each rectangle, and back; a part that it passes twice encloses no area::
 *
 *     stem   +--+  +----+
 *      |     |  |  |    |
 *      |     +--+  |    |
 *      +-----|-----+----+
 */
class Rectangles {
  /** @param {number} left x of the stem, left of all rectangles */
  constructor(left) {
    this.left = left;
    this.bottom = NaN;
    this.x = [];
    this.y = [];
  }

  add(bottom, x0, x1, y0, y1) {
    if (bottom !== this.bottom) this.#toRow(bottom);
    this.x.push(x0, x0, x1, x1, x0, x0);
    this.y.push(bottom, y1, y1, y0, y0, bottom);
  }

  #toRow(bottom) {
    if (this.x.length) this.#point(this.left, this.bottom);
    this.#point(this.left, bottom);
    this.bottom = bottom;
  }

  #point(x, y) {
    this.x.push(x);
    this.y.push(y);
  }

  /** The closed line. */
  closed() {
    if (this.x.length) {
      this.#point(this.left, this.bottom);
      this.#point(this.left, this.y[0]);
    }
    return { x: this.x, y: this.y };
  }
}

/** Turns merged rows, and the selection, into Plotly traces. */
export class Painter {
  /** @param {Timeline} timeline @param {any} layout */
  constructor(timeline, layout) {
    this.timeline = timeline;
    this.view = timeline.view;
    this.pixel = timeline.pixel;
    this.colors = layout;
    const rectangles = () => new Rectangles((this.view.from - 20 * this.pixel) / 1e6);
    const byCategory = () => new Map(timeline.categories.map(({ code }) => [code, rectangles()]));
    this.solid = byCategory();
    this.pale = byCategory();
    this.edges = rectangles();
    this.marks = rectangles();
    this.selection = rectangles();
    this.shade = rectangles();
    this.arrows = [];
    this.text = { x: [], y: [], text: [], color: [], half: [] };
    this.thin = [];
    this.hidden = timeline.hidden;
    this.exposed = timeline.categories.find(({ name }) => name === "exposed");
    this.ink = new Map(timeline.categories.map(({ code, color }) => [code, inkOn(color)]));
  }

  /** @param {{row: Row, boxes: Box[], cells: Cell[]}} drawn */
  add({ row, boxes, cells }) {
    const [from, to] = this.view.on(row);
    // A long box is cut outside of the window: its coordinates would be too large to draw.
    const left = from - 9 * this.pixel, right = to + 9 * this.pixel;
    let last = NaN;
    for (const { track, at } of boxes) {
      const start = Math.max(left, track.start[at]), end = Math.min(right, track.end[at]);
      this.#rectangle(this.solid, row, track, start, end, 0, 1);
      const width = (end - start) / this.pixel;
      // Without an edge, neighbours of one colour would look like one box.
      if (width >= LEAST_EDGE && track.start[at] === last) this.#edge(row, start);
      if (width >= LEAST_EDGE / 2) this.#label(row, track, at, Math.max(from, start), Math.min(to, end));
      last = track.end[at];
    }
    this.#addCells(row, cells);
    for (const track of row.tracks) {
      for (const mark of this.timeline.search.marks(track, from, to, this.pixel)) this.#mark(row, ...mark);
    }
  }

  /** Solid colour shows which share of a column is covered; the rest of a column with boxes is pale. */
  #addCells(row, cells) {
    for (let at = 0; at < cells.length; ) {
      const { from, to } = cells[at];
      let covered = 0, largest = cells[at];
      for (; at < cells.length && cells[at].from === from; at++) {
        const cell = cells[at];
        covered = cell.base + cell.share;
        if (cell.share > largest.share) largest = cell;
        if (cell.share) this.#rectangle(this.solid, row, cell.track, from, to, cell.base, covered);
      }
      const end = to > from ? to : from + this.pixel;
      if (covered < 1) this.#rectangle(this.pale, row, largest.track, from, end, covered, 1);
    }
  }

  #x(row, time) {
    return this.view.ms(row, time);
  }

  /** Draws a box between two heights, which are shares of the row from its bottom. */
  #rectangle(rectangles, row, track, from, to, low, high) {
    const height = row.bottom - row.top;
    rectangles.get(track.category).add(
      row.bottom, this.#x(row, from), this.#x(row, to), row.bottom - low * height, row.bottom - high * height);
  }

  #edge(row, time) {
    const half = 0.4 * this.pixel;
    this.edges.add(row.bottom, this.#x(row, time - half), this.#x(row, time + half), row.bottom, row.top);
  }

  /** Draws a frame around a match, or a tick above it if there is no room for a frame. */
  #mark(row, from, to, marks = this.marks) {
    const line = 2 * this.pixel, x = (time) => this.#x(row, time);
    const { top, bottom } = row;
    if (to - from < 3 * line) return marks.add(bottom, x(from), x(to), top + TICK, top);
    marks.add(bottom, x(from), x(from + line), bottom, top);
    marks.add(bottom, x(from + line), x(to - line), top + 2, top);
    marks.add(bottom, x(from + line), x(to - line), bottom, bottom - 2);
    marks.add(bottom, x(to - line), x(to), bottom, top);
  }

  /** Draws a frame around the selected box, or a shade over the selected range and a line under it. */
  addSelection(selected) {
    const { row, track, at, from, to } = selected;
    if (!row) {
      const height = this.timeline.bottom, { view, pixel } = this;
      const [low, high] = [Math.max(from, view.from - 9 * pixel) / 1e6, Math.min(to, view.to + 9 * pixel) / 1e6];
      if (low >= high) return undefined;
      this.shade.add(height, low, high, height, 0);
      return this.selection.add(height, low, high, height, height - 3);
    }
    const [low, high] = this.view.on(row), start = Math.max(low, track.start[at]), end = Math.min(high, track.end[at]);
    if (row.seen && start < high && end > low) this.#mark(row, start, Math.max(end, start + 2 * this.pixel), this.selection);
    this.arrows.push(...needArrows(this.timeline, selected));
    return this.#launch(arrowOf(this.timeline, selected));
  }

  /** Draws an arrow from the call to the work that it launched, and a tick in the host lane at the call. */
  #launch(arrow) {
    if (!arrow) return;
    const { at, to, host, line } = arrow, x0 = (at - this.pixel) / 1e6, x1 = (at + this.pixel) / 1e6;
    for (const { top, bottom } of host) this.selection.add(bottom, x0, x1, bottom, top);
    if (line) this.arrows.push({ x: [at / 1e6, to / 1e6], y: line });
  }

  #label(row, track, at, from, to) {
    const room = (to - from) / this.pixel - PADDING, height = row.bottom - row.top;
    if (height < FONT_PX || this.hidden.has(track.category)) return;
    const text = room < LEAST_TEXT - PADDING ? "" : fitting(this.timeline.texts(track, at), room);
    if (!text) {
      if (row.kind === "strip" && track.category === this.exposed?.code) this.thin.push({ row, track, from: track.start[at], to: track.end[at] });
      return;
    }
    const length = row.kind === "strip" ? milliseconds(track.end[at] - track.start[at]) : "", isTall = height >= 2 * FONT_PX;
    const isBeside = length && !isTall && widthOf(`${text} ${length}`) <= room;
    const whole = isBeside ? `${text} ${length}` : text, below = isTall ? length : "";
    this.text.x.push(this.#x(row, (from + to) / 2));
    this.text.y.push((row.top + row.bottom) / 2);
    this.text.text.push(below && widthOf(below) <= room ? `${asText(text)}<br>${below}` : asText(whole));
    this.text.color.push(this.ink.get(track.category));
    this.text.half.push(widthOf(whole) / 2);
  }

  /** The lengths of exposed times that are too thin to hold them; neighbours without room between are summed. */
  numbers() {
    const room = NUMBER_PX * this.pixel, groups = [];
    for (const each of this.thin) {
      const last = groups.at(-1);
      if (last?.row === each.row && each.from - last.to < room) last.to = each.to;
      else groups.push({ ...each });
    }
    const isFree = ({ track, to }) => !track.covered(to, to + room);
    const numbered = groups.filter(isFree).map((group) => ({ ...group, ns: Math.round(group.track.covered(group.from, group.to)) }));
    const shown = numbered.sort((one, other) => other.ns - one.ns).slice(0, MOST_NUMBERS);
    return shown.map(({ row, to, ns }) => {
      const text = milliseconds(ns), width = widthOf(text) + PADDING, last = this.view.on(row)[1];
      // A number that the page's edge would cut ends there.
      const isCut = to + width * this.pixel > last, at = isCut ? last : to;
      this.#clear(row, isCut ? last - width * this.pixel : to, width);
      return {
        x: this.#x(row, at), y: (row.top + row.bottom) / 2, xanchor: isCut ? "right" : "left", xshift: isCut ? 0 : 2, showarrow: false,
        borderpad: 1, text, font: { size: FONT_PX - 1, color: this.exposed.color }, bgcolor: this.colors.paper_bgcolor,
      };
    });
  }

  /** Removes the labels of a row that lie within some pixels after a time, where a number is. */
  #clear(row, time, width) {
    const { text } = this, left = this.#x(row, time), right = this.#x(row, time + width * this.pixel);
    const half = (at) => (text.half[at] * this.pixel) / 1e6;
    const isFree = (at) => text.y[at] !== (row.top + row.bottom) / 2 || text.x[at] - half(at) > right || text.x[at] + half(at) < left;
    const kept = [...text.x.keys()].filter(isFree);
    for (const [name, values] of Object.entries(text)) text[name] = kept.map((at) => values[at]);
  }

  /** @returns {Object[]} the traces, always the same number in the same order */
  traces() {
    const { categories } = this.timeline, { paper_bgcolor: paper, font } = this.colors;
    return [
      ...categories.map((each) => filled(this.pale.get(each.code), each.color + PALE, each)),
      ...categories.map((each) => filled(this.solid.get(each.code), each.color, each, each.in_legend)),
      filled(this.edges, paper),
      filled(this.marks, recolor(this.timeline.data.notice)),
      filled(this.shade, font.color + SHADE),
      filled(this.selection, font.color),
      pointing(this.arrows, font.color),
      written(this.text, font.family),
    ];
  }
}

const INERT = { type: "scatter", hoverinfo: "skip", showlegend: false };

/** @param {Rectangles} rectangles @param {string} color @param {Partial<Category>} category */
function filled(rectangles, color, { legend, color: group } = {}, showlegend = false) {
  const line = rectangles.closed();
  if (showlegend && !line.x.length) Object.assign(line, { x: [null], y: [null] }); // keeps its entry in the legend
  return {
    ...INERT, ...line, mode: "none", fill: "toself", fillcolor: color,
    line: { simplify: false, width: 0 }, name: legend, legendgroup: group, showlegend,
  };
}

/** Arrows as one line with gaps. */
function pointing(arrows, color) {
  const joined = (gap, each) => arrows.flatMap((arrow, at) => [...(at ? [gap] : []), ...each(arrow)]);
  const x = joined(null, (arrow) => arrow.x), y = joined(null, (arrow) => arrow.y);
  const marker = { symbol: joined("circle", () => ["circle", "arrow"]), size: joined(6, () => [6, 11]), angleref: "previous", color };
  return { ...INERT, x, y, mode: "lines+markers", line: { color, width: 1.5 }, marker };
}

function written({ x, y, text, color }, family) {
  return { ...INERT, x, y, text, mode: "text", textfont: { color, size: FONT_PX - 0.5, family } };
}
