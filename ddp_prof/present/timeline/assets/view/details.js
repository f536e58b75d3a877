// What stays on the page below the lanes: the box that was clicked, or the sums of the range that was measured.

const MOST_KERNELS = 12;

class Details {
  /** @param {Timeline} timeline @param {HTMLElement} pane */
  constructor(timeline, pane) {
    Object.assign(this, { timeline, pane, hint: [...pane.childNodes] });
  }

  clear() {
    this.timeline.select(null);
    this.pane.replaceChildren(...this.hint);
  }

  /** @param {{row: Row, track: Track, at: number}} box */
  showBox(box) {
    this.timeline.select(box);
    const facts = factsOf(this.timeline, box);
    const [[, title], ...others] = facts;
    const pairs = others.flatMap(([name, text]) => [element("dt", name), element("dd", element("bdi", text))]);
    this.pane.replaceChildren(element("h2", element("bdi", title)), element("dl", ...pairs));
  }

  /** The sums of a range of the axis, by category and by name; each box counts with what lies in the range. */
  showRange(from, to) {
    this.timeline.select({ from, to });
    const { categories, names } = sumsIn(this.timeline, from, to);
    const largest = [...names].sort(([, one], [, other]) => other.time - one.time);
    const head = `${milliseconds(Math.round(to - from))} measured`;
    this.pane.replaceChildren(
      element("h2", head),
      sumsTable("by category", categories),
      sumsTable("by name", largest.slice(0, MOST_KERNELS)),
      ...(largest.length > MOST_KERNELS ? [element("p", `and ${largest.length - MOST_KERNELS} more names`)] : []));
  }
}

/** What is known of a box, as pairs; the first one is its title. */
function factsOf(timeline, { row, track, at }) {
  const source = track.source[at], { columns, data } = timeline, offset = timeline.view.offsets[row.panel];
  const duration = track.end[at] - track.start[at], bytes = columns.bytes[source], step = columns.step[source];
  const { legend } = timeline.categories.find(({ code }) => code === track.category);
  const { title, panel } = data.ranks[row.rank];
  return [
    ["name", timeline.texts(source)[0]],
    ["kind", legend],
    ["duration", `${milliseconds(duration)} (${duration.toLocaleString("en")} ns)`],
    ["start", `${milliseconds(track.start[at] - offset)} on the axis`],
    ["lane", `${data.panels.length > 1 ? `${data.panels[panel].title}, ` : ""}${title}, ${row.lane}`],
    ...(step >= 0 ? [["step", String(step)]] : []),
    ...(bytes >= 0 ? [["bytes", `${bytes.toLocaleString("en")}: ${traffic(bytes, duration)}`]] : []),
    ...(row.from_launch ? [["lasts", "from launch to completion, as the host saw it"]] : []),
  ];
}

function sumsIn(timeline, from, to) {
  const categories = new Map(), names = new Map();
  for (const row of timeline.rows) {
    const offset = timeline.view.offsets[row.panel], low = from + offset, high = to + offset;
    for (const track of row.tracks) {
      const { legend } = timeline.categories.find(({ code }) => code === track.category);
      const stop = track.startingFrom(high);
      for (let at = track.endingAfter(low); at < stop; at++) {
        const time = Math.min(high, track.end[at]) - Math.max(low, track.start[at]);
        add(categories, `${legend} (${row.kind})`, time);
        if (!row.is_strip && !row.is_host) add(names, timeline.texts(track.source[at])[0], time);
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
