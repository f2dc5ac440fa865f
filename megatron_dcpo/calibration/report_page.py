"""The frame of ``report.html``: styles for light and dark, wide and narrow. Filled in by ``string.Template``."""

PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
:root {
  color-scheme: light dark;
  --paper: #fbfbfa; --card: #fff; --ink: #1c1d1f; --soft: #5d636b; --line: #e1e3e6;
  --good: #00795a; --bad: #b64d00; --mark: #fff0c2; --reasoning: #34526b;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #131517; --card: #1b1e21; --ink: #e7e9ec; --soft: #9aa2ab; --line: #2e3338;
    --good: #3ecf9f; --bad: #ff9a52; --mark: #4a3c10; --reasoning: #a9c8e2;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 76rem;
  background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
}
h1 { font-size: 1.6rem; margin: 0; letter-spacing: -0.01em; }
h2 { font-size: 1.15rem; margin: 2.4rem 0 0.5rem; }
h3 { font-size: 0.95rem; margin: 1.2rem 0 0.4rem; color: var(--soft); font-weight: 600; }
.hint, .runs { color: var(--soft); font-size: 0.875rem; margin: 0.3rem 0 0.8rem; max-width: 60rem; }
.scroll { overflow-x: auto; background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: 0.925rem; }
th, td { padding: 0.5rem 0.8rem; text-align: right; white-space: nowrap; }
thead th {
  white-space: normal; color: var(--soft); font-weight: 600; font-size: 0.8rem; border-bottom: 1px solid var(--line);
}
tbody tr + tr > * { border-top: 1px solid var(--line); }
th:first-child { text-align: left; position: sticky; left: 0; background: var(--card); }
tbody th { font-weight: 600; }
td.note { text-align: left; white-space: normal; min-width: 15rem; color: var(--bad); }
@media (max-width: 40rem) {
  th, td { padding: 0.4rem 0.5rem; }
  th:first-child { max-width: 8.5rem; min-width: 6rem; white-space: normal; overflow-wrap: anywhere; }
}
td.best { font-weight: 700; color: var(--good); }
.grid { display: grid; gap: 0.9rem; }
.panels { grid-template-columns: repeat(auto-fill, minmax(min(15.5rem, 100%), 1fr)); }
.curves { grid-template-columns: repeat(auto-fill, minmax(min(21rem, 100%), 1fr)); }
figure { margin: 0; padding: 0.6rem; background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
figure svg { display: block; width: 100%; height: auto; max-width: 30rem; margin: 0 auto; }
figcaption {
  color: var(--soft); font-size: 0.78rem; text-align: center; padding-top: 0.3rem; font-variant-numeric: tabular-nums;
}
.legend { display: flex; flex-wrap: wrap; gap: 0.3rem 1.2rem; margin: 0.3rem 0 0.8rem; font-size: 0.9rem; }
.legend i {
  display: inline-block; width: 1.3rem; height: 0.22rem; border-radius: 2px; margin-right: 0.45rem;
  vertical-align: middle;
}
details { margin: 0.6rem 0; }
summary { cursor: pointer; font-weight: 600; font-size: 0.925rem; padding: 0.3rem 0; }
article {
  background: var(--card); border: 1px solid var(--line); border-left: 4px solid var(--bad); border-radius: 8px;
  padding: 0.7rem 0.9rem; margin: 0.7rem 0;
}
article.correct { border-left-color: var(--good); }
article header { display: flex; flex-wrap: wrap; gap: 0.2rem 1rem; font-size: 0.85rem; color: var(--soft); }
article header b { color: var(--bad); }
article.correct header b { color: var(--good); }
pre {
  white-space: pre-wrap; overflow-wrap: anywhere; margin: 0.5rem 0 0; max-height: 26rem; overflow-y: auto;
  font: 0.84rem/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace;
}
pre.problem { color: var(--soft); }
.reasoning { color: var(--reasoning); }
mark { background: var(--mark); color: inherit; border-radius: 3px; padding: 0 0.15em; }
</style>
</head>
<body>
<header>
<h1>$title</h1>
<p class="runs">$runs</p>
</header>
<main>
$body
</main>
<script type="application/json" id="comparison">$data</script>
</body>
</html>
"""
