// Tables sort by a click or Enter on a heading: numbers by value, text by alphabet. A link opens its section.
// This is the only script of the page.
"use strict";
for (const table of document.querySelectorAll("table.sortable")) {
  const headings = [...table.tHead.rows[0].cells];
  headings.forEach((heading, column) => {
    heading.querySelector("button").addEventListener("click", () => {
      const down = heading.getAttribute("aria-sort") !== "descending";
      const rows = [...table.tBodies[0].rows];
      const number = (row) => parseFloat(row.cells[column].dataset.number);
      const text = (row) => row.cells[column].textContent.trim();
      const numeric = rows.some((row) => !Number.isNaN(number(row)));
      rows.sort((a, b) => {
        if (!numeric) return down ? text(b).localeCompare(text(a)) : text(a).localeCompare(text(b));
        const [p, q] = [number(a), number(b)];
        if (Number.isNaN(p) || Number.isNaN(q)) return Number.isNaN(p) - Number.isNaN(q);
        return down ? q - p : p - q;
      });
      table.tBodies[0].append(...rows);
      headings.forEach((other) => other.removeAttribute("aria-sort"));
      heading.setAttribute("aria-sort", down ? "descending" : "ascending");
    });
  });
}
const reveal = () => {
  const section = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  const details = section && section.querySelector("details.section");
  if (details) details.open = true;
};
addEventListener("hashchange", reveal);
reveal();
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((details) => { details.open = true; }));
