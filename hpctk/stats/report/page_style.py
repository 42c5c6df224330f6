"""How a report's page looks, by day and by night, on a desk and on a phone."""

STYLE = """
:root { color-scheme: light dark;
  --paper: #ffffff; --card: #f7f8fa; --ink: #1d2330; --soft: #5b6475; --rule: #dde1e8; --grid: #e4e7ee;
  --accent: #2563a8; --second: #c2571a;
  --part0: #6b9bc9; --part1: #e0762f; --part2: #4f9d69; --part3: #9a6fb0; --part4: #cfa3dc; --part5: #d9b23c;
  --part6: #a0a7b4; --step: #dfe7f1; --call: #2f6f4f; --warn: #fff4e3; --warn-rule: #e0a458;
  --run0: #2563a8; --run1: #c2571a; --run2: #2f8a57; --run3: #9a4fb0; --run4: #a88410; --run5: #3a8fa3;
  --run6: #b03a5b; --run7: #6d7480; }
@media (prefers-color-scheme: dark) { :root {
  --paper: #14171d; --card: #1b1f27; --ink: #e6e9ef; --soft: #9aa4b5; --rule: #303746; --grid: #2a303c;
  --accent: #74b0f4; --second: #f0995a;
  --part0: #4f80b5; --part1: #e6843f; --part2: #58ad76; --part3: #a37cc0; --part4: #6f5080; --part5: #d6b245;
  --part6: #6a7282; --step: #273142; --call: #63b78a; --warn: #2d2415; --warn-rule: #a5762f;
  --run0: #74b0f4; --run1: #f0995a; --run2: #63c38d; --run3: #c78be0; --run4: #d6b84a; --run5: #6cc3d6;
  --run6: #ec7f9c; --run7: #a5adba; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); line-height: 1.45;
  font: 15px/1.45 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 20px 16px 48px; }
h1 { font-size: 22px; margin: 0 0 2px; overflow-wrap: anywhere; }
h2 { font-size: 16px; margin: 0 0 8px; }
p { margin: 0 0 6px; }
.soft, figcaption { color: var(--soft); font-size: 13px; }
.said { margin: 14px 0; font-size: 16px; }
.warn { background: var(--warn); border-left: 4px solid var(--warn-rule); padding: 8px 12px; margin: 14px 0; }
.warn p { overflow-wrap: anywhere; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(140px, 1fr)); gap: 10px; margin: 16px 0; }
.tile { background: var(--card); border: 1px solid var(--rule); border-radius: 8px; padding: 8px 12px; }
.tile b { display: block; font-size: 20px; font-weight: 600; }
.figures { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 16px; }
.card { margin: 0; background: var(--card); border: 1px solid var(--rule); border-radius: 8px; padding: 12px 14px;
  min-width: 0; }
.three { grid-template-columns: repeat(3, minmax(0, 1fr)); margin-top: 16px; } .three .t { font-size: 13.5px; }
.tall { grid-row: span 2; }
.wide { grid-column: 1 / -1; }
.scroll { overflow-x: auto; }
.card svg { display: block; width: 100%; height: auto; margin: 4px 0; }
.card:not(.wide):not(.tall) svg { max-width: 520px; margin: 4px auto; }
.narrow { display: none; }
.empty-figure { color: var(--soft); padding: 28px 0; text-align: center; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 14px; font-size: 13px; margin: 2px 0 6px; }
.legend i { display: inline-block; width: 12px; height: 12px; border-radius: 2px; margin-right: 5px;
  vertical-align: -1px; }
section { margin-top: 22px; }
table { border-collapse: collapse; width: 100%; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: 4px 8px; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--rule); }
th.l, td.l { text-align: left; }
td.l { max-width: 26ch; overflow: hidden; text-overflow: ellipsis; }
th { position: sticky; top: 0; background: var(--paper); white-space: normal; vertical-align: bottom; }
th button { all: unset; cursor: pointer; font-weight: 600; }
th button:focus-visible { outline: 2px solid var(--accent); }
th[aria-sort=ascending] button::after { content: " \\25B2"; font-size: 9px; }
th[aria-sort=descending] button::after { content: " \\25BC"; font-size: 9px; }
#runs th { min-width: 9ch; }
.rows { max-height: 480px; overflow: auto; border: 1px solid var(--rule); border-radius: 8px; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 14px; margin: 10px 0; font-size: 14px; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
.t { fill: var(--soft); font-size: 12px; } .name { fill: var(--ink); }
.grid { stroke: var(--grid); } .axis { stroke: var(--soft); } .node { stroke: var(--ink); stroke-width: 1; }
.node.many { stroke: var(--soft); stroke-width: 0.4; }
.mark { stroke: var(--ink); stroke-width: 1.5; } .empty { fill: var(--paper); stroke: var(--rule); }
.field { fill: var(--accent); background: var(--accent); }
.step { fill: var(--step); background: var(--step); } .call { fill: var(--call); background: var(--call); }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; }
.first.line { stroke: var(--accent); } .first.dot { fill: var(--accent); } i.first { background: var(--accent); }
.faint { opacity: 0.3; stroke-width: 1; }
.second.line { stroke: var(--second); stroke-dasharray: 6 4; } .second.dot { fill: var(--second); }
i.second { background: var(--second); }
""" + "".join(
    f".part{i} {{ fill: var(--part{i}); background: var(--part{i}); }}\n" for i in range(7)
) + "".join(
    f".run{i}.line {{ stroke: var(--run{i}); }} .run{i}.dot, rect.run{i} {{ fill: var(--run{i}); }} "
    f"i.run{i} {{ background: var(--run{i}); }}\n"
    for i in range(8)
) + """
@media (max-width: 720px) {
  main { padding: 14px 10px 32px; } h1 { font-size: 18px; }
  .figures { grid-template-columns: minmax(0, 1fr); gap: 12px; }
  .three { grid-template-columns: minmax(0, 1fr); } .three .t { font-size: 12px; } .tall { grid-row: auto; }
  .card { padding: 10px; } .wide .scroll > svg { min-width: 640px; }
  .broad { display: none; } .narrow { display: block; }
  .tiles { grid-template-columns: repeat(2, minmax(0, 1fr)); }
}
@media print { #runs th { min-width: 9ch; }
.rows { max-height: none; overflow: visible; } }
"""  # fmt: skip
