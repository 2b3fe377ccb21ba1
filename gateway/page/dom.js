// Small helpers.  Text is put into the page only as text nodes; the page's security policy forbids all other ways.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

export function make(tag, className, ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...children);
  return element;
}

export function makeSvg(tag, attributes, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
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

export function timeParts(row) {
  return timeShares(row).map(([cause, , share]) => {
    const part = make("span");
    part.dataset.cause = cause;
    part.style.width = `${(100 * share).toFixed(1)}%`;
    return part;
  });
}
