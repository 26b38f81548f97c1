"use strict";
// Sorts a table by a column when its heading is clicked. Columns of numbers sort as numbers; missing ones stay last.
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells];
  const text = (row, column) => row.cells[column].textContent.trim().replace("−", "-").replace(/(\d),(?=\d{3})/g, "$1");
  heads.forEach((head, column) => {
    if ("fixed" in head.dataset) return;
    const rows = [...body.rows];
    const numeric = rows.every((row) => /^([-+]?[.\d]|–|not measured)/.test(text(row, column)));
    if (numeric) for (const cell of [head, ...rows.map((row) => row.cells[column])]) cell.classList.add("number");
    const key = (row) => numeric ? parseFloat(text(row, column)) : text(row, column);
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    head.setAttribute("aria-sort", "none");
    button.addEventListener("click", () => {
      const sign = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
      const order = (a, b) => numeric
        ? Number.isNaN(a) - Number.isNaN(b) || sign * (a - b) || 0 : sign * a.localeCompare(b);
      body.append(...[...body.rows].sort((one, other) => order(key(one), key(other))));
    });
  });
}
// Switches the dots of a card.
for (const group of document.querySelectorAll(".views")) {
  const buttons = [...group.children];
  buttons.forEach((button, chosen) => button.addEventListener("click", () => {
    buttons.forEach((other) => other.setAttribute("aria-pressed", String(other === button)));
    for (const place of group.parentElement.querySelectorAll(".plot"))
      [...place.children].forEach((view, number) => { view.hidden = number !== chosen; });
  }));
}
// Shows the values below the pointer, or below a finger.
const tip = document.getElementById("tip");
document.addEventListener("pointerover", (event) => {
  const found = event.target.closest("[data-tip]");
  tip.hidden = !found;
  if (!found) return;
  tip.textContent = found.dataset.tip;
  const left = Math.min(event.clientX + 12, document.documentElement.clientWidth - tip.offsetWidth - 8);
  const below = event.clientY + 16 + tip.offsetHeight < window.innerHeight;
  tip.style.left = `${Math.max(8, left)}px`;
  tip.style.top = `${below ? event.clientY + 16 : Math.max(8, event.clientY - tip.offsetHeight - 12)}px`;
});
