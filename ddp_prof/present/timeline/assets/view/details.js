// The details of the selected box, or the sums of a measured range: over the lower edge of a wide window, so that nothing
// moves, and below the lanes on a narrow page.

/** @import { BoxPlace } from "./model.js" */
/** @import { Timeline } from "./timeline.js" */
import { element } from "../base/dom.js";
import { milliseconds } from "../base/format.js";
import { factsOf, sumsIn } from "../data/facts.js";

const MOST_KERNELS = 12;
const LONG = 120; // characters; what is longer begins with two lines

export class Details {
  /** @param {Timeline} timeline @param {HTMLElement} pane */
  constructor(timeline, pane) {
    this.timeline = timeline;
    this.pane = pane;
    this.hint = [...pane.childNodes];
    this.close = Object.assign(element("button", "✕"), { className: "close", title: "close (Esc)", ariaLabel: "close details" });
    this.close.addEventListener("click", () => this.clear());
  }

  clear() {
    this.timeline.select(null);
    this.#fill(...this.hint);
  }

  #fill(...content) {
    const { pane, timeline: { selected } } = this;
    document.body.classList.toggle("selected", Boolean(selected));
    if (selected) content.unshift(this.close);
    pane.replaceChildren(...content);
    pane.scrollTop = 0;
    pane.classList.remove("above");
    pane.classList.toggle("above", this.#hidesSelection());
  }

  /** Whether the pane lies over the row of the selected box. */
  #hidesSelection() {
    const { pane, timeline: { selected, element: figure } } = this;
    if (!selected?.row || getComputedStyle(pane).position !== "fixed") return false;
    const lanes = figure.getBoundingClientRect().top + (figure._fullLayout?._size.t ?? 0);
    return lanes + selected.row.bottom > pane.getBoundingClientRect().top;
  }

  /** @param {BoxPlace} box */
  showBox(box) {
    this.timeline.select(box);
    const facts = factsOf(this.timeline, box);
    const [[, title], ...others] = facts;
    const pairs = others.map(([name, text, target]) => element("div", element("dt", name),
      element("dd", target?.href ? linkTo(text, target.href) : target ? this.#link(text, target) : shortened(text))));
    this.#fill(element("h2", shortened(title)), element("dl", ...pairs));
  }

  /** A button that leads to another box. */
  #link(text, box) {
    const name = element("bdi", text), button = element("button", name);
    button.className = "link";
    if (text.length > LONG) name.className = "long";
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

/** A text; of a long one two lines, and a button that shows the rest. */
function shortened(text) {
  const name = element("bdi", text);
  if (text.length <= LONG) return name;
  const more = Object.assign(element("button"), { className: "link more", ariaLabel: "all of the name" });
  name.className = "long";
  more.addEventListener("click", () => name.classList.toggle("long"));
  return element("span", name, more);
}

function linkTo(text, href) {
  return Object.assign(element("a", text), { href });
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
export function scoped(text, scope) {
  const cell = element("th", element("bdi", text));
  cell.scope = scope;
  return cell;
}
