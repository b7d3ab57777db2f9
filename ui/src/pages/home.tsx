// Home: what needs attention, numbers, workers, the store.
import { type Attention, type Home, read } from "../api";
import { bytes, counted, duration, glyph } from "../format";
import { link } from "../place";
import { Loading, Problem, useRead } from "../parts";
import { bulk, may, title } from "../actions";

const ORDER = ["Running", "Pending", "Paused", "Blocked", "Failed", "Completed", "Cancelled", "Terminated"];

export function HomePage() {
  const { value, error, again } = useRead(() => read<Home>("/home"), []);
  if (!value) return error ? <Problem error={error} /> : <Loading />;
  const oldest = Math.max(value.work.oldest_ms ?? 0, value.messages.oldest_ms ?? 0);
  return (
    <>
      <section aria-labelledby="attention">
        <h1 id="attention">Needs attention</h1>
        {value.attention.length === 0 ? (
          <p class="calm">
            <span aria-hidden="true">✓</span> Nothing. {counted(value.counts.Running ?? 0, "run")} running, {counted(value.workers, "worker")}.
          </p>
        ) : (
          <ul class="attention">
            {value.attention.map((each) => (
              <Item key={each.kind + each.sentence} each={each} again={again} />
            ))}
          </ul>
        )}
      </section>
      <section aria-labelledby="statuses">
        <h2 id="statuses">Runs</h2>
        <ul class="tiles">
          {ORDER.filter((status) => value.counts[status]).map((status) => (
            <li key={status}>
              <a href={link("runs", { q: `status:${status.toLowerCase()}` })} class={`tile ${status.toLowerCase()}`}>
                <b>{(value.counts[status] ?? 0).toLocaleString("en")}</b>
                <span>
                  <span aria-hidden="true">{glyph(status)}</span> {status.toLowerCase()}
                </span>
              </a>
            </li>
          ))}
          {Object.keys(value.counts).length === 0 && (
            <li class="dim">
              None yet. Start one: <code>perdure start NAME --input JSON</code>
            </li>
          )}
        </ul>
      </section>
      <Series home={value} />
      <section aria-labelledby="work">
        <h2 id="work">Work</h2>
        <ul class="strip">
          <li>
            <h3>
              <a href={link("workers")}>Workers</a>
            </h3>
            <p>
              {counted(value.workers, "worker")}, {value.busy} of {value.slots} slots busy
            </p>
          </li>
          <li>
            <h3>Queues</h3>
            <p>
              {counted(value.work.ready, "ready activity", "ready activities")}, {value.work.locked} running, {value.work.later} later; {counted(value.messages.ready, "ready message")}
            </p>
            <p class={oldest > 60_000 ? "again" : "dim"}>{oldest > 0 ? `the oldest ready work waits ${duration(oldest)}` : value.messages.ready ? "messages of blocked and paused runs wait with them" : "no ready work waits"}</p>
          </li>
          <li>
            <h3>
              <a href={link("store")}>Store</a>
            </h3>
            <p>
              {value.store.provider}, {bytes(value.store.size_bytes)}
            </p>
            <p class="dim place">{value.store.location}</p>
          </li>
        </ul>
      </section>
    </>
  );
}

function Item({ each, again }: { each: Attention; again: () => void }) {
  return (
    <li class={each.severity}>
      <span class="sign" aria-hidden="true">
        {each.severity === "bad" ? "■" : "▲"}
      </span>
      <div class="what">
        <b>
          {each.sentence} {each.count > 1 && !each.sentence.startsWith(String(each.count)) && <span class="count">{each.count.toLocaleString("en")}</span>}
        </b>
        <p>{each.advice}</p>
      </div>
      <div class="buttons">
        {each.query && (
          <a class="button" href={link("runs", { q: each.query })}>
            Show
          </a>
        )}
        {each.page && (
          <a class="button" href={link(each.page)}>
            {each.page[0]!.toUpperCase() + each.page.slice(1)}
          </a>
        )}
        {each.action && may("admin") && <button onClick={() => void bulk(each.action!, { q: each.query }, again)}>{title(each.action)} all</button>}
      </div>
    </li>
  );
}

const TALL = 88;

function Series({ home }: { home: Home }) {
  const most = Math.max(1, ...home.series.map((each) => Math.max(each.started, each.completed + each.failed)));
  const wide = 600 / home.series.length;
  const tall = (number: number) => (number / most) * TALL;
  const total = (key: "started" | "completed" | "failed") => home.series.reduce((sum, each) => sum + each[key], 0);
  return (
    <section aria-labelledby="hour">
      <h2 id="hour">The last hour</h2>
      <figure class="series">
        <figcaption>
          {total("started") >= 1000 ? "Of the newest 1,000 runs: " : ""}
          {(["started", "completed", "failed"] as const).map((word) => (
            <span key={word} class={`legend ${word === "failed" && total(word) ? "error" : ""}`}>
              <span class={`key ${word}`} aria-hidden="true" /> {total(word).toLocaleString("en")} {word}
            </span>
          ))}
          <span class="most dim">at most {counted(most, "run")} in 2 minutes</span>
        </figcaption>
        <svg viewBox={`0 0 600 ${TALL + 1}`} preserveAspectRatio="none" aria-hidden="true">
          {home.series.map((each, i) => (
            <g key={each.at}>
              <title>
                {new Date(each.at).toLocaleTimeString()}: {each.started} started, {each.completed} completed, {each.failed} failed
              </title>
              <rect class="started" x={i * wide + 2} y={TALL - tall(each.started)} width={wide / 2 - 2.5} height={tall(each.started)} />
              <rect class="completed" x={i * wide + wide / 2} y={TALL - tall(each.completed)} width={wide / 2 - 2.5} height={tall(each.completed)} />
              <rect class="failed" x={i * wide + wide / 2} y={TALL - tall(each.completed) - tall(each.failed)} width={wide / 2 - 2.5} height={tall(each.failed)} />
            </g>
          ))}
        </svg>
        <div class="hours dim" aria-hidden="true">
          <span>60 min ago</span>
          <span>30 min</span>
          <span>now</span>
        </div>
      </figure>
    </section>
  );
}
