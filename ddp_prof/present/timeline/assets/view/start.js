// Draws the page: at once the window on which it opens, then what all columns hold. Neither Plotly nor the columns are
// needed for the first, and they come last in the page: each takes longer to read than a reader likes to wait.

const timeline = new Timeline(byId("timeline"), byId("labels"), read("timeline-data"));
const whole = new WholeRun(timeline, byId("whole"));
const readout = new Readout(timeline, byId("in-view"), byId("sums"));

async function start() {
  timeline.arrange(); // the bands of the whole run took room
  timeline.onPaint(() => whole.update());
  const address = new Address(timeline);
  address.follow();
  timeline.onDraw(() => readout.update());
  if (timeline.data.rows.some((row) => row.overview)) {
    showStep(timeline);
    await drawFirst();
    await nextFrame();
    performance.mark("first view");
  }
  await loadPlotly();
  const { tables, foldedTables } = timeline.data;
  const [boxes, untold] = await columnsIn("timeline-boxes", tables);
  timeline.fill(boxesOf(boxes), untold);
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

/** The boxes of the window on which the page opens; where the address asks for another, an overview stands in. */
async function drawFirst() {
  const { opening } = timeline.data;
  if (!opening || !timeline.isOpening) return timeline.drawOverview();
  const [boxes, untold] = unpack(await inflate(byId("timeline-opening").textContent), opening.tables);
  timeline.fill(boxesOf(boxes), untold, opening.rows);
  return timeline.schedule();
}

/** Plotly is a text of the page, or a file beside it, until there is something to see. */
async function loadPlotly() {
  await parsed();
  const { textContent, dataset: { file } } = byId("plotly"), script = element("script");
  if (!file) script.textContent = textContent;
  const loaded = file && new Promise((done, fail) => Object.assign(script, { src: file, onload: done, onerror: () => fail(new Error(`no ${file}`)) }));
  document.head.append(script);
  await loaded;
}

/** The columns come last in the page, so that the first view need not wait for them. */
async function columnsIn(id, tables) {
  await parsed();
  return unpack(await inflate(byId(id).textContent), tables);
}

/** When the whole page has been read. */
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
