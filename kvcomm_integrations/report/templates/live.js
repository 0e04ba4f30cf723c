"use strict";
const main = document.getElementById("panels");
const state = document.getElementById("state");
const button = document.getElementById("pause");
const base = location.pathname.replace(/\/$/, "");
let paused = false;

button.addEventListener("click", () => {
  paused = !paused;
  button.setAttribute("aria-pressed", String(paused));
  button.textContent = paused ? "Go on" : "Pause";
});

async function refresh() {
  if (!paused && !main.contains(document.activeElement)) {
    try {
      const answer = await fetch(base + "/panels", { cache: "no-store" });
      if (!answer.ok) throw new Error("status " + answer.status);
      const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
      const open = new Set([...main.querySelectorAll("details[open][id]")].map((element) => element.id));
      for (const element of fresh.querySelectorAll("details[id]")) {
        if (document.getElementById(element.id)) element.open = open.has(element.id);
      }
      const line = fresh.getElementById("state-line");
      if (line.textContent !== state.textContent) {
        main.replaceChildren(...fresh.getElementById("panels-now").childNodes);
        state.textContent = line.textContent;
      }
    } catch (error) {
      state.textContent = "The engine does not answer (" + error.message + "); trying again.";
    }
  }
  setTimeout(refresh, 2000);
}
setTimeout(refresh, 2000);
