// Tables sort by a click or Enter on a heading: numbers by value, text by alphabet. This is the only script of the page.
"use strict";
const number = (text) => {
  const match = text.replace("<", "").match(/^[+-]?\d+(\.\d+)?(e[+-]?\d+)?/i);
  return match ? parseFloat(match[0]) : NaN;
};
for (const table of document.querySelectorAll("table.sortable")) {
  const headings = [...table.tHead.rows[0].cells];
  headings.forEach((heading, column) => {
    heading.querySelector("button").addEventListener("click", () => {
      const down = heading.getAttribute("aria-sort") !== "descending";
      const rows = [...table.tBodies[0].rows];
      const keys = new Map(rows.map((row) => [row, row.cells[column].textContent.trim()]));
      const numeric = rows.some((row) => !Number.isNaN(number(keys.get(row))));
      rows.sort((a, b) => {
        const [x, y] = [keys.get(a), keys.get(b)];
        if (!numeric) return down ? y.localeCompare(x) : x.localeCompare(y);
        const [p, q] = [number(x), number(y)];
        if (Number.isNaN(p) || Number.isNaN(q)) return Number.isNaN(p) - Number.isNaN(q);
        return down ? q - p : p - q;
      });
      table.tBodies[0].append(...rows);
      headings.forEach((other) => other.removeAttribute("aria-sort"));
      heading.setAttribute("aria-sort", down ? "descending" : "ascending");
    });
  });
}
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((details) => { details.open = true; }));
