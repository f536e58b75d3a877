// The pointer over the figure: wheel, drag, click, tooltip.

/** @import { Details } from "./details.js" */
/** @import { Timeline } from "./timeline.js" */
import { byId } from "../base/dom.js";
import { Tooltip } from "./inspect.js";

const CLICK = 4; // pixels that a pointer may move during a click

export function controlPointer(timeline, details) {
  const tooltip = new Tooltip(timeline, byId("tooltip")), figure = timeline.element;
  timeline.onDraw(() => tooltip.hide());
  figure.addEventListener("wheel", (event) => onWheel(timeline, tooltip, event), { passive: false });
  const drag = new Drag(timeline, details);
  figure.addEventListener("pointerdown", (event) => drag.start(event));
  figure.addEventListener("pointermove", (event) => {
    drag.move(event);
    const { x, y, inside } = timeline.place(event);
    if (inside && !drag.from) tooltip.show(x, y, event.clientX, event.clientY);
    else tooltip.hide();
  });
  figure.addEventListener("pointerup", (event) => drag.end(event));
  figure.addEventListener("pointercancel", () => drag.cancel());
  figure.addEventListener("pointerleave", () => tooltip.hide());
  figure.addEventListener("dblclick", (event) => {
    const { x, inside } = timeline.place(event);
    if (inside) timeline.zoom(0.5, x / timeline.width);
  });
}

function onWheel(timeline, tooltip, event) {
  const { x, inside } = timeline.place(event);
  if (!inside || event.ctrlKey) return;
  event.preventDefault();
  tooltip.hide();
  const { deltaX, deltaY, shiftKey } = event;
  if (shiftKey || Math.abs(deltaX) > Math.abs(deltaY)) timeline.pan((deltaX || deltaY) / 800);
  else timeline.zoom(Math.exp(Math.max(-1, Math.min(1, deltaY / 250))), x / timeline.width);
}

/** A pressed pointer: a drag moves the window, a drag with shift measures a range, a click selects. */
class Drag {
  /** @param {Timeline} timeline @param {Details} details */
  constructor(timeline, details) {
    this.timeline = timeline;
    this.details = details;
    /** @type {?{x: number, y: number, last: number, moved: number, measures: boolean}} */
    this.from = null;
  }

  start(event) {
    const { x, y, inside } = this.timeline.place(event);
    if (event.button || !inside) return;
    this.from = { x, y, last: event.clientX, moved: 0, measures: event.shiftKey };
    this.timeline.element.setPointerCapture(event.pointerId);
  }

  move(event) {
    if (!this.from) return;
    const by = this.from.last - event.clientX;
    this.from.moved += Math.abs(by);
    this.from.last = event.clientX;
    if (this.from.measures) this.timeline.select(this.#range(event));
    else this.timeline.pan(by / this.timeline.width);
  }

  end(event) {
    const { from, timeline, details } = this;
    if (!from) return;
    this.from = null;
    if (from.measures && from.moved > CLICK) return void details.showRange(...Object.values(this.#range(event, from)));
    if (from.moved > CLICK) return;
    const box = timeline.boxAt(from.x, from.y);
    if (box) details.showBox(box);
    else details.clear();
  }

  cancel() {
    this.from = null;
  }

  /** The range between the place where the pointer was pressed and its place now. */
  #range(event, { x } = this.from) {
    const { view, pixel, width } = this.timeline;
    const ends = [x, Math.min(Math.max(this.timeline.place(event).x, 0), width)].sort((one, other) => one - other);
    const [from, to] = ends.map((end) => Math.round(view.from + end * pixel));
    return { from, to };
  }
}
