// What a list adds with scripts on: how many rows are selected, and word of newer ones. No row ever moves by itself.
"use strict";

(() => {
  const form = document.getElementById("changelist-form");
  if (form !== null) {
    const boxes = () => [...form.querySelectorAll("input[name=_selected_action]")];
    const all = form.querySelector("[data-selects]");
    const said = form.querySelector("[data-selected-count]");
    const clear = form.querySelector("[data-clear-selection]");
    const direct = [...form.querySelectorAll("[data-counts]")].map((button) => [button, button.textContent]);
    const count = () => {
      const chosen = boxes().filter((box) => box.checked).length;
      const text = chosen === 0 ? "" : `${chosen} of ${boxes().length} selected`;
      if (said.textContent !== text) said.textContent = text;
      clear.hidden = chosen === 0;
      for (const [button, label] of direct) button.textContent = chosen === 0 ? label : `${label} ${chosen}`;
      all.checked = chosen === boxes().length;
      all.indeterminate = chosen > 0 && !all.checked;
    };
    form.addEventListener("change", count);
    form.addEventListener("reset", () => setTimeout(count));
    window.addEventListener("pageshow", count); // a page that comes back keeps its boxes
  }

  const offer = document.querySelector("[data-newer-url]");
  if (offer === null) return;
  const every = 15_000;
  let tag = "";

  const ask = async () => {
    if (document.hidden) return true;
    const answer = await fetch(offer.dataset.newerUrl, { headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store" });
    if (answer.redirected || (answer.status >= 400 && answer.status < 500)) return false; // signed out, or not theirs
    if (answer.status !== 200) return true;
    tag = answer.headers.get("ETag") ?? "";
    const { newer } = await answer.json();
    offer.hidden = !newer;
    if (newer) offer.textContent = `${newer} new, refresh`;
    return true;
  };

  const askInTime = () => setTimeout(
    () => ask().catch(() => true).then((goesOn) => { if (goesOn) askInTime(); }), every);
  // A tab that is looked at again asks at once.
  document.addEventListener("visibilitychange", () => { if (!document.hidden) ask().catch(() => {}); });
  askInTime();
})();
