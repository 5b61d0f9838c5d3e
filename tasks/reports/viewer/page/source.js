/** Where the page gets its data: from the server that it came from, or out of the file that it stands in. */

const MOST_KEPT_CHARACTERS = 48e6; // of parts of texts, which are the only large thing that is not needed all the time
const ASKED_AGAIN_MILLISECONDS = 200;

/** Something could not be shown. It says what was expected, what was found and what to do. */
export class ViewError extends Error {
  constructor({ expected, found, remedy }) {
    super(`Expected ${expected}. Found ${found}. ${remedy}`);
    Object.assign(this, { expected, found, remedy });
  }
}

/** Chooses the source: a page with data in it needs no server. */
export function openSource(page = document) {
  const embedded = new Map();
  for (const script of page.querySelectorAll('script[type="application/octet-stream"][data-name]')) {
    embedded.set(script.dataset.name, script);
  }
  return new Source(embedded.size ? (name) => embeddedBytes(embedded, name) : fetchedBytes, embedded.size > 0);
}

/** Reads what stands below the page's address by name; answers are kept as long as they are few characters. */
export class Source {
  constructor(read, embedded) {
    this.read = read;
    this.embedded = embedded;
    this.kept = new Map();
    this.keptCharacters = 0;
  }

  /** Values of a JSON file, or null where there is none. `waited` hears of progress, until it is there. */
  async json(name, { signal, waited } = {}) {
    const bytes = await this.read(name, { signal, waited });
    return bytes && parsed(name, bytes);
  }

  /** Bytes of a file of columns, which must be so many. */
  async column(name, size, options) {
    const bytes = await this.read(name, options);
    if (bytes?.length === size) return bytes;
    throw new ViewError({
      expected: `${size} bytes in ${name}`,
      found: bytes ? `${bytes.length} bytes` : "nothing of that name",
      remedy: "Load the page again; if that does not help, open the records anew with assay view.",
    });
  }

  /** Texts and answers of some questions; the latest are kept. */
  async part(key, number, { asOf = "", ...options } = {}) {
    const name = `${key}/part/${number}.json${asOf}`;
    const found = this.kept.get(name) ?? (await this.readPart(name, options));
    this.kept.delete(name);
    this.kept.set(name, found); // the last is the one used last
    for (const [old, { length }] of this.kept) {
      if (this.keptCharacters <= MOST_KEPT_CHARACTERS || old === name) break;
      this.kept.delete(old);
      this.keptCharacters -= length;
    }
    return found.part;
  }

  async readPart(name, options) {
    const bytes = await this.read(name, options);
    if (!bytes) {
      throw new ViewError({
        expected: `questions and answers in ${name}`,
        found: "nothing of that name",
        remedy: "Load the page again; the records may have changed since.",
      });
    }
    if (!this.kept.has(name)) this.keptCharacters += bytes.length;
    return { part: parsed(name, bytes), length: bytes.length };
  }

  /** The server's search; in a file the page looks through the parts itself. Hears of questions as they are found. */
  async search(key, text, { parts, signal, found }) {
    if (!this.embedded) {
      const answer = await this.json(`${key}/search.json?text=${encodeURIComponent(text)}`, { signal });
      found([...answer.in_questions, ...answer.in_answers], answer.complete);
      return;
    }
    const wanted = text.toLowerCase();
    const hits = [];
    for (let number = 0; number < parts && !signal.aborted; number += 1) {
      const part = await this.part(key, number, { signal });
      part.questions.forEach((question, place) => {
        if ([...textsOf(question)].some((each) => each.toLowerCase().includes(wanted))) hits.push(part.first + place);
      });
    }
    if (!signal.aborted) found(hits, true);
  }
}

function* textsOf(question) {
  yield* [question.context, question.prompt, question.target ?? "", ...question.choices];
  for (const answers of question.answers) for (const answer of answers) yield answer.output;
}

function parsed(name, bytes) {
  try {
    return JSON.parse(new TextDecoder().decode(bytes));
  } catch (error) {
    throw new ViewError({
      expected: `JSON in ${name}`,
      found: String(error.message),
      remedy: "Open the records anew with assay view.",
    });
  }
}

async function fetchedBytes(name, { signal, waited } = {}) {
  for (;;) {
    let answer;
    try {
      answer = await fetch(new URL(name, document.baseURI), { signal });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ViewError({
        expected: "an answer from the server of this page",
        found: "none",
        remedy: "Is assay view still running? Start it again, and open the address that it prints.",
      });
    }
    if (answer.status === 404) return null;
    if (!answer.ok) {
      throw new ViewError({
        expected: `${name} from the server of this page`,
        found: `status ${answer.status}, ${reasonIn(await answer.text())}`,
        remedy: answer.status === 403 || answer.status === 401
          ? "Open the whole address that assay view printed, with its token."
          : "The terminal of assay view may say more.",
      });
    }
    if (answer.status !== 202) return new Uint8Array(await answer.arrayBuffer());
    waited?.(await answer.json());
    await new Promise((resolve) => setTimeout(resolve, ASKED_AGAIN_MILLISECONDS));
    signal?.throwIfAborted();
  }
}

/** The server's own words for what went wrong. */
function reasonIn(body) {
  try {
    return JSON.parse(body).error ?? body;
  } catch {
    return body.slice(0, 600) || "without a word";
  }
}

async function embeddedBytes(scripts, name) {
  const script = scripts.get(name);
  if (!script) return null;
  const packed = Uint8Array.from(atob(script.textContent.trim()), (letter) => letter.charCodeAt(0));
  const unpacked = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(unpacked).arrayBuffer());
}
