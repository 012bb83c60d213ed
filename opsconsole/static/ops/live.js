// Keeps [data-live] up to date: asks for its fragment, and puts each part that has changed in the place of the old one.
// The page is whole without this file; whoever has no scripts loads it again. A module, so that its names are its own.
const SECONDS = 1000;
const LONGEST_ANSWER = 8 * SECONDS;

const clock = (date) => `${date.toISOString().slice(11, 19)} UTC`;

class Live {
  constructor(place) {
    this.place = place;
    this.state = place.querySelector("[data-live-state]");
    this.button = place.querySelector("[data-live-pause]");
    this.every = Number(place.dataset.liveSeconds) || 10;
    this.etag = place.dataset.liveEtag || "";
    this.updatedAt = new Date();
    this.waiting = new Map(); // parts that are newer than what is shown, and whose place is in use
    this.isPaused = false;
    this.isOver = false;
    this.isStale = false;
    this.timer = 0;
    this.button.hidden = false;
    this.button.addEventListener("click", () => this.pause(!this.isPaused));
    document.addEventListener("visibilitychange", () => this.plan(0));
    place.addEventListener("focusout", () => setTimeout(() => this.settle(), 0));
    place.addEventListener("toggle", () => this.settle(), true);
    document.addEventListener("selectionchange", () => { if (this.waiting.size) this.settle(); });
    this.say(`Refreshes every ${this.every} s`);
    this.plan(this.every);
  }

  say(text) {
    if (this.state.textContent !== text) this.state.textContent = text;
  }

  // The next look in so many seconds; none while nobody can see it, or while it is paused, or once it is over.
  plan(seconds) {
    clearTimeout(this.timer);
    if (document.hidden || this.isPaused || this.isOver) return;
    this.timer = setTimeout(() => this.tick().finally(() => this.plan(this.every)), seconds * SECONDS);
  }

  pause(isPaused) {
    this.isPaused = isPaused;
    this.button.textContent = isPaused ? "Resume" : "Pause";
    if (isPaused) {
      clearTimeout(this.timer);
      this.say(`Paused; shown as of ${clock(this.updatedAt)}`);
    } else {
      this.say(`Refreshes every ${this.every} s`);
      this.plan(0);
    }
  }

  async tick() {
    let answer;
    let text = "";
    try {
      answer = await fetch(this.place.dataset.live, {
        headers: this.etag ? { "If-None-Match": this.etag } : {},
        cache: "no-store",
        redirect: "manual",
        signal: AbortSignal.timeout(LONGEST_ANSWER),
      });
      if (answer.ok) text = await answer.text();
    } catch {
      return this.fail("No answer; it is asked again.");
    }
    if (this.isPaused) return; // what came in the meantime is left for later, its tag as well
    if (answer.type === "opaqueredirect" || answer.status === 401) return this.end("You are signed out.", "Sign in");
    if (answer.status === 403) return this.end("You may no longer see this.", "Sign in as somebody else");
    if (answer.status === 304) return this.succeed();
    if (!answer.ok) return this.fail("The console answers with an error; it is asked again.");
    const fragment = new DOMParser().parseFromString(text, "text/html");
    const parts = fragment.querySelectorAll("[data-live-part]");
    if (parts.length === 0) return this.fail("Something else than the console answers; it is asked again.");
    for (const part of parts) this.waiting.set(part.dataset.livePart, part);
    this.etag = answer.headers.get("ETag") || "";
    this.settle();
    this.succeed();
  }

  succeed() {
    this.updatedAt = new Date();
    this.isStale = false;
    this.place.classList.remove("ops-stale");
    this.say(`Refreshes every ${this.every} s`);
  }

  fail(why) {
    if (this.isPaused) return;
    this.isStale = true;
    this.place.classList.add("ops-stale");
    this.say(`Not updated since ${clock(this.updatedAt)}. ${why}`);
  }

  end(why, what) {
    this.fail(why);
    this.isOver = true;
    this.button.hidden = true;
    const link = document.createElement("a");
    link.href = `${this.place.dataset.liveLogin}?next=${encodeURIComponent(location.pathname + location.search)}`;
    link.textContent = what;
    this.state.append(" ", link);
  }

  // Puts what has waited in its place, part by part. What somebody is at work on stays until they leave it.
  settle() {
    for (const [name, fresh] of this.waiting) {
      const old = document.querySelector(`[data-live-part="${CSS.escape(name)}"]`); // one stands above the page itself
      if (old !== null && isInUse(old)) continue;
      this.waiting.delete(name);
      if (old === null) continue;
      for (const one of old.querySelectorAll("details[data-live-keep]")) {
        const same = fresh.querySelector(`details[data-live-keep="${CSS.escape(one.dataset.liveKeep)}"]`);
        if (same !== null) same.open = one.open;
      }
      if (old.innerHTML !== fresh.innerHTML) old.replaceWith(fresh);
    }
  }
}

const isInUse = (part) => {
  const marked = getSelection();
  return part.contains(document.activeElement)
    || part.querySelector(".ops-more[open]") !== null
    || (marked.rangeCount > 0 && !marked.isCollapsed && marked.getRangeAt(0).intersectsNode(part));
};

for (const place of document.querySelectorAll("[data-live]")) new Live(place);
