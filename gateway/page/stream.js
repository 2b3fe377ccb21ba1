// Reads `fleet/events` while the page is open.  Reconnects after a loss, and when a connection is silent.
// It uses `fetch`, because `EventSource` cannot send an Authorization header and hides the status of a refusal.

const SILENCE_MS = 8000;
const FIRST_RETRY_MS = 1000;
const LAST_RETRY_MS = 10000;
const KEY = "outrider-api-key";

// `on.view(data)`, `on.state(name, words)` with the names live, lost, denied.
export class FleetStream {
  constructor(on) {
    this.on = on;
    this.retryMs = FIRST_RETRY_MS;
    this.abort = null;
    this.timer = 0;
    this.running = false;
  }

  start() {
    if (this.running) return;
    this.running = true;
    this.retryMs = FIRST_RETRY_MS;
    this.connect();
  }

  stop() {
    this.running = false;
    clearTimeout(this.timer);
    this.abort?.abort();
  }

  useKey(key) {
    sessionStorage.setItem(KEY, key);
    this.stop();
    this.start();
  }

  async connect() {
    const abort = new AbortController();
    this.abort = abort;
    let watchdog = 0;
    const heard = () => {
      clearTimeout(watchdog);
      watchdog = setTimeout(() => abort.abort(), SILENCE_MS);
    };
    let words = "the gateway closed the connection";
    try {
      heard();
      const key = sessionStorage.getItem(KEY);
      const headers = key ? { authorization: `Bearer ${key}` } : {};
      const response = await fetch("fleet/events", { headers, signal: abort.signal, cache: "no-store" });
      if (response.status === 401) {
        sessionStorage.removeItem(KEY);
        this.running = false;
        this.on.state("denied", key ? "that key is wrong" : "");
        return;
      }
      if (!response.ok) throw new Error(`the gateway answers ${response.status}`);
      await this.read(response.body.pipeThrough(new TextDecoderStream()).getReader(), heard);
    } catch (error) {
      words = error.name === "AbortError" ? "no answer" : error.name === "TypeError" ? "no connection" : error.message;
    } finally {
      clearTimeout(watchdog);
    }
    // The stream was stopped, or another connection has replaced this one.
    if (!this.running || this.abort !== abort) return;
    this.on.state("lost", words);
    this.timer = setTimeout(() => this.connect(), this.retryMs);
    this.retryMs = Math.min(2 * this.retryMs, LAST_RETRY_MS);
  }

  async read(reader, heard) {
    let text = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      heard();
      text += value;
      const events = text.split("\n\n");
      text = events.pop();
      // Of several events that have come at once, only the latest is shown.
      const last = events.findLast((event) => event.startsWith("event: fleet\n"));
      if (last === undefined || !this.running) continue;
      const data = last.split("\n").find((line) => line.startsWith("data: "));
      this.retryMs = FIRST_RETRY_MS;
      this.on.state("live", "");
      this.on.view(JSON.parse(data.slice(6)));
    }
  }
}
