// Data, elements, and how numbers and statistics are said.

const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

function draw(parent, tag, attributes = {}, text = null) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== null) node.textContent = text;
  parent.append(node);
  return node;
}

const WORDS = {nan: NaN, inf: Infinity, "-inf": -Infinity};
const value = (v) => (v === null || v === undefined ? null : typeof v === "string" ? WORDS[v] : v);
const finite = (v) => typeof v === "number" && Number.isFinite(v);

function said(v, digits = 4) {
  if (v === null || v === undefined) return "–";
  v = value(v);
  if (Number.isNaN(v)) return "NaN";
  if (!Number.isFinite(v)) return v > 0 ? "Inf" : "-Inf";
  if (v !== 0 && (Math.abs(v) < 1e-3 || Math.abs(v) >= 1e6)) return v.toExponential(2).replace("e+", "e");
  return String(Number(v.toPrecision(digits)));
}

const UNITS = {"underflows%": "%", "overflows%": "%", "saturated%": "%", sqnr: "dB"};
const TITLES = {
  "underflows%": "underflow",
  "overflows%": "overflow",
  "saturated%": "saturated",
  sqnr: "SQNR",
  scale_inv_max: "scale, largest",
  scale_inv_min: "scale, least",
  cur_amax: "amax",
};
const SIDE = "_columnwise"; // the other orientation of a cast
const bare = (stat) => (stat.endsWith(SIDE) ? stat.slice(0, -SIDE.length) : stat);
const stem = (stat) => {
  const own = bare(stat);
  return Object.keys(TITLES).find((name) => own === name || own.endsWith("_" + name)) || own;
};
const unit = (stat) => UNITS[stem(stat)] || "";
const title = (stat) => {
  const own = bare(stat),
    found = stem(stat);
  const before = own === found ? "" : own.slice(0, -found.length - 1) + ": ";
  const after = own === stat ? "" : ", columnwise";
  return before + (TITLES[found] || found) + after + (unit(stat) ? ", " + unit(stat) : "");
};
const isLog = (stat) => /scale_inv|amax$|^(l1|l2)_norm$|^std$/.test(bare(stat));
const isLeast = (stat) => ["sqnr", "cosine"].includes(stem(stat));
const isShare = (stat) => bare(stat).endsWith("%");

const ticks = (low, high, count) => {
  if (!(high > low)) return [low];
  const rough = (high - low) / count,
    power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough * 0.999);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-6; at += step)
    found.push(Number(at.toPrecision(12)));
  return found;
};

const tip = byId("tip");
function showTip(event, lines) {
  tip.replaceChildren(
    ...lines.map((line, i) => (i ? make("div", {}, line) : make("div", {}, make("b", {}, line)))),
  );
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left =
    event.clientX + 14 + box.width > innerWidth ? event.clientX - box.width - 14 : event.clientX + 14;
  const top = Math.min(event.clientY + 14, innerHeight - box.height - 6);
  tip.style.left = Math.max(4, left) + "px";
  tip.style.top = top + "px";
}
const hideTip = () => {
  tip.hidden = true;
};

function options(select, entries, chosen) {
  select.replaceChildren(...entries.map(([key, text]) => make("option", {value: key}, text)));
  if (entries.some(([key]) => key === chosen)) select.value = chosen;
}

const colour = (i) => `var(--s${i % 8})`;
const dash = (i) => (i < 8 ? "" : i < 16 ? "6 3" : "2 3");
