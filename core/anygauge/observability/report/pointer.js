// The values under the pointer, and a range of steps that is dragged.
const follow = (chart, choose) => {
  const { main, lines } = chart, box = chart.find(".box"), at = chart.find(".at output");
  const cursor = chart.find(".cursor"), selection = chart.find(".selection");
  const resting = new Map([at, ...lines.map((line) => line.output)].map((output) => [output, output.textContent]));
  let start = null;

  const share = (event) => {
    const bounds = box.getBoundingClientRect();
    return Math.min(Math.max((event.clientX - bounds.left) / bounds.width, 0), 1);
  };
  const valueAt = (share) => chart.range.low + share * (chart.range.high - chart.range.low);
  const indexAt = (share) => {
    const [first, last] = chart.span(main), index = nearest(xs(main.axis), valueAt(share));
    return Math.min(Math.max(index, first), Math.max(last - 1, first, 0));
  };

  const show = (event) => {
    const index = indexAt(share(event)), step = main.steps[index], x = xs(main.axis)[index];
    cursor.hidden = false;
    cursor.style.left = `${100 * chart.toX(x)}%`;
    at.textContent = view.x === "steps" ? step : `${step} \u00b7 ${spentText(x)}`;
    for (const line of lines) line.output.textContent = format(read(line, step, x));
  };
  // What is recorded now and then shows its latest value up to there. Runs that are compared have spent different
  // amounts at their steps: the nearest one counts.
  const read = (line, step, x) => {
    const axis = xs(line.axis);
    let index = nearest(axis, x);
    if (line.marked && axis[index] > x) index -= 1;
    const isKnown = line.marked || line.steps[index] === step || (view.x !== "steps" && x <= axis.at(-1));
    return isKnown ? line.values[index] : null;
  };
  const leave = () => {
    cursor.hidden = true;
    for (const [output, text] of resting) output.textContent = text;
  };

  const ends = (event) => [start, share(event)].sort((a, b) => a - b);
  const drag = (event) => {
    if (start === null) return;
    const [low, high] = ends(event);
    selection.hidden = false;
    Object.assign(selection.style, { left: `${100 * low}%`, width: `${100 * (high - low)}%` });
  };
  const drop = (event) => {
    if (start === null) return;
    const toStep = (end) => (view.x === "steps" ? Math.round(valueAt(end)) : main.steps[indexAt(end)]);
    const [from, to] = ends(event).map(toStep);
    cancel();
    if (from < to) choose({ from, to });
  };
  const cancel = () => {
    start = null;
    selection.hidden = true;
  };

  box.addEventListener("pointerdown", (event) => {
    show(event);
    // A finger scrolls and reads values.
    if (event.pointerType !== "mouse" || event.button) return;
    start = share(event);
    box.setPointerCapture(event.pointerId);
  });
  box.addEventListener("pointermove", (event) => { show(event); drag(event); });
  box.addEventListener("pointerup", drop);
  box.addEventListener("pointercancel", cancel);
  box.addEventListener("pointerleave", leave);
};
