// Ticks of the axis, in the unit that suits the window: s, ms, µs or ns.

const UNITS = [[1e9, "s"], [1e6, "ms"], [1e3, "µs"], [1, "ns"]];

/**
 * @param {number} from @param {number} to ns @param {number} most how many there is room for
 * @returns {{tickvals: number[], ticktext: string[]}} places in ms, as the figure has them
 */
function ticksOf(from, to, most) {
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

/** The next of 1, 2, 5, 10, 20, ... */
function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(Math.max(1, least)));
  return power * [1, 2, 5, 10].find((factor) => factor * power >= least);
}
