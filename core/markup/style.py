"""The style of pages and of what notebooks show: one sheet, light and dark, without anything from elsewhere."""

from typing import Final

CLASS: Final = "trainfold"

COLOURS: Final = {  # name -> light, dark; each text colour has a contrast of at least 4.5 : 1 with both grounds
    "ground": ("#ffffff", "#15181c"),
    "raised": ("#f5f6f8", "#1d2127"),
    "ink": ("#1b1f24", "#e7eaee"),
    "quiet": ("#59616c", "#a6aeb9"),
    "line": ("#d5d9df", "#363c45"),
    "accent": ("#1d5fa8", "#7fb5f2"),
    "soft": ("#a9c7e8", "#35557a"),
    "warm": ("#ad3a12", "#f59a78"),
    "good": ("#1b6b3f", "#7fd0a0"),
}


def _variables(which: int) -> str:
    return "".join(f"--{name}:{colours[which]};" for name, colours in COLOURS.items())


_PARTS: Final = """
.trainfold{color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;font-variant-numeric:tabular-nums}
.trainfold table{border-collapse:collapse;margin:0;font-size:14px;line-height:1.45}
.trainfold caption{text-align:left;overflow-wrap:anywhere;font-weight:600;padding:0 0 .4em;caption-side:top;color:var(--ink)}
.trainfold th,.trainfold td{text-align:left;vertical-align:top;padding:.32em 1.4em .32em 0;border-bottom:1px solid var(--line);font-weight:400;background:none;color:inherit;overflow-wrap:break-word}
.trainfold thead th{color:var(--quiet);font-size:13px;white-space:nowrap;border-bottom-color:var(--quiet)}
.trainfold tbody th{white-space:nowrap;min-width:3em}
.trainfold th.number,.trainfold td.number{text-align:right;white-space:nowrap}
.trainfold td.moment{white-space:nowrap}
.trainfold tr:last-child>*{border-bottom:0}
.trainfold figure{margin-left:0;margin-right:0;margin-bottom:0}
.trainfold figcaption{font-weight:600;padding:0 0 .5em;overflow-wrap:anywhere}
.trainfold .key{display:flex;flex-wrap:wrap;gap:.2em 1.2em;margin:.4em 0 0;padding:0;list-style:none;font-size:13px;color:var(--quiet);overflow-wrap:anywhere}
.trainfold .key svg{width:22px;height:12px;vertical-align:-1px;margin-right:.4em}
.trainfold .plot{display:grid;grid-template-columns:auto 1fr;grid-template-rows:auto 1fr auto;column-gap:.6em}
.trainfold .plot .unit{grid-column:1/-1;overflow-wrap:anywhere;font-size:12.5px;color:var(--quiet);padding-bottom:.6em}
.trainfold .plot .left{position:relative;font-size:12.5px;color:var(--quiet);text-align:right}
.trainfold .plot .left span{position:absolute;right:0;transform:translateY(-50%);white-space:nowrap}
.trainfold .plot .left i{visibility:hidden;font-style:normal;display:block;height:0;white-space:nowrap}
.trainfold .plot .area{position:relative;min-width:0}
.trainfold .plot svg{display:block;width:100%;height:100%;overflow:visible}
.trainfold .plot .below{grid-column:2;position:relative;height:1.7em;font-size:12.5px;color:var(--quiet)}
.trainfold .plot .below span{position:absolute;top:.3em;transform:translateX(-50%);white-space:nowrap}
.trainfold .plot .below span.first{transform:none}
.trainfold .plot .below span.last{transform:translateX(-100%)}
.trainfold svg path{vector-effect:non-scaling-stroke;fill:none;stroke-width:1.5;stroke-linejoin:round}
.trainfold svg .grid{stroke:var(--line);stroke-width:1}
.trainfold svg .accent{stroke:var(--accent)}.trainfold svg .warm{stroke:var(--warm)}.trainfold svg .good{stroke:var(--good)}
.trainfold svg .quiet{stroke:var(--quiet)}.trainfold svg .soft{stroke:var(--soft)}.trainfold svg .ink{stroke:var(--ink)}
.trainfold svg .dashed{stroke-dasharray:3 4}
.trainfold svg .dots{stroke-width:6;stroke-linecap:round}.trainfold svg .squares{stroke-width:7;stroke-linecap:square}
.trainfold svg .bars{stroke-width:4}.trainfold svg .wide{stroke-width:5}
.trainfold .share{display:block;height:.6em;min-width:1px;background:var(--accent);border-radius:1px;margin-top:.45em}
@media (max-width:520px){.trainfold .plot .below span.odd{display:none}}
"""

_PAGE: Final = """
*{box-sizing:border-box}
html{color-scheme:light dark;background:var(--ground);scroll-padding-top:1em;-webkit-text-size-adjust:100%}
body{margin:0;background:var(--ground);padding:2.2rem clamp(1rem,4vw,3rem) 4rem;overflow-wrap:break-word}
header,main,footer{max-width:64rem;margin:0 auto}
h1{font-size:1.7rem;line-height:1.2;margin:0 0 .25rem;font-weight:650;letter-spacing:-.01em;overflow-wrap:anywhere}
h2{font-size:1.2rem;line-height:1.3;margin:0 0 .3rem;font-weight:650}
p{margin:0 0 .8rem;max-width:44rem}
.quiet{color:var(--quiet)}
p.note{font-size:14px;color:var(--quiet);margin:.6rem 0 0}
code{font:.92em ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;background:var(--raised);padding:.1em .3em;border-radius:3px;overflow-wrap:anywhere}
a{color:var(--accent);text-underline-offset:.15em;text-decoration-thickness:1px}
a:focus-visible,summary:focus-visible,[tabindex]:focus-visible{outline:2px solid var(--accent);outline-offset:3px;border-radius:2px}
.skip{position:absolute;left:-99em}.skip:focus{position:static}
nav ul{display:flex;flex-wrap:wrap;gap:.15rem 1.1rem;margin:1.1rem 0 0;padding:.7rem 0;list-style:none;border-top:1px solid var(--line);border-bottom:1px solid var(--line);font-size:14px}
nav a{display:inline-block;padding:.25rem 0}
section{padding:2.2rem 0 0}
figure{margin-top:0}
section>*+*{margin-top:1rem}
#overview{padding-top:.2rem}
.scroll td:not(.number):not(.moment){min-width:7em}
section>h2+p{margin-top:0}
section>figure+figure,section>.note+figure,section>figure+.scroll,section>.scroll+.scroll{margin-top:2rem}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(8.5rem,1fr));gap:1.1rem 1.5rem;margin:1.4rem 0 0}
.figures div{min-width:0}
.figures dt{font-size:13px;color:var(--quiet)}
.figures dd{margin:.1rem 0 0;font-size:1.25rem;font-weight:600;line-height:1.25;overflow-wrap:anywhere}
.figures dd small{display:block;font-size:13px;font-weight:400;color:var(--quiet)}
.scroll{overflow-x:auto}
.scroll table{min-width:min(100%,34rem);width:100%}
@media (max-width:520px){.scroll td:not(.number):not(.moment){min-width:13em}}
details summary{cursor:pointer;color:var(--accent);padding:.3rem 0;font-size:14px}
.findings{margin:0;padding:0;list-style:none}
.findings li{padding:.55rem 0 .55rem .8rem;border-left:3px solid var(--line);margin:0 0 .5rem;max-width:52rem}
.findings li.warm{border-color:var(--warm)}
.findings .message{white-space:pre-line}
.findings .when{display:block;font-size:13px;color:var(--quiet)}
footer{margin-top:3rem;padding-top:1rem;border-top:1px solid var(--line);font-size:13px;color:var(--quiet)}
#now{font-size:14px;color:var(--quiet);min-height:1.5em}
@media print{nav,.skip{display:none}section{break-inside:avoid}}
@media (prefers-reduced-motion:no-preference){html{scroll-behavior:smooth}}
"""


def parts_style() -> str:
    """The style of parts, whose colours are set for what is inside of ``.trainfold``: a notebook keeps its own."""
    light, dark = (f".{CLASS}{{{_variables(which)}}}" for which in (0, 1))
    return f"{light}@media (prefers-color-scheme:dark){{{dark}}}{_PARTS}"


def page_style() -> str:
    """The style of a whole page."""
    light, dark = (f":root{{{_variables(which)}}}" for which in (0, 1))
    return f"{light}@media (prefers-color-scheme:dark){{{dark}}}{_PARTS}{_PAGE}"
