"use strict";
const root = document.documentElement;
root.classList.add("scripted");
document.getElementById("theme").addEventListener("click", () => {
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});

document.querySelectorAll("th").forEach((head) => head.addEventListener("click", () => {
  const body = head.closest("table").tBodies[0], place = head.cellIndex, up = head.dataset.sort === "down";
  head.parentNode.querySelectorAll("th").forEach((other) => delete other.dataset.sort);
  head.dataset.sort = up ? "up" : "down";
  const value = (row) => { const text = row.cells[place].textContent, number = parseFloat(text); return Number.isNaN(number) ? text : number; };
  const compare = (x, y) => typeof x === typeof y ? (x < y ? -1 : x > y ? 1 : 0) : typeof x === "number" ? 1 : -1;
  body.append(...[...body.rows].sort((a, b) => compare(value(a), value(b)) * (up ? 1 : -1)));
}));

// Text of models and datasets only ever becomes text: no markup is made of it.
const make = (name, className, text) => {
  const node = document.createElement(name);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
};
const PAGE = 10, EQUAL = 4;  // examples that are shown at first; the bin of those without a difference
const mean = (numbers) => { const known = numbers.filter((number) => number !== null); return known.reduce((a, b) => a + b, 0) / known.length; };

function readerOf(section) {
  const data = JSON.parse(section.querySelector("script").textContent), find = (name) => section.querySelector(`[name=${name}]`);
  const list = section.querySelector(".examples"), more = section.querySelector(".more"), count = section.querySelector(".count");
  const base = data.methods.findIndex((method) => method.name === data.baseline), sign = data.greater ? 1 : -1;
  data.examples.forEach((example) => {
    example.means = example.scores.map(mean);
    example.changes = example.means.map((score) => score - example.means[base]);
    const texts = example.outputs.flat().filter(Boolean).map((pieces) => pieces.filter((piece) => piece[0] !== "-").map((piece) => piece.slice(1)).join(""));
    example.all = [example.source, ...example.references, ...texts].join("\n").toLowerCase();
  });
  let chosen = null, shown = PAGE;

  const kept = (example) => {
    const [kind, method] = find("show").value.split(" "), bin = example.bins[method];
    if (chosen && example.bins[chosen.method] !== chosen.bin) return false;
    if (kind === "differ" && example.bins.every((one) => one === EQUAL)) return false;
    if ((kind === "better" && bin <= EQUAL) || (kind === "worse" && bin >= EQUAL)) return false;
    return example.all.includes(find("search").value.trim().toLowerCase());
  };
  const orders = {
    index: (a, b) => a.index - b.index,
    spread: (a, b) => Math.max(...b.changes.map(Math.abs)) - Math.max(...a.changes.map(Math.abs)) || a.index - b.index,
    low: (a, b) => sign * (a.means[base] - b.means[base]) || a.index - b.index,
  };
  const output = (title, pieces, score, colour) => {
    const card = make("div", "output"), head = make("h4");
    if (colour) card.style.setProperty("--colour", colour);
    head.append(make("span", "", title));
    if (score !== "") head.append(make("b", "", score));
    card.append(head);
    pieces.forEach((piece) => card.append(piece[0] === "=" ? piece.slice(1) : make(piece[0] === "+" ? "ins" : "del", "", piece.slice(1))));
    if (!pieces.some((piece) => piece[0] !== "-")) card.append(make("span", "faint", "(empty)"));
    return card;
  };
  const draw = (example) => {
    const box = make("div", "example"), source = make("p", "source"), outputs = make("div", data.texts ? "outputs" : "outputs short");
    source.append(make("span", "faint", `example ${example.index}`), example.source);
    outputs.append(output(example.references.length > 1 ? "references" : "reference", ["=" + example.references.join("\n")], ""));
    data.methods.forEach((method, place) => {
      const at = example.outputs[place].length === 1 ? 0 : data.seeds.indexOf(Number(find("seed").value));
      const pieces = example.outputs[place][at], score = example.scores[place][at], share = example.shares && example.shares[place][at];
      if (!pieces) return;
      const text = data.texts ? score.toFixed(0) : `${score ? "✓" : "✗"}${share === null ? "" : ` ${share.toFixed(0)}%`}`;
      const several = example.scores[place].length > 1 ? ` (${example.means[place].toFixed(0)})` : "";
      const card = output(method.free ? `${method.name} (free)` : method.name, pieces, text + several, method.colour);
      if (score >= 100) card.classList.add("right");
      outputs.append(card);
    });
    box.append(source, outputs);
    return box;
  };
  const show = () => {
    const examples = data.examples.filter(kept).sort(orders[find("order").value]);
    list.dataset.marks = find("marks").value;
    list.replaceChildren(...examples.slice(0, shown).map(draw));
    count.textContent = `${Math.min(shown, examples.length)} of ${examples.length} examples`
      + (examples.length < data.examples.length ? ` that match, of ${data.examples.length}` : "")
      + (data.examples.length < data.total ? ` on this page; the test set has ${data.total}` : "");
    more.hidden = examples.length <= shown;
    section.querySelectorAll(".bin").forEach((bin) => bin.setAttribute("aria-pressed", Boolean(chosen && chosen.button === bin)));
    find("clear").hidden = !chosen && !find("search").value && find("show").value === "all";
  };
  const again = () => { shown = PAGE; show(); };
  ["seed", "show", "order", "marks"].forEach((name) => find(name).addEventListener("change", again));
  find("search").addEventListener("input", again);
  more.addEventListener("click", () => { shown += PAGE; show(); });
  find("clear").addEventListener("click", () => { chosen = null; find("search").value = ""; find("show").value = "all"; again(); });
  section.querySelectorAll(".bin").forEach((bin) => bin.addEventListener("click", () => {
    const method = data.methods.findIndex((one) => one.name === bin.dataset.method);
    chosen = chosen && chosen.button === bin ? null : { button: bin, method, bin: Number(bin.dataset.bin) };
    again();
    if (chosen) section.querySelector(".controls").scrollIntoView({ block: "start" });
  }));
  section.querySelectorAll(".reading").forEach((part) => { part.hidden = false; });
  show();
}
document.querySelectorAll(".reader").forEach(readerOf);
