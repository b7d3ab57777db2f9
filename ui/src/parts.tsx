// Small parts that several pages use.
import { signal } from "@preact/signals";
import type { ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { ApiError, type Run, follow } from "./api";
import { duration, glyph, json, ms } from "./format";
import { runLink } from "./place";

// The word for what a run is doing: a running one may wait, sleep or retry.
export function wordOf(run: Pick<Run, "status" | "doing">): string {
  const isOpen = run.status === "Running" && run.doing && run.doing !== "ended";
  return isOpen ? run.doing! : run.status.toLowerCase();
}

export function Status({ run }: { run: Pick<Run, "status" | "doing"> }) {
  const word = wordOf(run);
  return (
    <span class={`status ${word}`}>
      <span aria-hidden="true">{glyph(word)}</span> {word}
    </span>
  );
}

export function RunLink({ id, children }: { id: string; children?: ComponentChildren }) {
  return (
    <a class="id" href={runLink(id)}>
      {children ?? id}
    </a>
  );
}

export function Json({ value }: { value: unknown }) {
  const cut = typeof value === "string" ? /\(([\d,]+ bytes in all)\)$/.exec(value) : null;
  const text = cut ? String(value) : json(value, 2);
  const isLong = text.length > 4000;
  const [whole, setWhole] = useState(false);
  return (
    <div class="json">
      <pre tabIndex={0}>{isLong && !whole ? `${text.slice(0, 4000)}…` : text}</pre>
      <div class="tools">
        {cut && <span class="dim">{cut[1]}</span>}
        <Copy text={text} />
        {isLong && !whole && <button onClick={() => setWhole(true)}>show all</button>}
      </div>
    </div>
  );
}

export function Copy({ text, label = "copy" }: { text: string; label?: string }) {
  const [done, setDone] = useState(false);
  const copy = async () => {
    await navigator.clipboard?.writeText(text);
    setDone(true);
    setTimeout(() => setDone(false), 1500);
  };
  return (
    <button class="quiet" onClick={copy}>
      {done ? "copied" : label}
    </button>
  );
}

// A value that is read from the API, again whenever the store says that it has changed.
export function useRead<T>(load: () => Promise<T>, keys: unknown[], topic = "counts", id: string | null = null) {
  const [value, setValue] = useState<T | null>(null);
  const [error, setError] = useState<ApiError | null>(null);
  const serial = useRef(0);
  const again = async () => {
    const mine = ++serial.current;
    try {
      const found = await load();
      if (mine === serial.current) {
        setValue(found);
        setError(null);
      }
    } catch (caught) {
      if (mine === serial.current && caught instanceof ApiError) setError(caught);
    }
  };
  useEffect(() => {
    void again();
  }, keys);
  const latest = useRef(again);
  latest.current = again;
  useEffect(() => {
    if (topic === "") return;
    return follow(id, (change) => {
      if (change.topics.includes(topic)) void latest.current();
    });
  }, [topic, id]);
  return { value, error, again };
}

// The time, once a second, for countdowns.
export const second = signal(Date.now());
setInterval(() => {
  if (!document.hidden) second.value = Date.now();
}, 1000);

// A narrow window has the time of a step below its text.
const narrow = matchMedia("(max-width: 760px)");
export const isNarrow = signal(narrow.matches);
narrow.addEventListener("change", () => (isNarrow.value = narrow.matches));

// A sentence of the server whose time to the next event goes on counting down.
export function Sentence({ text, due }: { text: string; due: string | null | undefined }) {
  const left = ms(due) - second.value;
  const live = due && left > 0 ? text.replace(/\b(in) \d+\w+( \d+\w+)?/, `$1 ${duration(Math.round(left / 1000) * 1000)}`) : text;
  return <span>{live}</span>;
}

export function Problem({ error }: { error: ApiError | null }) {
  if (!error) return null;
  return (
    <div class="problem" role="alert">
      <p>{error.message}</p>
      {error.near.length > 0 && (
        <p>
          Do you mean {error.near.map((id, i) => [i > 0 && ", ", <RunLink id={id} />])}?
        </p>
      )}
    </div>
  );
}

export function Loading() {
  return <p class="dim">Reading…</p>;
}

// --- a dialog for one action, which shows its command and Python forms

// `progress` says how far it is, and returns whether to go on.
export type Progress = (done: number, total: number) => boolean;

export interface Question {
  title: string;
  body: ComponentChildren;
  button: string;
  danger?: boolean;
  command: string;
  python: string;
  typed?: string;
  act: (progress: Progress) => Promise<string | { said: string; errors: [string, string][] }>;
}

const asked = signal<Question | null>(null);
export const said = signal<{ text: string; bad: boolean } | null>(null);

export function ask(what: Question): void {
  asked.value = what;
}

// A question does not outlive the view that asked it.
addEventListener("popstate", () => (asked.value = null));

// Say what was done for some seconds, or what went wrong until it is closed.
export function say(text: string, bad = false): void {
  said.value = { text, bad };
  if (bad) return;
  setTimeout(() => {
    if (said.value?.text === text) said.value = null;
  }, 8000);
}

export function Dialog() {
  const what = asked.value;
  const box = useRef<HTMLDialogElement>(null);
  const stopped = useRef(false);
  const [typed, setTyped] = useState("");
  const [busy, setBusy] = useState(false);
  const [far, setFar] = useState<[number, number] | null>(null);
  const [errors, setErrors] = useState<[string, string][]>([]);
  useEffect(() => {
    setTyped("");
    setBusy(false);
    setFar(null);
    setErrors([]);
    stopped.current = false;
    if (what && !box.current?.open) box.current?.showModal();
  }, [what]);
  if (!what) return null;
  const act = async () => {
    setBusy(true);
    try {
      const answer = await what.act((done, total) => {
        setFar([done, total]);
        return !stopped.current;
      });
      const { said, errors: found } = typeof answer === "string" ? { said: answer, errors: [] } : answer;
      say(said, found.length > 0);
      setErrors(found);
      if (found.length === 0) asked.value = null;
    } catch (error) {
      say((error as Error).message, true);
    }
    setBusy(false);
  };
  return (
    <dialog
      ref={box}
      onClose={() => {
        stopped.current = true;
        asked.value = null;
      }}
      aria-labelledby="dialog-title"
    >
      <h2 id="dialog-title">{what.title}</h2>
      {what.body}
      {what.typed && (
        <label>
          Type {what.typed} to confirm
          <input value={typed} inputMode="numeric" onInput={(event) => setTyped(event.currentTarget.value)} />
        </label>
      )}
      {far && far[1] > 1 && (
        <p role="status">
          <progress max={far[1]} value={far[0]} aria-label="Progress" /> {far[0].toLocaleString("en")} of {far[1].toLocaleString("en")}
        </p>
      )}
      {errors.length > 0 && (
        <div class="problem" role="alert">
          <p>{errors.length.toLocaleString("en")} could not be done:</p>
          <ul>
            {errors.slice(0, 20).map(([id, message]) => (
              <li key={id}>
                <RunLink id={id} /> {message}
              </li>
            ))}
          </ul>
        </div>
      )}
      <details>
        <summary>The same from a terminal or from Python</summary>
        <Code text={what.command} />
        <Code text={what.python} />
      </details>
      <div class="buttons">
        {busy && far && far[1] > 1 ? (
          <button onClick={() => (stopped.current = true)}>Stop</button>
        ) : (
          <button onClick={() => box.current?.close()}>{errors.length ? "Close" : "Leave it"}</button>
        )}
        {errors.length === 0 && (
          <button class={what.danger ? "danger" : "primary"} disabled={busy || (what.typed !== undefined && typed !== what.typed)} onClick={act}>
            {busy ? "Working…" : what.button}
          </button>
        )}
      </div>
    </dialog>
  );
}

// A command or a line of code, with a button that copies it.
export function Code({ text }: { text: string }) {
  return (
    <div class="command">
      <code>{text}</code>
      <Copy text={text} />
    </div>
  );
}

// --- long lists: only the rows in sight are in the document

export function Rows<T>({ items, height, render }: { items: T[]; height: number; render: (item: T, index: number) => ComponentChildren }) {
  const box = useRef<HTMLDivElement>(null);
  const [span, setSpan] = useState<[number, number]>([0, 60]);
  useEffect(() => {
    const look = () => {
      const top = box.current?.getBoundingClientRect().top ?? 0;
      const first = Math.max(0, Math.floor(-top / height) - 20);
      setSpan([first, first + Math.ceil(innerHeight / height) + 40]);
    };
    look();
    addEventListener("scroll", look, { passive: true });
    addEventListener("resize", look);
    return () => {
      removeEventListener("scroll", look);
      removeEventListener("resize", look);
    };
  }, [height, items.length]);
  if (items.length <= 200) return <div ref={box}>{items.map(render)}</div>;
  const [first, last] = span;
  return (
    <div ref={box} class="rows" style={{ height: `${items.length * height}px` }}>
      <div style={{ transform: `translateY(${first * height}px)` }}>
        {items.slice(first, last).map((item, i) => render(item, first + i))}
      </div>
    </div>
  );
}
