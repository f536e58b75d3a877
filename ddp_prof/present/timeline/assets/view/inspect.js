// The tooltip beside the pointer, and the sums of the window.

/** @import { Timeline } from "./timeline.js" */
import { element } from "../base/dom.js";
import { fixed, milliseconds, percent, rankName, sizeOf } from "../base/format.js";
import { bandwidthOf } from "../lanes/launches.js";
import { scoped } from "./details.js";

/** Describes the box, or the merged boxes, under the pointer. */
export class Tooltip {
  /** @param {Timeline} timeline @param {HTMLElement} element */
  constructor(timeline, element) {
    this.timeline = timeline;
    this.element = element;
  }

  hide() {
    this.element.hidden = true;
  }

  /** @param {number} x @param {number} y in the lanes, pixels @param {number} clientX @param {number} clientY */
  show(x, y, clientX, clientY) {
    const lines = this.#lines(x, y);
    this.element.hidden = !lines;
    if (!lines) return;
    // Names are isolated, so that right-to-left text does not reverse anything else; none is read as markup.
    this.element.replaceChildren(...lines.map((line, at) => element(at ? "div" : "b", element("bdi", line))));
    const { offsetWidth: width, offsetHeight: height } = this.element;
    this.element.style.left = `${Math.max(4, Math.min(clientX + 14, innerWidth - width - 4))}px`;
    this.element.style.top = `${clientY + 18 + height > innerHeight ? clientY - height - 10 : clientY + 18}px`;
  }

  #lines(x, y) {
    const row = this.timeline.rowAt(y), box = this.timeline.boxAt(x, y);
    if (!row) return null;
    const { view, pixel } = this.timeline;
    return box ? this.#box(row, box.track, box.at) : this.#cells(row, view.on(row)[0] + x * pixel);
  }

  #box(row, track, at) {
    const source = track.source[at], { columns } = track, { categories } = this.timeline;
    const duration = track.end[at] - track.start[at], bytes = columns.bytes[source], step = columns.step[source];
    const category = categories.find(({ code }) => code === track.category);
    const start = track.start[at] - this.timeline.view.offsets[row.panel];
    const inStep = step >= 0 && category.name !== "step" ? `, ${this.timeline.stepName(step, this.timeline.data.panels[row.panel])}` : "";
    const [title] = this.timeline.texts(track, at);
    return [
      title.length > 160 ? title.slice(0, 160) + "…" : title,
      `${milliseconds(duration)} from ${milliseconds(start)}${inStep}`,
      ...(bytes >= 0 ? [sizeOf(bytes) + this.#bandwidth(row, track, at)] : []),
      ...(title === category.legend ? [] : [`${category.legend} · ${row.lane}`]),
    ];
  }

  #bandwidth(row, track, at) {
    const found = bandwidthOf(this.timeline, { row, track, at });
    return found ? `, ${found.name} ${found.rate}` : "";
  }

  #cells(row, time) {
    const { drawn, categories } = this.timeline;
    const cells = drawn.find((each) => each.row === row)?.cells.filter(({ from, to }) => from <= time && time < to);
    if (!cells?.length) return null;
    const width = cells[0].to - cells[0].from, count = cells.reduce((sum, cell) => sum + cell.count, 0);
    return [
      `${count.toLocaleString("en")} short ${count === 1 ? "box" : "boxes"} in ${milliseconds(Math.round(width))}`,
      ...cells.map(({ track, count, share }) => {
        const { legend } = categories.find(({ code }) => code === track.category);
        return `${legend}: ${count.toLocaleString("en")}, covers ${percent(share)}`;
      }),
      `${row.lane} · zoom in to see each`,
    ];
  }
}

const MOST_NAMED = 3; // panels that a sentence names
const MAY_BE_LEFT_OUT = ["exposed_memory", "graph", "unnamed"]; // parts that some captures do not have

/** The strip's sums in the window: a sentence, and a table with one row per rank. */
export class Readout {
  /** @param {Timeline} timeline @param {HTMLElement} sentence @param {HTMLTableElement} table */
  constructor(timeline, sentence, table) {
    this.timeline = timeline;
    this.sentence = sentence;
    this.table = table;
    const held = new Set(timeline.data.categories.map(({ name }) => name));
    this.parts = timeline.data.strip.filter(({ name }) => held.has(name) || !MAY_BE_LEFT_OUT.includes(name));
  }

  update() {
    const [from, to] = this.timeline.window, ranks = this.timeline.sums();
    const overlap = ranks.some(({ sums }) => sums && sums.overlapped + sums.exposed) ? ` · ${this.#shares(ranks)} overlapped` : "";
    this.sentence.textContent = `${this.#step()}in view: ${milliseconds(to - from)}${overlap}`;
    this.#fill(ranks, to - from);
  }

  /** The share of each panel; of many, the least and the most. */
  #shares(ranks) {
    const { panels } = this.timeline.data;
    const shares = panels.map((_, panel) => shareOf(ranks.filter((rank) => rank.panel === panel)));
    if (panels.length <= MOST_NAMED) {
      return shares.map((share, at) => (panels.length > 1 ? `${panels[at].title}: ` : "") + percent(share)).join(", ");
    }
    const known = shares.filter((share) => !Number.isNaN(share));
    return [...new Set([Math.min(...known), Math.max(...known)].map(percent))].join(" to ");
  }

  /** The name and length of the step that is shown; the window is a little longer. */
  #step() {
    const { isBase, step } = this.timeline, length = this.timeline.lengthOf(step);
    return isBase && length ? `${this.timeline.stepName(step)}: ${length} · ` : "";
  }

  /** Fills the table; the parts sum to the window. */
  #fill(ranks, span) {
    const { parts, timeline: { data } } = this, several = data.panels.length > 1;
    const hasRest = several || ranks.some(({ rest }) => rest > 0);
    const head = ["rank", ...parts.map(({ label }) => label), ...(hasRest ? ["not captured"] : []), "overlapped share", "blocking"];
    const rows = ranks.map((rank) => {
      const cells = [...parts.map(({ name }) => rank.sums?.[name]), ...(hasRest ? [rank.rest] : [])];
      return element("tr", scoped(rankName(data, rank), "row"), ...cells.map((cell) => sumCell(cell, span)), element("td", overlapOf([rank])), blockingCell(rank, span));
    });
    this.table.replaceChildren(
      element("caption", "Where the time in view goes"),
      element("thead", element("tr", ...head.map((text) => scoped(text, "col")))), element("tbody", ...rows));
  }
}

/** A cell with a time, in ms unless the window is shorter, and its share of the window; the tooltip has the ns. */
function sumCell(ns, span) {
  if (ns === null || ns === undefined) return element("td", "n/a");
  const time = span < 1e6 ? milliseconds(ns) : `${fixed(ns / 1e6, 2)} ms`;
  const made = element("td", time, element("small", ` ${percent(ns / span)}`));
  made.title = `${ns.toLocaleString("en")} ns`;
  return made;
}

/** A cell with the blocking time; the tooltip says why it is not known. */
function blockingCell({ blocking, whyUnknown }, span) {
  const made = sumCell(blocking, span);
  if (blocking === null) made.title = whyUnknown ?? "";
  return made;
}

/** @returns {string} the overlapped share of the communication of some ranks */
function overlapOf(ranks) {
  return percent(shareOf(ranks));
}

/** @returns {number} that share, not a number without communication */
function shareOf(ranks) {
  const total = (part) => ranks.reduce((sum, { sums }) => sum + (sums?.[part] ?? 0), 0);
  return total("overlapped") / (total("overlapped") + total("exposed"));
}
