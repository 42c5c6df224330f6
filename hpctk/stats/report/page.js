"use strict";
function sorted(head) {
  const table = head.closest("table"), body = table.tBodies[0], column = head.cellIndex;
  const before = head.getAttribute("aria-sort"), words = head.classList.contains("l");
  const up = before === "none" ? words : before !== "ascending";
  const value = (row) => {
    const kept = row.cells[column].dataset.v;
    return kept === undefined ? row.cells[column].textContent : Number(kept);
  };
  const rows = Array.from(body.rows).map((row, place) => [value(row), place, row]);
  rows.sort((a, b) => (a[0] < b[0] ? -1 : a[0] > b[0] ? 1 : 0) * (up ? 1 : -1) || a[1] - b[1]);
  for (const [, , row] of rows) body.append(row);
  for (const other of table.tHead.rows[0].cells) other.setAttribute("aria-sort", "none");
  head.setAttribute("aria-sort", up ? "ascending" : "descending");
}
for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => sorted(button.closest("th")));
}
const asked = /^#sort=(\w+),(\d+)$/.exec(location.hash);
if (asked) {
  const table = document.getElementById(asked[1]);
  if (table && table.tHead && table.tHead.rows[0].cells[asked[2]]) {
    table.tHead.rows[0].cells[asked[2]].querySelector("button").click();
  }
}
