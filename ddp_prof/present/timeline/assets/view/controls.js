// Keys, and the bar above the figure.

/** @import { Timeline } from "./timeline.js" */
import { dark } from "../../../html/assets/look.js";
import { byId, element } from "../base/dom.js";
import { widthOf } from "../base/letters.js";
import { Details } from "./details.js";
import { controlPointer } from "./pointer.js";

/** @param {Timeline} timeline @returns {Details} */
export function control(timeline) {
  controlSteps(timeline);
  controlLanes(timeline);
  const details = new Details(timeline, byId("details"));
  controlSearch(timeline, details);
  controlPointer(timeline, details);
  byId("show-keys").addEventListener("click", toggleKeys);
  addEventListener("keydown", (event) => event.key === "Escape" && !typesIn(event) && details.clear());
  for (const [id, act] of Object.entries({
    "zoom-in": () => timeline.zoom(0.5), "zoom-out": () => timeline.zoom(2), "show-all": () => timeline.showAll(),
  })) byId(id).addEventListener("click", act);
  addEventListener("keydown", (event) => onKey(timeline, details, event));
  onResize(timeline);
  dark.addEventListener("change", () => timeline.schedule());
  return details;
}

/** Draws again after a change of size. The observer also calls once at the beginning, when nothing has changed. */
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
  const field = byId("lanes"), chip = byId("lanes-chip");
  const clear = () => {
    field.value = "";
    field.dispatchEvent(new Event("input"));
  };
  field.addEventListener("input", () => timeline.filter(field.value));
  field.addEventListener("keydown", (event) => {
    if (event.key === "Escape") clear();
    if (["Enter", "Escape"].includes(event.key)) field.blur();
  });
  // The chip shows the filter; the field holds it only while it has the focus.
  field.addEventListener("focus", () => {
    field.value = timeline.folding.filter;
    field.select();
  });
  field.addEventListener("blur", () => (field.value = ""));
  chip.addEventListener("click", clear);
  timeline.onDraw(() => {
    const words = timeline.folding.filter.trim();
    chip.hidden = !words;
    chip.replaceChildren("lanes: ", element("bdi", words), " ✕");
  });
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
  f: (timeline) => timeline.showSelection(), Backspace: (timeline) => timeline.back(),
  b: (timeline, details) => goTo(timeline, details, timeline.nextOf("blocking", 1)),
  B: (timeline, details) => goTo(timeline, details, timeline.nextOf("blocking", -1)),
  e: (timeline, details) => goTo(timeline, details, timeline.nextBySize("exposed", 1)),
  E: (timeline, details) => goTo(timeline, details, timeline.nextBySize("exposed", -1)),
  "?": () => toggleKeys(),
};

/** Selects a box, if there is one, and brings it into view. */
function goTo(timeline, details, box) {
  if (!box) return;
  timeline.bringIntoView(box);
  details.showBox(box);
}

/** Whether a key event belongs to a field or a dialog. */
function typesIn(event) {
  return event.target.closest?.("input, select, textarea, dialog");
}

function toggleKeys() {
  const list = byId("keys");
  if (list.open) list.close();
  else list.showModal();
}

function onKey(timeline, details, event) {
  const closes = event.key === "?" && byId("keys").open;
  if ((typesIn(event) && !closes) || event.ctrlKey || event.metaKey || event.altKey) return;
  const act = KEYS[event.key] ?? KEYS[event.key.toLowerCase()];
  if (!act) return;
  event.preventDefault();
  act(timeline, details);
}

/** Fills the menu of steps with the current step only, because thousands of entries take long; keeps its full width. */
export function showStep(timeline) {
  const menu = byId("steps"), names = timeline.stepKeys.map((key) => timeline.stepName(key));
  byId("step-controls").hidden = !names.length;
  if (timeline.step === null) return;
  const widest = names.reduce((one, other) => (widthOf(other) > widthOf(one) ? other : one));
  menu.append(new Option(timeline.stepName(timeline.step), timeline.step, false, true), new Option(widest));
  menu.style.width = `${menu.offsetWidth}px`; // fixed, so that the browser does not measure all entries
}

function controlSteps(timeline) {
  const menu = byId("steps");
  byId("step-controls").hidden = !timeline.stepKeys.length;
  menu.replaceChildren(menu.options[0], menu.options[1], ...timeline.stepKeys.map((key) => new Option(timeline.stepName(key), key)));
  menu.addEventListener("change", () => {
    if (menu.value === "whole") timeline.showAll();
    else if (menu.value) timeline.showStep(Number(menu.value));
    else timeline.showSteps();
  });
  byId("step-before").addEventListener("click", () => timeline.showNeighbour(-1));
  byId("step-after").addEventListener("click", () => timeline.showNeighbour(1));
  timeline.onDraw(() => {
    menu.value = timeline.step ?? (timeline.isWhole ? "whole" : "");
  });
}

/** Searches words as if the reader had typed them. */
export function searchFor(words) {
  const field = byId("search");
  field.value = words;
  field.dispatchEvent(new Event("input"));
}

function controlSearch(timeline, details) {
  const { search } = timeline, field = byId("search"), result = byId("found");
  const report = () => {
    const goals = search.goals.toLocaleString("en"), others = search.count - search.goals;
    const position = search.current ? `${search.position.toLocaleString("en")} of ${goals}` : `${goals} found`;
    const marked = others ? ` · ${others.toLocaleString("en")} others marked` : "";
    result.textContent = search.words ? position + marked : "";
  };
  timeline.onDraw(report);
  const go = (direction) => {
    search.go(direction);
    if (search.current) details.showBox(search.current);
    report();
  };
  const find = () => {
    search.find(field.value);
    report();
    timeline.schedule();
  };
  field.addEventListener("input", find);
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter") go(event.shiftKey ? -1 : 1);
    if (event.key !== "Escape") return;
    field.value = "";
    field.blur();
    find();
  });
  byId("found-before").addEventListener("click", () => go(-1));
  byId("found-after").addEventListener("click", () => go(1));
}
