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

// A page that waits for results puts its own newest content in the place of the old, unless somebody is at work on it.
// What was said once stands above the content and stays; so does the place to which the page was scrolled.
const isInUse = (content) => {
  const marked = getSelection();
  return content.querySelector(":focus-visible, .ops-more[open]") !== null
    || (!marked.isCollapsed && content.contains(marked.anchorNode));
};

const renew = async () => {
  const content = document.querySelector("[data-renew]");
  if (document.hidden || isInUse(content)) return;
  const answer = await fetch(location.href);
  if (answer.redirected || (answer.status >= 400 && answer.status < 500)) {
    location.reload(); // signed out, or no longer theirs: the page says so itself
  } else if (answer.ok) {
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    const fresh = page.getElementById("content");
    const opened = [...content.querySelectorAll("details")].map((one) => one.open);
    fresh.querySelectorAll("details").forEach((one, place) => { one.open = opened[place] ?? one.open; });
    if (!isInUse(content)) content.replaceWith(fresh);
  }
};

const renewInTime = () => {
  const content = document.querySelector("[data-renew]");
  if (content === null) return;
  // A server that is away for a moment is asked again the next time.
  setTimeout(() => renew().catch(() => {}).then(renewInTime), content.dataset.renew * 1000);
};

renewInTime();
