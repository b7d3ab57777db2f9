// Runs: a query, views, a table with the sentence of what each run is doing.
import { useSignal } from "@preact/signals";
import { useEffect, useRef, useState } from "preact/hooks";
import { type ApiError, type Run, counts, read } from "../api";
import { bulk, may, title } from "../actions";
import { ago, counted, duration, json, ms, short } from "../format";
import { go, link, place } from "../place";
import { follow } from "../api";
import { Loading, Problem, RunLink, Status } from "../parts";

const VIEWS: [string, string][] = [
  ["All", ""],
  ["Open", "status:open"],
  ["Paused", "status:paused"],
  ["Blocked", "status:blocked"],
  ["Failed", "status:failed"],
  ["Last hour", "created:<1h"],
  ["Roots", "parent:none"],
];
const QUALIFIERS = ["status:running", "status:pending", "status:blocked", "status:paused", "status:failed", "status:completed", "status:cancelled", "status:open", "status:ended", "name:", "version:", "id:", "text:", "parent:none", "parent:", "created:<1h", "created:>7d", "completed:<1d"];

const OPEN = ["Pending", "Running", "Paused", "Blocked"];

// The number of runs in a view, from the counts that the stream brings; none for the others.
function countOf(name: string): number | null {
  const known = counts.value;
  const sum = (statuses: string[]) => statuses.reduce((total, each) => total + (known[each] ?? 0), 0);
  if (Object.keys(known).length === 0) return null;
  if (name === "All") return sum(Object.keys(known));
  if (name === "Open") return sum(OPEN);
  return name === "Paused" || name === "Blocked" || name === "Failed" ? sum([name]) : null;
}

interface Page {
  runs: Run[];
  next_cursor: string | null;
}

export function RunsPage() {
  const q = place.value.given.get("q") ?? "";
  const [text, setText] = useState(q);
  const [runs, setRuns] = useState<Run[] | null>(null);
  const [cursor, setCursor] = useState<string | null>(null);
  const [error, setError] = useState<ApiError | null>(null);
  const [news, setNews] = useState(0);
  const [chosen, setChosen] = useState(new Set<string>());
  const at = useSignal(-1);
  const [isBusy, setBusy] = useState(true);
  const serial = useRef(0);

  // A late answer to an older question is dropped. The list stays until the next one is there.
  const load = async (more = false) => {
    const mine = ++serial.current;
    setBusy(true);
    try {
      const page = await read<Page>("/runs", { q, cursor: more ? cursor : null });
      if (mine !== serial.current) return;
      setRuns((before) => (more ? [...(before ?? []), ...page.runs] : page.runs));
      setCursor(page.next_cursor);
      setError(null);
      setNews(0);
      if (!more) at.value = -1;
    } catch (caught) {
      if (mine !== serial.current) return;
      setError(caught as ApiError);
    }
    setBusy(false);
  };
  useEffect(() => {
    setText(q);
    setChosen(new Set());
    void load();
  }, [q]);

  // Rows do not move under the pointer: what is shown is read again in place, new runs are counted.
  const latest = useRef<() => void>(() => {});
  latest.current = async () => {
    const mine = serial.current;
    const page = await read<Page>("/runs", { q }).catch(() => null);
    if (!page || !runs || mine !== serial.current) return;
    const known = new Map(page.runs.map((run) => [run.id, run]));
    const shown = new Set(runs.map((run) => run.id));
    setRuns((before) => before?.map((run) => known.get(run.id) ?? run) ?? null);
    setNews(page.runs.filter((run) => !shown.has(run.id)).length);
  };
  useEffect(() => follow(null, () => latest.current()), []);
  // An effect runs after the rows are painted, so it would handle a quick key with old values.
  // The reference changes with the rows, and the signal with the key.
  const press = useRef<(event: KeyboardEvent) => void>(() => {});
  press.current = (event) => {
    if (event.target instanceof HTMLInputElement || event.ctrlKey || event.metaKey || !runs) return;
    const run = runs[at.value];
    if (event.key === "j") at.value = Math.min(runs.length - 1, at.value + 1);
    else if (event.key === "k") at.value = Math.max(0, at.value - 1);
    else if (event.key === "Enter" && run && document.activeElement === document.body) go(link("run", { id: run.id }));
    else if (event.key === "x" && run) toggle(run.id);
    else return;
    event.preventDefault();
  };
  useEffect(() => {
    const forward = (event: KeyboardEvent) => press.current(event);
    addEventListener("keydown", forward);
    return () => removeEventListener("keydown", forward);
  }, []);
  const toggle = (id: string) =>
    setChosen((before) => {
      const next = new Set(before);
      if (!next.delete(id)) next.add(id);
      return next;
    });
  const actions = ["cancel", "pause", "resume", "retry", "terminate", "delete"];
  const targets = chosen.size ? { ids: [...chosen] } : { q };

  return (
    <>
      <h1>Runs</h1>
      <form
        class="filter"
        onSubmit={(event) => {
          event.preventDefault();
          go(link("runs", { q: text }));
        }}
      >
        <input id="search" list="qualifiers" aria-label="Query" placeholder="status:failed name:order* created:<2h" value={text} spellcheck={false} autocomplete="off" onInput={(event) => setText(event.currentTarget.value)} />
        <datalist id="qualifiers">
          {QUALIFIERS.map((each) => (
            <option value={`${text.replace(/\S*$/, "")}${each}`} />
          ))}
        </datalist>
        <button class="primary">Find</button>
      </form>
      {error && (
        <div class="problem" role="alert">
          {error.position !== null && error.position !== undefined && (
            <pre>
              {q}
              {"\n"}
              {" ".repeat(error.position)}^
            </pre>
          )}
          {error.message}
        </div>
      )}
      <nav class="views" aria-label="Views">
        {VIEWS.map(([name, query]) => (
          <a key={name} href={link("runs", { q: query })} aria-current={query === q ? "page" : undefined}>
            {name} <span class="dim">{countOf(name)?.toLocaleString("en") ?? ""}</span>
          </a>
        ))}
      </nav>
      {may("admin") && (
        <div class="bulk">
          <span class="dim">{chosen.size ? `${chosen.size} selected` : q && !error ? "All that match" : "Select rows, or search, to act on many"}</span>
          {(chosen.size || (q && !error) ? actions : []).map((action) => (
            <button key={action} class="small" onClick={() => void bulk(action, targets, () => void load())}>
              {title(action)}
            </button>
          ))}
        </div>
      )}
      {news > 0 && (
        <button class="news" onClick={() => void load()}>
          {counted(news, "new run")}: show
        </button>
      )}
      {runs === null ? (
        error ? null : <Loading />
      ) : runs.length === 0 ? (
        <p class="calm">No run fits.</p>
      ) : (
        <table class="runs" aria-busy={isBusy}>
          <thead>
            <tr>
              {may("admin") && <th class="check"><span class="unseen">Select</span></th>}
              <th class="c-status">Status</th>
              <th class="c-name">Name</th>
              <th class="c-id">Id</th>
              <th class="wide c-time">Started</th>
              <th class="wide c-time">Took</th>
              <th>Now</th>
            </tr>
          </thead>
          <tbody>
            {runs.map((run, i) => (
              <tr key={run.id} class={i === at.value ? "at" : ""}>
                {may("admin") && (
                  <td class="check">
                    <input type="checkbox" aria-label={`Select ${run.id}`} checked={chosen.has(run.id)} onChange={() => toggle(run.id)} />
                  </td>
                )}
                <td>
                  <Status run={run} />
                </td>
                <td>
                  {run.name}
                  <span class="dim">{run.version ? `@${run.version}` : ""}</span>
                </td>
                <td>
                  <RunLink id={run.id} />
                </td>
                <td class="wide">{ago(run.created_at)}</td>
                <td class="wide">{duration((ms(run.completed_at) || Date.now()) - ms(run.created_at))}</td>
                <td class={run.failure || run.block ? "error" : ""}>{now(run)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      )}
      {cursor && <button onClick={() => void load(true)}>More</button>}
      <Problem error={error?.kind === "BadQuery" ? null : error} />
    </>
  );
}

function now(run: Run): string {
  if (run.status === "Completed") return run.output === null ? "" : `→ ${short(json(run.output))}`;
  const custom = run.custom_status === null || run.name.startsWith("perdure.") ? "" : ` · ${short(json(run.custom_status), 60)}`;
  return short(run.sentence ?? "", 200) + custom;
}
