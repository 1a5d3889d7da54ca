// Paths in a box of 1000 by 1000, as in paths.py, from points whose places are fractions of the box.
const MOST_POINTS = 590, SMOOTHED = 100;

const place = ([x, y]) => `${(1000 * x).toFixed(1)} ${(1000 * (1 - Math.min(Math.max(y, -9), 10))).toFixed(1)}`;

const linePath = (points) => {
  const strokes = [[]];
  for (const point of points) {
    if (point[1] === null) strokes.push([]); else strokes.at(-1).push(place(point));
  }
  const drawn = strokes.filter((stroke) => stroke.length);
  return drawn.map((stroke) => `M${stroke.join("L")}${stroke.length > 1 ? "" : "h0"}`).join("");
};

const dotsPath = (points) => points.filter(([, y]) => y !== null).map((point) => `M${place(point)}h0`).join("");

const areaPath = (lower, upper) => `M${[...upper, ...lower.toReversed()].map(place).join("L")}Z`;

// At most so many points that look the same: the least and the greatest of each stretch.
const thin = (points) => {
  const width = Math.ceil((2 * points.length) / MOST_POINTS);
  if (width <= 2) return points;
  const kept = [];
  for (let start = 0; start < points.length; start += width) {
    const order = points.slice(start, start + width).filter(([, y]) => y !== null).sort((a, b) => a[1] - b[1]);
    const ends = order.length > 1 ? [order[0], order.at(-1)] : order;
    kept.push(...(order.length ? ends.sort((a, b) => a[0] - b[0]) : [points[start]]));
  }
  return kept;
};

// The means of whole windows around points that are evenly far apart.
const smooth = (points, window) => {
  const sums = [0], counts = [0], half = window >> 1, smoothed = [];
  for (const [, y] of points) {
    sums.push(sums.at(-1) + (y ?? 0));
    counts.push(counts.at(-1) + (y !== null));
  }
  const stride = Math.ceil((points.length - 2 * half) / MOST_POINTS);
  for (let index = half; index < points.length - half; index += stride) {
    const [start, end] = [index - half, index + half + 1], count = counts[end] - counts[start];
    smoothed.push([points[index][0], count ? (sums[end] - sums[start]) / count : null]);
  }
  return smoothed;
};

// The layers of a line, as its kind and its path; `points` gives those between two indices, which may lie outside.
const lineLayers = (points, first, last, marked) => {
  const count = last - first;
  if (!marked && count > SMOOTHED) {
    const window = Math.max(9, Math.floor(count / 30)) | 1, half = window >> 1;
    const cut = points(first - half, last + half).map(([x, y]) => [x, y === null ? y : Math.min(Math.max(y, 0), 1)]);
    return [["faint", dotsPath(thin(points(first, last)))], ["line", linePath(smooth(cut, window))]];
  }
  // One more at either end, so that the line reaches the edge.
  const kept = thin(points(first - 1, last + 1)), line = ["line", linePath(kept)];
  return marked ? [line, ["dots", dotsPath(kept)]] : [line];
};
