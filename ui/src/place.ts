// The address of the page: every view is one.
import { signal } from "@preact/signals";

export interface Place {
  view: string;
  given: URLSearchParams;
}

const base = new URL(document.baseURI).pathname;
// A page that was saved has one view, and keeps what it shows behind the # of its address.
export const isSaved = document.getElementById("report") !== null;

function now(): Place {
  if (isSaved) return { view: "file", given: new URLSearchParams(location.hash.slice(1)) };
  const view = location.pathname.slice(base.length).replace(/^\/+|\/+$/g, "");
  return { view, given: new URLSearchParams(location.search) };
}

export const place = signal<Place>(now());
addEventListener("popstate", () => (place.value = now()));

// The runs of a file are shown, not those of the store.
export function inFile(): boolean {
  return place.value.view === "file";
}

export function runLink(id: string, given: Record<string, string | number | null | undefined> = {}): string {
  return link(inFile() ? "file" : "run", { id, ...given });
}

export function link(view: string, given: Record<string, string | number | null | undefined> = {}): string {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(given)) {
    if (value !== null && value !== undefined && value !== "") query.set(name, String(value));
  }
  if (isSaved) return `#${query}`;
  return `${base}${view}${query.size ? `?${query}` : ""}`;
}

export function go(address: string, replace = false): void {
  if (replace) history.replaceState(null, "", address);
  else {
    history.pushState(null, "", address);
    scrollTo(0, 0);
  }
  place.value = now();
}

// Links inside of the page change the view without loading it again.
addEventListener("click", (event) => {
  const anchor = (event.target as Element | null)?.closest?.("a[href]") as HTMLAnchorElement | null;
  if (!anchor || anchor.target || anchor.hasAttribute("download") || event.defaultPrevented) return;
  if (event.button !== 0 || event.ctrlKey || event.metaKey || event.shiftKey || event.altKey) return;
  const url = new URL(anchor.href);
  if (isSaved || anchor.getAttribute("href")?.startsWith("#")) return;
  if (url.origin !== location.origin || !url.pathname.startsWith(base)) return;
  event.preventDefault();
  go(url.pathname + url.search);
});
