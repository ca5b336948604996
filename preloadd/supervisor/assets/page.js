// Fetches the page again and carries over what differs, so that focus, selection and scrolling stay.
(() => {
  "use strict";
  const EVERY_MS = 2000, PATIENCE_MS = 5000;
  const main = document.getElementById("main");
  const icon = document.querySelector("link[rel=icon]");
  const lost = document.getElementById("lost");
  let seen = Date.now();

  function same(a, b) {
    return a.nodeType === b.nodeType && a.nodeName === b.nodeName && (a.id || "") === (b.id || "");
  }

  function patch(old, next) {
    if (old.nodeType === Node.TEXT_NODE) {
      if (old.data !== next.data) old.data = next.data;
      return;
    }
    for (const {name} of [...old.attributes]) {
      if (!next.hasAttribute(name)) old.removeAttribute(name);
    }
    for (const {name, value} of next.attributes) {
      if (old.getAttribute(name) !== value) old.setAttribute(name, value);
    }
    const wanted = [...next.childNodes];
    wanted.forEach((child, index) => {
      const there = old.childNodes[index];
      if (!there) old.append(child);
      else if (same(there, child)) patch(there, child);
      else there.replaceWith(child);
    });
    while (old.childNodes.length > wanted.length) old.lastChild.remove();
  }

  function show(text) {
    const next = new DOMParser().parseFromString(text, "text/html");
    patch(main, next.getElementById("main"));
    icon.href = next.querySelector("link[rel=icon]").href;
    document.title = next.title;
  }

  function complain() {
    const seconds = Math.round((Date.now() - seen) / 1000);
    lost.textContent = `The supervisor does not answer; this is what it told ${seconds} s ago.`;
    lost.hidden = false;
    main.className = "stale";
  }

  async function refresh() {
    if (!document.hidden) {
      try {
        const answer = await fetch("/?bare=1", {cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS)});
        if (!answer.ok) throw new Error(answer.statusText);
        show(await answer.text());
        seen = Date.now();
      } catch {
        complain();
      }
    }
    setTimeout(refresh, EVERY_MS);
  }

  setTimeout(refresh, EVERY_MS);
})();
