"""docs/settings.md, made from the declarations of all settings.

`python tests/support/settings_page.py` writes it anew.
"""

from pathlib import Path

import hpctk
from hpctk.comm.environment import VARIABLES
from hpctk.compressors import COMPRESSORS
from hpctk.methods import METHODS
from hpctk.settings import rows, settings_of
from hpctk.slurm.options import ONLY, Options
from hpctk.tasks import TASKS
from hpctk.tasks.core.settings import SETTINGS, Settings

PAGE = Path(__file__).parents[2] / "docs" / "settings.md"
HEAD = """# Settings

Every setting of hpctk: what is allowed, the default, and what it means. Another value is an error that names the
setting, the value and what is allowed. What has no default has to be given. This page is written from the declarations
in the code by `python tests/support/settings_page.py`; a test fails where they differ.
"""
METHODS_HEAD = """
## Methods

Arguments of `hpctk.METHOD(...)`; on the command line `hpctk train TASK --method NAME --set SETTING=VALUE`, in a file of
settings the table `[method_settings]`. What they do is in [methods.md](methods.md).
"""
COMPRESSORS_HEAD = """
## Compressors

Arguments of `hpctk.COMPRESSOR(...)`. The first may follow the name and a colon on a command line, as in `topk:0.01`.
All also take, by name:
"""
TASKS_HEAD = """
## Training jobs

Options of `hpctk train TASK` with - for _, and names in a file of settings ([training.md](training.md)).
`method_settings` are given by `--set`.
"""
SLURM_HEAD = """
## Job scripts

Options of `hpctk slurm` with - for _ (`modules` by `--module`, once for each), and names in the file of a site
([slurm.md](slurm.md)). Where there is no default, the template's value stays, or Slurm's.
"""
VARIABLES_HEAD = """
## Environment variables

An empty value counts as none. `hpctk doctor` names what is wrong with them, and `HPCTK_*` that nothing reads.
"""


def table(declared, hidden=None):
    """Return settings as a table in Markdown; without the default `hidden`."""
    lines = ["", "| setting | allowed | default | meaning |", "|---|---|---|---|"]
    for name, values, default, meaning in rows(declared):
        cells = [f"`{name}`", values, f"`{default}`" if default and default != hidden else "", meaning]
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def without(declared, common):
    """Return the settings that are not in `common`, or differ from it."""
    return {name: one for name, one in declared.items() if common.get(name) != one}


def page():
    """Return the text of the page."""
    text = HEAD + METHODS_HEAD
    for name in METHODS:
        if name == "LGRAWA":
            text += "\n### LGRAWA\n\nAs MGRAWA.\n"
            continue
        text += f"\n### {name}\n" + table(settings_of(getattr(hpctk, name)))
    text += "\n### QSR\n\nA `period_rule`; `qsr:ALPHA` or `qsr:ALPHA:STEPS` on a command line.\n" + table(
        settings_of(hpctk.QSR)
    )
    common = settings_of(hpctk.Identity)
    text += COMPRESSORS_HEAD + table(common)
    for kind in COMPRESSORS.values():
        if own := without(settings_of(kind), common):
            text += f"\n### {kind.__name__}\n" + table(own)
    text += TASKS_HEAD + "\n### Of all jobs\n" + table(settings_of(Settings))
    for name in TASKS:
        own = without(settings_of(SETTINGS[name]), settings_of(Settings))
        text += f"\n### {name}\n" + table(own)
    options = {name: one for name, one in settings_of(Options).items() if name not in ("kind", "command")}
    text += SLURM_HEAD + table(options, hidden="none")
    limited = [f"`{name}` only for {', '.join(kinds)}" for name, kinds in ONLY.items()]
    text += f"\n{'; '.join(limited)}.\n"
    return text + VARIABLES_HEAD + table(VARIABLES)


if __name__ == "__main__":
    PAGE.write_text(page())
