// Shows the samples of one step at a time, searches in them, and shows the log-probs of their tokens.
const stepper = document.querySelector(".stepper");
const search = document.querySelector("[type=search]"), all = document.querySelector("[type=checkbox]");
const range = document.querySelector("[type=range]");

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

if (stepper) {
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
}
