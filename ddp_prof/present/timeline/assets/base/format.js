// Formats times, shares, bytes and names of ranks, and the ticks of the axis in a unit that fits the window.

/** @type {Array<[number, string]>} */
const UNITS = [[1e9, "s"], [1e6, "ms"], [1e3, "µs"], [1, "ns"]];

/**
 * @param {number} from @param {number} to ns @param {number} most ticks that there is room for
 * @returns {{tickvals: number[], ticktext: string[]}} places in ms, the unit of the figure
 */
export function ticksOf(from, to, most) {
  const step = niceStep((to - from) / Math.max(2, most));
  const [size, unit] = UNITS.find(([size]) => to - from >= 2 * size) ?? UNITS.at(-1);
  const decimals = Math.max(0, Math.ceil(Math.log10(size / step) - 1e-9));
  const tickvals = [], ticktext = [];
  for (let tick = Math.ceil(from / step); tick * step <= to; tick++) {
    tickvals.push((tick * step) / 1e6);
    const value = (tick * step) / size + 0; // no minus before 0
    ticktext.push(`${value.toLocaleString("en", { minimumFractionDigits: decimals, maximumFractionDigits: decimals })} ${unit}`);
  }
  return { tickvals, ticktext };
}

/** The smallest of 1, 2, 5, 10, 20, ... that is not below a number. */
function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(Math.max(1, least)));
  return power * [1, 2, 5, 10].find((factor) => factor * power >= least);
}

/** A number with so many decimals, and thousands set apart. @param {number} value @param {number} decimals */
export const fixed = (value, decimals) =>
  value.toLocaleString("en", { minimumFractionDigits: decimals, maximumFractionDigits: decimals });

/** A time with about three digits, as milliseconds in present/text.py, but also in s and ns. */
export function milliseconds(ns) {
  const size = Math.abs(ns);
  if (size >= 1e10) return `${fixed(ns / 1e9, 2)} s`;
  if (size >= 9.995e6 || ns === 0) return `${fixed(ns / 1e6, 1)} ms`;
  if (size >= 1e5) return `${(ns / 1e6).toFixed(2)} ms`;
  return size >= 1000 ? `${(ns / 1e3).toFixed(1)} µs` : `${ns} ns`;
}

/** A rank, with its panel if there are several; the title of a panel may end with its rank. */
export function rankName({ panels }, { panel, title }) {
  const run = panels[panel].title;
  return panels.length < 2 ? title : run.endsWith(`, ${title}`) ? run : `${run}, ${title}`;
}

/** A share, as percent in present/text.py. */
export function percent(ratio) {
  if (Number.isNaN(ratio)) return "n/a";
  const value = ratio * 100;
  const isWhole = value === 0 || value === 100 || (value >= 1 && value <= 99);
  return `${value.toFixed(isWhole ? 0 : 1)} %`;
}

/** A number with three digits. */
export function digits(value) {
  return Number(value.toPrecision(3)).toString();
}

export function sizeOf(bytes) {
  return bytes >= 2 ** 20 / 100 ? `${digits(bytes / 2 ** 20)} MiB` : `${bytes.toLocaleString("en")} bytes`;
}

/** A name of a function of C++ without the return type void and namespaces; a mere `kernel` keeps its last one. */
export function withoutNamespaces(name) {
  return name.replace(/\((?:anonymous namespace|unnamed)\)::|<unnamed>::/g, "").replace(/^(?:void )?(?:\w+::)*?(?=(?:\w+::kernel|(?!kernel\b)\w+)[<(])/i, "");
}
