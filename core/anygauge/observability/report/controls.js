// The controls of all charts, and the button of each.
const charts = figures.map((figure) => new Chart(figure));
const [xChoice, from, to, allSteps] = controls.querySelectorAll("select, input, button");

const choose = (change) => {
  Object.assign(view, change);
  keep();
  const range = shown();
  xChoice.value = view.x;
  [from.value, to.value] = [view.from ?? "", view.to ?? ""];
  allSteps.disabled = !range.isZoomed;
  for (const chart of charts) chart.draw(range);
};

const offerLog = (chart) => {
  const button = chart.find(".log");
  if (!button) return;
  button.hidden = !chart.lines.some((line) => line.values.some((value) => value > 0));
  button.setAttribute("aria-pressed", chart.isLog);
  button.addEventListener("click", () => {
    const { id } = chart.figure;
    view.log = chart.isLog ? view.log.filter((other) => other !== id) : [...view.log, id];
    button.setAttribute("aria-pressed", chart.isLog);
    keep();
    chart.draw(shown());
  });
};

const typed = ({ valueAsNumber }) => (Number.isFinite(valueAsNumber) ? valueAsNumber : null);

if (charts.length) {
  for (const chart of charts) {
    follow(chart, choose);
    offerLog(chart);
  }
  [from.placeholder, to.placeholder] = numbers(figures[0].dataset.x);
  for (const option of xChoice.options) {
    option.hidden = option.disabled = option.value !== "steps" && !data.spent[option.value];
  }
  controls.addEventListener("change", () => choose({ x: xChoice.value, from: typed(from), to: typed(to) }));
  allSteps.addEventListener("click", () => choose({ from: null, to: null }));
  controls.hidden = false;
  choose({});
}
