// Bundle the page into the package, and check its size.
import { build } from "esbuild";
import { copyFileSync, mkdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { gzipSync } from "node:zlib";

const target = "../src/perdure/dashboard/static";
const budgets = { "page.js": 60 * 1024, "page.css": 10 * 1024 };

rmSync(target, { recursive: true, force: true });
mkdirSync(target, { recursive: true });
await build({
  entryPoints: { page: "src/main.tsx" },
  outdir: target,
  bundle: true,
  minify: true,
  format: "esm",
  target: "es2022",
  jsx: "automatic",
  jsxImportSource: "preact",
  legalComments: "none",
});
copyFileSync("src/index.html", `${target}/index.html`);
const licences = ["preact", "@preact/signals", "@preact/signals-core"].map(
  (name) => `${name}\n\n${readFileSync(`node_modules/${name}/LICENSE`, "utf8")}`,
);
writeFileSync(`${target}/LICENSES.txt`, licences.join("\n\n"));
for (const [name, most] of Object.entries(budgets)) {
  const size = gzipSync(readFileSync(`${target}/${name}`)).length;
  console.log(`${name}: ${(size / 1024).toFixed(1)} KB gzip, at most ${most / 1024}`);
  if (size > most) process.exit(1);
}
