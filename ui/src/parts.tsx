// Small parts that several pages use.
import { signal } from "@preact/signals";
import type { ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { ApiError, type Run, follow } from "./api";
import { duration, glyph, json, ms } from "./format";
import { link } from "./place";

export function Status({ run }: { run: Pick<Run, "status" | "doing"> }) {
  const word = run.doing === "retrying" ? "retrying" : run.status.toLowerCase();
  return (
    <span class={`status ${word}`}>
      <span aria-hidden="true">{glyph(word)}</span> {word}
    </span>
  );
}

export function RunLink({ id, children }: { id: string; children?: ComponentChildren }) {
  return (
    <a class="id" href={link("run", { id })}>
      {children ?? id}
    </a>
  );
}

export function Json({ value }: { value: unknown }) {
  const text = typeof value === "string" && value.endsWith("bytes in all)") ? value : json(value, 2);
  const isLong = text.length > 4000;
  const [whole, setWhole] = useState(false);
  return (
    <div class="json">
      <pre tabIndex={0}>{isLong && !whole ? `${text.slice(0, 4000)}…` : text}</pre>
      <div class="tools">
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

export function Countdown({ to }: { to: string | null | undefined }) {
  if (!to) return null;
  const left = ms(to) - second.value;
  if (left <= 0 || left > 3_600_000) return null; // the sentence says it
  return <span class="countdown"> · {duration(left)} left</span>;
}

export function Problem({ error }: { error: ApiError | null }) {
  if (!error) return null;
  return (
    <div class="problem" role="alert">
      <p>{error.message}</p>
      {error.near.length > 0 && (
        <p>
          Similar: {error.near.map((id, i) => [i > 0 && ", ", <RunLink id={id} />])}
        </p>
      )}
    </div>
  );
}

export function Loading() {
  return <p class="dim">Reading…</p>;
}

// --- a dialog for one action, which shows its command and Python forms

interface Ask {
  title: string;
  body: ComponentChildren;
  button: string;
  danger?: boolean;
  command: string;
  python: string;
  typed?: string;
  act: () => Promise<string>;
}

const asked = signal<Ask | null>(null);
export const said = signal<{ text: string; bad: boolean } | null>(null);

export function ask(what: Ask): void {
  asked.value = what;
}

export function say(text: string, bad = false): void {
  said.value = { text, bad };
  setTimeout(() => {
    if (said.value?.text === text) said.value = null;
  }, 8000);
}

export function Dialog() {
  const what = asked.value;
  const box = useRef<HTMLDialogElement>(null);
  const [typed, setTyped] = useState("");
  const [busy, setBusy] = useState(false);
  useEffect(() => {
    setTyped("");
    setBusy(false);
    if (what) box.current?.showModal();
    else box.current?.close();
  }, [what]);
  if (!what) return null;
  const act = async () => {
    setBusy(true);
    try {
      say(await what.act());
      asked.value = null;
    } catch (error) {
      say((error as Error).message, true);
      setBusy(false);
    }
  };
  return (
    <dialog ref={box} onClose={() => (asked.value = null)} aria-labelledby="dialog-title">
      <h2 id="dialog-title">{what.title}</h2>
      {what.body}
      {what.typed && (
        <label>
          Type {what.typed} to confirm
          <input value={typed} onInput={(event) => setTyped(event.currentTarget.value)} />
        </label>
      )}
      <details>
        <summary>The same from a terminal or from Python</summary>
        <pre tabIndex={0}>{what.command}</pre>
        <Copy text={what.command} />
        <pre tabIndex={0}>{what.python}</pre>
        <Copy text={what.python} />
      </details>
      <div class="buttons">
        <button onClick={() => (asked.value = null)}>Leave it</button>
        <button
          class={what.danger ? "danger" : "primary"}
          disabled={busy || (what.typed !== undefined && typed !== what.typed)}
          onClick={act}
        >
          {busy ? "Working…" : what.button}
        </button>
      </div>
    </dialog>
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
