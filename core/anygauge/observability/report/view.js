// What is chosen for all charts: the x axis and the range of steps, and which charts are logarithmic.
const data = JSON.parse(document.getElementById("data").textContent);
const figures = [...document.querySelectorAll(".chart[data-x]")], controls = document.querySelector(".controls");
const numbers = (text) => text.split(" ").map(Number);

// What is chosen outlives a reload, which the page of a running run makes every half minute.
const KEY = `anygauge ${location.pathname}`;
const view = { x: "steps", from: null, to: null, log: [] };
try { Object.assign(view, JSON.parse(sessionStorage.getItem(KEY))); } catch { /* nothing may be stored here */ }
if (view.x !== "steps" && !data.spent[view.x]) view.x = "steps";
const keep = () => {
  try { sessionStorage.setItem(KEY, JSON.stringify(view)); } catch { /* nothing may be stored here */ }
};

const UNITS = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];
const unitOf = (span) => UNITS.find(([, seconds]) => span >= 2 * seconds) ?? UNITS.at(-1);
const spentText = (value) => {
  if (view.x === "tokens") return `${number(value, { maximumSignificantDigits: 3, notation: "compact" })} tokens`;
  const [unit, seconds] = unitOf(value);
  return `${number(value / seconds, { maximumSignificantDigits: 3 })} ${unit}`;
};

const xTicks = (low, high) => {
  if (view.x === "steps") return niceTicks(low, high, 8).filter(Number.isInteger).map((tick) => [tick, tickText(tick)]);
  if (view.x === "tokens") return niceTicks(low, high, 6).map((tick) => [tick, tickText(tick)]);
  const [unit, size] = unitOf(high - low);
  return niceTicks(low / size, high / size, 6).map((tick) => [tick * size, `${tickText(tick)} ${unit}`]);
};

const xs = (axis) => (view.x === "steps" ? data.axes : data.spent[view.x])[axis];

// First and last step that are shown, and where the axis begins and ends; the same for all charts.
const shown = () => {
  const [start, end] = numbers(figures[0].dataset.x), inside = (step) => Math.min(Math.max(step, start), end);
  let [first, last] = [inside(view.from ?? start), inside(view.to ?? end)].sort((a, b) => a - b);
  if (first === last) [first, last] = first < end ? [first, first + 1] : [end - 1, end];
  const isZoomed = first > start || last < end;
  if (view.x === "steps") return { first, last, low: first, high: last, isZoomed };
  let low = Infinity, high = -Infinity;
  for (const [axis, steps] of data.axes.entries()) {
    const range = xs(axis).slice(lower(steps, first), lower(steps, last + 1));
    if (range.length) [low, high] = [Math.min(low, range[0]), Math.max(high, range.at(-1))];
  }
  return { first, last, low, high: high > low ? high : low + 1, isZoomed };
};
