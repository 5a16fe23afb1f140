"""The stylesheet and the script of the page."""

from __future__ import annotations

CSS = """
:root {
  color-scheme: light dark;
  --page: #f5f6f8; --card: #ffffff; --ink: #1d232b; --muted: #5c6672; --line: #dfe3e8;
  --accent: #b34f00; --mark: #fff4ea;
}
@media screen and (prefers-color-scheme: dark) {
  :root {
    --page: #0f1216; --card: #171b21; --ink: #e6e9ee; --muted: #a0a9b5; --line: #2c333d;
    --accent: #ff8b3d; --mark: #2b2018;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif;
}
main { max-width: 1000px; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
h1, h2, h3, p, td, th, li, dd { overflow-wrap: anywhere; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0 0 .25rem; }
h2 { font-size: 1.25rem; margin: 2.5rem 0 .75rem; }
h3 { font-size: 1rem; margin: 0 0 .5rem; }
a { color: var(--accent); }
.lead, .caption, .note { color: var(--muted); }
.lead { margin: 0 0 1rem; }
nav ul { list-style: none; display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; padding: 0; }
nav a { text-decoration: none; }
nav a:hover, nav a:focus { text-decoration: underline; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(8.5rem, 1fr)); gap: .75rem;
  margin: 0; }
.facts.wide { grid-template-columns: repeat(auto-fit, minmax(13rem, 1fr)); margin-top: .75rem; }
.facts div, .card { background: var(--card); border: 1px solid var(--line); border-radius: 8px; }
.facts div { padding: .6rem .8rem; }
.facts dt { color: var(--muted); font-size: .85rem; }
.facts dd { margin: 0; font-size: 1.15rem; font-weight: 600; }
.facts dd small { display: block; font-size: .85rem; font-weight: 400; color: var(--muted); }
.card { padding: 1rem 1.1rem; margin: 0 0 1.25rem; }
figure { margin: 0; overflow-x: auto; }
figure svg { width: 100%; height: auto; }
figure svg * { stroke-linejoin: round; stroke-linecap: butt; }
svg.light { display: block; }
svg.dark { display: none; }
@media screen and (prefers-color-scheme: dark) {
  svg.light { display: none; }
  svg.dark { display: block; }
}
.caption { margin: .75rem 0 .5rem; font-size: .95rem; }
details { font-size: .95rem; }
summary { cursor: pointer; color: var(--accent); }
.scroll { overflow-x: auto; margin-top: .5rem; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums;
  min-width: 100%; }
th, td { padding: .3rem .6rem; border-bottom: 1px solid var(--line); text-align: left;
  vertical-align: top; overflow-wrap: normal; white-space: nowrap; }
td.number, th.number { text-align: right; }
td.long { min-width: 18rem; white-space: normal; }
.table table { font-size: .8rem; }
.table th, .table td { padding: .3rem .45rem; }
thead th { color: var(--muted); font-weight: 600; border-bottom-width: 2px; }
tr.best td { background: var(--mark); font-weight: 600; }
button { font: inherit; color: var(--ink); background: var(--card); padding: .3rem .9rem;
  border: 1px solid var(--muted); border-radius: 6px; cursor: pointer; }
:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
@media (max-width: 640px) {
  main { padding: 1.25rem .75rem 3rem; }
  .card { padding: .8rem .7rem; }
  figure svg { min-width: 620px; }
}
@media print {
  :root { color-scheme: light; }
  @page { margin: 14mm; }
  body { background: none; font-size: 10pt; }
  main { max-width: none; padding: 0; }
  nav, button { display: none; }
  .card { border: 0; padding: 0; break-inside: avoid; }
  .card.table { break-inside: auto; }
  details:not([open]) { display: none; }
  h2, h3 { break-after: avoid; }
  tr { break-inside: avoid; }
  .scroll, figure { overflow: visible; }
  table, .table table { font-size: 7.5pt; }
  th, td, .table th, .table td { padding: 1pt 3pt; white-space: normal; }
  td.long { min-width: 0; }
  td:not(.number) { overflow-wrap: anywhere; }
  figure svg { min-width: 0; }
}
"""

# Copies as tab-separated text. Where the clipboard is closed to a page opened from disk, the table
# is left selected, and one key press copies it.
SCRIPT = """
(function () {
  "use strict";
  function select(table) {
    var range = document.createRange();
    range.selectNodeContents(table);
    var selection = window.getSelection();
    selection.removeAllRanges();
    selection.addRange(range);
    try { return document.execCommand("copy"); } catch (error) { return false; }
  }
  function text(table) {
    return Array.prototype.map.call(table.rows, function (row) {
      return Array.prototype.map.call(row.cells, function (cell) {
        return cell.textContent;
      }).join("\\t");
    }).join("\\n");
  }
  Array.prototype.forEach.call(document.querySelectorAll("button[data-copy]"), function (button) {
    var table = document.getElementById(button.getAttribute("data-copy"));
    var status = button.nextElementSibling;
    function done() { status.textContent = "Copied."; }
    function fallback() {
      if (select(table)) { done(); return; }
      status.textContent = "The table is selected: press Ctrl+C (or Cmd+C) to copy it.";
    }
    button.hidden = false;
    button.addEventListener("click", function () {
      if (navigator.clipboard && navigator.clipboard.writeText) {
        navigator.clipboard.writeText(text(table)).then(done, fallback);
      } else {
        fallback();
      }
    });
  });
}());
"""
