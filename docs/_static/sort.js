// A click on the head of a column sorts the table by it: by numbers where cells begin with one, else by text.
document.addEventListener("DOMContentLoaded", () => {
  for (const head of document.querySelectorAll("table.docutils thead th")) {
    head.style.cursor = "pointer";
    head.addEventListener("click", () => {
      const body = head.closest("table").tBodies[0];
      const text = (row) => row.cells[head.cellIndex].innerText.trim();
      const down = head.dataset.sorted !== "down";
      head.dataset.sorted = down ? "down" : "up";
      const order = (a, b) => {
        const [x, y] = [a, b].map((row) => parseFloat(text(row).replace(/,/g, "")));
        const by = Number.isNaN(x) || Number.isNaN(y) ? text(b).localeCompare(text(a)) : x - y;
        return down ? -by : by;
      };
      body.append(...[...body.rows].sort(order));
    });
  }
});
