"use strict";
// Sorts a table by a column when its heading is clicked. Columns of numbers sort as numbers; missing ones stay last.
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const cells = [...body.rows].map((row) => row.cells[column]);
    const numeric = cells.every((cell) => /^(-?[.\d]|–|not measured)/.test(cell.textContent));
    if (numeric) for (const cell of [head, ...cells]) cell.classList.add("number");
    const key = (row) => numeric ? parseFloat(row.cells[column].textContent) : row.cells[column].textContent;
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    head.setAttribute("aria-sort", "none");
    button.addEventListener("click", () => {
      const sign = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
      heads.forEach((other) => other.setAttribute("aria-sort", "none"));
      head.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
      const order = (a, b) => numeric
        ? Number.isNaN(a) - Number.isNaN(b) || sign * (a - b) || 0 : sign * a.localeCompare(b);
      body.append(...[...body.rows].sort((one, other) => order(key(one), key(other))));
    });
  });
}
