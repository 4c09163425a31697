"""The style sheet of the run card: two palettes, system type, one column that folds for a phone."""

PALETTE_LIGHT = """
  --paper: #faf9f6; --card: #ffffff; --ink: #1b1d21; --soft: #5b6069; --line: #e4e1da;
  --rule: #ebe8e2; --rail: #a9a59b; --a: #1d5fa8; --b: #b8460e; --c: #0d7268; --d: #6d4bb3;
  --tint: #f8ece4; --shadow: 0 1px 2px rgba(40, 36, 28, .05);
"""

PALETTE_DARK = """
  --paper: #131518; --card: #1a1d21; --ink: #e9e7e2; --soft: #a3a7ae; --line: #2d3136;
  --rule: #262a2f; --rail: #5d636b; --a: #7fb4f2; --b: #f2a071; --c: #62cbbb; --d: #b9a2f3;
  --tint: #35271f; --shadow: none;
"""

STYLE = (
    """
:root { color-scheme: light dark;"""
    + PALETTE_LIGHT
    + """}
@media (prefers-color-scheme: dark) { :root {"""
    + PALETTE_DARK
    + """} }
"""
    + """
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body {
  margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.55 ui-sans-serif, system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue",
    Arial, sans-serif;
  font-variant-numeric: tabular-nums;
}
main { max-width: 1200px; margin: 0 auto; padding: 40px 24px 64px; }
code, .digest, .mono {
  font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: .9em;
}
h1, h2, h3, p, figure, table, dl, ol { margin: 0; padding: 0; }
h1 { font-size: 34px; line-height: 1.18; font-weight: 650; letter-spacing: -.021em;
  max-width: 24em; text-wrap: balance; overflow-wrap: anywhere; }
h2 { font-size: 21px; line-height: 1.3; font-weight: 650; letter-spacing: -.012em; }
h3 { font-size: 15px; font-weight: 650; margin-bottom: 8px; }
section { margin-top: 56px; }
section > p.lead { color: var(--soft); margin-top: 4px; max-width: 64em; text-wrap: pretty; }
section > h2 + *, section > p.lead + * { margin-top: 20px; }
:focus-visible { outline: 2px solid var(--a); outline-offset: 2px; border-radius: 4px; }

.masthead { display: flex; align-items: center; gap: 9px; color: var(--soft); font-size: 14px;
  margin-bottom: 18px; }
.masthead svg { width: 26px; height: 17px; flex: none; }
.masthead .run { color: var(--ink); font-weight: 600; overflow-wrap: anywhere; }

.stats { display: grid; grid-template-columns: 1.35fr 1fr 1fr 1fr 1fr; margin-top: 30px;
  border-top: 1px solid var(--line); border-bottom: 1px solid var(--line); }
.stats > div { padding: 15px 18px 16px; border-left: 1px solid var(--line); min-width: 0; }
.stats > div:first-child { border-left: 0; padding-left: 0; }
.stats dt { font-size: 13px; color: var(--soft); }
.stats dd { margin: 0; font-size: 23px; line-height: 1.3; font-weight: 600;
  letter-spacing: -.015em; white-space: nowrap; }
.stats .was { color: var(--soft); font-weight: 450; }
.stats .b dd strong { color: var(--b); font-weight: 650; }
.stats dd.more { font-size: 13px; font-weight: 400; letter-spacing: 0; color: var(--soft);
  white-space: normal; }

.chart { min-width: 0; }
.chart figcaption { display: flex; flex-wrap: wrap; gap: 2px 16px; align-items: baseline; }
.chart .name { font-weight: 650; }
.chart .note { color: var(--soft); font-size: 13px; }
.legend { display: inline-flex; gap: 14px; font-size: 13px; color: var(--soft); }
.key::before { content: ""; display: inline-block; width: 16px; height: 3px; border-radius: 2px;
  margin-right: 6px; vertical-align: .22em; background: currentcolor; }
.key.dotted::before { width: 8px; height: 8px; border-radius: 50%; vertical-align: 0; }
.key.a::before { background: var(--a); } .key.b::before { background: var(--b); }
.key.c::before { background: var(--c); } .key.d::before { background: var(--d); }
.plot { margin: 30px 2px 30px 46px; height: 168px; }
.chart.big .plot { height: 320px; }
.plot > svg { display: block; width: 100%; height: 100%; overflow: visible; }
.axis line { stroke: var(--rule); stroke-width: 1; } .axis line.base { stroke: var(--rail); }
.axis text { font-size: 12px; fill: var(--soft); } .ytick { text-anchor: end; }
.curve { fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round;
  vector-effect: non-scaling-stroke; }
.dots { fill: none; stroke-width: 8; stroke-linecap: round; vector-effect: non-scaling-stroke; }
.curve.a, .dots.a { stroke: var(--a); } .curve.b, .dots.b { stroke: var(--b); }
.curve.c, .dots.c { stroke: var(--c); } .curve.d, .dots.d { stroke: var(--d); }
.band rect { fill: transparent; }
.band line { stroke: var(--ink); stroke-width: 1; opacity: 0; pointer-events: none; }
.band text { font-size: 13px; font-weight: 600; fill: var(--ink); opacity: 0; pointer-events: none;
  paint-order: stroke; stroke: var(--paper); stroke-width: 6px; }
.band:hover line { opacity: .35; } .band:hover text { opacity: 1; }
.trio { display: grid; grid-template-columns: repeat(3, minmax(0, 1fr)); gap: 0 36px;
  margin-top: 30px; }

details { font-size: 14px; }
summary { cursor: pointer; color: var(--soft); width: fit-content; border-radius: 4px;
  padding: 2px 0; }
summary:hover { color: var(--ink); }
.chart summary { font-size: 13px; }
.scroll { overflow-x: auto; max-height: 420px; margin-top: 8px; }

table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: 7px 14px 7px 0; border-bottom: 1px solid var(--line);
  vertical-align: baseline; }
th { font-weight: 500; color: var(--soft); font-size: 13px; }
tbody th { font-size: inherit; font-weight: 400; color: var(--soft); }
td:last-child, th:last-child { padding-right: 0; }
table.numbers { width: auto; min-width: 220px; }
table.numbers th, table.numbers td { text-align: right; padding: 3px 0 3px 26px; font-size: 13px; }
table.numbers th:first-child, table.numbers td:first-child { padding-left: 0; text-align: left; }
table.artifacts td { white-space: nowrap; padding-right: 20px; }
table.facts td { text-align: right; font-weight: 550; white-space: nowrap; }
table.facts.words td { white-space: normal; overflow-wrap: anywhere; }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 36px 48px; align-items: start; }
.pair > div { min-width: 0; }
.under { color: var(--soft); font-size: 13px; margin-top: 10px; }

.lineage .wide { display: block; width: 100%; height: auto; margin: 0 auto; }
.lineage .narrow { display: none; }
.rail { fill: none; stroke: var(--rail); stroke-width: 1.75; }
.rail.main { stroke: var(--ink); stroke-width: 3; }
.node .box { fill: var(--card); stroke: var(--line); stroke-width: 1.25; }
.node.destination .box { stroke: var(--b); stroke-width: 2; }
.node.source .box { stroke-dasharray: 4 4; }
.node text { fill: var(--soft); font-size: 11.5px; } .node .name { fill: var(--ink);
  font-size: 13.5px; font-weight: 650; } .node .digest { font-size: 12px; fill: var(--ink); }
.data .mark, .stop.data { fill: var(--a); } .model .mark, .stop.model { fill: var(--b); }
.measure .mark, .stop.measure { fill: var(--c); }
.source .mark, .stop.source { fill: var(--rail); }
.node:hover .box { stroke: var(--soft); } .node.destination:hover .box { stroke: var(--b); }
.stop { stroke: var(--paper); stroke-width: 2; }
.families { display: flex; flex-wrap: wrap; gap: 4px 20px; font-size: 13px; color: var(--soft);
  margin: 14px 0 12px; }
.families span::before { content: ""; display: inline-block; width: 8px; height: 8px;
  border-radius: 50%; margin-right: 7px; background: var(--rail); }
.families .a::before { background: var(--a); } .families .b::before { background: var(--b); }
.families .c::before { background: var(--c); }

.samples { display: grid; gap: 14px; }
.sample { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  box-shadow: var(--shadow); padding: 16px 20px 18px; overflow-wrap: anywhere;
  white-space: pre-wrap; font-size: 15px; line-height: 1.65; max-height: 480px; overflow-y: auto; }
.sample .prompt { font-weight: 650; background: var(--tint); border-radius: 4px; padding: 2px 4px;
  margin-left: -4px; box-decoration-break: clone; -webkit-box-decoration-break: clone; }
.sample .end { color: var(--soft); font-size: 13px; }
table.time td, table.time th { border-bottom: 0; padding: 5px 16px 5px 0; }
table.time tbody th { color: var(--ink); white-space: nowrap; width: 1%; }
table.time td:last-child { padding-right: 0; }
table.time td.amount { white-space: nowrap; width: 1%; text-align: right; }
table.time td.share { white-space: nowrap; width: 1%; text-align: right; color: var(--soft); }
.bar { display: block; height: 12px; border-radius: 3px; background: var(--rail);
  min-width: 2px; }
.bar.data { background: var(--a); } .bar.model { background: var(--b); }
.bar.measure { background: var(--c); }

.options { columns: 3 260px; column-gap: 40px; }
.options div { break-inside: avoid; display: flex; gap: 12px; justify-content: space-between;
  align-items: baseline; padding: 5px 0; border-bottom: 1px solid var(--line); font-size: 14px; }
.options dt { color: var(--soft); flex: none; max-width: 82%; overflow-wrap: anywhere; }
.options dt code { font-size: .93em; }
.options dd { margin: 0; font-weight: 600; text-align: right; overflow-wrap: anywhere; }
.options dd small { font-weight: 400; color: var(--soft); font-size: 13px; }
.options.quiet dd { font-weight: 400; }
.more-options { margin-top: 16px; }
.more-options > .options, .more-options > .scroll, .more-options > h3 { margin-top: 12px; }
.gap { margin-top: 36px; }
.block + .block, .scroll + .block { margin-top: 32px; }
footer { margin-top: 64px; padding-top: 16px; border-top: 1px solid var(--line);
  color: var(--soft); font-size: 13px; overflow-wrap: anywhere; }

@media (max-width: 860px) {
  .stats { grid-template-columns: repeat(6, 1fr); }
  .stats > div { grid-column: span 2; border-top: 1px solid var(--line); }
  .stats > div:nth-child(-n+2) { grid-column: span 3; border-top: 0; }
  .stats > div:nth-child(3) { border-left: 0; padding-left: 0; }
  .trio { grid-template-columns: 1fr; gap: 26px 0; }
  .pair { grid-template-columns: 1fr; }
  .lineage .wide { display: none; }
  .lineage .narrow { display: flex; }
  .narrow svg { flex: none; overflow: visible; }
  .narrow ol { list-style: none; flex: 1; min-width: 0; }
  .narrow li { height: var(--row); display: flex; flex-direction: column; justify-content: center;
    padding-left: 12px; line-height: 1.35; }
  .narrow .name { font-weight: 650; } .narrow .detail { color: var(--soft); font-size: 13px; }
}
@media (max-width: 560px) {
  main { padding: 24px 16px 48px; }
  h1 { font-size: 26px; }
  section { margin-top: 44px; }
  .stats { grid-template-columns: 1fr 1fr; }
  .stats > div, .stats > div:nth-child(-n+2) { grid-column: auto; }
  .stats > div, .stats > div:nth-child(2) { border-top: 1px solid var(--line); }
  .stats > div:first-child { grid-column: span 2; border-top: 0; }
  .stats > div:nth-child(even) { border-left: 0; padding-left: 0; }
  .stats > div:nth-child(odd):not(:first-child) { border-left: 1px solid var(--line);
    padding-left: 16px; }
  .stats > div { padding: 12px 12px 13px 0; }
  .stats dd:not(.more) { font-size: 20px; }
  .stats > div:first-child dd:not(.more) { font-size: 24px; }
  .chart.big .plot { height: 240px; }
  .sample { padding: 13px 14px 15px; }
  table.time td.bars { width: 40%; }
  table.time td, table.time th { padding-right: 10px; }
}
@media print {
  :root {"""
    + PALETTE_LIGHT
    + """}
  main { padding: 0; } section { break-inside: avoid; }
}
"""
)
