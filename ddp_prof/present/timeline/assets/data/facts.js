// What is known of a box, and the sums of a range, as texts.

import { milliseconds, rankName, sizeOf } from "../base/format.js";
import { nameOf } from "./search.js";
import { bandwidthOf, launchOf } from "../lanes/launches.js";
import { needFacts } from "../lanes/needs.js";

const NOT_SUMMED = ["strip", "waiting", "host", "ranges"]; // their boxes contain others

/** The facts about a box as [name, text, target]; the target is a box or a link, if any. The first fact is the title. */
export function factsOf(timeline, box) {
  const { row, track, at } = box, source = track.source[at], { data } = timeline, offset = timeline.view.offsets[row.panel];
  const duration = track.end[at] - track.start[at], bytes = track.columns.bytes[source], step = track.columns.step[source];
  const { legend } = timeline.categories.find(({ code }) => code === track.category);
  const rank = data.ranks[row.rank], { panel } = rank, [name, , bucket] = timeline.texts(track, at);
  return [
    ["name", name],
    ["duration", `${milliseconds(duration)} (${duration.toLocaleString("en")} ns)`],
    ["kind", legend],
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
export function kernelFound(timeline, shape, phase) {
  return timeline.search.first((box) => shapeOf(timeline, box) === shape && phaseOf(timeline, box) === phase)
    ?? timeline.search.first(() => true);
}

/** A link to the kernel's row in the table of all kernels, if the report has one. */
function tableFacts(timeline, box) {
  const page = timeline.kernelsPage, { row, track, at } = box;
  const isKernel = ["compute", "communication"].includes(row.kind) && !row.from_launch && timeline.data.panels[row.panel].device !== "cpu";
  if (!page || !isKernel || !timeline.launches) return [];
  const query = { kernel: nameOf(timeline.texts(track, at)), shape: shapeOf(timeline, box), phase: phaseOf(timeline, box) };
  return [["all like it", "in the table of kernels", { href: `${page}#${new URLSearchParams(query)}` }]];
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

export function sumsIn(timeline, from, to) {
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
