// Wheel, drag, keys and the bar above the figure.

const byId = (id) => document.getElementById(id);

/** @param {Timeline} timeline */
function control(timeline) {
  controlSteps(timeline);
  controlLanes(timeline);
  controlSearch(timeline);
  const details = new Details(timeline, byId("details"));
  controlPointer(timeline, details);
  byId("show-keys").addEventListener("click", toggleKeys);
  addEventListener("keydown", (event) => event.key === "Escape" && !typesIn(event) && details.clear());
  for (const [id, act] of Object.entries({
    "zoom-in": () => timeline.zoom(0.5), "zoom-out": () => timeline.zoom(2), "show-all": () => timeline.showAll(),
  })) byId(id).addEventListener("click", act);
  addEventListener("keydown", (event) => onKey(timeline, event));
  onResize(timeline);
  dark.addEventListener("change", () => timeline.schedule());
}

/** Other pixels, other columns. The observer calls once at the beginning, too, when nothing has changed. */
function onResize(timeline) {
  let width = timeline.element.clientWidth;
  const again = () => {
    timeline.arrange();
    timeline.schedule();
  };
  addEventListener("resize", again);
  new ResizeObserver(() => {
    if (timeline.element.clientWidth !== width) again();
    width = timeline.element.clientWidth;
  }).observe(timeline.element);
}

function controlLanes(timeline) {
  const field = byId("lanes");
  field.addEventListener("input", () => timeline.filter(field.value));
  field.addEventListener("keydown", (event) => ["Enter", "Escape"].includes(event.key) && field.blur());
}

const KEYS = {
  ArrowLeft: (timeline) => timeline.pan(-0.25), a: (timeline) => timeline.pan(-0.25),
  ArrowRight: (timeline) => timeline.pan(0.25), d: (timeline) => timeline.pan(0.25),
  "+": (timeline) => timeline.zoom(0.5), "=": (timeline) => timeline.zoom(0.5), w: (timeline) => timeline.zoom(0.5),
  "-": (timeline) => timeline.zoom(2), s: (timeline) => timeline.zoom(2),
  0: (timeline) => timeline.showAll(),
  n: (timeline) => timeline.showNeighbour(1), p: (timeline) => timeline.showNeighbour(-1),
  "/": () => byId("search").focus(),
  l: () => byId("lanes").focus(),
  c: (timeline) => timeline.toggle("calls"), r: (timeline) => timeline.toggle("ranges"),
  f: (timeline) => timeline.showSelection(),
  "?": () => toggleKeys(),
};

/** Whether keys go into a field. */
function typesIn(event) {
  return event.target.closest?.("input, select, textarea, dialog");
}

function toggleKeys() {
  const list = byId("keys");
  if (list.open) list.close();
  else list.showModal();
}

function onKey(timeline, event) {
  const closes = event.key === "?" && byId("keys").open;
  if ((typesIn(event) && !closes) || event.ctrlKey || event.metaKey || event.altKey) return;
  const act = KEYS[event.key] ?? KEYS[event.key.toLowerCase()];
  if (!act) return;
  event.preventDefault();
  act(timeline);
}

function controlSteps(timeline) {
  const menu = byId("steps");
  byId("step-controls").hidden = !timeline.stepNumbers.length;
  menu.append(...timeline.stepNumbers.map((number) => new Option(`step ${number}`, number)));
  menu.addEventListener("change", () => (menu.value ? timeline.showStep(Number(menu.value)) : timeline.showAll()));
  byId("step-before").addEventListener("click", () => timeline.showNeighbour(-1));
  byId("step-after").addEventListener("click", () => timeline.showNeighbour(1));
  timeline.onDraw(() => {
    menu.value = timeline.step ?? "";
  });
}

function controlSearch(timeline) {
  const { search } = timeline, field = byId("search"), said = byId("found");
  const tell = () => {
    const count = search.count.toLocaleString("en");
    const position = search.current ? `${search.position.toLocaleString("en")} of ${count}` : `${count} found`;
    said.textContent = search.words ? position : "";
  };
  byId("lanes").addEventListener("input", tell);
  const go = (direction) => {
    search.go(direction);
    tell();
  };
  field.addEventListener("input", () => {
    search.find(field.value);
    tell();
    timeline.schedule();
  });
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter") go(event.shiftKey ? -1 : 1);
    if (event.key === "Escape") field.blur();
  });
  byId("found-before").addEventListener("click", () => go(-1));
  byId("found-after").addEventListener("click", () => go(1));
}

const CLICK = 4; // pixels that a pointer may move and still have clicked

function controlPointer(timeline, details) {
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

/** A pointer that is down: it moves the window, with shift it measures a range, and where it stays it selects. */
class Drag {
  constructor(timeline, details) {
    Object.assign(this, { timeline, details, from: null });
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

  /** What lies between where the pointer went down and where it is. */
  #range(event, { x } = this.from) {
    const { view, pixel, width } = this.timeline;
    const ends = [x, Math.min(Math.max(this.timeline.place(event).x, 0), width)].sort((one, other) => one - other);
    const [from, to] = ends.map((end) => Math.round(view.from + end * pixel));
    return { from, to };
  }
}
