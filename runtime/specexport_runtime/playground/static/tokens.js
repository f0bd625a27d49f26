// The text of a run: one element a token, appended as tokens come and never rebuilt.

const ORIGIN = {
  accepted: (drafter) => `Accepted: drafted by ${drafter}, and the target agreed`,
  branch: (drafter) => `Accepted: a branch of ${drafter}’s draft, beside its chain`,
  corrected: () => "Corrected: the target’s token in place of a rejected draft",
  bonus: () => "Bonus: the target’s token after a draft that passed whole",
  target: () => "Target: no draft was tested",
};

const tip = document.getElementById("tip");
const info = document.getElementById("token-info");

/** Show what is said of an element, beside it. */
export function showTip(element, lines) {
  tip.replaceChildren(...lines.map((line) => Object.assign(document.createElement("div"), { textContent: line })));
  tip.hidden = false;
  const box = element.getClientRects()[0] ?? element.getBoundingClientRect();
  const size = tip.getBoundingClientRect();
  const left = Math.min(Math.max(8, box.left), document.documentElement.clientWidth - size.width - 8);
  const above = box.top - size.height - 8;
  tip.style.left = `${Math.max(left, 8)}px`;
  tip.style.top = `${above > 8 ? above : box.bottom + 8}px`;
}

export function hideTip() {
  tip.hidden = true;
}

/** What happened in a round, in words. */
export function describeRound(round, index) {
  const end = { corrected: ", then a correction", bonus: ", then the bonus", target: "", null: ", then the text ended" };
  const whose = round.drafter ? ` of ${round.drafter}` : "";
  const beside = round.branches ? `, ${round.branches} of them beside the chain` : "";
  const drafted = round.end === "target" ? "no draft" : `${round.accepted} accepted${whose}${beside}`;
  return `Round ${index + 1}: ${drafted}${end[round.end]}`;
}

/** The tokens of a run in a container that scrolls. */
export class TokenView {
  constructor(container, { onRound = () => {} } = {}) {
    this.container = container;
    this.onRound = onRound;
    this._begin(null);
    container.addEventListener("pointerover", (event) => this._enter(event.target));
    container.addEventListener("pointerleave", () => this.leave());
    container.addEventListener("focusin", (event) => this._enter(event.target, true));
    container.addEventListener("focusout", () => this.leave());
    container.addEventListener("scroll", () => this._scrolled(), { passive: true });
    container.addEventListener("keydown", (event) => this._key(event));
  }

  /** Begin anew, with the prompt before the text. */
  clear(run = null, prompt = "") {
    this._begin(run);
    this.container.replaceChildren();
    if (prompt) {
      const span = document.createElement("span");
      span.className = "prompt";
      span.textContent = prompt;
      this.container.append(span);
    }
  }

  _begin(run) {
    this.run = run;
    this.byRound = [];
    this.count = 0;
    this._hot = -1;
  }

  /** Append tokens; the view follows the end if it was there. */
  append(tokens) {
    const box = this.container;
    const atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 24;
    const fragment = document.createDocumentFragment();
    for (const { text, kind, drafter, branch, round } of tokens) {
      const span = document.createElement("span");
      span.className = branch ? `t ${kind} branch` : `t ${kind}`;
      span.textContent = text; // the model's text is never markup
      if (drafter) span.dataset.drafter = drafter;
      span.dataset.round = round;
      span.dataset.index = this.count++;
      (this.byRound[round] ??= []).push(span);
      fragment.append(span);
    }
    box.append(fragment);
    if (atEnd) box.scrollTop = box.scrollHeight;
  }

  /** Mark the tokens of a round; -1 marks none. */
  mark(round) {
    if (round === this._hot) return;
    for (const span of this.byRound[this._hot] ?? []) span.classList.remove("hot");
    for (const span of this.byRound[round] ?? []) span.classList.add("hot");
    this._hot = round;
  }

  /** Scroll to the tokens of a round. */
  reveal(round) {
    const top = this.byRound[round][0].offsetTop - this.container.offsetTop;
    this.container.scrollTop = top - this.container.clientHeight / 2;
  }

  leave() {
    hideTip();
    this.mark(-1);
    this.onRound(-1);
  }

  _enter(element, aloud = false) {
    if (!element.classList.contains("t") || !this.run) return;
    const kind = element.classList[2] === "branch" ? "branch" : element.classList[1];
    const round = Number(element.dataset.round);
    const lines = [ORIGIN[kind](element.dataset.drafter), `${describeRound(this.run.rounds[round], round)} · token ${Number(element.dataset.index) + 1}`];
    showTip(element, lines);
    if (aloud) info.textContent = `${element.textContent.trim() || "white space"}. ${lines.join(". ")}`;
    this.mark(round);
    this.onRound(round);
  }

  _scrolled() {
    const at = document.activeElement; // scrolled to by an arrow key
    if (at?.parentElement === this.container) this._enter(at);
    else hideTip();
  }

  _key(event) {
    const step = { ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling" }[event.key];
    if (event.key === "Escape") this.leave();
    if (!step) return;
    event.preventDefault();
    const current = event.target;
    let next = current === this.container ? this.container.querySelector(".t") : current[step];
    while (next && !next.textContent) next = next[step]; // a token may be part of a character
    if (!next?.classList.contains("t")) return;
    next.tabIndex = -1;
    next.focus({ preventScroll: true });
    next.scrollIntoView({ block: "nearest" });
  }
}
