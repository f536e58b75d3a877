// The details beside the lanes, or below them on a narrow page: of the selected box, or the sums of a measured range.

const MOST_KERNELS = 12;
const NOT_SUMMED = ["strip", "waiting", "host", "ranges"]; // their boxes contain others

class Details {
  /** @param {Timeline} timeline @param {HTMLElement} pane */
  constructor(timeline, pane) {
    Object.assign(this, { timeline, pane, hint: [...pane.childNodes] });
    this.close = Object.assign(element("button", "✕"), { className: "close", title: "close (Esc)", ariaLabel: "close details" });
    this.close.addEventListener("click", () => this.clear());
  }

  clear() {
    this.timeline.select(null);
    this.#fill(...this.hint);
  }

  /** The details take room beside the lanes only while something is selected. */
  #fill(...content) {
    const { pane, timeline: { selected } } = this;
    pane.parentElement.classList.toggle("docked", Boolean(selected));
    if (selected) content.unshift(this.close);
    pane.replaceChildren(...content);
    pane.scrollTop = 0;
  }

  /** @param {{row: Row, track: Track, at: number}} box */
  showBox(box) {
    this.timeline.select(box);
    const facts = factsOf(this.timeline, box);
    const [[, title], ...others] = facts;
    const pairs = others.flatMap(([name, text, target]) =>
      [element("dt", name), element("dd", target?.href ? linkTo(text, target.href) : target ? this.#link(text, target) : element("bdi", text))]);
    this.#fill(element("h2", element("bdi", title)), element("dl", ...pairs));
  }

  /** A button that leads to another box. */
  #link(text, box) {
    const button = element("button", element("bdi", text));
    button.className = "link";
    button.addEventListener("click", () => {
      this.timeline.moveTo(box);
      this.showBox(box);
    });
    return button;
  }

  /** Shows the sums of a range of the axis, by category and by name; a box counts with its part in the range. */
  showRange(from, to) {
    this.timeline.select({ from, to });
    const { categories, names } = sumsIn(this.timeline, from, to);
    const largest = [...names].sort(([, one], [, other]) => other.time - one.time);
    const head = `${milliseconds(Math.round(to - from))} measured`;
    this.#fill(
      element("h2", head),
      sumsTable("by category", categories),
      sumsTable("by name", largest.slice(0, MOST_KERNELS)),
      ...(largest.length > MOST_KERNELS ? [element("p", `and ${largest.length - MOST_KERNELS} more names`)] : []));
  }
}

/** The facts about a box as [name, text, target]; the target is a box or a link, if any. The first fact is the title. */
function factsOf(timeline, box) {
  const { row, track, at } = box, source = track.source[at], { data } = timeline, offset = timeline.view.offsets[row.panel];
  const duration = track.end[at] - track.start[at], bytes = track.columns.bytes[source], step = track.columns.step[source];
  const { legend } = timeline.categories.find(({ code }) => code === track.category);
  const rank = data.ranks[row.rank], { panel } = rank, [name, , bucket] = timeline.texts(track, at);
  return [
    ["name", name],
    ["kind", legend],
    ["duration", `${milliseconds(duration)} (${duration.toLocaleString("en")} ns)`],
    ["start", `${milliseconds(track.start[at] - offset)} on the axis`],
    ["lane", `${rankName(data, rank)}, ${row.lane}`],
    ...launchFacts(timeline, box),
    ...(step >= 0 ? [["step", timeline.stepName(step, data.panels[panel]).replace(/^step /, "")]] : []),
    ...(legend === "step" ? [["step length", timeline.lengthOf(step, [data.panels[panel]]) || "not known"]] : []),
    ...phaseFacts(timeline, box),
    ...(bucket >= 0 ? [["bucket", String(bucket)]] : []),
    ...(bytes >= 0 ? trafficFacts(timeline, box, bytes) : []),
    ...exposureFacts(timeline, box),
    ...needFacts(timeline, box),
    ...tableFacts(timeline, box),
    ...(row.from_launch ? [["lasts", "from launch to completion, as the host saw it"]] : []),
  ];
}

/** Facts about the launch: its time, the call, the delay, grid, block and registers. */
function launchFacts(timeline, box) {
  const launch = launchOf(timeline, box);
  if (!launch) return [];
  const { call, launched, count } = launch, { view, data } = timeline;
  const called = call.track.start[call.at], delay = launched.track.start[launched.at] - called;
  const facts = [["launch delay", `${milliseconds(delay)} (${delay.toLocaleString("en")} ns) from the start of the call`]];
  if (call === box) {
    const more = count > 1 ? `, the first of ${count.toLocaleString("en")}` : "";
    return [["launched", `${timeline.texts(launched.track, launched.at)[0]}, ${launched.row.lane}${more}`, launched], ...facts];
  }
  const [name] = timeline.texts(call.track, call.at), thread = call.row.lane.replace(/^CUDA calls, /, "");
  const [shape, registers] = data.shapes[timeline.launches.shape[box.track.source[box.at]]];
  const [, grid, block] = shape.match(/^grid (\S+) block (\S+)$/) ?? [];
  return [
    ["launched", `${milliseconds(called - view.offsets[call.row.panel])} on the axis, by ${name} on ${thread}`, call],
    ...facts,
    ...(grid ? [["grid", grid], ["block", block]] : []),
    ...(registers >= 0 ? [["registers", `${registers} a thread`]] : []),
  ];
}

/** The phase that launched a box. @returns {string} empty if it is not known */
function phaseOf({ launches, data }, { row, track, at }) {
  return row.folded ? "" : data.phases[launches?.phase[track.source[at]] - 1] ?? "";
}

function phaseFacts(timeline, box) {
  const name = phaseOf(timeline, box), inferred = name === "backward" && timeline.data.ranks[box.row.rank].infersBackward;
  if (!name) return [];
  return [["phase", inferred ? `${name}, inferred from the thread that launched it` : name]];
}

/** The launch shape of a kernel: its grid and block. */
function shapeOf({ launches, data }, { track, at }) {
  return data.shapes[launches.shape[track.source[at]]][0];
}

/** The first match of the search with this shape and phase, else the first match. */
function kernelFound(timeline, shape, phase) {
  return timeline.search.first((box) => shapeOf(timeline, box) === shape && phaseOf(timeline, box) === phase)
    ?? timeline.search.first(() => true);
}

/** A link to the kernel's row in the table of all kernels, if the report has one. */
function tableFacts(timeline, box) {
  const page = document.querySelector('a[data-page="kernels"]')?.getAttribute("href"), { row, track, at } = box;
  const isKernel = ["compute", "communication"].includes(row.kind) && !row.from_launch && timeline.data.panels[row.panel].device === "cuda";
  if (!page || !isKernel || !timeline.launches) return [];
  const query = { kernel: nameOf(timeline.texts(track, at)), shape: shapeOf(timeline, box), phase: phaseOf(timeline, box) };
  return [["all like it", "in the table of kernels", { href: `${page}#${new URLSearchParams(query)}` }]];
}

function linkTo(text, href) {
  return Object.assign(element("a", text), { href });
}

function trafficFacts(timeline, box, bytes) {
  const found = bandwidthOf(timeline, box);
  return [
    ["bytes", `${bytes.toLocaleString("en")}: ${sizeOf(bytes)}`],
    ...(found ? [[found.name, `${found.rate}: ${found.over}`]] : []),
  ];
}

/** The overlapped time of a collective, and its exposed time by when and why; each ns counts for one collective. */
function exposureFacts({ launches, data }, { row, track, at }) {
  const found = row.folded ? [] : launches?.partsOf(track.source[at]) ?? [];
  const exposed = found.filter(([part]) => part < data.parts.length);
  const hidden = found.find(([part]) => part === data.parts.length);
  const known = data.ranks[row.rank].knowsWait;
  const total = exposed.reduce((sum, [, ns]) => sum + ns, 0);
  const reasons = exposed.sort(([, one], [, other]) => other - one).map(([part, ns]) => {
    const [when, why] = data.parts[part];
    return [`exposed ${when}`, `${milliseconds(ns)}: ${why}${why === "in transfer" && !known ? " or waiting for a peer" : ""}`];
  });
  return [
    ...(hidden ? [["overlapped", milliseconds(hidden[1])]] : []),
    ...(total ? [["exposed", milliseconds(total)], ...reasons] : []),
  ];
}

function sumsIn(timeline, from, to) {
  const categories = new Map(), names = new Map();
  for (const row of timeline.rows) {
    if (row.folded && !row.seen) continue;
    const offset = timeline.view.offsets[row.panel], low = from + offset, high = to + offset;
    for (const track of row.tracks) {
      const { legend } = timeline.categories.find(({ code }) => code === track.category);
      const stop = track.startingFrom(high);
      for (let at = track.endingAfter(low); at < stop; at++) {
        const time = Math.min(high, track.end[at]) - Math.max(low, track.start[at]);
        add(categories, `${legend} (${row.kind})`, time);
        if (!NOT_SUMMED.includes(row.kind)) add(names, timeline.texts(track, at)[0], time);
      }
    }
  }
  return { categories, names };
}

function add(sums, name, time) {
  const sum = sums.get(name) ?? { time: 0, count: 0 };
  sums.set(name, { time: sum.time + time, count: sum.count + 1 });
}

/** @param {Iterable<[string, {time: number, count: number}]>} sums */
function sumsTable(caption, sums) {
  const head = ["name", "count", "sum"].map((text) => scoped(text, "col"));
  const lines = [...sums].map(([name, { time, count }]) => element("tr",
    scoped(name.length > 100 ? `${name.slice(0, 100)}…` : name, "row"),
    element("td", count.toLocaleString("en")), element("td", milliseconds(Math.round(time)))));
  return element("table", element("caption", caption), element("thead", element("tr", ...head)),
    element("tbody", ...lines));
}

/** A cell that heads a column or a row. */
function scoped(text, scope) {
  const cell = element("th", element("bdi", text));
  cell.scope = scope;
  return cell;
}
