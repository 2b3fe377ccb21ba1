// Small helpers.  Text is put into the page only by `textContent`; the page's security policy forbids all other ways.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

export function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

export function makeSvg(tag, attributes = {}) {
  const element = document.createElementNS(SVG, tag);
  setAttributes(element, attributes);
  return element;
}

// Changes the document only where a value changed, because most of a large fleet is the same from second to second.
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function setAttributes(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    const text = String(value);
    if (element.getAttribute(name) !== text) element.setAttribute(name, text);
  }
}

// Keeps one element per key, in the order of `items`; removes elements whose key is gone.
export function keyed(parent, items, keyOf, create, update) {
  const known = parent.keyedElements ?? (parent.keyedElements = new Map());
  const wanted = new Set();
  let previous = null;
  for (const item of items) {
    const key = keyOf(item);
    wanted.add(key);
    let element = known.get(key);
    if (!element) {
      element = create(item);
      known.set(key, element);
    }
    const place = previous ? previous.nextSibling : parent.firstChild;
    if (place !== element) parent.insertBefore(element, place);
    update(element, item);
    previous = element;
  }
  for (const [key, element] of known) {
    if (wanted.has(key)) continue;
    element.remove();
    known.delete(key);
  }
}

export const NOTHING = "–";
const formats = new Map();

export function number(value, digits = 0) {
  if (value === null || value === undefined) return NOTHING;
  if (!formats.has(digits)) {
    const options = { minimumFractionDigits: digits, maximumFractionDigits: digits };
    formats.set(digits, new Intl.NumberFormat("en", options));
  }
  return formats.get(digits).format(value);
}

export function percent(share, digits = 0) {
  return share === null || share === undefined ? NOTHING : `${number(100 * share, digits)} %`;
}

export const clock = (unix) => new Date(1000 * unix).toTimeString().slice(0, 8);

// The parts of a verifier's time, in drawing order.
export const TIMES = [
  ["busy", "busy"],
  ["awaiting_draft", "waiting for drafts"],
  ["swap", "swap"],
  ["no_work", "no work"],
];

export function timeShares(row) {
  if (row.busy === null || row.busy === undefined) return [];
  const shares = { busy: row.busy, ...row.idle };
  const known = TIMES.filter(([cause]) => cause in shares);
  const others = Object.keys(shares).filter((cause) => !TIMES.some(([each]) => each === cause));
  return [...known, ...others.map((cause) => [cause, cause])].map(([cause, words]) => [cause, words, shares[cause]]);
}

export function timeBar(element, row) {
  const shares = timeShares(row);
  keyed(element, shares, ([cause]) => cause, ([cause]) => {
    const part = make("span");
    part.dataset.cause = cause;
    return part;
  }, (part, [, , share]) => {
    const width = `${(100 * share).toFixed(1)}%`;
    if (part.style.width !== width) part.style.width = width;
  });
  const words = shares.filter(([, , share]) => share >= 0.005).map(([, words, share]) => `${words} ${percent(share)}`);
  return words.join(", ");
}
