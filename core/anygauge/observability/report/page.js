// Reads values under the pointer, shows the samples of one step at a time, searches in them, and shows the log-probs
// of their tokens. All else in the page is there without it.
(() => {
  "use strict";
  const data = JSON.parse(document.getElementById("data").textContent);

  const format = (value) => {
    if (value === null || value === undefined) return "\u2013";
    const size = Math.abs(value);
    const far = size && (size < 1e-3 || size >= 1e7);
    const text = far ? value.toExponential(3) : value.toLocaleString("en", { maximumSignificantDigits: 4 });
    return text.replaceAll("-", "\u2212");
  };

  // The index of the step nearest to a place on the axis, by bisection.
  const nearest = (axis, place) => {
    let low = 0, high = axis.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (axis[middle] < place) low = middle + 1; else high = middle;
    }
    return low > 0 && place - axis[low - 1] <= axis[low] - place ? low - 1 : low;
  };

  for (const chart of document.querySelectorAll(".chart[data-x0]")) {
    const box = chart.querySelector(".box"), cursor = chart.querySelector(".cursor");
    const x0 = Number(chart.dataset.x0), x1 = Number(chart.dataset.x1);
    const at = chart.querySelector(".at output");
    const lines = [...chart.querySelectorAll("[data-metric]")].map((item) => {
      const [axis, values] = data.metrics[JSON.parse(`"${item.dataset.metric}"`)];
      const output = item.querySelector("output");
      return { axis: data.axes[axis], values, output, last: output.textContent, marked: "marked" in item.dataset };
    });
    // Steps come from the densest series; what is recorded now and then shows its latest value up to there.
    const main = lines.reduce((most, line) => (line.axis.length > most.axis.length ? line : most));

    const show = (event) => {
      const bounds = box.getBoundingClientRect();
      const share = Math.min(Math.max((event.clientX - bounds.left) / bounds.width, 0), 1);
      const step = main.axis[nearest(main.axis, x0 + share * (x1 - x0))];
      cursor.hidden = false;
      cursor.style.left = `${(100 * (step - x0)) / (x1 - x0)}%`;
      at.textContent = step;
      for (const line of lines) {
        let index = nearest(line.axis, step);
        if (line.marked && line.axis[index] > step) index -= 1;
        const known = index >= 0 && (line.marked || line.axis[index] === step);
        line.output.textContent = format(known ? line.values[index] : null);
      }
    };
    const leave = () => {
      cursor.hidden = true;
      at.textContent = at.dataset.last;
      for (const line of lines) line.output.textContent = line.last;
    };
    box.addEventListener("pointermove", show);
    box.addEventListener("pointerdown", show);
    box.addEventListener("pointerleave", leave);
  }

  const stepper = document.querySelector(".stepper");
  const search = document.querySelector("[type=search]"), all = document.querySelector("[type=checkbox]");
  const range = document.querySelector("[type=range]");

  // The page of a running run is written anew. It is not taken away from a reader who searches, selects, opened
  // something or looks at an earlier step.
  const seconds = Number(document.documentElement.dataset.live);
  if (seconds) {
    const made = document.querySelector("[data-made]"), age = (Date.now() / 1000 - made.dataset.made) / 60;
    made.textContent = age < 1.5 ? "Updated just now." : `Updated ${Math.round(age)} minutes ago.`;
    setInterval(() => {
      const busy = search?.value || all?.checked || (range && range.value !== range.defaultValue)
        || !getSelection().isCollapsed || document.querySelector("details:not(.step)[open]");
      if (!document.hidden && !busy) location.reload();
    }, 1000 * seconds);
  }

  // Tokens become elements when they are looked at: a long run has many.
  for (const view of document.querySelectorAll("details.tokens")) {
    view.hidden = false;
    view.addEventListener("toggle", () => {
      const target = view.querySelector("div"), [texts, logProbs] = data.tokens[view.dataset.sample];
      if (target.firstChild) return;
      texts.forEach((text, index) => {
        const token = document.createElement("span"), logProb = logProbs[index];
        // A text is a log-prob that is not finite, such as "nan".
        const isNumber = typeof logProb === "number";
        token.textContent = text;
        token.title = logProb === null ? "not sampled" : !isNumber ? `log-prob ${logProb}`
          : `log-prob ${format(logProb)}, probability ${format(Math.exp(logProb))}`;
        token.className = logProb === null ? "given" : isNumber ? "token" : "token broken";
        if (isNumber) token.style.setProperty("--doubt", `${Math.round(70 * (1 - Math.exp(logProb)))}%`);
        target.append(token);
      });
    });
  }

  if (!stepper) return;
  const steps = [...document.querySelectorAll("details.step")].reverse();
  const matches = stepper.querySelector(".matches");
  const texts = new Map();
  for (const sample of document.querySelectorAll("article.sample")) {
    const parts = [...sample.querySelectorAll(".prompt, .response, .error, .label dd")].map((part) => part.textContent);
    texts.set(sample, parts.join("\n").toLowerCase());
  }
  const select = () => {
    const wanted = search.value.trim().toLowerCase();
    let count = 0;
    for (const [index, step] of steps.entries()) {
      let found = 0;
      for (const sample of step.querySelectorAll("article.sample")) {
        sample.hidden = !texts.get(sample).includes(wanted);
        found += !sample.hidden;
      }
      const chosen = index === Number(range.value);
      step.hidden = wanted ? !found : !chosen && !all.checked;
      step.open = wanted ? found > 0 : chosen;
      count += found;
    }
    matches.textContent = wanted ? `${count} of ${texts.size} samples` : "";
    stepper.querySelector("output").textContent = `step ${steps[range.value].dataset.step}`;
  };
  for (const button of stepper.querySelectorAll("button")) {
    button.addEventListener("click", () => { range.value = Number(range.value) + Number(button.dataset.move); select(); });
  }
  range.addEventListener("input", select);
  search.addEventListener("input", select);
  all.addEventListener("change", select);
  stepper.hidden = false;
  select();
})();
