// A click on a head sorts the rows by that column, best first, and the other way round at the second click.
const table = document.querySelector("#judges");
const heads = [...table.querySelectorAll("th")];
heads.forEach((head, place) => head.addEventListener("click", () => {
  const falls = head.getAttribute("aria-sort") === "ascending" || (head.dataset.first === "high" && !head.hasAttribute("aria-sort"));
  heads.forEach(other => other.removeAttribute("aria-sort"));
  head.setAttribute("aria-sort", falls ? "descending" : "ascending");
  const value = row => row.cells[place].dataset.value;
  const rows = [...table.tBodies[0].rows];
  rows.sort((left, right) => {
    const [a, b] = [value(left), value(right)];
    if (a === "" || b === "") return (a === "") - (b === "");  // what was not asked stands last, either way
    const order = isNaN(a) || isNaN(b) ? a.localeCompare(b) : a - b;
    return falls ? -order : order;
  });
  table.tBodies[0].append(...rows);
}));
