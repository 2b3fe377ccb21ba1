// What the page shows of the fleet: rates, shares and acceptance lengths from differences of counters over the last seconds.
// Pure.  Ratios are those of sums, never averages of ratios.  Undefined values (no work, no drafts) are null.

const WINDOW_S = 10;
const KEPT = 40;
const STATES = { ready: "is ready", draining: "takes no new work", lost: "has not reported in time" };

const ratio = (part, whole) => (whole > 0 ? Math.max(0, part / whole) : null);
const grown = (old, now) => Math.max(0, now - old);
const sum = (values) => values.reduce((total, value) => total + value, 0);

// The answers of `/fleet` within the window, and the logs of what changed since the page was opened, the latest first.
export class History {
  constructor() {
    this.snapshots = [];
    this.log = [];
    this.plans = [];
  }

  // Takes in an answer, and returns it with the window's figures.
  add(snapshot) {
    snapshot.members = new Map([...snapshot.verifiers, ...snapshot.drafters].map((each) => [each.id, each]));
    const before = this.snapshots.at(-1);
    if (before && before.answered_s !== null && snapshot.answered_s !== null) {
      const at = snapshot.at;
      this.log = [...changes(before, snapshot).map((each) => ({ at, ...each })).reverse(), ...this.log].slice(0, KEPT);
      this.plans = [...newPlans(before, snapshot).map((text) => ({ at, kind: "plan", text })), ...this.plans].slice(0, KEPT);
    }
    this.snapshots.push(snapshot);
    // The last answer before the window is kept, because differences are taken from it.
    while (this.snapshots.length > 2 && this.snapshots[1].at <= snapshot.at - WINDOW_S) this.snapshots.shift();
    const flows = snapshot.verifiers.map((each) => flow(this.reports(each)));
    const verifiers = snapshot.verifiers.map((each, index) => verifierRow(each, flows[index]));
    return {
      ...snapshot,
      totals: totals(verifiers, flows, snapshot.queued),
      verifiers,
      drafters: snapshot.drafters.map((each) => drafterRow(each, this.reports(each), served(snapshot, each.id))),
      pairs: this.pairs(snapshot),
      log: this.log,
      plans: this.plans,
    };
  }

  // A member's reports within the window, oldest first, all of one process: [seconds, report].
  reports(now) {
    if (now.state === "lost") return [];
    const known = this.snapshots.map((each) => [each.at, each.members.get(now.id)]);
    return known.filter(([, each]) => each?.busy_s !== undefined && each.incarnation === now.incarnation);
  }

  // Each verifier with each drafter that is assigned to it, or whose drafts it verified within the window.
  pairs(snapshot) {
    const pairs = [];
    for (const verifier of snapshot.verifiers) {
      const reports = this.reports(verifier);
      const bound = snapshot.assignments.filter((each) => each.verifier === verifier.id).map((each) => each.drafter);
      const drafters = new Set([...bound, ...Object.keys(reports.at(-1)?.[1].drafters ?? {})]);
      for (const drafter of drafters) {
        const down = reports.length > 0 && verifier.drafters_down.includes(drafter);
        const pair = { verifier: verifier.id, drafter, bound: bound.includes(drafter), down, ...drafted(reports, drafter) };
        if (pair.bound || pair.drafts_per_s > 0) pairs.push(pair);
      }
    }
    return pairs;
  }
}

const served = ({ assignments }, id) => assignments.filter((each) => each.drafter === id).map((each) => each.verifier);

// A verifier's work within the window.
function flow(reports) {
  if (!reports.length) return { tokens: 0, tokens_per_s: 0, sequence_s: 0, busy_s: 0, idle_s: {}, drafts: 0, accepted: 0 };
  const [[began, old], [ended, now]] = [reports[0], reports.at(-1)];
  const tokens = grown(old.tokens, now.tokens);
  const counted = (name) => sum(Object.entries(now.drafters).map(([id, each]) => grown(old.drafters[id]?.[name] ?? 0, each[name])));
  return {
    tokens,
    tokens_per_s: ratio(tokens, ended - began) ?? 0,
    // Running sequences, integrated over time.
    sequence_s: sum(reports.slice(1).map(([at, each], index) => {
      const [before, earlier] = reports[index];
      return ((at - before) * (earlier.running + each.running)) / 2;
    })),
    busy_s: grown(old.busy_s, now.busy_s),
    idle_s: Object.fromEntries(Object.entries(now.idle_s).map(([cause, spent]) => [cause, grown(old.idle_s[cause] ?? 0, spent)])),
    drafts: counted("drafts"),
    accepted: counted("accepted_tokens"),
  };
}

function figures(flows) {
  const total = (name) => sum(flows.map((each) => each[name]));
  const [tokens, drafts, busy_s, idle] = [total("tokens"), total("drafts"), total("busy_s"), {}];
  for (const { idle_s } of flows) for (const [cause, spent] of Object.entries(idle_s)) idle[cause] = (idle[cause] ?? 0) + spent;
  // Relative to the counters' own time (busy + idle = wall), because they advance only with each step.
  const wall = busy_s + sum(Object.values(idle));
  return {
    tokens_per_s: total("tokens_per_s"),
    tgs: tokens ? ratio(tokens, total("sequence_s")) : null,
    acceptance_length: drafts ? 1 + total("accepted") / drafts : null,
    busy: ratio(busy_s, wall),
    idle: wall > 0 ? Object.fromEntries(Object.entries(idle).map(([cause, spent]) => [cause, spent / wall])) : {},
  };
}

function verifierRow(now, flow) {
  const nothing = { mode: null, running: 0, waiting: 0, kv_usage: 0, plan_k: 0, plan_outcomes: 0, plan_changes: 0 };
  const quiet = now.state === "lost" || now.busy_s === undefined;
  return { ...now, ...(quiet ? nothing : {}), ...figures([flow]), ...(quiet ? { tokens_per_s: null } : {}) };
}

function drafterRow(now, reports, verifiers) {
  const quiet = { sequences: 0, cache_usage: 0, busy: null, draft_tokens_per_s: null };
  if (!reports.length) return { ...now, verifiers, ...quiet };
  const [[began, old], [ended, latest]] = [reports[0], reports.at(-1)];
  const per_s = (name) => ratio(latest[name] - old[name], ended - began);
  const busy = per_s("busy_s");
  return { ...now, verifiers, busy: busy && Math.min(1, busy), draft_tokens_per_s: per_s("draft_tokens") };
}

function drafted(reports, drafter) {
  const now = reports.at(-1)?.[1].drafters[drafter];
  if (!now) return { acceptance_length: null, drafts_per_s: 0, rounds_per_s: 0, round_trip_ms: null, dropped_per_s: 0 };
  const since = (name) => now[name] - (reports[0][1].drafters[drafter]?.[name] ?? 0);
  const seconds = reports.at(-1)[0] - reports[0][0];
  return {
    acceptance_length: since("drafts") > 0 ? 1 + since("accepted_tokens") / since("drafts") : null,
    drafts_per_s: ratio(since("drafts"), seconds) ?? 0,
    rounds_per_s: ratio(since("rounds"), seconds) ?? 0,
    round_trip_ms: ratio(1000 * since("round_trip_s"), since("rounds")),
    dropped_per_s: ratio(since("dropped"), seconds) ?? 0,
  };
}

function totals(verifiers, flows, queued) {
  const added = (name) => sum(verifiers.map((each) => each[name]));
  const kv_usage = Math.max(0, ...verifiers.map((each) => each.kv_usage));
  return { running: added("running"), waiting: queued + added("waiting"), kv_usage, ...figures(flows) };
}

// What changed between two answers.
function changes(before, now) {
  const said = [];
  const say = (kind, text) => said.push({ kind, text });
  for (const [id, member] of now.members) {
    const known = before.members.get(id);
    if (!known) say("joined", `${id} joined, ${member.state}`);
    else if (known.incarnation !== member.incarnation) say("restarted", `${id} is another process now, ${member.state}`);
    else if (known.state !== member.state && member.state in STATES) say(member.state, `${id} ${STATES[member.state]}`);
  }
  for (const id of before.members.keys()) if (!now.members.has(id)) say("left", `${id} left the fleet`);
  for (const id of new Set([...before.assignments, ...now.assignments].map((each) => each.drafter))) {
    const [old, present] = [served(before, id), served(now, id)];
    const to = present.filter((each) => !old.includes(each)).join(", ");
    const away = old.filter((each) => !present.includes(each)).join(", ");
    if (to && away) say("moved", `${id} moved from ${away} to ${to}`);
    else if (to) say("assigned", `${id} serves ${to}`);
    else if (away) say("released", `${id} no longer serves ${away}`);
  }
  for (const { id, learning } of now.drafters) {
    const old = before.members.get(id)?.learning;
    if (!old || !learning || old.version === learning.version) continue;
    const share = Math.round(100 * old.live_acceptance);
    const known = old.live_acceptance === null ? "" : `; of version ${old.version}, ${share}% of drafts began right`;
    say("head", `${id} drafts with version ${learning.version}${known}`);
  }
  // Each gateway counts the sequences that it moved itself.
  for (const { kind, cause, verifier, sequences } of before.gateway === now.gateway ? now.moved : []) {
    const same = before.moved.find((each) => each.kind === kind && each.cause === cause && each.verifier === verifier);
    const count = sequences - (same?.sequences ?? 0);
    const many = count === 1 ? "1 sequence" : `${count} sequences`;
    const why = kind === "failover" ? "after a loss" : "on purpose";
    if (count) say(kind, `${many} moved to ${verifier} ${why} (${cause.replaceAll("_", " ")})`);
  }
  return said;
}

function newPlans(before, now) {
  const said = [];
  for (const verifier of now.verifiers) {
    const old = before.members.get(verifier.id);
    if (old?.incarnation !== verifier.incarnation || old.plan_changes === undefined || verifier.plan_changes === undefined) continue;
    const count = verifier.plan_changes - old.plan_changes;
    if (!count) continue;
    const [was, is] = [planWords(old), planWords(verifier)];
    const times = count > 1 ? ` (${count} changes)` : "";
    said.push(was === is ? `${verifier.id}: ${is} again, after ${count} changes` : `${verifier.id}: ${was} → ${is}${times}`);
  }
  return said;
}

// A verifier's plan in words: `K 8, 4 outcomes ahead`.
function planWords({ plan_k, plan_outcomes }) {
  if (!plan_k) return "drafters not asked";
  return plan_outcomes ? `K ${plan_k}, ${plan_outcomes} outcomes ahead` : `K ${plan_k}`;
}
