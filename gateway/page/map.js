// The map: verifiers on the left, drafters on the right, a line per pair.  Texts have fixed sizes on the screen.

import { makeSvg, number, percent } from "./dom.js";

const byName = new Intl.Collator("en", { numeric: true }).compare;

// The more members, the less room each one gets.  Above 150, only marks are shown; the tables have the names.
function sizes(count) {
  if (count <= 20) return { row: 44, height: 36, lines: 2 };
  if (count <= 150) return { row: 20, height: 16, lines: 1 };
  return { row: 8, height: 6, lines: 0 };
}

function place(members, x, height, row, above) {
  const gap = members.length > 1 ? (height - row) / (members.length - 1) : 0;
  return new Map(members.map((member, index) => {
    const y = members.length > 1 ? above + index * gap : above + (height - row) / 2;
    return [member.id, { member, x, y: y + row / 2 }];
  }));
}

// A drafter stands beside its verifiers, so that lines cross as little as possible.
function ordered(drafters, rank) {
  const height = (drafter) => {
    const known = drafter.verifiers.filter((id) => rank.has(id)).map((id) => rank.get(id));
    return known.length ? known.reduce((sum, each) => sum + each, 0) / known.length : Infinity;
  };
  const heights = new Map(drafters.map((each) => [each.id, height(each)]));
  return [...drafters].sort((a, b) => {
    const [x, y] = [heights.get(a.id), heights.get(b.id)];
    return x === y ? byName(a.id, b.id) : x - y;
  });
}

export function drawMap(svg, fleet) {
  const room = Math.max(svg.parentElement.clientWidth, 280);
  const verifiers = [...fleet.verifiers].sort((a, b) => byName(a.id, b.id));
  const rank = new Map(verifiers.map((each, index) => [each.id, index]));
  const drafters = ordered(fleet.drafters, rank);
  const count = Math.max(verifiers.length, drafters.length, 1);
  const size = sizes(count);
  const height = count * size.row;
  const wide = size.lines ? Math.min(260, Math.floor(room * 0.4)) : 12;
  const view = { width: room, height: height + 8, viewBox: `0 0 ${room} ${height + 8}`, "aria-label": words(fleet) };
  for (const [name, value] of Object.entries(view)) svg.setAttribute(name, value);
  const left = place(verifiers, 1, height, size.row, 4);
  const right = place(drafters, room - wide - 1, height, size.row, 4);
  svg.replaceChildren(
    makeSvg("g", { class: "lines" }, ...lines(fleet.pairs, left, right, wide, size.row / 44)),
    makeSvg("g", { class: "nodes" }, ...[...left.values(), ...right.values()].map((each) => node(each, wide, size))),
  );
}

function lines(pairs, left, right, wide, scale) {
  const drawn = pairs.filter((pair) => left.has(pair.verifier) && right.has(pair.drafter));
  const most = Math.max(1, ...drawn.map((pair) => pair.drafts_per_s));
  return drawn.map((pair) => {
    const [from, to] = [left.get(pair.verifier), right.get(pair.drafter)];
    const [x0, x1] = [from.x + wide, to.x];
    const bend = (x1 - x0) / 2;
    return makeSvg("path", {
      d: `M${x0} ${from.y}C${x0 + bend} ${from.y} ${x1 - bend} ${to.y} ${x1} ${to.y}`,
      "stroke-width": pair.bound ? (1 + 4.5 * scale * Math.sqrt(pair.drafts_per_s / most)).toFixed(2) : 1.5,
      "data-state": pair.down ? "down" : !pair.bound ? "gone" : pair.drafts_per_s > 0 ? "drafting" : "bound",
    }, makeSvg("title", {}, pairWords(pair)));
  });
}

function pairWords(pair) {
  const parts = [`${pair.drafter} drafts for ${pair.verifier}`, `${number(pair.drafts_per_s, 1)} drafts/s`];
  if (pair.acceptance_length !== null) parts.push(`acceptance length ${number(pair.acceptance_length, 2)}`);
  if (pair.round_trip_ms !== null) parts.push(`round trip ${number(pair.round_trip_ms, 1)} ms`);
  if (pair.down) parts.push("not waited for");
  if (!pair.bound) parts.push("no longer assigned");
  return parts.join(", ");
}

function node({ member, x, y }, wide, size) {
  const state = member.state === "ready" && member.connected === false ? "starting" : member.state;
  const told = detailOf(member);
  const id = size.lines ? cut(member.id, wide, size.lines === 1 ? 11 : 13) : "";
  const detail = size.lines === 2 ? cut(told.join(" · "), wide, 11) : "";
  const at = `translate(${size.lines ? 14 : 6} ${size.height / 2})`;
  return makeSvg("g", { class: "node", transform: `translate(${x} ${y - size.height / 2})`, "data-state": state },
    makeSvg("title", {}, `${member.id}, ${member.state}: ${told.join(", ")}`),
    makeSvg("rect", { width: wide, height: size.height, rx: Math.min(6, size.height / 2) }),
    makeSvg("path", { class: "mark", d: MARKS[state] ?? MARKS.starting, transform: at }),
    makeSvg("text", { class: "id", x: 28, y: size.lines === 2 ? 15 : size.height - 4 }, id),
    makeSvg("text", { class: "detail", x: 28, y: 29 }, detail),
  );
}

// A mark per state, told apart by shape and not by colour alone; drawn around 0, 0.
const MARKS = {
  ready: "M-5 0a5 5 0 1 0 10 0a5 5 0 1 0 -10 0Z",
  starting: "M-5 0a5 5 0 1 0 10 0a5 5 0 1 0 -10 0ZM-2.5 0a2.5 2.5 0 1 1 5 0a2.5 2.5 0 1 1 -5 0Z",
  draining: "M-5 -4H5L0 5Z",
  lost: "M-5 -3L-3 -5L0 -2L3 -5L5 -3L2 0L5 3L3 5L0 2L-3 5L-5 3L-2 0Z",
};

function detailOf(member) {
  if (member.state === "lost") return [`silent for ${number(member.last_report_s)} s`];
  if ("verifiers" in member) {
    return [`${percent(member.busy)} busy`, `${number(member.sequences)} sequences`, `${number(member.draft_tokens_per_s)} tok/s`];
  }
  const parts = [`${number(member.running)} running`, `${number(member.tokens_per_s)} tok/s`];
  if (member.acceptance_length !== null) parts.push(`accepts ${number(member.acceptance_length, 2)}`);
  return parts;
}

// Cut to about what fits; the title has the whole text.
function cut(text, wide, fontSize) {
  const fits = Math.floor((wide - 34) / (0.56 * fontSize));
  return text.length <= fits ? text : `${text.slice(0, Math.max(1, fits - 1))}…`;
}

function words(fleet) {
  const bound = fleet.pairs.filter((pair) => pair.bound).length;
  const many = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;
  return `${many(fleet.verifiers.length, "verifier")}, ${many(fleet.drafters.length, "drafter")}, ${many(bound, "assignment")}`;
}
