// The whole run above the lanes: a band for each panel, with the window marked on it.

/** @import { Timeline } from "./timeline.js" */
import { dark, recolor } from "../../../html/assets/look.js";
import { element } from "../base/dom.js";

export class WholeRun {
  /** @param {Timeline} timeline @param {HTMLElement} box that holds the bands */
  constructor(timeline, box) {
    this.timeline = timeline;
    this.box = box;
    this.drawn = "";
    const { data, shownRows } = timeline;
    this.span = [data.start, Math.max(data.end, data.start + 1)];
    this.bands = data.panels.map(({ title }, panel) => {
      const canvas = element("canvas"), place = element("i"), band = element("div", canvas, place);
      band.className = "band";
      band.title = `${title}: the whole run; a click or a drag moves the window`;
      band.addEventListener("pointerdown", (event) => event.button || this.#grab(event, panel));
      return { panel, band, canvas, place, rows: shownRows.filter((row) => row.kind === "strip" && row.panel === panel) };
    });
    box.hidden = !this.bands.some(({ rows }) => rows.length);
    box.replaceChildren(element("span", "whole run"), ...this.bands.map(({ band }) => band));
  }

  /** Aligns the bands with the lanes, and draws them again if their width or colours changed. */
  update() {
    const { element: figure, margin, width } = this.timeline;
    this.box.style.setProperty("--left", `${figure._fullLayout?._size.l ?? margin.l}px`);
    this.box.style.setProperty("--width", `${width}px`);
    this.box.classList.toggle("narrow", this.timeline.arrangement.narrow);
    const look = `${width} ${devicePixelRatio} ${dark.matches} ${this.timeline.isComplete}`;
    if (look !== this.drawn) this.bands.forEach((band) => this.#draw(band, width * devicePixelRatio));
    this.drawn = look;
    const places = this.bands.map((band) => this.#placeWindow(band, width));
    // Ranks on one clock have the window at one place: one frame lies round all of their bands.
    this.bands.forEach(({ band }, at) => band.classList.toggle("joined", places[at] === places[at - 1]));
  }

  /** Places the window on a band; returns where it lies. */
  #placeWindow({ panel, place }, width) {
    const [start, end] = this.span, [from, to] = this.timeline.view.on({ panel });
    const x = (time) => (Math.min(Math.max(time, start), end) - start) / (end - start) * width;
    const wide = Math.max(4, x(to) - x(from)), left = Math.min(x(from), width - wide);
    Object.assign(place.style, { left: `${left}px`, width: `${wide}px` });
    return `${Math.round(left)} ${Math.round(wide)}`;
  }

  /** Divides each pixel column like the time in it, by the mean over the panel's ranks. */
  #draw({ canvas, rows }, width) {
    const columns = Math.max(1, Math.round(width)), height = canvas.clientHeight * devicePixelRatio || 1;
    Object.assign(canvas, { width: columns, height });
    const context = canvas.getContext("2d"), filled = new Float64Array(columns);
    for (const { code, color } of this.timeline.data.categories) {
      context.fillStyle = recolor(color);
      const shares = rows.map((row) => this.#shares(row, code, columns)).filter(Boolean);
      if (!shares.length) continue;
      for (let at = 0; at < columns; at++) {
        const share = shares.reduce((sum, of) => sum + of[at], 0) / rows.length;
        context.fillRect(at, height * (1 - filled[at] - share), 1, height * share);
        filled[at] += share;
      }
    }
  }

  /** The share of each pixel column that a category covers in a row. @returns {?Float64Array} */
  #shares(row, code, columns) {
    const [start, end] = this.span, width = (end - start) / columns;
    const track = this.timeline.isComplete && row.tracks.find(({ category }) => category === code);
    if (!track) return null;
    return Float64Array.from({ length: columns }, (_, at) => track.covered(start + at * width, start + (at + 1) * width) / width);
  }

  /** Drags the window mark, or moves it to a pointer pressed beside it. */
  #grab(event, panel) {
    const { band, place } = this.bands[panel], { timeline } = this, [start, end] = this.span;
    const timeAt = ({ clientX }) => start + (clientX - band.getBoundingClientRect().left) / band.clientWidth * (end - start);
    const middle = () => (timeline.view.from + timeline.view.to) / 2 + timeline.view.offsets[panel];
    const hold = event.target === place ? timeAt(event) - middle() : 0;
    const move = (event) => {
      const { span, offsets } = timeline.view, from = timeAt(event) - hold - offsets[panel] - span / 2;
      timeline.show(from, from + span);
    };
    timeline.remember();
    if (event.target !== place) move(event);
    const moving = new AbortController(), { signal } = moving;
    band.setPointerCapture(event.pointerId);
    band.addEventListener("pointermove", move, { signal });
    for (const end of ["pointerup", "pointercancel"]) band.addEventListener(end, () => moving.abort(), { signal });
  }
}
