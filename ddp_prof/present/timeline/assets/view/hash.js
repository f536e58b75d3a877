// What is shown of a page as the fragment of its address, and back, so that a view can be shared:
//   #step=3, #step=all           a step, all steps
//   from=-1000&to=2000           the window, in ns on the axis
//   unfold=calls&fold=copies     lanes that the reader unfolded and folded
//   lanes=stream                 the filter on the titles of lanes; of many files it is theirs to begin with
//   box=12@5000                  the selected box: its row, and its start in ns of the panel's time
//   range=-1000,2000             the measured range
//   search=words                 the search
// Links to the page may also use:
//   #worst                       the longest time that waits for communication, else the longest exposed time
//   #step=3&rank=rank 0&collective=7    a collective by its position in the step
//   #kernel=name&shape=grid 1x1x1 block 1x1x1&phase=backward    a search for a kernel, with one match selected
// Without a hash the page opens on the typical step.

/** @import { Model, Selection } from "./model.js" */
import { kernelFound } from "../data/facts.js";
import { TOGETHER } from "../lanes/arrange.js";

/** Shows the window of a fragment, with its folds and its filter; ignores steps that do not exist.
 * @param {Model} timeline @param {URLSearchParams} query */
export function showWindowOf(timeline, query) {
  const [step, from, to] = ["step", "from", "to"].map((name) => Number(query.get(name) ?? NaN));
  timeline.folding.chosen.clear();
  for (const key of query.getAll("fold")) timeline.folding.set(key, true);
  for (const key of query.getAll("unfold")) timeline.folding.set(key, false);
  timeline.filter(query.get("lanes") ?? timeline.data.filter);
  if (timeline.stepKeys.includes(step)) timeline.showStep(step);
  else if (from < to || query.get("step") === "all") timeline.showSteps();
  else timeline.open();
  if (from < to) timeline.show(from, to);
}

/** The words that a fragment searches. @param {URLSearchParams} query @returns {string} */
export function wordsOf(query) {
  const kernel = query.get("kernel");
  return kernel ? `"${kernel}"` : query.get("search") ?? "";
}

/**
 * What a fragment selects, a box or a range; ignores boxes that do not exist. A box that a link names by what it is, and
 * not by its place, is brought into view.
 * @param {Model} timeline @param {URLSearchParams} query @returns {?Selection}
 */
export function selectionOf(timeline, query) {
  const numbers = (name, by) => (query.get(name) ?? "").split(by).map(Number);
  const [from, to] = numbers("range", ","), [index, start] = numbers("box", "@"), row = timeline.rows[index];
  const startsThere = (track) => track.start[track.startingFrom(start)] === start;
  const track = start !== undefined && row?.tracks.find(startsThere);
  const kernel = query.get("kernel"), rank = query.get("rank"), collective = query.get("collective");
  const goal = kernel ? kernelFound(timeline, query.get("shape"), query.get("phase"))
    : collective && timeline.needs.collective(timeline, rank, Number(query.get("step")), Number(collective));
  const worst = query.has("worst") && (timeline.longestOf("blocking") ?? timeline.longestOf("exposed"));
  if (worst) {
    const step = worst.track.columns.step[worst.track.source[worst.at]];
    if (timeline.stepKeys.includes(step)) timeline.showStep(step);
    else timeline.bringIntoView(worst);
    return worst;
  }
  if (goal) {
    timeline.bringIntoView(goal);
    if (kernel) timeline.search.current = goal;
    return goal;
  }
  if (track) return { row, track, at: track.startingFrom(start) };
  return from < to ? { from, to } : null;
}

/** The fragment of what is shown, empty or with its "#". @param {Model} timeline @returns {string} */
export function hashOf(timeline) {
  const { step, view, isBase, folding, search, data } = timeline, parts = new URLSearchParams();
  if (step !== null && !(isBase && step === data.typical)) parts.set("step", String(step));
  if (step === null && isBase && data.typical !== null) parts.set("step", "all");
  if (!isBase) {
    parts.set("from", String(Math.round(view.from)));
    parts.set("to", String(Math.round(view.to)));
  }
  for (const [key, folded] of folding.chosen) {
    if (folded !== key in TOGETHER) parts.append(folded ? "fold" : "unfold", key);
  }
  if (folding.filter !== data.filter) parts.set("lanes", folding.filter);
  if (search.words) parts.set("search", search.words);
  const text = [String(parts), selectionIn(timeline)].filter(Boolean).join("&");
  return text && `#${text}`;
}

function selectionIn({ rows, selected }) {
  if (!selected) return "";
  const { row, track, at, from, to } = selected;
  return row ? `box=${rows.indexOf(row)}@${track.start[at]}` : `range=${from},${to}`;
}
