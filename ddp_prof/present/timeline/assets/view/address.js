// What is seen in the address of the page, so that a view can be sent: #step=3&from=-1000&to=2000, in ns on the axis,
// #step=all for all steps, &unfold=calls&fold=copies for lanes that are not as at first, &lanes=stream for those whose
// titles hold it, &box=12@5000 for the box that is selected (its row, and its start in ns on the panel's time),
// &range=-1000,2000 for a range that is measured, &search=words for what is searched.
// Without a hash the page opens on the typical step; #worst shows the longest time that waits for communication, or that
// is exposed; #step=3&rank=rank 0&collective=7 shows a collective by its position in the step;
// #kernel=name&shape=grid 1x1x1 block 1x1x1&phase=backward searches a kernel and shows one of this shape and phase.

const WRITE_AFTER = 300; // ms; browsers refuse to be told too often
const COPIED_FOR = 2000; // ms

class Address {
  /** @param {Timeline} timeline */
  constructor(timeline) {
    this.timeline = timeline;
    this.links = [...document.querySelectorAll('a[data-page="why"]')].map((link) => [link, link.getAttribute("href")]);
    addEventListener("hashchange", () => this.follow());
  }

  /**
   * From now on the address is written: not before all of it was followed, or what it asks for would be lost.
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

  /** Shows what the address says; what is not there is passed over. */
  follow() {
    this.known = location.hash;
    const { timeline } = this, asked = new URLSearchParams(location.hash.slice(1));
    const [step, from, to] = ["step", "from", "to"].map((name) => Number(asked.get(name) ?? NaN));
    timeline.folding.chosen.clear();
    for (const key of asked.getAll("fold")) timeline.folding.set(key, true);
    for (const key of asked.getAll("unfold")) timeline.folding.set(key, false);
    timeline.filter(asked.get("lanes") ?? "");
    if (timeline.stepKeys.includes(step)) timeline.showStep(step);
    else if (from < to || asked.get("step") === "all") timeline.showSteps();
    else timeline.open();
    if (from < to) timeline.show(from, to);
    if (this.details) this.#followSelection();
  }

  #followSelection() {
    const { timeline, details } = this, asked = new URLSearchParams(location.hash.slice(1));
    const numbers = (name, by) => (asked.get(name) ?? "").split(by).map(Number);
    const [from, to] = numbers("range", ","), [index, start] = numbers("box", "@"), row = timeline.rows[index];
    const startsThere = (track) => track.start[track.startingFrom(start)] === start;
    const track = start !== undefined && row?.tracks.find(startsThere);
    const kernel = asked.get("kernel"), words = kernel ? `"${kernel}"` : asked.get("search") ?? "";
    if (words !== timeline.search.words) searchFor(words);
    const rank = asked.get("rank"), collective = asked.get("collective");
    const goal = kernel ? kernelFound(timeline, asked.get("shape"), asked.get("phase"))
      : collective && timeline.needs.collective(timeline, rank, Number(asked.get("step")), Number(collective));
    const worst = asked.has("worst") && (timeline.longestOf("blocking") ?? timeline.longestOf("exposed"));
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

  /** Copies the address; where the browser refuses, shows it selected. */
  async copy() {
    this.write();
    const said = byId("copied"), field = byId("link");
    try {
      await navigator.clipboard.writeText(location.href);
      said.textContent = "copied";
      setTimeout(() => (said.textContent = ""), COPIED_FOR);
    } catch {
      field.value = location.href;
      field.hidden = false;
      field.select();
      field.addEventListener("blur", () => (field.hidden = true), { once: true });
    }
  }

  /** Where another address was given meanwhile, the page is about to hear of it, and it stays. */
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
    const said = [String(parts), this.#selection()].filter(Boolean).join("&"), hash = said && `#${said}`;
    if (hash !== location.hash) history.replaceState(null, "", hash || "#");
    this.known = location.hash;
    for (const [link, page] of this.links) link.setAttribute("href", step === null ? page : `${page}#step=${step}`);
  }
}
