// A chart of a run: one column a round, one cell a token. Columns are appended and only the last one is redrawn.

import { describeRound, hideTip, showTip } from "./tokens.js";

const SVG = "http://www.w3.org/2000/svg";
const STEP = 11; // pixels from cell to cell
const CELL = 9;

/** The chart in its scrolling container. */
export class RoundChart {
  constructor(container, { onRound = () => {}, onPick = () => {} } = {}) {
    this.container = container;
    this.onRound = onRound;
    this.svg = element("svg", { class: "cells" });
    container.replaceChildren(this.svg);
    this.clear(null, 4);
    this.svg.addEventListener("pointerover", (event) => this._enter(event.target.closest("g")));
    this.svg.addEventListener("pointerleave", () => this._leave());
    this.svg.addEventListener("click", (event) => {
      const group = event.target.closest("g");
      if (group) onPick(Number(group.dataset.round));
    });
    container.addEventListener("scroll", hideTip, { passive: true });
  }

  /** Begin anew. `lookahead` draft tokens fit at first; the chart grows with what comes. */
  clear(run, lookahead) {
    this.run = run;
    this.columns = [];
    this._drawn = 0; // rounds that will not change any more
    this._hot = -1;
    this.rows = lookahead + 1;
    this.svg.replaceChildren();
    this._resize();
  }

  /** Draw the rounds that are new or have grown. */
  update() {
    const { rounds } = this.run;
    const box = this.container;
    const atEnd = box.scrollWidth - box.scrollLeft - box.clientWidth < 24;
    for (let i = this._drawn; i < rounds.length; i += 1) {
      this.columns[i]?.remove();
      this.columns[i] = this._column(rounds[i], i);
      this.svg.append(this.columns[i]);
      if (rounds[i].end) this._drawn = i + 1;
      this.rows = Math.max(this.rows, rounds[i].accepted + 1);
    }
    this._resize();
    if (atEnd) box.scrollLeft = box.scrollWidth;
  }

  /** Say in words what the chart shows. */
  describe() {
    const lengths = this.run.rounds.map((round) => round.accepted + (round.end ? 1 : 0));
    this.container.setAttribute("aria-label", `${lengths.length} rounds; tokens of each: ${lengths.join(", ")}`);
  }

  /** Mark a column; -1 marks none. */
  mark(round) {
    if (round === this._hot) return;
    this.columns[this._hot]?.classList.remove("hot");
    this.columns[round]?.classList.add("hot");
    this._hot = round;
  }

  // The rows go up from y = 0, so that no column moves when the chart grows.
  _resize() {
    const width = Math.max(this.run?.rounds.length ?? 0, 1) * STEP + 2;
    const height = this.rows * STEP + 4;
    this.svg.setAttribute("viewBox", `-1 ${2 - height} ${width} ${height}`);
    this.svg.setAttribute("width", width);
    this.svg.setAttribute("height", height);
  }

  _column(round, index) {
    const group = element("g", { "data-round": index });
    const x = index * STEP;
    const cells = round.accepted + (round.end ? 1 : 0);
    group.append(element("rect", { class: "hit", x: x - 1, y: -this.rows * STEP - 1, width: STEP, height: this.rows * STEP + 2 }));
    for (let i = 0; i < round.accepted; i += 1) {
      const own = i < round.accepted - round.branches; // those of branches come last
      group.append(element("rect", { class: own ? "accepted" : "accepted branch", x, y: -(i + 1) * STEP + 1, width: CELL, height: CELL, rx: 2 }));
    }
    if (round.end) group.append(topCell(round.end, x, -cells * STEP + 1));
    return group;
  }

  _enter(group) {
    if (!group) return;
    const round = Number(group.dataset.round);
    showTip(group.lastElementChild, [describeRound(this.run.rounds[round], round)]);
    this.mark(round);
    this.onRound(round);
  }

  _leave() {
    hideTip();
    this.mark(-1);
    this.onRound(-1);
  }
}

// Shapes differ, not only colours.
function topCell(kind, x, y) {
  if (kind === "bonus") return element("circle", { class: kind, cx: x + CELL / 2, cy: y + CELL / 2, r: CELL / 2 });
  if (kind === "target") return element("rect", { class: kind, x: x + 1, y: y + 1, width: CELL - 2, height: CELL - 2, rx: 2 });
  const [a, b, c, d] = [x + 1, y + 1, x + CELL - 1, y + CELL - 1];
  return element("path", { class: kind, d: `M${a} ${b} ${c} ${d}M${c} ${b} ${a} ${d}` });
}

function element(name, attributes) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  return node;
}
