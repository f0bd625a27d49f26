// The form: what the bundle can do, example prompts, and the settings of a run.

const EXAMPLES = [
  ["Function", 'def mean(data):\n    """Return the sample arithmetic mean of data.\n\n    >>> mean([1, 2, 3, 4, 4])\n    2.8\n\n    If ``data`` is empty, StatisticsError will be raised.\n    """'],
  ["Class", "class IncrementalDecoder(codecs.IncrementalDecoder):\n    def __init__(self, errors='strict'):"],
  ["Checks", 'def check_output(*popenargs, timeout=None, **kwargs):\n    """Run command with arguments and return its output.\n\n    If the exit code was non-zero it raises a CalledProcessError.\n    """'],
  ["Story", "The lighthouse keeper wrote every evening what he had seen of the sea. On the last page"],
];
const CHAT_EXAMPLES = [
  ["Explain", "Explain in three sentences how a hash table finds a key."],
  ["Rewrite", "Rewrite this in plain English: The party of the first part shall indemnify the party of the second part."],
  ["Code", "Write a Python function that merges two sorted lists."],
];

export const byId = (id) => document.getElementById(id);

/** Replace the text of an element. Texts of the server and of the model go through here or `textContent`, never as markup. */
export function setText(id, text) {
  byId(id).textContent = text;
}

/** A number for people; a dash for none. */
export function number(value, digits = 0) {
  if (value == null) return "–";
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

/** The controls of the page. */
export class Controls {
  constructor() {
    this.bundle = null;
    this.form = byId("controls");
    byId("drafter").addEventListener("change", () => this._showLookaheads());
    byId("compare").addEventListener("change", () => this._showOrder());
    byId("together").addEventListener("change", () => this._showOrder());
    byId("mode").addEventListener("change", () => this._showMode());
    byId("prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.form.requestSubmit();
    });
    this._showMode();
    this._showOrder();
  }

  get key() {
    return byId("api-key").value;
  }

  get compare() {
    return byId("compare").checked;
  }

  get together() {
    return this.compare && byId("together").checked;
  }

  /** Offer what the bundle can do (`/playground.json`). */
  show(bundle) {
    this.bundle = bundle;
    setText("fact-model", bundle.model);
    setText("fact-context", `${number(bundle.max_model_len)} tokens`);
    setText("fact-draft", `up to ${bundle.max_speculative_tokens} tokens`);
    byId("facts").hidden = false;
    byId("mode").hidden = !bundle.chat;
    byId("max-tokens").max = bundle.max_tokens;
    byId("drafter").replaceChildren(
      ...bundle.drafters.map(({ name, obstacle }) => {
        const option = new Option(obstacle ? `${name} (not here)` : name, name);
        option.disabled = obstacle !== null;
        option.title = obstacle ?? "";
        return option;
      }),
    );
    byId("drafter").value = bundle.default_drafter ?? bundle.drafters.find(({ obstacle }) => obstacle === null).name;
    this._showLookaheads();
  }

  /** Settings of a run, with drafts or plain. Fields left empty are not sent. */
  settings({ plain }) {
    const numberOf = (id) => (byId(id).value.trim() === "" ? undefined : Number(byId(id).value));
    const choice = byId("lookahead").value;
    const lookahead = choice === "auto" ? choice : Number(choice);
    const drafter = byId("drafter").value;
    return {
      model: this.bundle.model,
      chat: this._isChat,
      system: byId("system").value,
      prompt: byId("prompt").value,
      maxTokens: numberOf("max-tokens"),
      temperature: numberOf("temperature"),
      topP: numberOf("top-p"),
      seed: numberOf("seed"),
      drafter: plain ? "none" : drafter,
      lookahead: plain ? undefined : lookahead,
    };
  }

  setRunning(running) {
    byId("run").disabled = running;
    byId("stop").disabled = !running;
  }

  /** Ask for the key that the server wants. */
  askForKey() {
    byId("key-field").hidden = false;
    byId("api-key").focus();
  }

  get _isChat() {
    return this.form.elements.mode.value === "chat";
  }

  _showLookaheads() {
    const { bundle } = this;
    const drafter = bundle.drafters.find(({ name }) => name === byId("drafter").value);
    const choices = Array.from({ length: bundle.max_speculative_tokens }, (_, i) => String(i + 1));
    if (bundle.auto) choices.unshift("auto");
    byId("lookahead").replaceChildren(...choices.map((text) => new Option(text, text)));
    const isDefault = drafter.name === bundle.default_drafter;
    byId("lookahead").value = String(isDefault ? bundle.default_num_speculative_tokens : drafter.num_speculative_tokens);
  }

  _showMode() {
    const examples = this._isChat ? CHAT_EXAMPLES : EXAMPLES;
    byId("examples").replaceChildren(
      ...examples.map(([title, text]) => {
        const button = Object.assign(document.createElement("button"), { type: "button", textContent: title });
        button.addEventListener("click", () => {
          byId("prompt").value = text;
        });
        return button;
      }),
    );
    byId("prompt").value = examples[0][1];
    byId("system-field").hidden = !this._isChat;
    setText("prompt-label", this._isChat ? "Message" : "Prompt");
  }

  _showOrder() {
    byId("together").disabled = !this.compare;
    let note = "The plain run comes second, so that neither slows the other.";
    if (!this.compare) note = "Only the speculative run.";
    else if (this.together) note = "Both share the machine and the batch: neither speed is its own.";
    setText("order-note", note);
  }
}
