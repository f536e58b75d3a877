// Launch calls, launch shapes, phases and exposed parts of boxes; known when the folded lanes have been read.

/** @import { BoxPlace, Model } from "../view/model.js" */
import { digits, milliseconds } from "../base/format.js";
import { summed } from "../data/columns.js";
import { locate } from "../data/rows.js";
import { firstAbove } from "../data/tracks.js";

export class Launches {
  /**
   * @param {Numbers} facts for each box shown: call, shape, phase
   * @param {Numbers} collectives for each part of a collective: box, part, ns
   */
  constructor({ call, shape, phase }, { box, part, ns }) {
    this.call = new Int32Array(call.length).fill(-1);
    for (let at = 0, last = 0; at < call.length; at++) {
      if (call[at]) this.call[at] = last += (call[at] - 1) / 2;
    }
    this.shape = shape;
    this.phase = phase;
    this.box = summed(box);
    this.part = part;
    this.ns = ns;
  }

  /**
   * The parts of a collective with their ns: index into `EXPOSED_PARTS`, the next index for overlapped time, and the one
   * after it for the transfer.
   * @returns {Array<[number, number]>}
   */
  partsOf(source) {
    /** @type {Array<[number, number]>} */
    const found = [];
    for (let at = firstAbove(this.box, source - 1); at < this.box.length && this.box[at] === source; at++) found.push([this.part[at], this.ns[at]]);
    return found;
  }
}

/**
 * The bandwidth of a box, as `Collective.algbw_bytes_per_s` in analyze/collectives/results.py: bytes over the transfer
 * time; for copies, and if peers are not known, over the duration.
 * @returns {?{name: string, rate: string, over: string}} null if the bytes are not known
 */
export function bandwidthOf({ launches, data }, { row, track, at }) {
  const source = track.source[at], bytes = track.columns.bytes[source], duration = track.end[at] - track.start[at];
  if (bytes < 0 || (row.kind === "communication" && !launches)) return null;
  const parts = row.kind === "communication" ? launches.partsOf(source) : [];
  const [, transfer] = parts.find(([part]) => part === data.parts.length + 1) ?? [];
  const time = transfer ?? duration, name = row.kind === "communication" ? "algbw" : "bandwidth";
  if (!time) return null;
  if (bytes / time > data.fastest / 1e9) return { name, rate: "n/a", over: "more than any link carries" };
  const over = name === "bandwidth" ? "bytes over duration" : "bytes over duration, as its transfer is not known";
  return { name, rate: `${digits(bytes / time)} GB/s`, over: transfer ? `bytes over transfer, ${milliseconds(transfer)}` : over };
}

/**
 * The launch of a box that is a call or was launched: the call, the first work that it launched, and their number.
 * @param {Model} timeline @param {BoxPlace} box
 * @returns {?{call: BoxPlace, launched: BoxPlace, count: number}}
 */
export function launchOf(timeline, box) {
  const { launches } = timeline;
  if (!launches || !box?.row) return null;
  const source = box.track.source[box.at];
  if (box.row.kind !== "calls") {
    const call = launches.call[source] ?? -1;
    return box.row.folded || call < 0 ? null : { call: locate(timeline.foldedRows, call), launched: box, count: 1 };
  }
  const first = launches.call.indexOf(source);
  if (first < 0) return null;
  let count = 0;
  for (let at = first; at >= 0; at = launches.call.indexOf(source, at + 1)) count++;
  return { call: box, launched: locate(timeline.shownRows, first), count };
}

/** The arrow of a launch, and the rows of the host in which the call is marked; in ns on the axis and in pixels. */
export function arrowOf(timeline, box) {
  const launch = launchOf(timeline, box);
  if (!launch) return null;
  const { call, launched } = launch, { view } = timeline;
  const host = timeline.shownRows.filter(({ rank, kind, seen }) => rank === launched.row.rank && kind === "host" && seen);
  const time = call.track.start[call.at], holds = ({ tracks }) => tracks.some((track) => track.covered(time, time + 1));
  const from = call.row.seen ? call.row : host.findLast(holds) ?? host.at(-1);
  return {
    at: time - view.offsets[call.row.panel],
    to: launched.track.start[launched.at] - view.offsets[launched.row.panel],
    host,
    line: from && launched.row.seen ? [(from.top + from.bottom) / 2, (launched.row.top + launched.row.bottom) / 2] : null,
  };
}
