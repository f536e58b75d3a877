// The state of the page in its address, so that a view can be shared:
//   #step=3, #step=all           a step, all steps
//   from=-1000&to=2000           the window, in ns on the axis
//   unfold=calls&fold=copies     lanes that the reader unfolded and folded
//   lanes=stream                 the filter on the titles of lanes
//   box=12@5000                  the selected box: its row, and its start in ns of the panel's time
//   range=-1000,2000             the measured range
//   search=words                 the search
// Links to the page may also use:
//   #worst                       the longest time that waits for communication, else the longest exposed time
//   #step=3&rank=rank 0&collective=7    a collective by its position in the step
//   #kernel=name&shape=grid 1x1x1 block 1x1x1&phase=backward    a search for a kernel, with one match selected
// Without a hash the page opens on the typical step.

const WRITE_AFTER = 300; // ms; browsers limit how often the address may change
const COPIED_FOR = 2000; // ms

class Address {
  /** @param {Timeline} timeline */
  constructor(timeline) {
    this.timeline = timeline;
    this.links = [...document.querySelectorAll('a[data-page="why"]')].map((link) => [link, link.getAttribute("href")]);
    addEventListener("hashchange", () => this.follow());
  }

  /**
   * Writes the address from now on; not earlier, because the selection in it could not be followed before.
   * @param {Details} details
   */
  start(details) {
    this.details = details;
    this.#followSelection();
    byId("copy-link").addEventListener("click", () => this.copy());
    this.timeline.onDraw(() => {
      clearTimeout(this.pending);
      this.pending = setTimeout(() => this.write(), WRITE_AFTER);
    });
  }

  /** Shows the state in the address; ignores steps and boxes that do not exist. */
  follow() {
    this.known = location.hash;
    const { timeline } = this, query = new URLSearchParams(location.hash.slice(1));
    const [step, from, to] = ["step", "from", "to"].map((name) => Number(query.get(name) ?? NaN));
    timeline.folding.chosen.clear();
    for (const key of query.getAll("fold")) timeline.folding.set(key, true);
    for (const key of query.getAll("unfold")) timeline.folding.set(key, false);
    timeline.filter(query.get("lanes") ?? "");
    if (timeline.stepKeys.includes(step)) timeline.showStep(step);
    else if (from < to || query.get("step") === "all") timeline.showSteps();
    else timeline.open();
    if (from < to) timeline.show(from, to);
    if (this.details) this.#followSelection();
  }

  #followSelection() {
    const { timeline, details } = this, query = new URLSearchParams(location.hash.slice(1));
    const numbers = (name, by) => (query.get(name) ?? "").split(by).map(Number);
    const [from, to] = numbers("range", ","), [index, start] = numbers("box", "@"), row = timeline.rows[index];
    const startsThere = (track) => track.start[track.startingFrom(start)] === start;
    const track = start !== undefined && row?.tracks.find(startsThere);
    const kernel = query.get("kernel"), words = kernel ? `"${kernel}"` : query.get("search") ?? "";
    if (words !== timeline.search.words) searchFor(words);
    const rank = query.get("rank"), collective = query.get("collective");
    const goal = kernel ? kernelFound(timeline, query.get("shape"), query.get("phase"))
      : collective && timeline.needs.collective(timeline, rank, Number(query.get("step")), Number(collective));
    const worst = query.has("worst") && (timeline.longestOf("blocking") ?? timeline.longestOf("exposed"));
    if (worst) {
      const step = worst.track.columns.step[worst.track.source[worst.at]];
      if (timeline.stepKeys.includes(step)) timeline.showStep(step);
      else timeline.bringIntoView(worst);
      details.showBox(worst);
    } else if (goal) {
      timeline.bringIntoView(goal);
      if (kernel) timeline.search.current = goal;
      details.showBox(goal);
    } else if (track) details.showBox({ row, track, at: track.startingFrom(start) });
    else if (from < to) details.showRange(from, to);
    else if (timeline.selected) details.clear();
  }

  #selection() {
    const { rows, selected } = this.timeline;
    if (!selected) return "";
    const { row, track, at, from, to } = selected;
    return row ? `box=${rows.indexOf(row)}@${track.start[at]}` : `range=${from},${to}`;
  }

  /** Copies the address; if the browser refuses that, shows it in a field, selected. */
  async copy() {
    this.write();
    const note = byId("copied"), field = byId("link");
    try {
      await navigator.clipboard.writeText(location.href);
      note.textContent = "copied";
      setTimeout(() => (note.textContent = ""), COPIED_FOR);
    } catch {
      field.value = location.href;
      field.hidden = false;
      field.select();
      field.addEventListener("blur", () => (field.hidden = true), { once: true });
    }
  }

  /** Writes the address, unless it changed meanwhile: then `hashchange` is about to come, and `follow` with it. */
  write() {
    if (location.hash !== this.known) return;
    const { step, view, isBase, folding, search, data } = this.timeline, parts = new URLSearchParams();
    if (step !== null && !(isBase && step === data.typical)) parts.set("step", step);
    if (step === null && isBase && data.typical !== null) parts.set("step", "all");
    if (!isBase) {
      parts.set("from", Math.round(view.from));
      parts.set("to", Math.round(view.to));
    }
    for (const [key, folded] of folding.chosen) {
      if (folded !== key in TOGETHER) parts.append(folded ? "fold" : "unfold", key);
    }
    if (folding.filter) parts.set("lanes", folding.filter);
    if (search.words) parts.set("search", search.words);
    const text = [String(parts), this.#selection()].filter(Boolean).join("&"), hash = text && `#${text}`;
    if (hash !== location.hash) history.replaceState(null, "", hash || "#");
    this.known = location.hash;
    for (const [link, page] of this.links) link.setAttribute("href", step === null ? page : `${page}#step=${step}`);
  }
}
