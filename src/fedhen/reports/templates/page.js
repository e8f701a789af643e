// Shows the values under the pointer, a finger or the arrow keys. The same values are in the tables below the plots.
"use strict";

function element(name, parent, text) {
  const made = parent.appendChild(document.createElementNS(parent.namespaceURI, name));
  if (text) made.textContent = text;
  return made;
}

function prepare(plot, body) {
  const svg = plot.querySelector("svg"), width = svg.viewBox.baseVal.width;
  const frame = svg.querySelector(".frame").getBBox(), rows = [...body.rows].slice(1);
  const curves = [...svg.querySelectorAll(".curve")].map((group) => ({
    column: +group.dataset.column,
    style: group.getAttribute("style"),
    points: new Map(group.dataset.rows.split(" ").filter(Boolean).map((row, place) =>
      [+row, group.querySelector(".line").getAttribute("points").split(" ")[place].split(",").map(Number)])),
  })).sort((a, b) => a.column - b.column);
  if (!rows.length) return;
  const heads = body.parentNode.tHead.rows[0].cells;
  const cursor = element("path", svg), dots = element("g", svg), tip = element("div", plot);
  cursor.setAttribute("class", "cursor");
  tip.className = "tip";
  plot.tabIndex = 0;
  let now = -1;

  function hide() {
    now = -1;
    tip.hidden = true;
    cursor.removeAttribute("d");
    dots.replaceChildren();
  }

  function show(row, near) {
    const there = curves.filter((curve) => curve.points.has(row));
    const x = near === undefined ? there[0].points.get(row)[0] : near;
    now = row;
    cursor.setAttribute("d", `M${x} ${frame.y}V${frame.y + frame.height}`);
    dots.replaceChildren();
    tip.replaceChildren();
    tip.hidden = false;
    tip.style.left = 0;
    element("b", tip, `${heads[0].textContent} ${rows[row].cells[0].textContent}`);
    for (const curve of there) {
      const [cx, cy] = curve.points.get(row), dot = element("circle", dots), line = element("span", tip);
      for (const [key, value] of Object.entries({ cx, cy, r: 4.5, style: curve.style })) dot.setAttribute(key, value);
      element("i", line).setAttribute("style", curve.style);
      element("span", line, heads[curve.column].textContent);
      element("b", line, rows[row].cells[curve.column].textContent);
    }
    const room = plot.clientWidth, middle = (x / width) * room, own = tip.offsetWidth;
    const left = x > width / 2 ? middle - own - 12 : middle + 12;
    tip.style.left = `${Math.max(0, Math.min(left, room - own))}px`;
    // A tall one goes below the plot, where it hides no curve.
    tip.style.top = tip.offsetHeight > plot.clientHeight / 2 ? "100%" : "";
  }

  function point(event) {
    const box = svg.getBoundingClientRect(), at = ((event.clientX - box.left) / box.width) * width;
    let best = [Infinity];
    for (const curve of curves) {
      for (const [row, [x]] of curve.points) if (Math.abs(x - at) < best[0]) best = [Math.abs(x - at), row, x];
    }
    show(best[1], best[2]);
  }

  function press(event) {
    const last = rows.length - 1, here = now < 0 ? last : now;
    const to = { ArrowLeft: here - 1, ArrowRight: here + 1, Home: 0, End: last }[event.key];
    if (event.key === "Escape") hide();
    if (to === undefined) return;
    event.preventDefault();
    show(Math.min(last, Math.max(0, to)));
  }

  hide();
  plot.addEventListener("pointerdown", point);
  plot.addEventListener("pointermove", point);
  plot.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && hide());
  plot.addEventListener("focus", () => plot.matches(":focus-visible") && show(rows.length - 1));
  plot.addEventListener("blur", hide);
  plot.addEventListener("keydown", press);
}

function prepareFigures(within) {
  for (const figure of within.matches?.("figure") ? [within] : within.querySelectorAll("figure")) {
    const bodies = figure.querySelectorAll("details tbody");
    figure.querySelectorAll(".plot").forEach((plot, place) => prepare(plot, bodies[place]));
  }
}

prepareFigures(document);
