// What the page holds and what of it is shown: rows, the window of time, what is folded, searched and selected. It knows
// nothing of the elements of the page.

/** @import { Columns } from "../data/columns.js" */
/** @import { Key } from "../data/search.js" */
/** @import { Track } from "../data/tracks.js" */
/** @import { Space } from "../lanes/arrange.js" */
/** @import { Launches } from "../lanes/launches.js" */
/** @import { Needs } from "../lanes/needs.js" */
import { summed, toTimes } from "../data/columns.js";
import { Row, View } from "../data/rows.js";
import { keyOf, nearest, Search } from "../data/search.js";
import { Arrangement, Folding, TOGETHER } from "../lanes/arrange.js";

const SHORTEST_SPAN = 100; // ns; for less, the axis would need more digits
const STEP_MARGIN = 0.02;
const MOST_LENGTHS = 3; // of a step in several panels; of more, the shortest and the longest
/** @param {string} text such as "1,500.0 ms" */
const microseconds = (text) => parseFloat(text.replaceAll(",", "")) * { ms: 1e3, s: 1e6 }[text.split(" ")[1]] || parseFloat(text);
const UNDRAWN_WIDTH = 1000, UNDRAWN = { narrow: false, room: 600, headers: [] };

/** @typedef {{row: Row, track: Track, at: number}} BoxPlace a box */
/** A box, or a range of the axis. @typedef {{row?: Row, track?: Track, at?: number, from?: number, to?: number}} Selection */

/** @param {BoxPlace} box */
const lengthOf = ({ track, at }) => track.end[at] - track.start[at];
/** @param {BoxPlace} box */
const stepOf = ({ track, at }) => track.columns.step[track.source[at]];

export class Model {
  /** @param {PageData} data */
  constructor(data) {
    this.data = data;
    /** The categories in the colours that the reader prefers. */
    this.categories = data.categories;
    this.isComplete = false;
    this.folding = new Folding();
    /** @type {?Arrangement} */
    this.arrangement = null;
    /** @type {?Columns} */
    this.columns = null;
    /** @type {?Launches} */
    this.launches = null;
    /** @type {?Needs} */
    this.needs = null;
    const rowOf = (row) => new Row(data.lanes[row.lane], row, data.ranks[data.lanes[row.lane].rank].panel);
    this.shownRows = data.rows.map(rowOf);
    /** Rows of lanes that are folded at first. */
    this.foldedRows = data.foldedRows.map(rowOf);
    /** @type {Row[]} */
    this.rows = [...this.shownRows, ...this.foldedRows];
    /** The least duration of a box that is drawn by itself. */
    this.columnWidth = 0;
    this.search = new Search(this);
    /** Keys of the steps of all panels. */
    this.stepKeys = [...new Set(data.panels.flatMap(({ steps }) => steps.map(([key]) => key)))].sort((one, other) => one - other);
    /** The selection: a box, or a range of the axis. @type {?Selection} */
    this.selected = null;
    /** The window before each jump. @type {Array<{step: ?number, view: View, base: View}>} */
    this.past = [];
    /** The step that is shown. @type {?number} */
    this.step = null;
    /** @type {?string} The page of all kernels, if the report has one. */
    this.kernelsPage = null;
    this.#reset();
  }

  // What a page that draws overrides.

  /** Width of the lanes in pixels. @returns {number} */
  get width() {
    return UNDRAWN_WIDTH;
  }

  /** Places the lanes. @param {Space} space */
  arrange(space = UNDRAWN) {
    this.arrangement = new Arrangement(this.data, this.folding, space);
    this.rows.forEach((row) => row.arrange(this.data.lanes));
  }

  /** Is called after each change. @returns {Promise<void>} when it is drawn */
  async schedule() {}

  /**
   * @param {Columns} columns of the boxes that are shown @param {Object} extra times, see encoding.py
   * @param {?Array<[number, number, number]>} parts lane, level and count of each row, if the columns hold only the
   * window on which the page opens; null if they hold all boxes
   */
  fill(columns, { rank: ranks, time }, parts = null) {
    this.columns = columns;
    this.isComplete = !parts;
    const countOf = ({ place, level, count }) => (parts ? parts.find(([lane, at]) => lane === place && at === level)?.[2] ?? 0 : count);
    this.shownRows.reduce((first, row) => row.fill(columns, first, countOf(row)), 0);
    const times = summed(new Float64Array(time));
    const spans = (rows) => rows.map(({ first, stop }) => [first, stop]);
    this.data.ranks.forEach((_, rank) => {
      const rows = this.shownRows.filter((row) => row.rank === rank), isStrip = ({ kind }) => kind === "strip";
      const others = rows.filter((row) => !isStrip(row));
      toTimes(columns, spans(rows.filter(isStrip)), spans(others), times.filter((_, at) => ranks[at] === rank));
    });
  }

  /** @param {Columns} columns of the boxes in folded lanes @param {Launches} launches of the other boxes
   * @param {Needs} needs */
  fillFolded(columns, launches, needs) {
    this.launches = launches;
    this.needs = needs;
    this.foldedRows.reduce((first, row) => row.fill(columns, first), 0);
  }

  // The arrangement of the lanes.

  /** Folds or unfolds lanes on all ranks. @param {string} key of a group */
  fold(key, folded) {
    this.folding.set(key, folded);
    this.arrange();
    return this.schedule();
  }

  /** @param {"calls" | "ranges"} key */
  toggle(key) {
    const group = this.arrangement.groups.flat().find((each) => each.key === key);
    return group && this.fold(key, !group.folded);
  }

  /** Shows only lanes whose titles contain the words. */
  filter(words) {
    this.folding.filter = words;
    this.search.find(this.search.words);
    this.arrange();
    return this.schedule();
  }

  /** Unfolds the lane of a row. */
  reveal(row) {
    const { title, kind } = this.data.lanes[row.place];
    if (!row.seen && !this.folding.passes({ title, kind })) this.filter("");
    if (!row.seen) this.fold(row.kind in TOGETHER ? row.kind : row.lane, false);
  }

  // The window.

  #reset() {
    this.step = null;
    this.view = new View(0, 1, this.data.panels.map(() => 0));
    this.view = this.view.moved(...this.home);
    this.base = this.view;
  }

  /** From the first to the last moment of any panel. */
  get whole() {
    const { start, end } = this.data, { offsets } = this.view;
    return [start - Math.max(...offsets), end - Math.min(...offsets)];
  }

  /** The same with a margin; each window lies within these limits. */
  get limits() {
    return this.#withMargin(...this.whole);
  }

  /** All measured steps. */
  get home() {
    return this.#withMargin(...this.data.home);
  }

  #withMargin(from, to) {
    const slack = (to - from) * this.data.margin;
    return [from - slack, to + slack];
  }

  /** Shows a window of the axis, in ns. @returns {Promise<void>} when it is drawn */
  show(from, to) {
    const [low, high] = this.limits;
    const span = Math.min(Math.max(to - from, SHORTEST_SPAN), high - low);
    const start = Math.min(Math.max((from + to - span) / 2, low), high - span);
    this.view = this.view.moved(start, start + span);
    return this.schedule();
  }

  /** Shows the window on which the page opens: the typical step, or all of a capture without steps. */
  open() {
    return this.data.typical === null ? this.showSteps() : this.showStep(this.data.typical);
  }

  /** Whether the window is the typical step, on which the page opens. */
  get isOpening() {
    return this.step !== null && this.step === this.data.typical && this.isBase;
  }

  /** Whether the boxes in the window were read. */
  get canDraw() {
    return this.isComplete || Boolean(this.columns && this.isOpening);
  }

  /** Whether the window has not moved since a step, or all steps, were shown. */
  get isBase() {
    return this.view.from === this.base.from && this.view.to === this.base.to;
  }

  /** Whether no step is shown, but the whole capture, which holds more than the measured steps. */
  get isWhole() {
    const [from, to] = this.limits, [first, last] = this.home;
    return this.step === null && this.view.from <= from && this.view.to >= to && (from < first || last < to);
  }

  /** Shows the whole capture. */
  showAll() {
    this.#reset();
    return this.show(...this.limits);
  }

  /** Shows all measured steps. */
  showSteps() {
    this.#reset();
    return this.schedule();
  }

  /** Shows a step in all panels; time 0 is its start in each panel. */
  showStep(key) {
    const marks = this.data.panels.map(({ steps }) => steps.find(([each]) => each === key));
    const shown = marks.filter(Boolean);
    this.step = key;
    this.view = new View(0, 1, marks.map((mark) => (mark ?? shown[0])[1]));
    const longest = Math.max(...shown.map(([, from, to]) => to - from));
    const drawn = this.show(-longest * STEP_MARGIN, longest * (1 + STEP_MARGIN));
    this.base = this.view;
    return drawn;
  }

  /** Shows the next step or the one before; if no step is shown yet, the one in the middle of the window. */
  showNeighbour(by) {
    const keys = this.stepKeys;
    if (!keys.length) return;
    const at = this.step === null ? keys.indexOf(this.#stepInView()) : keys.indexOf(this.step) + by;
    this.showStep(keys[Math.min(Math.max(at, 0), keys.length - 1)]);
  }

  /** The step in the middle of the window, or the first step if the window holds nearly all of them. */
  #stepInView() {
    const { from, span, offsets } = this.view, [first, last] = this.data.home;
    const { steps } = this.data.panels.find(({ steps }) => steps.length);
    const middle = (span > (last - first) * 0.9 ? from : from + span / 2) + offsets[0];
    return (steps.find(([, , end]) => end > middle) ?? steps[0])[0];
  }

  /** @param {number} factor of the span @param {number} at the place that does not move, from 0 (left) to 1 (right) */
  zoom(factor, at = 0.5) {
    const { from, span } = this.view;
    const [low, high] = this.limits;
    const next = Math.min(Math.max(span * factor, SHORTEST_SPAN), high - low);
    const start = from + at * (span - next);
    return this.show(start, start + next);
  }

  /** @param {number} share of the window */
  pan(share) {
    const { from, to, span } = this.view;
    const [low, high] = this.limits;
    const by = Math.min(Math.max(share * span, low - from), high - to);
    return this.show(from + by, to + by);
  }

  // The selection, and ways to it.

  /** @param {?Object} what a box, a range of the axis, or null */
  select(what) {
    this.selected = what;
    return this.schedule();
  }

  /** The interval of the selection on the axis. @returns {?number[]} */
  get selection() {
    if (!this.selected) return null;
    const { row, track, at, from, to } = this.selected;
    if (!row) return [from, to];
    const offset = this.view.offsets[row.panel];
    return [track.start[at] - offset, track.end[at] - offset];
  }

  /** Zooms to the selection. */
  showSelection() {
    if (!this.selection) return null;
    this.remember();
    const [from, to] = this.selection, slack = Math.max((to - from) / 8, SHORTEST_SPAN / 4);
    return this.show(from - slack, to + slack);
  }

  /** Moves a box to the middle, zooms if it is too short or too long for the window, and unfolds its lane. */
  bringIntoView({ row, track, at }) {
    this.remember();
    this.reveal(row);
    const offset = this.view.offsets[row.panel], duration = track.end[at] - track.start[at];
    const middle = (track.start[at] + track.end[at]) / 2 - offset;
    const isSeen = duration >= 4 * this.pixel && duration < this.view.span;
    const span = isSeen ? this.view.span : Math.max(duration * 12, 1000);
    return this.show(middle - span / 2, middle + span / 2);
  }

  /** Moves the window to a box that is not wholly in it, without zooming, and unfolds its lane. */
  moveTo({ row, track, at }) {
    this.remember();
    this.reveal(row);
    const { from, to, span, offsets } = this.view;
    const start = track.start[at] - offsets[row.panel], end = track.end[at] - offsets[row.panel];
    if (from <= start && end <= to) return this.schedule();
    return this.show((start + end - span) / 2, (start + end + span) / 2);
  }

  /** Keeps the window before a jump, for `back`. */
  remember() {
    const { step, view, base } = this;
    if (this.past.at(-1)?.view !== view) this.past.push({ step, view, base });
  }

  /** Shows the window before the last jump. */
  back() {
    while (this.past.at(-1)?.view === this.view) this.past.pop();
    Object.assign(this, this.past.pop());
    return this.schedule();
  }

  /** The next box of a category in time (row by row if several start together); null after the last one. */
  nextOf(name, direction) {
    const code = this.data.categories.find((each) => each.name === name)?.code, { selected, view: { from, to } } = this;
    const box = /** @type {BoxPlace} */ (selected);
    /** @type {Key} */
    const here = box?.track?.category === code ? keyOf(this, box) : [direction > 0 ? from : to, -direction * Infinity];
    const isOfKind = ({ category }) => category === code;
    const tracks = this.rows.flatMap((row, index) => (row.seen ? row.tracks.filter(isOfKind).map((track) => ({ row, index, track })) : []));
    return nearest(this, tracks, here, direction);
  }

  /**
   * The box of a category that is next by length, longest first; null after the last one. From anything else that is
   * selected it leads to the longest one.
   * @param {string} name @param {1 | -1} direction
   */
  nextBySize(name, direction) {
    const boxes = this.#bySize(name), { track, at } = /** @type {BoxPlace} */ (this.selected ?? {});
    const here = boxes.findIndex((box) => box.track === track && box.at === at);
    return boxes[here < 0 ? 0 : here + direction] ?? null;
  }

  /** The longest box of a category in a measured step, else the longest anywhere, or null. */
  longestOf(name) {
    const measured = new Set(this.stepKeys), [longest = null] = this.#boxesOf(name, (step) => measured.has(step));
    return longest ?? this.#boxesOf(name)[0] ?? null;
  }

  /**
   * Boxes of a category in the step that is shown, or in all steps, longest first. Those of less than a hundredth of
   * their rank's time of this category in their step are left out, as a reader could not find the others among them.
   */
  #bySize(name) {
    const boxes = this.#boxesOf(name, (step) => this.step === null || step === this.step);
    const groupOf = (box) => `${box.row.rank} ${stepOf(box)}`, sums = new Map();
    for (const box of boxes) sums.set(groupOf(box), (sums.get(groupOf(box)) ?? 0) + lengthOf(box));
    return boxes.filter((box) => 100 * lengthOf(box) >= sums.get(groupOf(box)));
  }

  /** Boxes of a category in steps that fit, longest first, then in order of time. @returns {BoxPlace[]} */
  #boxesOf(name, fits = (_step) => true) {
    const code = this.data.categories.find((each) => each.name === name)?.code;
    const boxes = this.rows.flatMap((row) => row.tracks.filter(({ category }) => category === code).flatMap((track) =>
      Array.from({ length: track.length }, (_, at) => ({ row, track, at }))));
    return boxes.filter((box) => fits(stepOf(box)))
      .sort((one, other) => lengthOf(other) - lengthOf(one) || keyOf(this, one)[0] - keyOf(this, other)[0]);
  }

  /** The box at a place of the lanes, if it is not merged with others. @returns {?{row, track, at}} */
  boxAt(x, y) {
    const row = this.rowAt(y);
    if (!row) return null;
    const time = this.view.on(row)[0] + x * this.pixel;
    for (const track of row.tracks) {
      const at = track.endingAfter(time);
      const here = at < track.length && track.start[at] <= time;
      if (here && track.end[at] - track.start[at] >= this.columnWidth) return { row, track, at };
    }
    return null;
  }

  rowAt(y) {
    return this.rows.find(({ seen, top, bottom }) => seen && top <= y && y < bottom);
  }

  /** Where the lanes end, in pixels from their top. */
  get bottom() {
    return this.arrangement.height;
  }

  /** The time in a pixel. */
  get pixel() {
    return this.view.span / this.width;
  }

  // Data.

  /** The name of a step in a panel, by default the first one that has it. */
  stepName(key, panel = this.data.panels.find(({ stepNames }) => key in stepNames)) {
    return panel.stepNames[key];
  }

  /** The length of a step as text, or an empty text if it is not known. */
  lengthOf(key, panels = this.data.panels) {
    const found = [...new Set(panels.map(({ stepLengths }) => stepLengths[key]).filter(Boolean))];
    if (found.length <= MOST_LENGTHS) return found.join(", ");
    const ends = found.flatMap((text) => text.split(" to ")).sort((one, other) => microseconds(one) - microseconds(other));
    return `${ends[0]} to ${ends.at(-1)}`;
  }

  /** The title of a box, its label, its bucket. */
  texts({ columns, source }, at) {
    return this.data.titles[columns.title[source[at]]];
  }

  /** The part of the window within the capture, in whole ns on the axis. */
  get window() {
    const [low, high] = this.whole, { from, to } = this.view;
    const start = Math.min(Math.max(low, Math.floor(from)), high);
    return [start, Math.max(start, Math.min(high, Math.ceil(to)))];
  }

  /**
   * For each rank, the time that each part of the strip covers in a window of the axis, in whole ns. `rest` is the time
   * outside of its panel's capture, or in steps that were recorded in part; parts and rest sum to the window. Both are
   * null if nothing is known of the rank, and so are parts that no step tells. `blocking` is how long something stood
   * still for communication, null if that is not known.
   * @param {number} from a whole number of ns @param {number} to
   */
  sums(from = this.window[0], to = this.window[1]) {
    const names = new Map(this.data.strip.map(({ code, name }) => [code, name]));
    const ranks = this.data.ranks.map((rank) => ({ ...rank, sums: null, rest: null, blocking: null }));
    for (const { rank, kind, panel, tracks } of this.shownRows) {
      if (kind !== "strip") continue;
      const offset = this.view.offsets[panel], found = ranks[rank];
      found.sums = Object.fromEntries(this.data.strip.map(({ name }) => [name, 0]));
      for (const track of tracks) found.sums[names.get(track.category)] = track.covered(from + offset, to + offset);
      found.blocking = this.#blocking(rank, from + offset, to + offset);
      found.rest = to - from - Object.values(found.sums).reduce((sum, part) => sum + part, 0);
      for (const name of found.unknown) found.sums[name] = null;
    }
    return ranks;
  }

  #blocking(rank, from, to) {
    const tracks = this.shownRows.filter((row) => row.kind === "waiting" && row.rank === rank).flatMap(({ tracks }) => tracks);
    const covered = (wanted) => tracks.reduce((sum, track) => sum + (this.#nameOf(track) === wanted ? track.covered(from, to) : 0), 0);
    return this.data.ranks[rank].knowsBlocking && !covered("maybe_blocking") ? covered("blocking") : null;
  }

  #nameOf({ category }) {
    return this.data.categories.find(({ code }) => code === category).name;
  }
}
