// The shell of the page: navigation, theme, keyboard, palette, token.
import { render } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { type Run, needsToken, offline, openFile, read, setToken, settings, type Settings } from "./api";
import { go, inFile, isSaved, link, place } from "./place";
import { Dialog, said, say } from "./parts";
import { HomePage } from "./pages/home";
import { DefinitionsPage, ErrorsPage, FilePage, InboxPage, StorePage, WorkersPage } from "./pages/others";
import { RunPage } from "./pages/run";
import { RunsPage } from "./pages/runs";
import { SchedulesPage } from "./pages/schedules";
import "./style.css";

const PAGES: Record<string, [string, () => preact.JSX.Element]> = {
  "": ["Home", HomePage],
  runs: ["Runs", RunsPage],
  errors: ["Errors", ErrorsPage],
  inbox: ["Inbox", InboxPage],
  schedules: ["Schedules", SchedulesPage],
  workers: ["Workers", WorkersPage],
  definitions: ["Definitions", DefinitionsPage],
  store: ["Store", StorePage],
};
const KEYS: [string, string][] = [
  ["/", "search"],
  ["j  k", "next and previous row"],
  ["enter", "open the row"],
  ["x", "select the row"],
  ["t", "light or dark"],
  ["Ctrl-K", "palette: pages, runs by id"],
  ["?", "this list"],
  ["drop a file", "look at an export; nothing is stored"],
];

function theme(next?: string): void {
  const chosen = next ?? localStorage.getItem("perdure-theme") ?? "";
  if (chosen) document.documentElement.dataset.theme = chosen;
  if (next) localStorage.setItem("perdure-theme", next);
}
theme();

function otherTheme(): void {
  const isDark = document.documentElement.dataset.theme ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  theme(isDark ? "light" : "dark");
}

async function readSettings(): Promise<void> {
  settings.value = await read<Settings>("/settings").catch(() => null);
}

function Shell() {
  const view = place.value.view;
  const Page = view === "run" ? RunPage : view === "file" ? FilePage : PAGES[view]?.[1];
  const [keys, setKeys] = useState(false);
  const [palette, setPalette] = useState(false);
  const [isOver, setOver] = useState(false);
  useEffect(() => {
    if (!inFile()) void readSettings();
  }, [needsToken.value, view === "file"]);
  useEffect(() => {
    if (isSaved) return;
    const over = (event: DragEvent) => {
      if (!event.dataTransfer?.types.includes("Files")) return;
      event.preventDefault();
      setOver(event.type === "dragover");
      const file = event.type === "drop" ? event.dataTransfer.files[0] : undefined;
      if (file) openFile(file).then(() => go(link("file")), (error: Error) => say(error.message, true));
    };
    const names = ["dragover", "dragleave", "drop"] as const;
    for (const name of names) addEventListener(name, over);
    return () => names.forEach((name) => removeEventListener(name, over));
  }, []);
  useEffect(() => {
    const id = place.value.given.get("id");
    document.title = `${id ?? PAGES[view]?.[0] ?? "File"} · Perdure`;
    document.querySelector(".top nav [aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" });
  }, [place.value]);
  useEffect(() => {
    const press = (event: KeyboardEvent) => {
      if ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "k" && !isSaved) {
        event.preventDefault();
        setPalette(true);
        return;
      }
      const typing = event.target instanceof HTMLInputElement || event.target instanceof HTMLTextAreaElement;
      if (typing || isSaved || event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.key === "/") {
        event.preventDefault();
        if (place.value.view !== "runs") go(link("runs"));
        setTimeout(() => document.getElementById("search")?.focus());
      } else if (event.key === "?") setKeys(true);
      else if (event.key === "t") otherTheme();
    };
    addEventListener("keydown", press);
    return () => removeEventListener("keydown", press);
  }, []);
  if (needsToken.value !== null) return <TokenForm />;
  return (
    <>
      <a class="skip" href="#content">
        to the content
      </a>
      <header class="top">
        <a class="brand" href={link("")}>
          perdure
        </a>
        <nav aria-label="Pages">
          {(isSaved ? [] : Object.entries(PAGES)).map(([path, [title]]) => (
            <a key={path} href={link(path)} aria-current={view === path || (path === "runs" && view === "run") ? "page" : undefined}>
              {title}
            </a>
          ))}
        </nav>
        <span class="dim who">
          {settings.value?.read_only ? "read-only" : settings.value && settings.value.identity !== "local" ? settings.value.identity : ""}
        </span>
        <button class="quiet" aria-label="Light or dark" onClick={otherTheme}>
          ◐
        </button>
        <button class="quiet" aria-label="Keyboard" onClick={() => setKeys(true)}>
          ?
        </button>
      </header>
      {offline.value && (
        <div class="banner" role="status">
          {offline.value}
        </div>
      )}
      {isOver && <div class="over">Drop an export file to look at it. Nothing is stored.</div>}
      <main id="content">{Page ? <Page /> : <p class="calm">There is no page {view}.</p>}</main>
      <div class="toast" role="status" aria-live="polite">
        {said.value && (
          <p class={said.value.bad ? "bad" : ""}>
            {said.value.text}
            {said.value.bad && <button onClick={() => (said.value = null)}>close</button>}
          </p>
        )}
      </div>
      <Dialog />
      {keys && <Keys close={() => setKeys(false)} />}
      {palette && <Palette close={() => setPalette(false)} />}
    </>
  );
}

function TokenForm() {
  const [text, setText] = useState("");
  return (
    <main class="token">
      <h1>perdure</h1>
      <form
        onSubmit={(event) => {
          event.preventDefault();
          setToken(text.trim());
        }}
      >
        {needsToken.value && (
          <p class="problem" role="alert">
            {needsToken.value}
          </p>
        )}
        <label>
          This server asks for a token.
          <input type="password" autocomplete="off" value={text} onInput={(event) => setText(event.currentTarget.value)} />
        </label>
        <button class="primary">Enter</button>
      </form>
    </main>
  );
}

function Keys({ close }: { close: () => void }) {
  const box = useRef<HTMLDialogElement>(null);
  useEffect(() => box.current?.showModal(), []);
  return (
    <dialog ref={box} onClose={close} aria-label="Keyboard">
      <h2>Keyboard</h2>
      <dl class="facts">
        {KEYS.map(([key, what]) => [
          <dt>
            <kbd>{key}</kbd>
          </dt>,
          <dd>{what}</dd>,
        ])}
      </dl>
      <div class="buttons">
        <button onClick={() => box.current?.close()}>Close</button>
      </div>
    </dialog>
  );
}

function Palette({ close }: { close: () => void }) {
  const box = useRef<HTMLDialogElement>(null);
  const [text, setText] = useState("");
  const [runs, setRuns] = useState<Run[]>([]);
  useEffect(() => box.current?.showModal(), []);
  useEffect(() => {
    if (text.length < 2) return setRuns([]);
    const wait = setTimeout(async () => {
      const page = await read<{ runs: Run[] }>("/runs", { q: `text:${JSON.stringify(text)}`, limit: 8 }).catch(() => ({ runs: [] }));
      setRuns(page.runs);
    }, 150);
    return () => clearTimeout(wait);
  }, [text]);
  const pages = Object.entries(PAGES).filter(([, [title]]) => title.toLowerCase().includes(text.toLowerCase()));
  const open = (address: string) => {
    box.current?.close();
    go(address);
  };
  const first = pages[0] ? link(pages[0][0]) : runs[0] ? link("run", { id: runs[0].id }) : null;
  return (
    <dialog ref={box} onClose={close} class="palette" aria-label="Go to">
      <form
        onSubmit={(event) => {
          event.preventDefault();
          if (first !== null) open(first);
        }}
      >
        <input aria-label="A page, or a part of an id or name" placeholder="a page, or a part of an id" value={text} onInput={(event) => setText(event.currentTarget.value)} />
      </form>
      <ul>
        {pages.map(([path, [title]]) => (
          <li key={path}>
            <button onClick={() => open(link(path))}>{title}</button>
          </li>
        ))}
        {runs.map((run) => (
          <li key={run.id}>
            <button onClick={() => open(link("run", { id: run.id }))}>
              {run.id} <span class="dim">{run.name}</span>
            </button>
          </li>
        ))}
      </ul>
    </dialog>
  );
}

render(<Shell />, document.getElementById("page")!);
