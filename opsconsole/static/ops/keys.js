// Keys for who has no hand free for the mouse. Conveniences only: whatever a key does, a link or a button does too.
"use strict";

(() => {
  const help = document.getElementById("ops-keys");
  const menus = "details.ops-drop[open], details.ops-more[open], details.ops-phone[open]";

  // Single letters can be turned off, for who speaks to the computer or types with one finger (WCAG 2.1.4).
  const remembered = () => { try { return localStorage.getItem("ops-keys"); } catch { return null; } };
  let isOn = remembered() !== "off";
  const choice = document.querySelector("[data-keys-on]");
  if (choice !== null) {
    choice.checked = isOn;
    choice.addEventListener("change", () => {
      isOn = choice.checked;
      try { localStorage.setItem("ops-keys", isOn ? "on" : "off"); } catch { /* it lasts as long as the page */ }
    });
  }
  const openHelp = () => {
    if (help === null || help.open) return;
    // Only what works on this page is offered.
    for (const key of help.querySelectorAll("[data-needs]")) {
      key.hidden = key.nextElementSibling.hidden = document.querySelector(key.dataset.needs) === null;
    }
    help.showModal();
  };
  for (const button of document.querySelectorAll("[data-keys-open]")) button.addEventListener("click", openHelp);

  const isTyping = (target) => target.isContentEditable || target.matches("textarea, select")
    || (target.matches("input") && !["checkbox", "radio", "button", "submit", "reset"].includes(target.type));

  // A row is a line of a table that leads somewhere or can be selected; a page may mark other things as rows.
  const row = "main tbody tr, main [data-row], main .ops-jobs > li";
  const rows = () => [...document.querySelectorAll(row)]
    .filter((one) => one.offsetParent !== null && handle(one) !== null);
  const handle = (one) => one.querySelector("th a[href]") ?? one.querySelector("a[href]")
    ?? one.querySelector("input:not([type=hidden]), button");
  let last = null; // the row that was left for a field or a button is where one goes on

  document.addEventListener("focusin", (event) => {
    last = event.target.closest(row) ?? last;
  });

  const current = () => document.activeElement.closest(row) ?? (last?.isConnected ? last : null);

  const move = (step) => {
    const all = rows();
    const place = all.indexOf(current());
    const next = place < 0 ? (step > 0 ? 0 : all.length - 1) : Math.min(Math.max(place + step, 0), all.length - 1);
    if (all.length === 0) return;
    handle(all[next]).focus({ focusVisible: true });
    all[next].scrollIntoView({ block: "nearest" });
  };

  const select = () => {
    const box = current()?.querySelector("input[type=checkbox]");
    if (box) box.click();
  };

  const bar = () => [...document.querySelectorAll(".ops-bulk .button, .ops-bar .button, .submit-row .button")]
    .find((button) => button.offsetParent !== null);

  const letters = {
    "/": () => document.querySelector("[data-search]")?.focus(),
    j: () => move(1),
    k: () => move(-1),
    x: select,
    b: () => bar()?.focus({ focusVisible: true }),
    "?": openHelp,
  };

  const closeMenus = (except) => {
    for (const menu of document.querySelectorAll(menus)) if (!menu.contains(except)) menu.open = false;
  };

  document.addEventListener("keydown", (event) => {
    if (event.defaultPrevented || event.isComposing || event.ctrlKey || event.altKey || event.metaKey) return;
    if (event.key === "Escape") {
      const open = [...document.querySelectorAll(menus)].at(-1);
      if (open && !help?.open) {
        open.open = false;
        open.querySelector("summary").focus();
      } else if (isTyping(event.target)) {
        event.target.blur();
      }
    } else if (event.key === "Enter" && event.target.matches("table input[type=checkbox]")) {
      // Enter in a checkbox would press the form's first button. Here it opens the row, as everywhere in it.
      event.preventDefault();
      event.target.closest("tbody tr")?.querySelector("th a[href], a[href]")?.click();
    } else if (isOn && !help?.open && !isTyping(event.target) && Object.hasOwn(letters, event.key)) {
      event.preventDefault();
      letters[event.key]();
    }
  });

  document.addEventListener("click", (event) => closeMenus(event.target));
  document.addEventListener("focusin", (event) => closeMenus(event.target));
})();
