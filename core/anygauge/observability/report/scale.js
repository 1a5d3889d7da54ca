// Numbers as text, ticks and ranges, by the rules of scale.py.
const number = (value, options) => value.toLocaleString("en", options).replaceAll("-", "\u2212").replace("K", "k");

const format = (value) => {
  if (value === null || value === undefined) return "\u2013";
  const size = Math.abs(value), far = size && (size < 1e-3 || size >= 1e7);
  return far ? value.toExponential(3).replaceAll("-", "\u2212") : number(value, { maximumSignificantDigits: 4 });
};

const tickText = (value) => {
  const size = Math.abs(value);
  if (size && size < 1e-3) return value.toExponential().replaceAll("-", "\u2212");
  return number(value, { maximumSignificantDigits: 6, notation: size < 1e4 ? "standard" : "compact" });
};

// The index of the first of ascending values that is not below a limit, by bisection.
const lower = (axis, limit) => {
  let low = 0, high = axis.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (axis[middle] < limit) low = middle + 1; else high = middle;
  }
  return low;
};

const nearest = (axis, place) => {
  const high = Math.min(lower(axis, place), axis.length - 1);
  return high > 0 && place - axis[high - 1] <= axis[high] - place ? high - 1 : high;
};

const niceTicks = (low, high, most) => {
  if (!(high > low) || high + (high - low) / most === high) return [];
  const least = (high - low) / most, magnitude = 10 ** Math.floor(Math.log10(least)), ticks = [];
  const step = magnitude * [1, 2, 2.5, 5, 10].find((size) => size * magnitude >= least * (1 - 1e-9));
  for (let index = Math.ceil(low / step - 1e-9); index <= high / step + 1e-9; index += 1) {
    ticks.push(Number((index * step).toPrecision(12)));
  }
  return ticks;
};

// Ticks between two powers of ten: the powers, with numbers between them where these are few.
const logTicks = (low, high) => {
  if (high - low < 1) return niceTicks(10 ** low, 10 ** high, 6);
  const stride = Math.ceil((high - low) / 8), ticks = [];
  for (let power = Math.floor(low / stride) * stride; power <= high; power += stride) {
    for (const digit of high - low < 2.5 ? [1, 2, 5] : [1]) ticks.push(Number(`${digit}e${power}`));
  }
  return ticks.filter((tick) => Math.log10(tick) >= low && Math.log10(tick) <= high);
};

// All values, or without far outliers, with some room.
const valueRange = (values) => {
  const order = Float64Array.from(values).sort(), cut = Math.floor(order.length / 100) + 1;
  let low = order[0], high = order.at(-1);
  if (order.length >= 50) {
    const inner = [order[cut], order.at(-cut - 1)], spread = inner[1] - inner[0];
    if (spread && high - low > 6 * spread) {
      [low, high] = [Math.max(low, inner[0] - spread / 2), Math.min(high, inner[1] + spread / 2)];
    }
  }
  const size = Math.max(Math.abs(low), Math.abs(high));
  const room = high - low > 1e-9 * size ? 0.06 * (high - low) : 0.1 * size || 1;
  return [low - room, high + room];
};
