// Wheel, drag, keys and the bar above the figure.

const byId = (id) => document.getElementById(id);

/** @param {Timeline} timeline */
function control(timeline) {
  controlSteps(timeline);
  controlSearch(timeline);
  controlPointer(timeline);
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
  new ResizeObserver(() => {
    if (timeline.element.clientWidth !== width) timeline.schedule();
    width = timeline.element.clientWidth;
  }).observe(timeline.element);
}

const KEYS = {
  ArrowLeft: (timeline) => timeline.pan(-0.25), a: (timeline) => timeline.pan(-0.25),
  ArrowRight: (timeline) => timeline.pan(0.25), d: (timeline) => timeline.pan(0.25),
  "+": (timeline) => timeline.zoom(0.5), "=": (timeline) => timeline.zoom(0.5), w: (timeline) => timeline.zoom(0.5),
  "-": (timeline) => timeline.zoom(2), s: (timeline) => timeline.zoom(2),
  0: (timeline) => timeline.showAll(),
  n: (timeline) => timeline.showNeighbour(1), p: (timeline) => timeline.showNeighbour(-1),
  "/": () => byId("search").focus(),
};

function onKey(timeline, event) {
  const typing = event.target.closest?.("input, select, textarea");
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
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

function controlPointer(timeline) {
  const tooltip = new Tooltip(timeline, byId("tooltip"));
  const figure = timeline.element;
  let last = null;
  timeline.onDraw(() => tooltip.hide());
  figure.addEventListener("wheel", (event) => {
    const { x, inside } = timeline.place(event);
    if (!inside || event.ctrlKey) return;
    event.preventDefault();
    tooltip.hide();
    const { deltaX, deltaY, shiftKey } = event;
    if (shiftKey || Math.abs(deltaX) > Math.abs(deltaY)) timeline.pan((deltaX || deltaY) / 800);
    else timeline.zoom(Math.exp(Math.max(-1, Math.min(1, deltaY / 250))), x / timeline.width);
  }, { passive: false });
  figure.addEventListener("pointerdown", (event) => {
    if (event.button || !timeline.place(event).inside) return;
    last = event.clientX;
    figure.setPointerCapture(event.pointerId);
  });
  figure.addEventListener("pointermove", (event) => {
    if (last !== null) {
      timeline.pan((last - event.clientX) / timeline.width);
      last = event.clientX;
    }
    const { x, y, inside } = timeline.place(event);
    if (inside && last === null) tooltip.show(x, y, event.clientX, event.clientY);
    else tooltip.hide();
  });
  for (const end of ["pointerup", "pointercancel"]) figure.addEventListener(end, () => (last = null));
  figure.addEventListener("pointerleave", () => tooltip.hide());
  figure.addEventListener("dblclick", (event) => timeline.place(event).inside && timeline.showAll());
}
