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
