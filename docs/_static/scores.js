// The table of all scores: filters, a sorted column, some rows at a time, and the command of a row.
const Scores = {
  PAGE: 100,
  FIRST: { task: "mean of tasks", tokens: "16384", question: "prefill", model: "qwen2.5-coder-1.5b" },
  CHOICES: ["task", "tokens", "question", "model"],
  HIDDEN: ["text", "again"],

  // The rows whose method has the text, whose columns have the chosen values ("" takes all), and that read at most a share.
  filter(data, wanted) {
    const at = (name) => data.columns.indexOf(name);
    const text = (wanted.method || "").toLowerCase().trim();
    return data.rows.filter((row) =>
      row[at("method")].toLowerCase().includes(text) &&
      Scores.CHOICES.every((name) => !wanted[name] || String(row[at(name)]) === wanted[name]) &&
      (!wanted.most || row[at("of Full's")] <= Number(wanted.most)));
  },

  // By a column, numbers as numbers, empty cells last.
  sort(data, rows, column, down) {
    const at = data.columns.indexOf(column);
    const by = (x, y) => (typeof x === "number" ? x - y : String(x).localeCompare(String(y)));
    return [...rows].sort(({ [at]: x }, { [at]: y }) => (x === null) - (y === null) || (down ? by(y, x) : by(x, y)));
  },

  // What measures a row again, or where it was measured if today's methods no longer can.
  command(data, row) {
    const [text, again] = [row[data.columns.indexOf("text")], row[data.columns.indexOf("again")]];
    if (text === null) return `measured at commit ${again}, whose method has other knobs`;
    return `${data.commands[again]} --methods ${/^[\w.:]+$/.test(text) ? text : `'${text}'`} --out runs/again`;
  },

  values(data, name) {
    const found = [...new Set(data.rows.map((row) => row[data.columns.indexOf(name)]))];
    return found.sort((x, y) => (typeof x === "number" ? x - y : x.localeCompare(y))).map(String);
  },

  show(root, data) {
    const make = (tag, parent, attributes = {}, text = "") => {
      const node = parent.appendChild(Object.assign(document.createElement(tag), attributes));
      if (text !== "") node.textContent = text;
      return node;
    };
    const shown = data.columns.filter((name) => !Scores.HIDDEN.includes(name));
    const wanted = { ...Scores.FIRST };
    let [column, down, count] = ["score", true, Scores.PAGE];
    const form = make("form", root);
    const labelled = (name, tag, attributes) => make(tag, make("label", form, {}, name), attributes);
    const changed = (name) => (event) => { wanted[name] = event.target.value; count = Scores.PAGE; draw(); };
    labelled("method", "input", { type: "search", placeholder: "part of a name", oninput: changed("method") });
    for (const name of Scores.CHOICES) {
      const select = labelled(name, "select", { onchange: changed(name) });
      make("option", select, { value: "" }, "all");
      for (const value of Scores.values(data, name)) make("option", select, { value, selected: value === wanted[name] }, value);
    }
    labelled("most % of Full's bytes", "input", { type: "number", min: 0, max: 200, oninput: changed("most") });
    const order = labelled("sort by", "select", { onchange: (event) => { column = event.target.value; draw(); } });
    for (const name of shown) make("option", order, { value: name }, name);
    form.onsubmit = (event) => event.preventDefault();
    const told = make("p", root, { role: "status" });
    const table = make("table", root);
    const heads = make("tr", make("thead", table));
    for (const name of shown) {
      const head = make("th", heads, { scope: "col" });
      make("button", head, { type: "button", onclick: () => { down = column === name ? !down : true; column = name; draw(); } }, name);
    }
    const body = make("tbody", table);
    const more = make("button", root, { type: "button", onclick: () => { count += Scores.PAGE; draw(); } }, "more rows");
    const draw = () => {
      const rows = Scores.sort(data, Scores.filter(data, wanted), column, down);
      body.replaceChildren();
      for (const row of rows.slice(0, count)) {
        const line = make("tr", body, { tabIndex: 0 });
        for (const name of shown) {
          const value = row[data.columns.indexOf(name)];
          const cell = make("td", line, {}, value === null ? "" : typeof value === "number" ? value.toLocaleString("en") : value);
          cell.dataset.name = name;
        }
        const open = () => {
          if (line.nextSibling?.className === "command") return line.nextSibling.remove();
          const below = make("tr", body, { className: "command" });
          make("code", make("td", below, { colSpan: shown.length }), {}, Scores.command(data, row));
          line.after(below);
        };
        line.onclick = open;
        line.onkeydown = (event) => { if (event.key === "Enter") open(); };
      }
      const found = Scores.filter(data, { method: wanted.method }).length;
      told.textContent = rows.length || !found
        ? `${rows.length} rows, ${Math.min(count, rows.length)} shown; a click on a row shows its command.`
        : `0 rows here; ${found} of such methods with other choices above: take "all" there.`;
      order.value = column;
      heads.childNodes.forEach((head, at) => {
        head.ariaSort = shown[at] !== column ? "none" : down ? "descending" : "ascending";
      });
      more.hidden = count >= rows.length;
    };
    draw();
  },
};

if (typeof module !== "undefined") module.exports = Scores;
if (typeof document !== "undefined") {
  const [root, found] = ["scores", "scores-data"].map((id) => document.getElementById(id));
  Scores.show(root, JSON.parse(found.textContent));
}
