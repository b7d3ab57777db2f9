// One run: what it does, why not further, what can be done; its picture, source, events, family.
import { useEffect, useState } from "preact/hooks";
import { ApiError, type Details, type Mismatch, type Tree, type Wait, read, settings } from "../api";
import { RerunForm, SendForm, act, fitting, may } from "../actions";
import { ago, clock, duration, glyph, json, ms, quoted } from "../format";
import { Journal } from "../journal";
import { go, link, place } from "../place";
import { Copy, Countdown, Json, Loading, Problem, Rows, RunLink, Status, useRead } from "../parts";

const TABS = ["journal", "source", "events", "state", "family", "compare"];

export function RunPage() {
  const given = place.value.given;
  const id = given.get("id") ?? "";
  const execution = given.get("execution");
  const tab = given.get("tab") ?? "journal";
  const { value: run, error, again } = useRead(() => read<Details>("/run", { id, execution }), [id, execution], "run", id);
  if (!run) return error ? <Problem error={error} /> : <Loading />;
  const waits = run.steps.filter((step) => step.state === "open" && (step.kind === "event" || step.kind === "message"));
  const step = Number(given.get("step") ?? 0) || null;
  return (
    <>
      <header class={`run ${run.status.toLowerCase()}`}>
        <p class="dim">
          {run.parent && (
            <>
              child of <RunLink id={run.parent} /> ·{" "}
            </>
          )}
          {run.name}
          {run.version ? `@${run.version}` : ""} · started {ago(run.created_at)} ({clock(run.created_at)})
          {run.executions.length > 1 && <Executions run={run} />}
        </p>
        <h1>
          <Status run={run} /> <span class="id">{run.id}</span> <Copy text={run.id} />
        </h1>
        <p class="sentence">
          {run.sentence}
          <Countdown to={run.due_at} />
        </p>
        {error && <Problem error={error} />}
        <Why run={run} />
        <div class="buttons">
          {fitting(run.status)
            .filter((action) => may(action === "terminate" || action === "delete" ? "admin" : "operate"))
            .map((action, i) => (
              <button key={action} class={i === 0 && action === "retry" ? "primary" : ""} onClick={() => act(action, run, again)}>
                {action}
              </button>
            ))}
          <Copy text={run.commands.join("\n")} label="copy commands" />
          <a class="button" download={`${run.id}.json`} href={`data:application/json,${encodeURIComponent(json(run, 2))}`}>
            download
          </a>
        </div>
        {may("operate") && waits.map((wait) => <SendForm key={wait.event} id={run.id} name={name(wait.call)} kind={wait.kind} done={again} />)}
        {may("operate") && <RerunForm run={run} from={step} />}
      </header>
      <nav class="tabs" aria-label="Parts of the run">
        {TABS.map((each) => (
          <a key={each} href={link("run", { id, execution, tab: each === "journal" ? null : each })} aria-current={tab === each ? "page" : undefined}>
            {each}
          </a>
        ))}
      </nav>
      {tab === "journal" && <Journal key={`${run.id} ${run.execution}`} run={run} />}
      {tab === "source" && <SourceTab run={run} />}
      {tab === "events" && <EventsTab run={run} />}
      {tab === "state" && <StateTab run={run} />}
      {tab === "family" && <FamilyTab run={run} />}
      {tab === "compare" && <CompareTab run={run} />}
    </>
  );
}

function name(call: string): string {
  return /"(.*)"/.exec(call)?.[1] ?? call;
}

function Executions({ run }: { run: Details }) {
  return (
    <span class="executions">
      {" "}
      · execution{" "}
      <select aria-label="Execution" value={run.execution} onChange={(event) => go(link("run", { id: run.id, execution: event.currentTarget.value }))}>
        {run.executions.map((each) => (
          <option key={each} value={each}>
            {each}
          </option>
        ))}
      </select>{" "}
      of {run.executions.length}
    </span>
  );
}

// Why it does not go further, or why it failed, and what to do.
function Why({ run }: { run: Details }) {
  const detail = run.block?.detail;
  if (run.block)
    return (
      <div class="problem">
        {typeof detail === "object" && detail ? (
          <Columns mismatch={detail} />
        ) : (
          <pre tabIndex={0}>{detail || run.block.message}</pre>
        )}
        <p>Nothing is lost. Deploy fixed code, and it goes on by itself; or retry now.</p>
        <pre tabIndex={0}>perdure retry {quoted(run.id)}</pre>
      </div>
    );
  if (run.status === "Failed" && run.traceback)
    return (
      <div class="problem">
        <details>
          <summary>
            {run.failure?.type_name}: {run.failure?.message}
          </summary>
          <pre tabIndex={0}>{run.traceback}</pre>
        </details>
        <p>After a fix, retry lets it go on from where it failed: finished steps stay finished.</p>
      </div>
    );
  if (run.problem) return <div class="problem">{run.problem}</div>;
  return null;
}

function Columns({ mismatch }: { mismatch: Mismatch }) {
  return (
    <div class="columns">
      <div>
        <b>history says</b>
        <pre tabIndex={0}>{mismatch.recorded}</pre>
      </div>
      <div>
        <b>the code did</b>
        <pre tabIndex={0}>{mismatch.performed}</pre>
      </div>
      {mismatch.diff && <pre tabIndex={0}>{mismatch.diff.join("\n")}</pre>}
    </div>
  );
}

// --- source

interface Source {
  why_not: string | null;
  file: string;
  first_line: number;
  lines: string[];
  executed: Record<string, number>;
  waits: Wait[];
}

function SourceTab({ run }: { run: Details }) {
  const { value, error } = useRead(() => read<Source>("/run/source", { id: run.id }), [run.id, run.events], "");
  if (!value) return error ? <Problem error={error} /> : <Loading />;
  const waiting = new Map<number, Wait>();
  for (const wait of value.waits) for (const frame of wait.frames) if (frame.file.endsWith(value.file)) waiting.set(frame.line, wait);
  return (
    <section>
      {value.why_not && <p class="calm">{value.why_not}</p>}
      {value.file && <p class="dim">{value.file}</p>}
      <ol class="source" start={value.first_line}>
        {value.lines.map((text, i) => {
          const line = value.first_line + i;
          const wait = waiting.get(line);
          const times = value.executed[String(line)];
          return (
            <li key={line} class={wait ? "waits" : times ? "ran" : ""}>
              <span class="number">{line}</span>
              <span class="sign" title={wait ? `waits for ${wait.waits_for}` : times ? `${times} steps` : ""}>
                {wait ? "◷" : times ? "✓" : ""}
              </span>
              <code>{text || " "}</code>
              {wait && (
                <span class="locals">
                  waits for {wait.waits_for} since {ago(wait.since)}
                  {wait.frames.flatMap((frame) => (frame.line === line ? Object.entries(frame.locals) : [])).map(([key, text]) => ` · ${key} = ${text}`)}
                </span>
              )}
            </li>
          );
        })}
      </ol>
    </section>
  );
}

// --- events

interface Event {
  id: number;
  type: string;
  at: string;
  data: unknown;
}

function EventsTab({ run }: { run: Details }) {
  const [events, setEvents] = useState<Event[]>([]);
  const [next, setNext] = useState<number | null>(0);
  const [filter, setFilter] = useState("");
  const [opened, setOpened] = useState<number | null>(null);
  const more = async (after: number, before: Event[]) => {
    const page = await read<{ events: Event[]; next_after: number | null }>("/run/events", { id: run.id, execution: run.execution, after, limit: 2000 });
    setEvents([...before, ...page.events]);
    setNext(page.next_after);
  };
  useEffect(() => {
    void more(0, []);
  }, [run.id, run.execution, run.events]);
  const wanted = filter.toLowerCase();
  const shown = events.filter((event) => !wanted || `${event.type} ${json(event.data)}`.toLowerCase().includes(wanted));
  const start = ms(events[0]?.at);
  return (
    <section>
      <div class="filter">
        <input aria-label="Filter events" placeholder="filter: failed, charge, …" value={filter} onInput={(event) => setFilter(event.currentTarget.value)} />
        <span class="dim">
          {shown.length} of {run.events} events
        </span>
      </div>
      <Rows
        items={shown}
        height={30}
        render={(event) => (
          <div key={event.id} class="event">
            <button class="code" aria-expanded={opened === event.id} onClick={() => setOpened(opened === event.id ? null : event.id)}>
              <span class="number">{event.id}</span>
              <span class="at">+{duration(ms(event.at) - start)}</span>
              <b>{event.type}</b> <span class="dim">{json(event.data).slice(0, 160)}</span>
            </button>
            {opened === event.id && <Json value={event.data} />}
          </div>
        )}
      />
      {next !== null && <button onClick={() => void more(next, events)}>More</button>}
    </section>
  );
}

// --- state, family, compare

function StateTab({ run }: { run: Details }) {
  const { value } = useRead(() => read<{ entries: { key: string; value: unknown; updated_at: string }[] }>("/run/state", { id: run.id }), [run.id, run.updated_at], "");
  return (
    <section class="state">
      <h2>Input</h2>
      <Json value={run.input} />
      <h2>Output</h2>
      {run.status === "Completed" ? <Json value={run.output} /> : <p class="dim">It has not completed.</p>}
      {run.custom_status !== null && (
        <>
          <h2>Custom status</h2>
          <Json value={run.custom_status} />
        </>
      )}
      <h2>State</h2>
      {value?.entries.length ? (
        value.entries.map((entry) => (
          <div key={entry.key}>
            <h3>
              <code>{entry.key}</code> <span class="dim">changed {ago(entry.updated_at)}</span>
            </h3>
            <Json value={entry.value} />
          </div>
        ))
      ) : (
        <p class="dim">It has no state.</p>
      )}
    </section>
  );
}

function FamilyTab({ run }: { run: Details }) {
  const { value, error } = useRead(() => read<Tree>("/run/family", { id: run.id }), [run.id, run.events], "");
  if (!value) return error ? <Problem error={error} /> : <Loading />;
  return <ul class="family">{<Member tree={value} here={run.id} />}</ul>;
}

function Member({ tree, here }: { tree: Tree; here: string }) {
  return (
    <li class={tree.id === here ? "here" : ""}>
      <span class={`sign ${tree.status.toLowerCase()}`} aria-hidden="true">
        {glyph(tree.status)}
      </span>{" "}
      {tree.name} <RunLink id={tree.id} /> <span class="dim">{tree.sentence}</span>
      {tree.children.length > 0 && (
        <ul>
          {tree.children.map((child) => (
            <Member key={child.id} tree={child} here={here} />
          ))}
        </ul>
      )}
    </li>
  );
}

interface Compared {
  left: string;
  right: string;
  lines: { op: string; left: string | null; right: string | null; same: boolean }[];
}

function CompareTab({ run }: { run: Details }) {
  const other = place.value.given.get("with") ?? "";
  const [text, setText] = useState(other);
  const [whole, setWhole] = useState(false);
  const { value, error } = useRead<Compared>(() => read("/run/compare", { left: run.id, right: other }), [run.id, other], "");
  const lines = value?.lines.filter((line) => whole || !line.same) ?? [];
  return (
    <section>
      <form
        class="filter"
        onSubmit={(event) => {
          event.preventDefault();
          go(link("run", { id: run.id, tab: "compare", with: text }));
        }}
      >
        <input aria-label="Compare with" placeholder="id of another run; empty: the last that completed" value={text} onInput={(event) => setText(event.currentTarget.value)} />
        <button>Compare</button>
      </form>
      {error instanceof ApiError && <Problem error={error} />}
      {value && (
        <>
          <table class="compare">
            <thead>
              <tr>
                <th>Step</th>
                <th>{value.left}</th>
                <th>{value.right}</th>
              </tr>
            </thead>
            <tbody>
              {lines.map((line) => (
                <tr key={line.op} class={line.same ? "" : "differs"}>
                  <td>{line.op}</td>
                  <td>{line.left ?? "–"}</td>
                  <td>{line.right ?? "–"}</td>
                </tr>
              ))}
            </tbody>
          </table>
          {lines.length === 0 && <p class="calm">Both runs took the same steps.</p>}
          <button class="quiet" onClick={() => setWhole(!whole)}>
            {whole ? "only what differs" : `all ${value.lines.length} steps`}
          </button>
        </>
      )}
      {settings.value?.has_code === false && <p class="dim">perdure diff {quoted(run.id)} OTHER</p>}
    </section>
  );
}
