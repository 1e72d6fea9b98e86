"""Templates of the roles that a small policy learns besides update and answer, and a folder with them.

    python -m recipes.embedded.role_templates --out work/roles

writes a copy of the embedded policy with a template for each role, ready for `embedded.train --roles` and
`embedded.release`. A template is the policy's own update prompt plus what distinguishes the role: not more, because
each token is read at each chunk. If the section is first, a server computes it once for all roles. A word that a reply
may have and the document does not, such as KEEP, is in the template, because readers refuse invented words.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Final

from memagent_graph.policies.profile import EMBEDDED_FOLDER

MEMORY_TOKENS: Final = 96
"""Enough for the names of two hops, and for several findings: merging them is not taught."""

_CARRIED: Final = "<memory> {memory} </memory>\n"
_SECTION: Final = "<section> {chunk} </section>\n"
_PROBLEM: Final = "<problem> {prompt} </problem>\n"

ROLE_TEMPLATES: Final = {
    "gated_update": _SECTION + _CARRIED + _PROBLEM + "KEEP or REWRITE:",
    "gated_update_or_stop": _SECTION + _CARRIED + _PROBLEM + "KEEP, REWRITE or STOP:",
    "extract": _SECTION + _CARRIED + _PROBLEM + "What it adds, or none:",
    "decompose": _CARRIED + _PROBLEM + "ANSWER or ASK:",
    "integrate": "<question> {subquestion} </question>\n<found> {chunk} </found>\n" + _CARRIED + _PROBLEM + "Memory:",
}
"""By role, as in `templates/ROLE.txt` of a policy's folder."""


def write_role_folder(source: Path, out: Path) -> None:
    """Copy a small policy and add the words of all roles, and the budgets that they need."""
    shutil.copytree(source, out, dirs_exist_ok=True)
    for role, text in ROLE_TEMPLATES.items():
        (out / "templates" / f"{role}.txt").write_text(text + "\n", encoding="utf-8")
    values = json.loads((out / "memagent.json").read_text(encoding="utf-8"))
    content = json.dumps({**values, "memory_tokens": MEMORY_TOKENS}, indent=2)
    (out / "memagent.json").write_text(content + "\n", encoding="utf-8")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--source", type=Path, default=EMBEDDED_FOLDER, help="a policy's folder")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    write_role_folder(arguments.source, arguments.out)
    print(f"{len(ROLE_TEMPLATES)} roles besides update and answer: {arguments.out}")


if __name__ == "__main__":
    main()
