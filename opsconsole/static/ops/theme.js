// The colours: those of the reader's system until they choose others. Runs before the page is painted.
"use strict";

(() => {
  const root = document.documentElement;
  const themes = ["auto", "light", "dark"];
  // Storage may be refused; the choice then lasts as long as the page.
  const stored = () => { try { return localStorage.getItem("ops-theme"); } catch { return null; } };
  const store = (theme) => { try { localStorage.setItem("ops-theme", theme); } catch { /* as above */ } };

  root.classList.add("ops-js");
  root.dataset.theme = themes.includes(stored()) ? stored() : "auto";

  const label = (button) => {
    const next = themes[(themes.indexOf(root.dataset.theme) + 1) % themes.length];
    button.setAttribute("aria-label", `Colours: ${root.dataset.theme}. Change to ${next}`);
    button.title = `Colours: ${root.dataset.theme}`;
    button.dataset.next = next;
  };

  document.addEventListener("DOMContentLoaded", () => {
    for (const button of document.querySelectorAll("[data-theme-toggle]")) {
      button.hidden = false;
      label(button);
      button.addEventListener("click", () => {
        root.dataset.theme = button.dataset.next;
        store(root.dataset.theme);
        label(button);
      });
    }
  });

  // Another tab has chosen.
  window.addEventListener("storage", (event) => {
    if (event.key !== "ops-theme" || !themes.includes(event.newValue)) return;
    root.dataset.theme = event.newValue;
    document.querySelectorAll("[data-theme-toggle]").forEach(label);
  });
})();
