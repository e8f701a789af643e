// Follows a fleet: takes the page anew every two seconds, and replaces what has changed of it.
const parts = (page) => [...page.body.children].filter((part) => !["SCRIPT", "NOSCRIPT"].includes(part.tagName));
const look = "details, .wide, .plot";
let last = parts(document).map((part) => part.outerHTML), since = null;

function replace(old, fresh) {
  const kept = [...old.querySelectorAll(look)], focus = kept.indexOf(document.activeElement);
  [...fresh.querySelectorAll(look)].forEach((made, place) => {
    if (kept[place] && kept[place].open) made.open = true;
  });
  old.replaceWith(fresh);
  prepareFigures(fresh);
  const made = [...fresh.querySelectorAll(look)];
  made.forEach((each, place) => {
    if (kept[place]) each.scrollLeft = kept[place].dataset.left || 0;
  });
  if (focus >= 0 && made[focus]) made[focus].focus({ preventScroll: true });
}

function take(text) {
  const fresh = parts(new DOMParser().parseFromString(text, "text/html"));
  const next = fresh.map((part) => part.outerHTML), here = parts(document);
  if (next.length !== here.length || fresh.some((part, place) => part.tagName !== here[place].tagName)) {
    here.forEach((part) => part.remove());
    document.body.prepend(...fresh);
    prepareFigures(document);
  } else {
    fresh.forEach((part, place) => next[place] !== last[place] && replace(here[place], part));
  }
  last = next;
}

async function follow() {
  const said = document.getElementById("live");
  try {
    const answer = await fetch(location.href, { cache: "no-store" });
    if (!answer.ok) throw new Error(answer.status);
    take(await answer.text());
    since = null;
    if (said) said.textContent = "";
  } catch {
    since = since || new Date();
    if (said) said.textContent = `No answer since ${since.toLocaleTimeString()}: is the page still served?`;
  }
  setTimeout(follow, 2000);
}

document.addEventListener("scroll", (event) => {
  if (event.target.dataset) event.target.dataset.left = event.target.scrollLeft;
}, true);
setTimeout(follow, 2000);
