// Draws the model of a page, and again after each change.

import { recolor } from "../../../html/assets/look.js";
import { ticksOf } from "../base/format.js";
import { mergeAll } from "../data/merge.js";
import { GAP, legendRoom, MARGIN, NARROW, NARROW_LEGEND, NARROW_SIDE } from "../lanes/arrange.js";
import { Labels } from "../lanes/labels.js";
import { Model } from "./model.js";
import { Painter } from "./paint.js";
import { removeSketch, sketch } from "./sketch.js";

const PIXELS_A_TICK = 120;
const BELOW = 125, BELOW_RANK = 27; // pixels below the figure for the table of sums, and for each of its rows
const CONFIG = { displaylogo: false, displayModeBar: false, showTips: false };

export class Timeline extends Model {
  /** @param {Figure} element @param {HTMLElement} labels @param {PageData} data see timeline_page.py */
  constructor(element, labels, data) {
    super(data);
    this.element = element;
    this.listeners = [];
    this.painters = [];
    /** The boxes and cells of the last drawing, by row. */
    this.drawn = [];
    this.boxes = 0;
    this.legendRoom = 0;
    /** Resolves when all of the page has been read and drawn. @type {Promise<void>} */
    this.ready = null;
    /** @type {?number} */
    this.arrangedFor = null;
    /** @type {?Promise<void>} */
    this.pending = null;
    this.kernelsPage = document.querySelector('a[data-page="kernels"]')?.getAttribute("href") ?? null;
    this.labels = new Labels(this, labels);
    this.arrange();
  }

  arrange() {
    const { element, data } = this, { clientWidth } = element, narrow = clientWidth < NARROW;
    if (clientWidth !== this.arrangedFor) this.legendRoom = legendRoom(data.categories, clientWidth, narrow);
    this.arrangedFor = clientWidth;
    const above = element.getBoundingClientRect().top + scrollY + MARGIN.t + this.legendRoom + MARGIN.b;
    const room = innerHeight - above - BELOW - BELOW_RANK * data.ranks.length;
    super.arrange({ narrow, room, headers: this.labels.headerHeights() });
  }

  onDraw(listener) {
    this.listeners.push(listener);
  }

  /** Calls the listener for empty lanes, too. */
  onPaint(listener) {
    this.painters.push(listener);
  }

  /** Draws once before the next frame, however often it is called. */
  schedule() {
    this.pending ??= new Promise((done) => requestAnimationFrame(() => {
      this.pending = null;
      this.draw().then(done);
    }));
    return this.pending;
  }

  get margin() {
    const sides = this.arrangement.narrow ? { l: NARROW_SIDE, r: NARROW_SIDE } : {};
    return { ...MARGIN, ...sides, t: MARGIN.t + this.legendRoom };
  }

  /** Width of the lanes; Plotly may have made room for a legend. */
  get width() {
    const { l, r } = this.margin;
    return Math.max(1, Math.round(this.element._fullLayout?._size.w ?? this.element.clientWidth - l - r));
  }

  async draw() {
    if (!this.canDraw) return; // the lanes stay empty until then
    const { drawn, boxes, columns } = mergeAll(this.rows.filter(({ seen }) => seen), this.view, this.width);
    Object.assign(this, { drawn, boxes, columnWidth: this.view.span / columns });
    await this.#paint(drawn);
    this.listeners.forEach((listener) => listener());
  }

  /** Draws the lanes and the axis while the columns are being read. */
  drawEmpty() {
    return this.#paint([]);
  }

  async #paint(drawn) {
    this.categories = this.data.categories.map((each) => ({ ...each, color: recolor(each.color) }));
    const layout = recolor({ ...this.data.layout, ...this.#frame() });
    layout.xaxis.range = [this.view.from / 1e6, this.view.to / 1e6];
    Object.assign(layout.xaxis, { tickmode: "array", ticksuffix: "" },
      ticksOf(this.view.from, this.view.to, this.width / (this.arrangement.narrow ? PIXELS_A_TICK / 2 : PIXELS_A_TICK)));
    if (this.step !== null) layout.xaxis.title.text = `time since the start of ${this.stepName(this.step)}`;
    layout.uirevision = "kept"; // keeps categories hidden
    const painter = new Painter(this, layout);
    drawn.forEach((each) => painter.add(each));
    if (this.selected && this.columns) painter.addSelection(this.selected);
    layout.annotations = painter.numbers();
    if (!window.Plotly) {
      sketch(this.element, painter.traces(), layout);
      return this.#painted();
    }
    await Plotly.react(this.element, painter.traces(), layout, CONFIG);
    removeSketch(this.element);
    const taken = this.arrangement.height - this.element._fullLayout._size.h;
    if (taken >= 1) {
      this.legendRoom += Math.ceil(taken); // so that the legend takes no room from the lanes
      return this.#paint(drawn);
    }
    return this.#painted();
  }

  #painted() {
    this.labels.update();
    this.painters.forEach((listener) => listener());
  }

  /** The parts of the layout that depend on the arrangement: heights, margins, lines between panels and ranks. */
  #frame() {
    const { height, panelTops, isHeadless, rankPlaces, narrow } = this.arrangement, { margin, data } = this;
    const { xaxis: { gridcolor: color }, yaxis, legend } = data.layout;
    const line = (y, width) => ({ type: "line", xref: "paper", x0: 0, x1: 1, yref: "y", y0: y, y1: y, layer: "below", line: { width, color } });
    const between = rankPlaces.slice(1).filter((_, at) => data.ranks[at].panel === data.ranks[at + 1].panel);
    return {
      width: this.element.clientWidth, height: Math.round(height + margin.t + margin.b), margin, yaxis: { ...yaxis, range: [height, 0] },
      legend: narrow ? { ...legend, font: { size: NARROW_LEGEND } } : legend,
      shapes: [...panelTops.filter((_, at) => at && !isHeadless[at]).map((top) => line(top - 2, 1.5)), ...between.map(({ top }) => line(top - GAP.rank / 2, 1))],
    };
  }

  /** Codes of the categories that were switched off in the legend. */
  get hidden() {
    const off = (this.element._fullData ?? []).filter(({ visible }) => visible === "legendonly");
    const names = new Set(off.map(({ name }) => name));
    return new Set(this.data.categories.filter(({ legend }) => names.has(legend)).map(({ code }) => code));
  }

  /** The place of a pointer in the lanes. */
  place({ clientX, clientY }) {
    const { left, top } = this.element.getBoundingClientRect(), { _size: size } = this.element._fullLayout;
    const x = clientX - left - size.l, y = clientY - top - size.t;
    return { x, y, inside: x >= 0 && x < size.w && y >= 0 && y < size.h };
  }
}
