"""A scripted policy that reads generated filings with known faults, and what follows from them for each field.

| fault | what follows |
|---|---|
| takes thousands for millions | a wrong revenue where it is stated in thousands |
| does not know "Net income (loss): ..." | a missing net income in wording 2 |
| does not see that a net loss is one | a wrong net income where it is negative, in wordings 0 and 1 |
| knows one wording of the staff, else takes the competitor's | wrong in wordings 1 and 2, invented if not stated |
| takes the first auditor that is named | a wrong auditor where there was another one |
| keeps four risks | wrong risks where there are more |
| answers for a trust in words, whatever it is asked | an error in the row, and all fields missing |
| writes revenue as text for holdings, at first | nothing: the answer is repaired |
"""

from __future__ import annotations

import datetime
import json
import re
from typing import Any

from benchmarks.filing_texts import Filing, GeneratedFiling
from support.scripts import part

MOST_RISKS = 4
_AMOUNT = r"(?:\$|€|£|CHF )([\d,.]*\d) (million|thousand|billion)"
_FACTS = {
    "company": re.compile(r"\A(.+)\n"),
    "report": re.compile(r"(Annual|Quarterly) report for the [a-z ]+ ended (\w+ \d+, \d{4})"),
    "currency": re.compile(r"All amounts are in (.+?) unless"),
    "employees": re.compile(r"At the end of the .+ we had ([\d,]+) employees"),
    "competitor": re.compile(r"is said to have ([\d,]+) workers"),
    "revenue": re.compile(
        rf"(?:Total revenue for the .+? was|achieved total revenue of|total revenue rose to) {_AMOUNT}"
    ),
    "net": re.compile(rf"[Nn]et (?:income|loss) (?:was|of) {_AMOUNT}"),
    "auditor": re.compile(
        r"^(?:(.+?) audited (?:our|the) |The accompanying .+ audited by (.+), indep|In our opinion .+ company\. (.+))",
        re.MULTILINE,
    ),
    "weakness": re.compile(r"identified a (material weakness)"),
}
_CURRENCIES = {"U.S. dollars": "USD", "euros": "EUR", "pounds sterling": "GBP", "Swiss francs": "CHF"}
_RISK = re.compile(r"^Risk: (.+)$", re.MULTILINE)


def imperfect_reader(prompt: str) -> str:
    """Keep a line for each fact in memory; answer with JSON made from the lines."""
    held = part(prompt, "memory")
    if "<memory>" not in prompt:  # a server's tokens are counted with a prompt of its own
        return "a text"
    memory = dict[str, str](line.split(": ", 1) for line in held.splitlines() if ": " in line)  # type: ignore[misc]
    if section := part(prompt, "section"):
        for name, pattern in _FACTS.items():
            found = pattern.search(section)
            if found and name not in memory and (name != "company" or not memory):
                memory[name] = " | ".join(group for group in found.groups() if group)
        risks = [part for part in memory.get("risks", "").split(" | ") if part] + _RISK.findall(section)
        memory["risks"] = " | ".join(risks[:MOST_RISKS])
        return "\n".join(f"{name}: {value}" for name, value in memory.items())
    if memory["company"].endswith("Trust"):
        return "The trust reports a good year."
    answer = _answer(memory)
    if memory["company"].endswith("Holdings") and not part(prompt, "error"):
        answer["revenue"] = "a good one"
    return json.dumps(answer)


def _answer(memory: dict[str, str]) -> dict[str, Any]:
    form, _, ended = memory["report"].partition(" | ")
    staff = memory.get("employees") or memory["competitor"]
    return {
        "company": memory["company"],
        "form": form.lower(),
        "period_end": datetime.datetime.strptime(ended, "%B %d, %Y").date().isoformat(),
        "currency": _CURRENCIES[memory["currency"]],
        "revenue": _millions(memory["revenue"]),
        "net_income": _millions(memory["net"]) if "net" in memory else None,
        "employees": int(staff.replace(",", "")),
        "auditor": memory["auditor"],
        "risks": memory["risks"].split(" | "),
        "material_weakness": "weakness" in memory,
    }


def _millions(amount: str) -> float:
    number, _, unit = amount.partition(" | ")
    factor = 1000 if unit == "billion" else 1
    return float(number.replace(",", "")) * factor


def expected(filing: GeneratedFiling) -> dict[str, str]:
    """How `benchmarks.filings.judge_value` must find each field of a filing that this policy has read."""
    truth, wording = filing.truth, filing.wording
    if truth.company.endswith("Trust"):
        return dict.fromkeys(Filing.model_fields, "missing")
    found = dict.fromkeys(Filing.model_fields, "right")
    if filing.scale == "thousands":
        found["revenue"] = "wrong"
    if truth.net_income is not None and wording == 2:
        found["net_income"] = "missing"
    elif truth.net_income is not None and truth.net_income < 0:
        found["net_income"] = "wrong"
    if truth.employees is None:
        found["employees"] = "invented"
    elif wording > 0:
        found["employees"] = "wrong"
    if filing.has_former_auditor:
        found["auditor"] = "wrong"
    if len(truth.risks) > MOST_RISKS:
        found["risks"] = "wrong"
    return found
