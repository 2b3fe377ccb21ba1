// The fleet page: gets a view each second from `stream.js` and shows it.

import { byId, clock, keyed, make, makeSvg, number, percent, setAttributes, setText, timeBar, timeShares } from "./dom.js";
import { drawMap } from "./map.js";
import { FleetStream } from "./stream.js";
import { drafterTable, verifierTable } from "./tables.js";

const STALE_MS = 3500;
const HIDDEN_MS = 30000;
const CURVE_POINTS = 300;
const STATE_WORDS = { lost: "reconnecting", denied: "needs a key" };

const TILES = [
  ["Tokens per second", (t) => t.tokens_per_s, (v) => number(v, v < 100 ? 1 : 0), "emitted by all verifiers"],
  ["TGS", (t) => t.tgs, (v) => number(v, 1), "tokens per second of one running sequence"],
  ["Acceptance length", (t) => t.acceptance_length, (v) => number(v, 2), "tokens per verified draft, 1 to K + 1"],
  ["Waiting for drafts", (t) => t.idle.awaiting_draft ?? null, (v) => percent(v, 1), "share of verifier time"],
  ["Running", (t) => t.running, (v) => number(v), "sequences being decoded"],
  ["Queue", (t) => t.waiting, (v) => number(v), "sequences waiting for a place in a batch"],
  ["KV cache", (t) => t.kv_usage, (v) => percent(v), "in use at the fullest verifier"],
];

const curves = TILES.map(() => []);
let latest = null;
let receivedAt = 0;
let paused = false;
let state = "connecting";

function tiles(totals) {
  const figures = TILES.map(([name, pick, show, words], index) => {
    const value = pick(totals);
    curves[index].push(value);
    if (curves[index].length > CURVE_POINTS) curves[index].shift();
    return { name, text: show(value), words, curve: curves[index] };
  });
  keyed(byId("tiles"), figures, (each) => each.name, (each) => {
    const tile = make("div", "tile");
    const value = make("dd");
    const curve = makeSvg("svg", { class: "curve", viewBox: "0 0 100 24", preserveAspectRatio: "none", "aria-hidden": "true" });
    curve.append(makeSvg("path", { class: "area" }), makeSvg("path", { class: "line" }));
    const drawn = make("dd");
    drawn.append(curve);
    tile.append(make("dt", "", each.name), value, make("dd", "words", each.words), drawn);
    return tile;
  }, (tile, each) => {
    setText(tile.children[1], each.text);
    drawCurve(tile.lastChild.firstChild, each.curve);
  });
}

// Gaps are not filled: where nothing was drafted, there is no acceptance length.
function drawCurve(svg, values) {
  const most = Math.max(...values.map((value) => value ?? 0), 1e-9);
  const step = 100 / (CURVE_POINTS - 1);
  const offset = CURVE_POINTS - values.length;
  let line = "";
  let area = "";
  let run = [];
  const flush = () => {
    if (run.length > 1) {
      const points = run.map(([x, y]) => `${x.toFixed(2)} ${y.toFixed(2)}`).join("L");
      line += `M${points}`;
      area += `M${run[0][0].toFixed(2)} 24L${points}L${run[run.length - 1][0].toFixed(2)} 24Z`;
    }
    run = [];
  };
  values.forEach((value, index) => {
    if (value === null) flush();
    else run.push([(offset + index) * step, 22 - (20 * value) / most]);
  });
  flush();
  setAttributes(svg.firstChild, { d: area });
  setAttributes(svg.lastChild, { d: line });
}

function time(totals) {
  timeBar(byId("time-bar"), totals);
  const shares = timeShares(totals);
  const none = [["none", "nothing measured yet", null]];
  keyed(byId("time-legend"), shares.length ? shares : none, ([cause]) => cause, ([cause, words]) => {
    const item = make("li");
    const swatch = make("span", "swatch");
    swatch.dataset.cause = cause;
    item.append(swatch, make("span", "", words), make("b"));
    return item;
  }, (item, [, , share]) => setText(item.lastChild, share === null ? "" : percent(share, 1)));
}

function log(list, entries, none) {
  const items = entries.length ? entries : [{ number: 0, text: none }];
  keyed(list, items, (each) => each.number, (each) => {
    const item = make("li");
    item.dataset.kind = each.kind ?? "none";
    if (each.at) item.append(make("time", "", clock(each.at)));
    item.append(make("span", "", each.text));
    return item;
  }, () => {});
}

function counters(counts) {
  keyed(byId("counters"), Object.entries(counts), ([name]) => name, ([name]) => {
    const pair = make("div");
    pair.append(make("dt", "", name.replaceAll("_", " ")), make("dd"));
    return pair;
  }, (pair, [, count]) => setText(pair.lastChild, number(count)));
  byId("counters").parentElement.hidden = !Object.keys(counts).length;
}

function summary(totals, kind) {
  const states = Object.entries(totals.members[kind] ?? {}).map(([name, count]) => `${count} ${name}`);
  return states.length ? states.join(", ") : "none";
}

function about(head, totals) {
  const words = [`model ${head.model}`, `mode ${head.mode}`];
  if (head.mode !== "off") words.push(`K up to ${head.num_speculative_tokens}`);
  words.push(`verifiers: ${summary(totals, "verifier")}`, `drafters: ${summary(totals, "drafter")}`);
  setText(byId("about"), words.join("  ·  "));
  document.title = `${head.model} – Outrider fleet`;
}

function render() {
  const { about: head, fleet } = latest;
  // Done first, because later drawings take their width from the page.
  byId("live").classList.remove("waiting");
  about(head, fleet.totals);
  tiles(fleet.totals);
  time(fleet.totals);
  drawMap(byId("map"), fleet);
  const filter = byId("filter").value.trim().toLowerCase();
  verifierTable(byId("verifier-table"), fleet, filter);
  drafterTable(byId("drafter-table"), fleet, filter);
  log(byId("log"), fleet.log, "Nothing since this gateway began to watch.");
  log(byId("plans"), fleet.plans, "No change of plan since this gateway began to watch.");
  counters({ ...fleet.counters, "failovers here": fleet.moved.failover, "migrations here": fleet.moved.migration });
  setText(byId("window"), number(fleet.window_s));
}

function notice(text) {
  setText(byId("notice"), text);
  byId("notice").hidden = !text;
}

// Shows the age of the view; called once a second and at every change.
function showConnection(words = "") {
  const age = receivedAt ? performance.now() - receivedAt : 0;
  const stale = state === "live" && !paused && age > STALE_MS;
  const shown = paused ? "paused" : stale ? "stale" : state;
  const pill = byId("connection");
  if (pill.dataset.state !== shown) {
    pill.dataset.state = shown;
    setText(byId("connection-state"), STATE_WORDS[shown] ?? shown);
  }
  setText(byId("connection-age"), receivedAt && (age > STALE_MS || shown !== "live") ? `${number(age / 1000)} s old` : "");
  byId("live").classList.toggle("stale", shown === "stale" || shown === "lost");
  byId("key-form").hidden = state !== "denied";
  if (state === "lost" && words) notice(`Lost the gateway (${words}); trying again. What is shown is the last that was heard.`);
  if (state === "denied") notice(words ? `The gateway says ${words}.` : "");
  if (state === "live") {
    const silent = latest?.fleet.snapshot_age_s;
    if (silent === null) notice("The coordinator has not answered this gateway yet.");
    else notice(silent > 5 ? `The coordinator has not answered for ${number(silent)} s; members are as it last said.` : "");
  }
}

const stream = new FleetStream({
  view(data) {
    receivedAt = performance.now();
    latest = data;
    if (!paused) render();
    showConnection();
  },
  state(name, words) {
    state = name;
    showConnection(words);
    if (name === "denied") byId("key").focus();
  },
});

byId("pause").addEventListener("click", () => {
  paused = !paused;
  byId("pause").setAttribute("aria-pressed", String(paused));
  setText(byId("pause"), paused ? "Go on" : "Pause");
  if (!paused && latest) render();
  showConnection();
});
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const key = byId("key").value;
  byId("key").value = "";
  state = "connecting";
  stream.useKey(key);
});
byId("filter").addEventListener("input", () => latest && render());
addEventListener("resize", () => latest && drawMap(byId("map"), latest.fleet));

// A hidden page disconnects after a while, so that other pages can connect.
let hidden = 0;
document.addEventListener("visibilitychange", () => {
  clearTimeout(hidden);
  if (document.hidden) hidden = setTimeout(() => stream.stop(), HIDDEN_MS);
  else if (state !== "denied") stream.start();
});

setInterval(showConnection, 1000);
stream.start();
