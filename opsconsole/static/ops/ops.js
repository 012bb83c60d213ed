// Conveniences only: every page works without this file.
"use strict";

// One box selects every row of the page.
for (const box of document.querySelectorAll("input[data-selects]")) {
  box.addEventListener("change", () => {
    for (const row of document.querySelectorAll(`input[name="${box.dataset.selects}"]`)) row.checked = box.checked;
  });
}

// A second click sends nothing. The server would repeat nothing either: the form carries its key.
for (const form of document.querySelectorAll("form[data-once]")) {
  form.addEventListener("submit", (event) => {
    if (form.dataset.sent) event.preventDefault();
    form.dataset.sent = "yes";
  });
}

// A page that comes back from the browser's memory may be sent again; its key makes that a replay.
window.addEventListener("pageshow", () => {
  for (const form of document.querySelectorAll("form[data-once]")) delete form.dataset.sent;
});

// What is to be copied stands in the page, in the element that the button names.
const offerCopies = (place) => {
  for (const button of place.querySelectorAll("[data-copy]")) {
    const source = document.getElementById(button.dataset.copy);
    if (source === null || !navigator.clipboard) continue; // a browser copies only over https, and on this very machine
    button.hidden = false;
    const label = button.textContent;
    button.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(source.value ?? source.textContent);
        button.textContent = "Copied";
      } catch {
        getSelection().selectAllChildren(source);
        button.textContent = "Selected: copy it with Ctrl+C";
      }
      setTimeout(() => { button.textContent = label; }, 3_000);
    });
  }
};
offerCopies(document);

// Every time on a page is UTC; this says what that is where the reader sits.
const tellTime = () => {
  const now = new Date();
  const local = now.toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" });
  const utc = now.toISOString().slice(11, 16);
  for (const clock of document.querySelectorAll("[data-clock]")) {
    clock.hidden = false;
    clock.textContent = local === utc ? `${utc} UTC` : `${utc} UTC · ${local} here`;
  }
};
tellTime();
setInterval(tellTime, 10_000);

// A page that waits for results puts its own newest content in the place of the old, unless somebody is at work on it.
// What was said once stands above the content until its state is another one; the place that was scrolled to stays.
const isInUse = (content) => {
  const marked = getSelection();
  return content.querySelector(":focus-visible, .ops-more[open], .ops-drop[open], dialog[open]") !== null
    || (!marked.isCollapsed && content.contains(marked.anchorNode));
};

const standing = (content) => [...content.querySelectorAll(".ops-kicker .ops-pill")].map((one) => one.textContent).join();

// Folds by what they say but for numbers, as their place changes: one that is gone or new must not open another one.
const folds = (content) => {
  const seen = new Map();
  return [...content.querySelectorAll("details")].map((one) => {
    const said = one.querySelector("summary").textContent.replace(/[\d,]+/g, "#").trim();
    seen.set(said, (seen.get(said) ?? 0) + 1);
    return [`${said} ${seen.get(said)}`, one];
  });
};

const renew = async () => {
  const content = document.querySelector("[data-renew]");
  if (document.hidden || isInUse(content)) return;
  const answer = await fetch(location.href);
  if (answer.redirected || (answer.status >= 400 && answer.status < 500)) {
    location.reload(); // signed out, or no longer theirs: the page says so itself
  } else if (!answer.ok) {
    throw new Error(`the console answers ${answer.status}`);
  } else {
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    const fresh = page.getElementById("content");
    const opened = new Map(folds(content).map(([name, one]) => [name, one.open]));
    for (const [name, one] of folds(fresh)) one.open = opened.get(name) ?? one.open;
    if (isInUse(content)) return;
    const isOver = fresh.dataset.renew === undefined || standing(fresh) !== standing(content);
    if (isOver) document.querySelector(".messagelist")?.remove();
    content.replaceWith(fresh);
    offerCopies(fresh);
  }
};

// What could not be renewed says so, and since when; the server is asked again the next time.
const say = (isStale) => {
  const note = document.querySelector("[data-renew-note]");
  if (note === null || note.classList.contains("ops-stale-note") === isStale) return;
  note.classList.toggle("ops-stale-note", isStale);
  if (isStale) {
    note.dataset.fresh = note.textContent;
    note.textContent = `Not renewed since ${new Date().toISOString().slice(11, 19)} UTC: the console does not answer.`;
  } else {
    note.textContent = note.dataset.fresh;
  }
};

const renewInTime = () => {
  const content = document.querySelector("[data-renew]");
  if (content === null) return;
  setTimeout(() => renew().then(() => say(false), () => say(true)).then(renewInTime), content.dataset.renew * 1000);
};

renewInTime();
