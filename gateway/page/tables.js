// The two tables: a row per verifier, a row per drafter.  Every column can sort; the choice is kept with the next view.

import { keyed, make, NOTHING, number, percent, setText, timeBar } from "./dom.js";

const byText = new Intl.Collator("en", { numeric: true }).compare;

function plan(row) {
  if (row.mode === null) return NOTHING;
  if (row.mode === "off" || row.mode === "native") return row.mode;
  if (!row.plan_k) return `${row.mode}: drafters not asked`;
  return `${row.mode}: K ${row.plan_k}${row.plan_outcomes ? `, ${row.plan_outcomes} ahead` : ""}`;
}

function chip(cell, state, detail) {
  let element = cell.firstChild;
  if (!element) {
    element = make("span", "chip");
    cell.append(element);
  }
  if (element.dataset.state !== state) element.dataset.state = state;
  setText(element, detail ? `${state}, ${detail}` : state);
}

function stateOf(row, kind) {
  // A member that loads a model may not report, which does not count as silence.
  if (row.state === "lost" || (row.heard_s > 2 && row.state !== "starting")) return `silent for ${number(row.heard_s)} s`;
  return kind === "verifier" && row.state === "ready" && !row.connected ? "not connected" : "";
}

// For each column: heading, value to sort by, content (text, or a function that fills the cell), class.
const VERIFIER = [
  ["Verifier", (r) => r.id, (r) => r.id, "name"],
  ["State", (r) => r.state, (r, cell) => chip(cell, r.state, stateOf(r, "verifier"))],
  ["Plan", (r) => plan(r), (r) => plan(r)],
  ["Changes", (r) => r.plan_changes, (r) => (r.mode === "auto" ? number(r.plan_changes) : NOTHING), "figure"],
  ["Running", (r) => r.running, (r) => number(r.running), "figure"],
  ["Queue", (r) => r.waiting, (r) => number(r.waiting), "figure"],
  ["KV", (r) => r.kv_usage, (r) => percent(r.kv_usage), "figure"],
  ["Tokens/s", (r) => r.tokens_per_s, (r) => number(r.tokens_per_s, 1), "figure"],
  ["TGS", (r) => r.tgs, (r) => number(r.tgs, 1), "figure"],
  ["Acceptance", (r) => r.acceptance_length, (r) => number(r.acceptance_length, 2), "figure"],
  ["Time", (r) => r.busy, timeCell],
  ["Drafters", (r) => r.served.join(" "), (r) => r.served.join(", ") || NOTHING, "list"],
  ["Node", (r) => r.node, (r) => r.node, "list"],
];

const DRAFTER = [
  ["Drafter", (r) => r.id, (r) => r.id, "name"],
  ["State", (r) => r.state, (r, cell) => chip(cell, r.state, stateOf(r, "drafter"))],
  ["Sequences", (r) => r.sequences, (r) => number(r.sequences), "figure"],
  ["Cache", (r) => r.cache_usage, (r) => percent(r.cache_usage), "figure"],
  ["Busy", (r) => r.busy, (r) => percent(r.busy), "figure"],
  ["Draft tokens/s", (r) => r.draft_tokens_per_s, (r) => number(r.draft_tokens_per_s, 1), "figure"],
  ["Acceptance", (r) => r.acceptance, (r) => number(r.acceptance, 2), "figure"],
  ["Round trip", (r) => r.round_trip, (r) => (r.round_trip === null ? NOTHING : `${number(r.round_trip, 1)} ms`), "figure"],
  ["Head version", (r) => r.version, headVersion, "figure"],
  ["Dropped/s", (r) => r.dropped, (r) => number(r.dropped, 1), "figure"],
  ["Serves", (r) => r.verifiers.join(" "), (r) => r.verifiers.join(", ") || NOTHING, "list"],
  ["Node", (r) => r.node, (r) => r.node, "list"],
];

// With the share of drafts whose first token was right, and that of the version before.
function headVersion(row) {
  if (row.version === null) return NOTHING;
  const share = (value) => (value === null ? "" : `: ${percent(value)}`);
  const known = row.previous_acceptance !== null && row.previous_version !== row.version;
  const before = known ? `, before ${number(row.previous_version)}${share(row.previous_acceptance)}` : "";
  return `${number(row.version)}${share(row.live_acceptance)}${before}`;
}

function timeCell(row, cell) {
  if (!cell.firstChild) cell.append(make("div", "bar"), make("span", "unseen"));
  const words = timeBar(cell.firstChild, row) || "nothing measured";
  setText(cell.lastChild, words);
  if (cell.title !== words) cell.title = words;
}

function head(table, columns, caption) {
  if (table.tHead) return;
  table.sortBy = { column: 0, down: false };
  table.append(make("caption", "unseen", caption));
  const row = make("tr");
  columns.forEach(([title, , , className], index) => {
    const cell = make("th", className);
    const button = make("button", "", title);
    cell.scope = "col";
    button.type = "button";
    button.addEventListener("click", () => {
      const { column, down } = table.sortBy;
      table.sortBy = { column: index, down: column === index ? !down : className === "figure" };
      table.redraw();
    });
    cell.append(button);
    row.append(cell);
  });
  const top = make("thead");
  top.append(row);
  table.append(top, make("tbody"));
}

function sorted(rows, columns, { column, down }) {
  const pick = columns[column][1];
  // Undefined values come last in both directions.
  return [...rows].sort((a, b) => {
    const [x, y] = [pick(a), pick(b)];
    if (x === null || y === null) return (x === null) - (y === null);
    const order = typeof x === "number" ? x - y : byText(x, y);
    return (down ? -order : order) || byText(a.id, b.id);
  });
}

function fill(table, columns, rows, caption, filter, none) {
  head(table, columns, caption);
  table.redraw = () => fill(table, columns, rows, caption, filter, none);
  [...table.tHead.rows[0].cells].forEach((cell, index) => {
    const { column, down } = table.sortBy;
    const order = column === index ? (down ? "descending" : "ascending") : "none";
    if (cell.getAttribute("aria-sort") !== order) cell.setAttribute("aria-sort", order);
  });
  const kept = rows.filter((row) => !filter || `${row.id} ${row.node} ${row.state}`.toLowerCase().includes(filter));
  const body = table.tBodies[0];
  keyed(body, sorted(kept, columns, table.sortBy), (row) => row.id, () => {
    const row = make("tr");
    columns.forEach(([, , , className], index) => {
      const cell = make(index ? "td" : "th", className);
      if (!index) cell.scope = "row";
      row.append(cell);
    });
    return row;
  }, (element, row) => {
    if (element.dataset.state !== row.state) element.dataset.state = row.state;
    columns.forEach(([, , show], index) => {
      const text = show(row, element.cells[index]);
      if (text !== undefined) setText(element.cells[index], text);
    });
  });
  empty(table, kept.length, rows.length ? "None matches the filter." : none, columns.length);
}

function empty(table, count, text, columns) {
  if (!table.tFoot) {
    const cell = make("td", "none");
    cell.colSpan = columns;
    const row = make("tr");
    row.append(cell);
    table.createTFoot().append(row);
  }
  table.tFoot.hidden = count > 0;
  setText(table.tFoot.rows[0].cells[0], text);
}

export function verifierTable(table, fleet, filter) {
  const served = new Map();
  // Pairs include what a verifier drafts by itself, without a drafter of the fleet.
  const members = new Set(fleet.drafters.map((row) => row.id));
  // Drafters that draft now come first, because a narrow cell hides its end.
  const rank = (pair) => (pair.bound ? 0 : members.has(pair.drafter) ? 2 : 1);
  for (const pair of [...fleet.pairs].sort((a, b) => rank(a) - rank(b))) {
    if (!served.has(pair.verifier)) served.set(pair.verifier, []);
    const words = pair.down ? " (not waited for)" : pair.bound ? "" : members.has(pair.drafter) ? " (earlier)" : " (its own)";
    served.get(pair.verifier).push(pair.drafter + words);
  }
  const rows = fleet.verifiers.map((row) => ({ ...row, served: served.get(row.id) ?? [] }));
  fill(table, VERIFIER, rows, "Verifiers: load, speed and time over the window", filter, "No verifier has joined yet.");
}

export function drafterTable(table, fleet, filter) {
  const pairs = new Map();
  for (const pair of fleet.pairs) {
    if (!pairs.has(pair.drafter)) pairs.set(pair.drafter, []);
    pairs.get(pair.drafter).push(pair);
  }
  const rows = fleet.drafters.map((row) => ({ ...row, ...overPairs(pairs.get(row.id) ?? []) }));
  fill(table, DRAFTER, rows, "Drafters: load and what verifiers see of them", filter, "There is no drafter.");
}

// Weighted by drafts, which gives the ratio of the sums.
function overPairs(pairs) {
  const drafts = pairs.reduce((sum, pair) => sum + (pair.acceptance_length === null ? 0 : pair.drafts_per_s), 0);
  const weighted = (pick) => pairs.reduce((sum, pair) => sum + (pick(pair) ?? 0) * pair.drafts_per_s, 0) / drafts;
  return {
    acceptance: drafts > 0 ? weighted((pair) => pair.acceptance_length) : null,
    round_trip: drafts > 0 ? weighted((pair) => pair.round_trip_ms) : null,
    dropped: pairs.reduce((sum, pair) => sum + pair.dropped_per_s, 0),
  };
}
