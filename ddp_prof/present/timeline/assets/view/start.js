// Draws the page: first the window on which it opens, then all of it. The first drawing needs neither Plotly nor all
// columns; these come last in the page, because each takes long to read.

import { read } from "../../../html/assets/look.js";
import { byId, element } from "../base/dom.js";
import { boxesOf, inflate, unpack } from "../data/columns.js";
import { Launches } from "../lanes/launches.js";
import { Needs } from "../lanes/needs.js";
import { Address } from "./address.js";
import { control, showStep } from "./controls.js";
import { Readout } from "./inspect.js";
import { Timeline } from "./timeline.js";
import { WholeRun } from "./whole.js";

const timeline = new Timeline(byId("timeline"), byId("labels"), read("timeline-data"));
const whole = new WholeRun(timeline, byId("whole"));
const readout = new Readout(timeline, byId("in-view"), byId("sums"));

async function start() {
  timeline.arrange(); // again, because the bands of the whole run take room
  timeline.onPaint(() => whole.update());
  const address = new Address(timeline);
  address.follow();
  timeline.onDraw(() => readout.update());
  if (timeline.data.opening) {
    showStep(timeline);
    await drawFirst();
    await nextFrame();
    performance.mark("first view");
  }
  await loadPlotly();
  const { tables, foldedTables } = timeline.data;
  const [boxes, extra] = await columnsIn("timeline-boxes", tables);
  timeline.fill(boxesOf(boxes), extra);
  const details = control(timeline);
  await timeline.draw();
  timeline.element.on("plotly_restyle", () => timeline.schedule()); // a category was switched on or off
  performance.mark("complete");
  const [folded, facts, collectives, needs] = await columnsIn("timeline-folded", foldedTables);
  timeline.fillFolded(boxesOf(folded), new Launches(facts, collectives), new Needs(needs));
  performance.mark("folded");
  address.start(details);
  await timeline.schedule();
  document.body.dataset.ready = "true";
}

/** Draws the window on which the page opens, or empty lanes if the address has another window. */
async function drawFirst() {
  const { opening } = timeline.data;
  if (!timeline.isOpening) return timeline.drawEmpty();
  const [boxes, extra] = unpack(await inflate(byId("timeline-opening").textContent), opening.tables);
  timeline.fill(boxesOf(boxes), extra, opening.rows);
  return timeline.schedule();
}

/** Runs Plotly, which until now was a text in the page or a file beside it. */
async function loadPlotly() {
  await parsed();
  const { textContent, dataset: { file } } = byId("plotly"), script = element("script");
  if (!file) script.textContent = textContent;
  const loaded = file && new Promise((done, fail) => Object.assign(script, { src: file, onload: done, onerror: () => fail(new Error(`no ${file}`)) }));
  document.head.append(script);
  await loaded;
}

/** Reads columns, which come last in the page. */
async function columnsIn(id, tables) {
  await parsed();
  return unpack(await inflate(byId(id).textContent), tables);
}

/** Resolves when the whole page has been parsed. */
async function parsed() {
  if (document.readyState === "loading") await new Promise((done) => addEventListener("DOMContentLoaded", done));
}

function nextFrame() {
  return new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
}

timeline.ready = start().catch((error) => {
  byId("in-view").textContent = `The boxes could not be read: ${error.message}`;
  throw error;
});
window.ddpProf = timeline;
