// Draws the page: at once what is known of the whole, then what the columns hold.

const timeline = new Timeline(byId("timeline"), byId("labels"), read("timeline-data"));
const whole = new WholeRun(timeline, byId("whole"));
const readout = new Readout(timeline, byId("in-view"), byId("sums"));

async function start() {
  timeline.arrange(); // the bands of the whole run took room
  timeline.onPaint(() => whole.update());
  const address = new Address(timeline);
  address.follow();
  if (timeline.data.rows.some((row) => row.overview)) {
    await timeline.drawOverview();
    await nextFrame();
    performance.mark("overview");
  }
  const { tables, foldedTables } = timeline.data;
  const [boxes, untold] = await columnsIn("timeline-boxes", tables);
  timeline.fill(boxesOf(boxes), untold);
  timeline.onDraw(() => readout.update());
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

/** The columns come last in the page, so that the overview need not wait for them. */
async function columnsIn(id, tables) {
  if (document.readyState === "loading") await new Promise((done) => addEventListener("DOMContentLoaded", done));
  return unpack(await inflate(byId(id).textContent), tables);
}

function nextFrame() {
  return new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
}

timeline.ready = start().catch((error) => {
  byId("in-view").textContent = `The boxes could not be read: ${error.message}`;
  throw error;
});
window.ddpProf = timeline;
