// Tables: a click on a heading sorts, a field above a long table filters, and headings have tooltips.
// A script that replaces the rows of a table sends it the event "rows".
const LONG = 8; // a table with so many rows has a filter
const meaning = Object.assign(document.createElement("div"), { id: "meaning", role: "tooltip", hidden: true });
document.body.append(meaning);

function explain(button) {
  meaning.textContent = button.dataset.meaning;
  meaning.hidden = !button.dataset.meaning;
  button.setAttribute("aria-describedby", "meaning");
  const { left, bottom } = button.getBoundingClientRect();
  meaning.style.left = `${Math.max(4, Math.min(left, innerWidth - meaning.offsetWidth - 4))}px`;
  meaning.style.top = `${bottom + 4}px`;
}
const hide = () => { meaning.hidden = true; };

// Sorts numbers by value and text by letters; n/a always comes last.
function order(at, isNumber, sign) {
  const text = (row) => row.cells[at].textContent.trim();
  return (one, other) => {
    const [a, b] = [text(one), text(other)];
    if ((a === "n/a") !== (b === "n/a")) return a === "n/a" ? 1 : -1;
    return sign * (isNumber ? Number.parseFloat(a) - Number.parseFloat(b) : a.localeCompare(b, "en", { numeric: true }));
  };
}

function sort(table, heading) {
  const isNumber = heading.classList.contains("number"), before = heading.getAttribute("aria-sort");
  const first = isNumber ? "descending" : "ascending", second = isNumber ? "ascending" : "descending";
  const now = before === first ? second : first;
  for (const other of table.tHead.rows[0].cells) other.setAttribute("aria-sort", "none");
  heading.setAttribute("aria-sort", now);
  const body = table.tBodies[0];
  body.append(...[...body.rows].sort(order(heading.cellIndex, isNumber, now === "ascending" ? 1 : -1)));
}

function addFilter(table) {
  const body = table.tBodies[0];
  if (body.rows.length < LONG) return;
  const label = Object.assign(document.createElement("label"), { className: "filter", textContent: "rows that contain " });
  const input = Object.assign(document.createElement("input"), { type: "search", autocomplete: "off" });
  const count = document.createElement("output");
  label.append(input);
  const line = document.createElement("div");
  line.className = "filter";
  line.append(label, count);
  table.parentElement.before(line);
  const filter = () => {
    const wanted = input.value.toLowerCase(), rows = [...body.rows];
    for (const row of rows) row.hidden = !row.textContent.toLowerCase().includes(wanted);
    count.textContent = wanted && `${rows.filter((row) => !row.hidden).length} of ${rows.length} rows`;
  };
  input.addEventListener("input", filter);
  table.addEventListener("rows", filter);
}

for (const table of /** @type {NodeListOf<HTMLTableElement>} */ (document.querySelectorAll("table.sortable"))) {
  addFilter(table);
  table.addEventListener("rows", () => {
    for (const heading of table.tHead.rows[0].cells) heading.setAttribute("aria-sort", "none");
  });
  for (const button of table.querySelectorAll("th button")) {
    button.addEventListener("click", () => sort(table, button.parentElement));
    for (const shown of ["mouseenter", "focus"]) button.addEventListener(shown, () => explain(button));
    for (const left of ["mouseleave", "blur"]) button.addEventListener(left, hide);
  }
}
addEventListener("keydown", ({ key }) => { if (key === "Escape") hide(); });
addEventListener("scroll", hide, true);
