// A chart over steps. It stays as it came with the page until something else is chosen.
const setTicks = (box, side, ticks) => {
  box.replaceChildren(...ticks.map(([at, text]) => {
    const span = document.createElement("span");
    span.style[side] = `${100 * at}%`;
    span.textContent = text;
    return span;
  }));
};

class Chart {
  constructor(figure) {
    this.figure = figure;
    this.svg = this.find("svg");
    this.note = this.find(".left-out");
    this.isStacked = "stacked" in figure.dataset;
    this.lines = [...figure.querySelectorAll("[data-metric]")].map((item) => this.readLine(item));
    // Steps come from the densest series.
    this.main = this.lines.reduce((most, line) => (line.steps.length > most.steps.length ? line : most));
    const children = (selector) => [...this.find(selector).children], axis = this.plot.getPropertyValue("--axis");
    this.original = { svg: children("svg"), x: children(".x"), y: children(".y"), axis, note: this.note.textContent };
  }

  find(selector) { return this.figure.querySelector(selector); }

  get plot() { return this.find(".plot").style; }

  get isLog() { return view.log.includes(this.figure.id); }

  readLine(item) {
    const [axis, values] = data.metrics[JSON.parse(`"${item.dataset.metric}"`)], steps = data.axes[axis];
    const color = item.querySelector("i").className.match(/c\d/)[0], output = item.querySelector("output");
    return { axis, steps, values, color, output, marked: "marked" in item.dataset };
  }

  // The indices of the steps of a line that are shown.
  span({ steps }) { return [lower(steps, this.range.first), lower(steps, this.range.last + 1)]; }

  toX(value) { return (value - this.range.low) / (this.range.high - this.range.low); }

  draw(range) {
    this.range = range;
    if (!range.isZoomed && view.x === "steps" && !this.isLog) return this.restore();
    const { y, paths, note } = this.isStacked ? this.stackedPaths() : this.linePaths();
    const ticks = (this.isLog ? logTicks(...y) : niceTicks(...y, 6)).map((tick) => {
      return [((this.isLog ? Math.log10(tick) : tick) - y[0]) / (y[1] - y[0]), tickText(tick)];
    });
    const grid = this.element("g", { class: "grid" });
    grid.append(...ticks.map(([place]) => this.element("path", { d: `M0 ${1000 * (1 - place)}H1000` })));
    this.svg.replaceChildren(grid, ...paths);
    this.svg.classList.toggle("zoomed", range.isZoomed);
    setTicks(this.find(".y"), "bottom", ticks);
    setTicks(this.find(".x"), "left", xTicks(range.low, range.high).map(([value, text]) => [this.toX(value), text]));
    this.plot.setProperty("--axis", `${Math.max(...ticks.map(([, text]) => text.length))}ch`);
    this.note.textContent = note;
  }

  restore() {
    this.svg.replaceChildren(...this.original.svg);
    this.svg.classList.remove("zoomed");
    this.find(".x").replaceChildren(...this.original.x);
    this.find(".y").replaceChildren(...this.original.y);
    this.plot.setProperty("--axis", this.original.axis);
    this.note.textContent = this.original.note;
  }

  element(tag, attributes) {
    const element = document.createElementNS(this.svg.namespaceURI, tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    return element;
  }

  linePaths() {
    const { isZoomed } = this.range, isKept = !isZoomed && !this.isLog;
    const scaled = this.lines.map((line) => {
      return { ...line, scaled: this.isLog ? line.values.map((v) => (v > 0 ? Math.log10(v) : null)) : line.values };
    });
    const known = (ends) => scaled.flatMap((line) => line.scaled.slice(...ends(line)).filter((v) => v !== null));
    const visible = known((line) => this.span(line));
    const y = isKept ? numbers(this.figure.dataset.y) : valueRange(visible.length ? visible : known(() => []));
    if (!isKept && !this.isLog && visible.every((value) => value >= 0)) y[0] = Math.max(y[0], 0);
    const paths = scaled.reverse().flatMap((line) => this.pathsOf(line, y));
    return { y, paths, note: isKept ? this.original.note : this.outside(visible, y) };
  }

  pathsOf(line, y) {
    const places = xs(line.axis), toY = (value) => (value === null ? null : (value - y[0]) / (y[1] - y[0]));
    const points = (start, end) => {
      const begin = Math.max(start, 0), values = line.scaled.slice(begin, Math.max(end, begin));
      return values.map((value, index) => [this.toX(places[begin + index]), toY(value)]);
    };
    const layers = lineLayers(points, ...this.span(line), line.marked);
    return layers.map(([kind, d]) => this.element("path", { class: `${kind} ${line.color}`, d }));
  }

  // A sentence about what the chart does not show.
  outside(visible, y) {
    const far = visible.filter((value) => value < y[0] || value > y[1]).length;
    const values = this.lines.flatMap((line) => line.values.slice(...this.span(line)));
    const lost = this.isLog ? values.filter((value) => value !== null && value <= 0).length : 0;
    const counted = (count, what) => (count ? `${count} ${count > 1 ? "points are" : "point is"} ${what}.` : "");
    return [counted(far, "outside this range"), counted(lost, "not above 0 and not shown")].filter(Boolean).join(" ");
  }

  // Areas one on another, each the means over stretches of steps.
  stackedPaths() {
    const [first, last] = this.span(this.main), width = Math.ceil((last - first) / (MOST_POINTS / 2));
    const means = (values) => {
      const stretches = [];
      for (let start = first; start < last; start += width) {
        stretches.push(values.slice(start, Math.min(start + width, last)));
      }
      return stretches.map((stretch) => stretch.reduce((sum, value) => sum + value, 0) / stretch.length);
    };
    const places = means(xs(this.main.axis)).map((x) => this.toX(x)), tops = [places.map(() => 0)];
    for (const line of this.lines) {
      const values = new Map(line.steps.map((step, index) => [step, Math.max(line.values[index] ?? 0, 0)]));
      const heights = means(this.main.steps.map((step) => values.get(step) ?? 0));
      tops.push(heights.map((height, index) => tops.at(-1)[index] + height));
    }
    const high = this.range.isZoomed ? 1.06 * Math.max(0, ...tops.at(-1)) || 1 : numbers(this.figure.dataset.y)[1];
    const edge = (heights) => heights.map((height, index) => [places[index], height / high]);
    const paths = this.lines.map(({ color }, index) => {
      return this.element("path", { class: `area ${color}`, d: areaPath(edge(tops[index]), edge(tops[index + 1])) });
    });
    return { y: [0, high], paths, note: this.range.isZoomed ? "" : this.original.note };
  }
}
