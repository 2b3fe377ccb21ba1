// The fleet page: asks for `/fleet` every two seconds while the page is visible, and shows it.

import { byId, make, makeSvg, number, percent, timeParts, timeShares } from "./dom.js";
import { History } from "./history.js";
import { drawMap } from "./map.js";
import { drafterTable, verifierTable } from "./tables.js";

const POLL_MS = 2000;
const TIMEOUT_MS = 8000;
const CURVE_POINTS = 150;
const KEY = "outrider-api-key";
const STATE_WORDS = { lost: "reconnecting", denied: "needs a key" };

const TILES = [
  ["Tokens per second", (t) => t.tokens_per_s, (v) => number(v, v < 100 ? 1 : 0), "emitted by all verifiers"],
  ["TGS", (t) => t.tgs, (v) => number(v, 1), "tokens per second of one running sequence"],
  ["Acceptance length", (t) => t.acceptance_length, (v) => number(v, 2), "tokens per verified draft, 1 to K + 1"],
  ["Waiting for drafts", (t) => t.idle.awaiting_draft ?? null, (v) => percent(v, 1), "share of verifier time"],
  ["Running", (t) => t.running, (v) => number(v), "sequences being decoded"],
  ["Queue", (t) => t.waiting, (v) => number(v), "sequences waiting at this gateway and at verifiers"],
  ["KV cache", (t) => t.kv_usage, (v) => percent(v), "in use at the fullest verifier"],
];

const history = new History();
const curves = TILES.map(() => []);
let latest = null;
let receivedAt = 0;
let timer = 0;
let asking = new AbortController();
let paused = false;
let state = "connecting";

function tile([name, pick, show, words], index) {
  const drawn = make("dd", "", curve(curves[index]));
  return make("div", "tile", make("dt", "", name), make("dd", "", show(pick(latest.totals))), make("dd", "words", words), drawn);
}

// Gaps are not filled: where nothing was drafted, there is no acceptance length.
function curve(values) {
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
  const frame = { class: "curve", viewBox: "0 0 100 24", preserveAspectRatio: "none", "aria-hidden": "true" };
  return makeSvg("svg", frame, makeSvg("path", { class: "area", d: area }), makeSvg("path", { class: "line", d: line }));
}

function timeLegend() {
  const shares = timeShares(latest.totals);
  const shown = shares.length ? shares : [["none", "nothing measured yet", null]];
  return shown.map(([cause, words, share]) => {
    const swatch = make("span", "swatch");
    swatch.dataset.cause = cause;
    return make("li", "", swatch, make("span", "", words), make("b", "", share === null ? "" : percent(share, 1)));
  });
}

function log(list, entries, none) {
  list.replaceChildren(...(entries.length ? entries : [{ kind: "none", text: none }]).map((each) => {
    const time = each.at ? [make("time", "", new Date(1000 * each.at).toTimeString().slice(0, 8))] : [];
    const item = make("li", "", ...time, make("span", "", each.text));
    item.dataset.kind = each.kind;
    return item;
  }));
}

function counters() {
  const moved = (kind) => latest.moved.filter((each) => each.kind === kind).reduce((sum, each) => sum + each.sequences, 0);
  const counts = { ...latest.counters, "failovers here": moved("failover"), "migrations here": moved("migration") };
  return Object.entries(counts).map(([name, count]) =>
    make("div", "", make("dt", "", name.replaceAll("_", " ")), make("dd", "", number(count))));
}

function summary(members) {
  const states = [...new Set(members.map((each) => each.state))];
  return states.map((name) => `${members.filter((each) => each.state === name).length} ${name}`).join(", ") || "none";
}

function about() {
  const words = [`model ${latest.model}`, `mode ${latest.mode}`];
  if (latest.mode !== "off") words.push(`K up to ${latest.num_speculative_tokens}`);
  words.push(`verifiers: ${summary(latest.verifiers)}`, `drafters: ${summary(latest.drafters)}`);
  byId("about").textContent = words.join("  ·  ");
  document.title = `${latest.model} – Outrider fleet`;
}

function render() {
  // Done first, because later drawings take their width from the page.
  byId("live").classList.remove("waiting");
  about();
  byId("tiles").replaceChildren(...TILES.map(tile));
  byId("time-bar").replaceChildren(...timeParts(latest.totals));
  byId("time-legend").replaceChildren(...timeLegend());
  drawMap(byId("map"), latest);
  const filter = byId("filter").value.trim().toLowerCase();
  verifierTable(byId("verifier-table"), latest, filter);
  drafterTable(byId("drafter-table"), latest, filter);
  log(byId("log"), latest.log, "Nothing since this page was opened.");
  log(byId("plans"), latest.plans, "No change of plan since this page was opened.");
  byId("counters").replaceChildren(...counters());
}

function notice(text) {
  // Only a change is put into the page, because screen readers read it aloud.
  if (byId("notice").textContent !== text) byId("notice").textContent = text;
  byId("notice").hidden = !text;
}

// Shows the age of the view; called once a second and at every change.
function showConnection() {
  const shown = paused ? "paused" : state;
  byId("connection").dataset.state = shown;
  const words = STATE_WORDS[shown] ?? shown;
  if (byId("connection-state").textContent !== words) byId("connection-state").textContent = words;
  const age = (performance.now() - receivedAt) / 1000;
  byId("connection-age").textContent = receivedAt && shown !== "live" ? `${number(age)} s old` : "";
  byId("live").classList.toggle("stale", shown === "lost");
  byId("key-form").hidden = state !== "denied";
}

async function poll() {
  clearTimeout(timer);
  asking.abort();
  if (document.hidden) return;
  const own = new AbortController();
  asking = own;
  timer = setTimeout(() => own.abort(new DOMException("", "TimeoutError")), TIMEOUT_MS);
  const key = sessionStorage.getItem(KEY);
  try {
    const headers = key ? { authorization: `Bearer ${key}` } : {};
    const response = await fetch("fleet", { headers, signal: own.signal, cache: "no-store" });
    if (response.status === 401) {
      clearTimeout(timer);
      sessionStorage.removeItem(KEY);
      state = "denied";
      notice(key ? "The gateway says that key is wrong." : "");
      showConnection();
      byId("key").focus();
      return;
    }
    if (!response.ok) throw new Error(`the gateway answers ${response.status}`);
    show(await response.json());
  } catch (error) {
    // A later call has taken over, or the page is hidden.
    if (own !== asking || error.name === "AbortError") return;
    const words = { TimeoutError: "no answer", TypeError: "no connection" }[error.name] ?? error.message;
    state = "lost";
    notice(`Lost the gateway (${words}); trying again. What is shown is the last that was heard.`);
  }
  showConnection();
  clearTimeout(timer);
  timer = setTimeout(poll, POLL_MS);
}

function show(snapshot) {
  latest = history.add(snapshot);
  receivedAt = performance.now();
  state = "live";
  TILES.forEach(([, pick], index) => {
    curves[index].push(pick(latest.totals));
    if (curves[index].length > CURVE_POINTS) curves[index].shift();
  });
  const silent = latest.answered_s;
  if (silent === null) notice("The coordinator has not answered this gateway yet.");
  else notice(silent > 5 ? `The coordinator has not answered for ${number(silent)} s; members are as it last said.` : "");
  if (!paused) render();
}

byId("pause").addEventListener("click", () => {
  paused = !paused;
  byId("pause").setAttribute("aria-pressed", String(paused));
  byId("pause").textContent = paused ? "Go on" : "Pause";
  if (!paused && latest) render();
  showConnection();
});
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  // No header can carry another character: `fetch` would fail for ever.
  if (!/^[\x20-\x7e]+$/.test(byId("key").value)) return notice("A key has only letters, digits and signs of ASCII.");
  sessionStorage.setItem(KEY, byId("key").value);
  byId("key").value = "";
  poll();
});
byId("filter").addEventListener("input", () => latest && render());
document.addEventListener("visibilitychange", () => state !== "denied" && poll());
addEventListener("resize", () => latest && drawMap(byId("map"), latest));

setInterval(showConnection, 1000);
poll();
