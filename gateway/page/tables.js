// The two tables: a row per verifier, a row per drafter.  Every column can sort; the choice is kept with the next view.

import { make, NOTHING, number, percent, timeParts, timeShares } from "./dom.js";

const byText = new Intl.Collator("en", { numeric: true }).compare;

function plan(row) {
  if (row.mode === null) return NOTHING;
  if (row.mode === "off" || row.mode === "native") return row.mode;
  if (!row.plan_k) return `${row.mode}: drafters not asked`;
  return `${row.mode}: K ${row.plan_k}${row.plan_outcomes ? `, ${row.plan_outcomes} ahead` : ""}`;
}

function chip(row) {
  const detail = stateOf(row);
  const element = make("span", "chip", detail ? `${row.state}, ${detail}` : row.state);
  element.dataset.state = row.state;
  return element;
}

function stateOf(row) {
  const silent = row.last_report_s;
  // A member that loads a model may not report, which does not count as silence.
  if (row.state === "lost" || (silent > 2 && row.state !== "starting")) return `silent for ${number(silent)} s`;
  return row.state === "ready" && row.connected === false ? "not connected" : "";
}

// For each column: heading, value to sort by, content (text or an element), class.
const VERIFIER = [
  ["Verifier", (r) => r.id, (r) => r.id, "name"],
  ["State", (r) => r.state, chip],
  ["Plan", plan, plan],
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
  ["State", (r) => r.state, chip],
  ["Sequences", (r) => r.sequences, (r) => number(r.sequences), "figure"],
  ["Cache", (r) => r.cache_usage, (r) => percent(r.cache_usage), "figure"],
  ["Busy", (r) => r.busy, (r) => percent(r.busy), "figure"],
  ["Draft tokens/s", (r) => r.draft_tokens_per_s, (r) => number(r.draft_tokens_per_s, 1), "figure"],
  ["Acceptance", (r) => r.acceptance, (r) => number(r.acceptance, 2), "figure"],
  ["Round trip", (r) => r.round_trip, (r) => (r.round_trip === null ? NOTHING : `${number(r.round_trip, 1)} ms`), "figure"],
  ["Head version", (r) => r.learning?.version ?? null, (r) => headVersion(r.learning), "figure"],
  ["Dropped/s", (r) => r.dropped, (r) => number(r.dropped, 1), "figure"],
  ["Serves", (r) => r.verifiers.join(" "), (r) => r.verifiers.join(", ") || NOTHING, "list"],
  ["Node", (r) => r.node, (r) => r.node, "list"],
];

// With the share of drafts whose first token was right, and that of the version before.
function headVersion(learning) {
  if (!learning) return NOTHING;
  const { version, live_acceptance, previous_version, previous_acceptance } = learning;
  const share = (value) => (value === null ? "" : `: ${percent(value)}`);
  const known = previous_acceptance !== null && previous_version !== version;
  const before = known ? `, before ${number(previous_version)}${share(previous_acceptance)}` : "";
  return `${number(version)}${share(live_acceptance)}${before}`;
}

function timeCell(row) {
  const shown = timeShares(row).filter(([, , share]) => share >= 0.005);
  const words = shown.map(([, words, share]) => `${words} ${percent(share)}`).join(", ") || "nothing measured";
  const cell = make("div", "", make("div", "bar", ...timeParts(row)), make("span", "unseen", words));
  cell.title = words;
  return cell;
}

// Made once, so that the button that was pressed keeps the focus.
function head(table, columns, caption) {
  table.sortBy = { column: 0, down: false };
  const titles = columns.map(([title, , , className], index) => {
    const button = make("button", "", title);
    const cell = make("th", className, button);
    cell.scope = "col";
    button.type = "button";
    button.addEventListener("click", () => {
      const { column, down } = table.sortBy;
      table.sortBy = { column: index, down: column === index ? !down : className === "figure" };
      table.redraw();
    });
    return cell;
  });
  table.append(make("caption", "unseen", caption), make("thead", "", make("tr", "", ...titles)), make("tbody"));
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
  if (!table.tHead) head(table, columns, caption);
  table.redraw = () => fill(table, columns, rows, caption, filter, none);
  const { column, down } = table.sortBy;
  [...table.tHead.rows[0].cells].forEach((cell, index) => {
    cell.setAttribute("aria-sort", column === index ? (down ? "descending" : "ascending") : "none");
  });
  const kept = rows.filter((row) => !filter || `${row.id} ${row.node} ${row.state}`.toLowerCase().includes(filter));
  const shown = sorted(kept, columns, table.sortBy).map((row) => {
    const cells = columns.map(([, , show, className], index) => make(index ? "td" : "th", className, show(row)));
    cells[0].scope = "row";
    const element = make("tr", "", ...cells);
    element.dataset.state = row.state;
    return element;
  });
  table.tBodies[0].replaceChildren(...shown);
  table.deleteTFoot();
  if (shown.length) return;
  const cell = make("td", "none", rows.length ? "None matches the filter." : none);
  cell.colSpan = columns.length;
  table.append(make("tfoot", "", make("tr", "", cell)));
}

export function verifierTable(table, fleet, filter) {
  // Pairs include what a verifier drafts by itself, without a drafter of the fleet.
  const members = new Set(fleet.drafters.map((row) => row.id));
  // Drafters that draft now come first, because a narrow cell hides its end.
  const rank = (pair) => (pair.bound ? 0 : members.has(pair.drafter) ? 2 : 1);
  const words = ["", " (its own)", " (earlier)"];
  const pairs = [...fleet.pairs].sort((a, b) => rank(a) - rank(b));
  const served = (id) => pairs.filter((pair) => pair.verifier === id).map((pair) =>
    pair.drafter + (pair.down ? " (not waited for)" : words[rank(pair)]));
  const rows = fleet.verifiers.map((row) => ({ ...row, served: served(row.id) }));
  fill(table, VERIFIER, rows, "Verifiers: load, speed and time over the window", filter, "No verifier has joined yet.");
}

export function drafterTable(table, fleet, filter) {
  const of = (id) => fleet.pairs.filter((pair) => pair.drafter === id);
  const rows = fleet.drafters.map((row) => ({ ...row, ...overPairs(of(row.id)) }));
  fill(table, DRAFTER, rows, "Drafters: load and what verifiers see of them", filter, "There is no drafter.");
}

// Weighted by drafts, or by rounds, which gives the ratio of the sums.
export function overPairs(pairs) {
  const total = (pick) => pairs.reduce((sum, pair) => sum + pick(pair), 0);
  const mean = (value, weight) => total((p) => p[weight]) > 0 ? total((p) => p[value] * p[weight]) / total((p) => p[weight]) : null;
  return {
    acceptance: mean("acceptance_length", "drafts_per_s"),
    round_trip: mean("round_trip_ms", "rounds_per_s"),
    dropped: total((pair) => pair.dropped_per_s),
  };
}
